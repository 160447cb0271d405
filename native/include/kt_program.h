/* kt_program.h - programs: how they are created and run; their operations are in
 * kt_operations.h.
 *
 * Buffers hold f32 rows, one per token of the step (domain KT_ROWS_TOKENS) or one per wanted output
 * (KT_ROWS_OUTPUTS). A view is a range of columns of a buffer. Each recording function appends one
 * operation and checks its arguments; operations run in the order they were recorded. T below is the
 * number of rows of the step in the operation's domain. Outputs lie in the order of their tokens.
 */
#ifndef KT_API_PROGRAM_H
#define KT_API_PROGRAM_H

#include "kt_pool.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kt_program kt_program;

enum kt_domain { KT_ROWS_TOKENS = 0, KT_ROWS_OUTPUTS = 1 };

/* How the KV cache holds numbers. FP8: codes E4M3, and E8M0 scale bytes for each head and each position. A layer's part of
 * a page holds the codes of each of its parts, as if they were elements of one byte, and behind all of those for each
 * part its scale bytes [64][heads]. A scale of the whole page would have to round codes again when a token is appended,
 * codes that others share. With a the largest magnitude of the head's columns (a NaN counts as infinity): 0 gives
 * scale 0 and codes 0; else p = exponent field of a - 126, e = p - 9 + (fraction bits of a > 0x600000), scale =
 * max(e + 127, 0), of the value 2^(scale - 127); a code is the one nearest to x * 2^(127 - scale), ties to the even
 * one, at most 448 in magnitude; NaN is 0x7f. What is read back is exact in bf16. Choices, and pooled rows, need
 * another cache. */
enum kt_cache { KT_CACHE_BF16 = 0, KT_CACHE_F32 = 1, KT_CACHE_FP8 = 2 };

typedef struct kt_program_options {
    int64_t max_tokens;     /* rows of token buffers */
    int64_t max_outputs;    /* rows of output buffers */
    int32_t exact;          /* 1: f32 activations in every product; 0: the fast path */
    int32_t cache;          /* KT_CACHE_* */
    int32_t by_row;         /* 1: no bit of a product's row depends on how many rows it is given, with tiles either (bf16) */
} kt_program_options;

typedef struct kt_view {
    int32_t buffer;
    int32_t column;
    int32_t width;
} kt_view;

KT_API kt_program *kt_program_create(kt_pool *pool, const kt_program_options *options, char *error,
                                     size_t error_size);
KT_API void kt_program_free(kt_program *program);
KT_API const char *kt_program_error(const kt_program *program);

/* A new buffer of `width` columns; its number (>= 0) or KT_ERR_*. */
KT_API int32_t kt_program_buffer(kt_program *program, int64_t width, int32_t domain);
/* Where a buffer lies, and its row stride in floats. Valid from kt_program_finish on. */
KT_API float *kt_program_data(kt_program *program, int32_t buffer, int64_t *stride);
/* All operations are recorded: reserve buffers and scratch. Bytes reserved in *size if not NULL. */
KT_API int kt_program_finish(kt_program *program, size_t *size);

/* A run: consecutive tokens of one sequence in a step. No result of a run depends on the other runs of its step. */
typedef struct kt_run {
    int64_t n_tokens;       /* >= 1 */
    int64_t start;          /* position of the first token */
    int64_t first_output;   /* tokens first_output..n_tokens-1 give outputs; n_tokens: none */
    /* Positions expanded..expanded_end-1 take the expanded form of latent attention, all others the absorbed one: last bits
     * differ. The form follows from the position alone, not from who goes together in a step. */
    int64_t expanded;
    int64_t expanded_end;   /* >= expanded; both may lie outside the run */
    /* The chunk of a prompt that the run is a piece of. Whether positions are chosen depends on the chunk; so pieces of it
     * give what all of it gives. */
    int64_t chunk_start;
    int64_t chunk_tokens;   /* 0: the run itself; 1: each token gives what it gives alone, as drafted ones must */
    const int32_t *pages;   /* [n_pages] cache page of each 64 positions of the sequence */
    int64_t n_pages;        /* >= ceil((start + n_tokens) / 64) */
    /* [n_pages] window page of each 64 positions, from the first on that the first token sees through the widest window
     * of kt_gqa.windowed; those before are not read. NULL where no operation keeps any. */
    const int32_t *window_pages;
    float temperature;      /* of the sums of kt_program_summary, finite; 0: none are wanted */
    int32_t defer;          /* how many experts per token kt_program_split defers, at most; 0: none */
    /* Slots of the states that operations keep of a sequence: of what is before `start`, and after the run. The first
     * is not written, so that a step that counts for nothing leaves no trace; runs may read the same one. */
    int32_t state;          /* -1, only at start 0: zeros */
    int32_t next_state;     /* no slot that this or another run of the step reads or writes */
    int32_t adapter;        /* whose updates its rows get (kt_adapters.h); 0: none */
} kt_run;

/* Everything that changes from step to step. Its rows are the tokens of its runs, run after run. */
typedef struct kt_step {
    const kt_run *runs;     /* [n_runs] */
    int64_t n_runs;         /* >= 1, of max_tokens tokens and max_outputs outputs in all */
    const int32_t *ids;     /* [rows] */
    void *cache;            /* [cache_pages][page_bytes]; a page is written by one run at most */
    int64_t cache_pages;
    size_t page_bytes;      /* multiple of 64, no less than the last layer's end */
    void *windows;          /* [n_window_pages][window_page_bytes]; likewise written by one run at most */
    int64_t n_window_pages;
    size_t window_page_bytes;   /* multiple of 64, no less than the last windowed layer's end */
    float *states;          /* [n_states][state_bytes] */
    int64_t n_states;
    size_t state_bytes;     /* multiple of 64, no less than the last operation's end */
} kt_step;

/* Run all operations for one step. */
KT_API int kt_program_run(kt_program *program, const kt_step *step);
/* Run the operations of one part. The parts in turn give what kt_program_run gives. */
KT_API int kt_program_run_part(kt_program *program, const kt_step *step, int32_t part);

/* Nanoseconds spent in each operation since the program was made, in recording order (added up over
 * steps). Writes at most `capacity` and returns the number of operations. */
KT_API int32_t kt_program_profile(const kt_program *program, int64_t *nanoseconds, int32_t capacity);

#ifdef __cplusplus
}
#endif
#endif
