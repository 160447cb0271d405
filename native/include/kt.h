/* kt.h - the whole public C API of libkt, the CPU side of kt.
 *
 * The Python binding reads this file: plain C declarations, integer #defines and enums only.
 *
 * Three ideas carry the library.
 *  1. A *pool* is a pinned team of threads plus one row of kernels (an ISA), chosen when it is made.
 *  2. A *weight* is packed once, in one layout that every row reads; a number format is data (kt_format).
 *  3. A *program* is a list of operations over fixed buffers, recorded once and replayed by one call
 *     per step: one token (decode) or many (prefill). Nothing is allocated while it runs.
 *
 * Conventions: functions that can fail return KT_OK or a negative KT_ERR_*; the handle's _error()
 * gives one sentence with the offending values, valid until the next call on that handle. create
 * functions return NULL on failure and write the sentence to `error`. _free(NULL) is fine. The library
 * never prints, aborts or exits, and holds no mutable global state. Memory the caller passes by
 * pointer stays the caller's and must outlive the handle it was recorded into.
 * Not thread-safe per handle; two programs may share a pool, but not run at the same time.
 */
#ifndef KT_H
#define KT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef KT_API
#define KT_API __attribute__((visibility("default")))
#endif

#define KT_API_VERSION 1
#define KT_PAGE_TOKENS 64   /* tokens of one KV page; also where attention partials are cut */
#define KT_BLOCK_COLUMNS 64 /* logits that are summed up together */
#define KT_MAX_NODES 64    /* teams of a pool */
#define KT_PANEL_ROWS 16    /* output rows of one weight panel: one zmm of int32, one AMX tile */

enum kt_result {
    KT_OK = 0,
    KT_ERR_SHAPE = -1,      /* sizes do not fit each other or the format */
    KT_ERR_RANGE = -2,      /* an index or count lies outside its bounds */
    KT_ERR_MEMORY = -3,     /* the system gave no memory */
    KT_ERR_VALUE = -4,      /* NaN or Inf where a finite number is needed */
    KT_ERR_IO = -5,         /* a read failed or came up short */
    KT_ERR_TIMEOUT = -6     /* something did not happen in time */
};

/* ---- ISA rows ------------------------------------------------------------------------------- */

typedef struct kt_isa_info {
    const char *name;       /* "amx", "avx512bf16", "avx512", "avx2", "portable" */
    int32_t usable;         /* 1: this CPU has all it needs and the OS saves its registers */
    char missing[160];      /* what is missing, space separated CPU feature names; "" if usable */
} kt_isa_info;

/* Fill out[0..min(capacity, n)) with the rows built into this library, best first; return n. */
KT_API int32_t kt_isa_rows(kt_isa_info *out, int32_t capacity);

/* Why the row amx does or does not run here, in the order in which it is decided. */
typedef struct kt_amx_info {
    int32_t tile, int8, bf16;   /* 1: the CPU has these instructions */
    int32_t shape;              /* 1: its tiles and its multiplier are large enough: 8 tiles of 16 rows of 64 bytes */
    int32_t os_state;           /* 1: the operating system saves tiles (XCR0) */
    int32_t permission;         /* 0: granted to this process; else the errno of asking; -1: not asked, as something
                                   above is missing */
    int32_t emulated;           /* 1: a test's emulator stands in for the CPU */
} kt_amx_info;

/* Asks for the permission, if there is something to ask for: it holds for the process from then on. */
KT_API void kt_amx(kt_amx_info *out);

/* Cache sizes as CPUID reports them, bytes; 0 = unknown. level 1 (data), 2 or 3. */
KT_API size_t kt_cache_bytes(int32_t level);

/* ---- pool ----------------------------------------------------------------------------------- */

typedef struct kt_pool kt_pool;

/* What products are told apart by where a row with tiles (amx) begins to use them. Integer formats give the same
 * bits with and without; bf16 adds in another order, within the same bound. */
enum kt_tile_kind { KT_TILE_INT4 = 0, KT_TILE_INT8 = 1, KT_TILE_BF16 = 2, KT_TILE_KINDS = 3 };

/* A pool is one team of threads per NUMA node: its threads, and the memory beside them. A *node* below is a
 * team's number, 0..n_nodes-1, which need not be the system's; several may share one memory. */
typedef struct kt_pool_options {
    const char *isa;        /* row to use, or NULL for the best usable one */
    int32_t n_threads;      /* the caller's thread is one of them; >= 1 */
    const int32_t *cpus;    /* [n_threads] OS numbers to pin to, or NULL: not pinned */
    int32_t spin_us;        /* how long an idle worker spins before it sleeps */
    int32_t n_nodes;        /* 1..KT_MAX_NODES */
    const int32_t *node_threads;    /* [n_nodes] threads of each team, >= 1 and n_threads in all; NULL: one team */
    const uint64_t *node_memory;    /* [n_nodes] bit i: OS node i holds what belongs to the team; 0 or NULL: anywhere */
    int32_t tile_min[KT_TILE_KINDS];    /* fewest rows of activations for which a product uses tiles; 0: 2 */
} kt_pool_options;

KT_API kt_pool *kt_pool_create(const kt_pool_options *options, char *error, size_t error_size);
KT_API void kt_pool_free(kt_pool *pool);
KT_API const char *kt_pool_error(const kt_pool *pool);
KT_API const char *kt_pool_isa(const kt_pool *pool);
KT_API int32_t kt_pool_threads(const kt_pool *pool);
KT_API int32_t kt_pool_nodes(const kt_pool *pool);
KT_API int32_t kt_pool_node_threads(const kt_pool *pool, int32_t node);     /* 0: there is no such node */
/* 0, or the errno with which the system refused to pin the threads: they run unpinned then. */
KT_API int32_t kt_pool_unpinned(const kt_pool *pool);

/* ---- memory --------------------------------------------------------------------------------- */

typedef struct kt_arena kt_arena;

/* `size` zeroed bytes, 64-byte aligned at least, on huge pages where the system gives them. nodes: bit i is OS
 * node i; the memory comes from there while there is some, page by page in turn from several; 0: anywhere. */
KT_API kt_arena *kt_arena_create(size_t size, uint64_t nodes, char *error, size_t error_size);
KT_API void kt_arena_free(kt_arena *arena);
KT_API void *kt_arena_data(kt_arena *arena);
/* 0, or the errno with which the system refused to bind the memory: it comes from anywhere then. */
KT_API int32_t kt_arena_refused(const kt_arena *arena);

/* dst[0..size) = the file's bytes from `offset`; parallel pread. KT_ERR_IO if the file is shorter. */
KT_API int kt_read(kt_pool *pool, int32_t fd, uint64_t offset, size_t size, void *dst);

typedef struct kt_copy_piece {
    void *dst;
    const void *src;
    size_t size;
} kt_copy_piece;

/* Copy pieces [n], of which none overlaps another's dst, with all threads. */
KT_API int kt_copy(kt_pool *pool, const kt_copy_piece *pieces, int64_t n);

/* ---- number formats and packed weights -------------------------------------------------------
 *
 * A weight matrix [n, k] (n outputs, k inputs) is padded with zeros to n' (multiple of 16) and k'
 * (multiple of `step`) and cut into panels of 16 rows. One panel, contiguous, 64-byte aligned:
 *
 *     codes    [k'/step][step/g][16][g]     scales  [groups][16], then padding to 64 bytes
 *
 *   bits 16: bf16 values,                     g = 2, step = 32, no scales (group 0, KT_SCALE_NONE)
 *   bits  8: signed codes in -127..127, or    g = 4, step = 64
 *            E4M3 bytes (KT_CODE_E4M3): OCP 8-bit floating point, bias 7, no infinities; the NaNs 0x7f
 *            and 0xff are no codes
 *   bits  4: indices 0..15 into codebook,     g = 4, step = 64; the line i (of 8) of a step holds in
 *            byte [r][j] the index of column 4i+j in its low and of column 32+4i+j in its high nibble
 *
 * value = code (or codebook[code]) * scale; one scale per row and per `group` columns, ascending;
 * group 0 = one scale for the whole row. groups = group ? k' / group : 1; group divides k' after k'
 * is rounded up to a multiple of max(step, group).
 * bits 32: f32 values, g = 1, step = 16: for what must stay exact.
 *
 * rotation R: the rows of W are multiplied by a block-diagonal Hadamard matrix H before they are encoded, and
 * activations before they are rounded: (W H)(H x) = W x. H spreads a large column over its whole block, so that
 * one scale serves a row. A block has B columns: the largest power of two <= R that divides k rounded up to 64.
 * H of a block x[0..B): for h = 1, 2, 4, ... B/2, for each i without bit h: x[i], x[i+h] = x[i] + x[i+h],
 * x[i] - x[i+h]; then each times (float)(1 / sqrt(B)). It is its own inverse, but for rounding.
 */
enum kt_scale_type { KT_SCALE_NONE = 0, KT_SCALE_F32 = 1, KT_SCALE_BF16 = 2, KT_SCALE_E8M0 = 3 };
enum kt_code_type { KT_CODE_INTEGER = 0, KT_CODE_E4M3 = 1 };

typedef struct kt_format {
    int32_t bits;           /* 4, 8, 16 or 32 */
    int32_t group;          /* columns per scale: 0 (whole row), 32, 64 or 128 */
    int32_t scale;          /* enum kt_scale_type */
    int8_t codebook[16];    /* 4 bits only: ascending; linear int4 is -8..7 */
    int32_t codes;          /* enum kt_code_type; KT_CODE_E4M3 with 8 bits only */
    int32_t rotation;       /* R: 0 (none), 64, 128 or 256; with 4 and 8 bits only */
} kt_format;

/* `count` packed matrices of one shape, one behind the other. */
typedef struct kt_weight {
    kt_format format;
    int64_t n, k, count;
    const void *data;
} kt_weight;

/* Bytes of one packed matrix; 0 if the format or the shape is not valid. */
KT_API size_t kt_packed_bytes(const kt_format *format, int64_t n, int64_t k);

/* From 16 on: blocks of GGUF files, see blocks.c. A row has a whole number of them. */
enum kt_dtype {
    KT_F32 = 0, KT_BF16 = 1, KT_F16 = 2,
    KT_Q4_0 = 16, KT_Q4_1 = 17, KT_Q5_0 = 18, KT_Q5_1 = 19, KT_Q8_0 = 20,
    KT_Q4_K = 21, KT_Q5_K = 22, KT_Q6_K = 23, KT_GGUF_MXFP4 = 24
};

/* dst[n][k] f32 = src[n][k] of `dtype`, row major. KT_ERR_VALUE if any is NaN or Inf. */
KT_API int kt_decode(kt_pool *pool, int32_t dtype, const void *src, int64_t n, int64_t k, float *dst);

/* How a quantized checkpoint stores a matrix: codes, row major, and one scale for each block of them. */
typedef struct kt_codes {
    int32_t bits;           /* 8: a byte each; 4: two in a byte, the first in its low nibble. Rows begin at bytes */
    int64_t block_rows, block_columns;
    int64_t row;            /* how many rows of the first block lie above src */
    const float *table;     /* [1 << bits] what each code means */
    const float *scale;     /* [ceil((row + n) / block_rows)][ceil(k / block_columns)] */
    const float *zero;      /* as many, or NULL: all 0 */
} kt_codes;

/* dst[n][k] f32 = (table[src[n][k]] - zero) * scale. KT_ERR_VALUE if any is NaN or Inf. */
KT_API int kt_decode_codes(kt_pool *pool, const kt_codes *codes, const void *src, int64_t n, int64_t k, float *dst);

typedef struct kt_pack_error {
    double sum_sq_error;    /* sum over the matrix of (value - source)^2 */
    double sum_sq;          /* sum of source^2 */
    double out_error;       /* the same two weighted by the importance of the columns, and the sum of value^2: what */
    double out_sq;          /* is to be expected of the products' error and size, and of their size as stored, for */
    double out_stored;      /* inputs with independent columns. Without importance each column counts 1 */
} kt_pack_error;

/* Encode src [n][k] f32 and write its panels to dst. Panel i goes to position i * panel_step, so that
 * two matrices can alternate (gate: dst, step 2; up: dst + one panel, step 2). `error` may be NULL,
 * else it is added to. The bytes do not depend on the row, the threads or the machine.
 * scales [n][groups] f32, for 4 and 8 bits with f32 scales: used instead of those that the encoder would choose,
 * except where one is outside 2^-60..2^60 in magnitude (0: choose); NULL: it chooses all. With the scales
 * that E4M3 values or integers were decoded with, these come back bit for bit: see kernels/formats.h.
 * importance [k] f32: how much the squared error of each column counts when scales are searched, 2^-20..2^20; of a
 * format with rotation, every column of a block counts the block's mean. NULL: all count the same. */
KT_API int kt_pack(kt_pool *pool, const kt_format *format, int64_t n, int64_t k, const float *src,
                   const float *scales, const float *importance, int64_t panel_step, void *dst,
                   kt_pack_error *error);

/* dst[n][k] f32 = matrix `index` of w, decoded, and rotated back. */
KT_API int kt_unpack(kt_pool *pool, const kt_weight *w, int64_t index, float *dst);

/* Nodes share a weight by rows or by columns. A slice is a weight of its own in the same format: rows
 * [first, last) or columns [first, last) of each matrix, packed; empty where first = last, and then data is
 * not used. Rows are cut at multiples of 16, columns at multiples of kt_cut_columns. */
enum kt_cut { KT_CUT_ROWS = 0, KT_CUT_COLUMNS = 1 };
typedef struct kt_slice {
    int64_t first, last;
    void *data;
} kt_slice;

/* Where columns can be cut: every 64, in bf16 every 32, in f32 every 16, and never inside a group or a rotation R.
 * Columns are cut of weights whose R is their block B, so that slices of any width have the same blocks. */
KT_API int64_t kt_cut_columns(const kt_format *format);

/* Fill slices[0..nodes of the pool), which follow one another from 0 to the end, with w's bytes: those of the
 * file from `offset`, or w's data if fd is negative. Each byte of the file is read once; pages that nobody
 * touched are first touched by the threads of their node. KT_ERR_IO if the file is shorter. */
KT_API int kt_place(kt_pool *pool, int32_t fd, uint64_t offset, const kt_weight *w, int32_t cut,
                    const kt_slice *slices);

/* Random codes and scales, values of mean 0 and rms about 1/sqrt(k), for benchmarks without a checkpoint. */
KT_API int kt_fill_random(kt_pool *pool, const kt_weight *w, uint64_t seed);

/* ---- program ---------------------------------------------------------------------------------
 *
 * Buffers hold f32 rows, one per token of the step (domain KT_ROWS_TOKENS) or one per wanted output
 * (KT_ROWS_OUTPUTS). A view is a range of columns of a buffer. Each recording function appends one
 * operation and checks its arguments; operations run in the order they were recorded. T below is the
 * number of rows of the step in the operation's domain.
 */
typedef struct kt_program kt_program;

enum kt_domain { KT_ROWS_TOKENS = 0, KT_ROWS_OUTPUTS = 1 };

typedef struct kt_program_options {
    int64_t max_tokens;     /* rows of token buffers */
    int64_t max_outputs;    /* rows of output buffers */
    int32_t exact;          /* 1: f32 activations in every product and f32 KV cache; 0: the fast path */
    int32_t kv_f32;         /* 1: f32 KV cache although the rest is fast, to measure what a bf16 one costs */
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

/* out[t] = table[ids[t]];  table [vocab][out.width] bf16, row major */
KT_API int kt_program_embed(kt_program *program, kt_view out, const uint16_t *table, int64_t vocab);

/* Each run of head_width columns: out = in / sqrt(mean(in^2) + eps) * gain;  gain [head_width] f32, or NULL:
 * ones. out may equal in. */
KT_API int kt_program_norm(kt_program *program, kt_view out, kt_view in, int64_t head_width,
                           const float *gain, float eps);

/* Each row: out = (in - mean) / sqrt(mean((in - mean)^2) + eps) * gain + bias;  gain, bias [in.width] f32. */
KT_API int kt_program_layer_norm(kt_program *program, kt_view out, kt_view in, const float *gain, const float *bias,
                                 float eps);

/* What a product reads its activations as. */
enum kt_reads {
    KT_READ_FORMAT,         /* as the weight's format says: int8 for integers, bf16 for bf16, f32 for E4M3 */
    KT_READ_F32,            /* f32 (the router) */
    KT_READ_WIDE,           /* two int8 values each, 15 bits, where the format says int8 (the output head) */
};

/* out = in * W^T (+ bias);  W one matrix [out.width, in.width], of which each node of the pool has some rows:
 * w [nodes], one behind the other, n = 0 where a node has none, all but the last a multiple of 16 rows;
 * bias [out.width] f32 or NULL; reads: KT_READ_*. The number of nodes never changes a bit. */
KT_API int kt_program_linear(kt_program *program, kt_view out, kt_view in, const kt_weight *w,
                             const float *bias, int32_t reads);

/* A rotation table: cos and sin of (position + shift) * inv_freq[i], times `scale`; inv_freq [dim/2] f32, copied.
 * Returns its number or KT_ERR_*. */
KT_API int32_t kt_program_rope_table(kt_program *program, int64_t dim, const float *inv_freq, float scale,
                                     int64_t shift);
/* Rotate in place columns [first, first + dim) of each run of head_width columns.
 * interleaved 1: pairs (2i, 2i+1); 0: pairs (i, i + dim/2). */
KT_API int kt_program_rope(kt_program *program, kt_view x, int32_t table, int64_t head_width, int64_t first,
                           int32_t interleaved);

/* Causal attention over the paged cache; the step's own K and V are appended first.
 * A page holds for this layer, from layer_offset, K and then V, bf16 (f32 when exact or kv_f32): K of each kv head in
 * panels of 16 tokens, [kv_heads][4][head_dim/2][16][2] - token 16 i + j is lane j of panel i, its columns
 * 2c and 2c + 1 are word c there - but rows [kv_heads][64][head_dim] when f32; V [kv_heads][64][value_dim].
 * head_dim is even. q [heads*head_dim], k [kv_heads*head_dim], v [kv_heads*value_dim], out [heads*value_dim]. */
typedef struct kt_gqa {
    int32_t heads, kv_heads, head_dim;
    float scale;            /* of the scores, positive; usually 1/sqrt(head_dim) */
    size_t layer_offset;    /* bytes into a page, multiple of 64 */
    int32_t window;         /* a token sees the last so many positions, its own included; 0: all */
    const float *sinks;     /* [heads] or NULL: each head's softmax has one more score, that of no key */
    int32_t choice;         /* of blocks, by as many heads as kv_heads: what kt_program_choose returned; 0: all */
    int32_t value_dim;      /* columns of a head's values, any number; 0: head_dim */
} kt_gqa;
KT_API int kt_program_gqa(kt_program *program, kt_view out, kt_view q, kt_view k, kt_view v,
                          const kt_gqa *shape);

/* Which cached places each token attends to; the step's own index keys are appended first. A place is a block of
 * so many positions. With weight [heads] there is one list per token: position j is worth
 *   scale * sum over heads h, ascending, of weight[h] * max(0, q[h] . key[j]),
 * and block is 1. Without (weight.width 0) each head has a list, a block of a multiple of 64 positions is worth the
 * greatest q[h] . key[j] of those that the token sees, and its own block and the local - 1 before it come first.
 * The top_k best are chosen, of equals the lower place. In a step that ends at or before position top_k * block
 * every place is, and nothing is scored.
 * A page holds for this, from layer_offset, bf16 keys in panels of 16 tokens, [4][dim/2][16][2], as kt_gqa has
 * them; rows [64][dim] f32 when exact or kv_f32. dim is even.
 * every > 1, with weights: a place is a window of so many positions. Its key is that of its last one, other keys are
 * not kept, and a token sees the windows that are complete with it: of position p, (p + 1) / every. A page then holds
 * 64 / every keys, rounded up to 16. */
typedef struct kt_choose {
    int32_t heads, dim, top_k, block, local;
    float scale;
    size_t layer_offset;    /* bytes into a page, multiple of 64 */
    int32_t every;          /* 0: 1; a divisor of 64 */
} kt_choose;
/* Returns the number (>= 1) of the choice or KT_ERR_*. It lasts until the next choose of the same top_k, block and
 * lists in the program, which gives it the same number. */
KT_API int32_t kt_program_choose(kt_program *program, kt_view q, kt_view key, kt_view weight, const kt_choose *shape);
/* What the last step chose: places [max_tokens][lists][top_k], ascending, and count [max_tokens][lists]. NULL: there
 * is no such choice. Without meaning after a step that scored nothing. */
KT_API const int32_t *kt_program_choice(kt_program *program, int32_t choice, const int32_t **count);

/* Multi-head latent attention. A page holds for this layer [64][lora + rope], bf16 (f32 when exact or kv_f32).
 * q [heads*(nope+rope)] rotated, latent [lora+rope] normed and rotated, out [heads*v]. Weights, one
 * matrix per head: uk_in [lora, nope] (q to latent), uk_out [nope, lora] (latent to k), uv [v, lora].
 * Few tokens: absorbed (uk_in, uv). Many: K and V are expanded per page block (uk_out, uv). With a choice (of single
 * positions, or of windows): absorbed over the chosen positions alone, unless all are. Of windows a token also attends
 * to the positions behind the last that is complete with it. */
typedef struct kt_mla {
    int32_t heads, nope, rope, v, lora;
    float scale;
    size_t layer_offset;
    kt_weight uk_in, uk_out, uv;
    int32_t choice;         /* what kt_program_choose returned; 0: a token attends to all that it sees */
} kt_mla;
KT_API int kt_program_mla(kt_program *program, kt_view out, kt_view q, kt_view latent, const kt_mla *shape);

/* Attention of many heads over one key, rotated, which is its own value: that of the last `window` positions and, with
 * every > 0, pooled rows of windows of so many positions, as kt_program_pool gives them; all that are complete with
 * the token, of position p the first (p + 1) / every, or those of them that were chosen. One softmax over both.
 * q and out [heads * dim], kv [dim], pooled [dim], or width 0 without windows. dim is even.
 * State: f32, [window][dim], position p in row p % window. A page holds, from layer_offset, rows [64 / every][dim]
 * of the windows that end in it, one where a window is longer than a page; bf16 (f32 when exact or kv_f32). */
typedef struct kt_mqa {
    int32_t heads, dim;
    float scale;            /* of the scores, positive */
    int32_t window;         /* 1 at least: a token's own */
    const float *sinks;     /* [heads] or NULL, copied: one more score of each head, that of no key */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
    int32_t every;          /* 0: no pooled rows; else a divisor or a multiple of 64 */
    int32_t choice;         /* of windows: what kt_program_choose returned; 0: a token attends to all it sees */
    int64_t most;           /* pooled rows that a token can see: steps end before position (most + 1) * every */
    size_t layer_offset;    /* bytes into a page, multiple of 64 */
} kt_mqa;
KT_API int kt_program_mqa(kt_program *program, kt_view out, kt_view q, kt_view kv, kt_view pooled,
                          const kt_mqa *shape);

/* Causal convolution of each column by itself, then silu:
 * out[t][c] = silu(sum over i < width of weight[i][c] * in[t - width + 1 + i][c])
 * over the rows of the step and those before it. State: the last width - 1 rows, [width - 1][columns] f32. */
typedef struct kt_conv {
    int32_t width;          /* 2..16 */
    const float *weight;    /* [width][columns]; the last one multiplies the row itself */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
} kt_conv;
KT_API int kt_program_conv(kt_program *program, kt_view out, kt_view in, const kt_conv *conv);

/* Windows of `every` positions, the first from position 0 on, each become one row: of each column c by itself
 *     out[c] = sum over the window's rows i of softmax_i(score[i][c] + bias[i][c]) * in[i][c]
 * which is in the row of the token that completes the window; the rows of other tokens are zero. overlap: in, score
 * and bias have twice as many columns as out, and a window is made of its own rows' second halves and of the first
 * halves of those of the window before, where there is one. State: f32, [3][out.width], with overlap [6][out.width]. */
typedef struct kt_pooling {
    int32_t every;          /* 1..65536 */
    int32_t overlap;
    const float *bias;      /* [every][in.width] */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
} kt_pooling;
KT_API int kt_program_pool(kt_program *program, kt_view out, kt_view in, kt_view score, const kt_pooling *pooling);

/* Gated delta rule: a head keeps a state S [dk][dv] and for each token, with g, b, k, q, v of its own,
 *     S = g S;   S = S + k (b (v - S^T k))^T;   out = S^T q
 * where q and k are divided by sqrt(sum of squares + 1e-6), q by sqrt(dk) as well, b = sigmoid(beta) and
 * g = exp(-e^log_rate softplus(decay + bias)), or with a lowest logarithm g = exp(lowest sigmoid(e^log_rate (decay +
 * bias))). Sources: Gated Delta Networks, arXiv 2412.06464, section 3.1; Kimi Linear, arXiv 2510.26692.
 * Views: q and k [key_heads * dk], each head of them for heads / key_heads heads in a row; v and out [heads * dv];
 * beta [heads]; decay [heads], or [heads * dk]: one for each key. q, k, decay and beta are overwritten.
 * State: heads * dk * ceil16(dv) f32, S of each head in panels of 64 columns (the last perhaps fewer, rounded up
 * to 16 with zeros), each [dk][columns]. */
typedef struct kt_delta {
    int32_t heads, key_heads, dk, dv;
    const float *log_rate;  /* [heads], copied */
    const float *bias;      /* as many as decay has columns */
    size_t state_offset;    /* bytes into the state, multiple of 64 */
    float lowest;           /* log g is above, negative; 0: nothing bounds it */
} kt_delta;
KT_API int kt_program_delta(kt_program *program, kt_view out, const kt_view qkv[3], kt_view decay, kt_view beta,
                            const kt_delta *shape);

enum kt_score { KT_SCORE_SOFTMAX = 0, KT_SCORE_SIGMOID = 1, KT_SCORE_SQRT_SOFTPLUS = 2 };
enum kt_group_score { KT_GROUP_MAX = 0, KT_GROUP_TOP2 = 1 };

/* Choose top_k experts per token from logits [T][experts]. score = softmax, sigmoid, or sqrt(log(1 + e^x)) of the
 * logits; chosen by score + bias, weighted by score alone. With n_group > 1 only the topk_group best groups
 * take part, a group scored by its maximum or by the sum of its two best. normalize: weights sum to 1;
 * then all are multiplied by `scale`. Ties go to the lower id. Slots are in descending choice order.
 * With a table the token's id says which experts it has, in this order, and nothing is chosen: no bias, no groups. */
typedef struct kt_router {
    int32_t experts, top_k, n_group, topk_group;
    int32_t score, group_score, normalize;
    float scale;
    const float *bias;      /* [experts] or NULL */
    const int32_t *table;   /* [vocab][top_k] or NULL; must outlive the program */
    int64_t vocab;
} kt_router;
/* Returns the number of the routing (ids [T][top_k] int32, gate [T][top_k] f32) or KT_ERR_*. */
KT_API int32_t kt_program_route(kt_program *program, kt_view logits, const kt_router *router);
KT_API const int32_t *kt_program_routing(kt_program *program, int32_t routing, const float **gate);

/* A routing whose ids [T][top_k] and gate [T][top_k] the caller writes before each run, where kt_program_routing
 * says (its const cast away): something else chose the experts. -1: no expert. Any other id outside 0..experts-1
 * counts as -1 and makes the run fail with KT_ERR_RANGE, after it. Rows are tokens. Its number or KT_ERR_*. */
KT_API int32_t kt_program_given(kt_program *program, int32_t experts, int32_t top_k);

/* Two routings from one, which share its gate. A slot whose expert e has elsewhere[e] != 0 is negative in both. Of
 * a token's other slots (n), the min(step.defer, max(0, n - 2)) with the lowest gate are in *late, all others in
 * *now; of equal gates the later slot is deferred first. Slots keep their places.
 *   elsewhere   [experts], read at each run, or NULL: nowhere
 *   late        NULL: nothing is deferred
 * Experts over *late are not computed at all in a step with defer 0: their output keeps what it holds. */
KT_API int kt_program_split(kt_program *program, int32_t routing, const uint8_t *elsewhere, int32_t *now,
                            int32_t *late);

/* counts [experts]: how often route, or a split of a given routing, met each expert since the program was made.
 * Counted while a step runs, to be read between steps. NULL: no such routing, or one that split made. */
KT_API const int64_t *kt_program_chosen(kt_program *program, int32_t routing);

/* The activation of a gated product. With g = min(gate, gate_limit) and u = up, kept within -limit..limit:
 * g / (1 + e^(-alpha * g)) * (u + shift). NULL for a pointer to one: silu(gate) * up. */
typedef struct kt_glu {
    float alpha;            /* 1: silu; 1.702: an approximate gelu */
    float limit;            /* > 0; 0: none */
    float shift;
    float gate_limit;       /* > 0; 0: that of up */
} kt_glu;

/* What experts may have besides their matrices. The arrays must outlive the program. */
typedef struct kt_experts {
    const kt_glu *glu;              /* or NULL */
    const float *gate_up_bias;      /* [experts][2I'] in the order of the rows of gate_up, or NULL */
    const float *down_bias;         /* [experts][H], or NULL */
} kt_experts;

/* out[t] = sum over k, by ascending id, of gate[t][k] * (down[id] * glu(gate_up[id] * in[t] + bias) + bias).
 * gate_up [2I', H] with I' = I rounded up to 16: panels of gate and up alternate, rows I..I' are zero;
 * down [H, I]. Negative ids: the slot runs elsewhere and is skipped.
 * Each node of the pool has a part of the width, cut where kt_cut_columns says for down: gate_up [nodes] its
 * rows, down [nodes] the same of its columns; n and k are 0 where a node has none. Each multiplies with the
 * same 8-bit activations as one node would, sums in f32, and the sums are added in the order of the nodes.
 * options: NULL: neither biases nor another activation than silu(gate) * up. */
KT_API int kt_program_experts(kt_program *program, kt_view out, kt_view in, int32_t routing,
                              const kt_weight *gate_up, const kt_weight *down, const kt_experts *options);

/* out [I] = glu(gate, up);  in [2I'] with I' = I rounded up to 16: runs of 16 gate and 16 up columns
 * alternate, as the packed gate_up matrix gives them. */
KT_API int kt_program_swiglu(kt_program *program, kt_view out, kt_view in, const kt_glu *glu);

enum kt_gate { KT_GATE_SIGMOID = 0, KT_GATE_SILU = 1, KT_GATE_SOFTPLUS = 2 };
/* out = x * sigmoid(by), x * by * sigmoid(by), or x * log(1 + e^by); by has one column for each of as many runs of
 * columns of x: for each column, for each head, or one for all of a row's. */
KT_API int kt_program_gate(kt_program *program, kt_view out, kt_view x, kt_view by, int32_t kind);

KT_API int kt_program_add(kt_program *program, kt_view out, kt_view a, kt_view b);

/* Hyper-connections: the residual is n streams side by side, [n * width], which a block reads as one and adds to
 * as many. Source: mHC, arXiv 2512.24880; transformers 5.23 (deepseek_v4). */

/* Each stream of out = in;  out.width a multiple of in.width. */
KT_API int kt_program_spread(kt_program *program, kt_view out, kt_view in);

/* How streams are mixed, in place from what a product made of them. Of x [(2 + n) * n] the columns become
 *     pre [n]      sigmoid(scale[0] x + base) + eps
 *     post [n]     2 sigmoid(scale[1] x + base)
 *     comb [n][n]  the softmax of each row of scale[2] x + base, + eps; then columns, and iterations - 1 times rows
 *                  and columns, are divided by their sums + eps
 * and of x [n] there is only pre. */
typedef struct kt_mix {
    int32_t streams;        /* n, 1..16 */
    int32_t iterations;     /* 1..1000 */
    float eps;              /* >= 0 */
    const float *scale;     /* [3]; of pre alone [1] */
    const float *base;      /* [x.width] */
} kt_mix;
KT_API int kt_program_mix(kt_program *program, kt_view x, const kt_mix *mix);

/* out = sum over streams s, ascending, of by[s] * in[s];  by [n], in [n * out.width]. */
KT_API int kt_program_collapse(kt_program *program, kt_view out, kt_view in, kt_view by);

/* Stream k of out = post[k] * y + sum over streams j, ascending, of comb[j][k] * in[j];  by: post [n], comb [n][n]. */
KT_API int kt_program_expand(kt_program *program, kt_view out, kt_view in, kt_view y, kt_view by);

/* out = in * by, a number;  out may equal in. */
KT_API int kt_program_scale(kt_program *program, kt_view out, kt_view in, float by);

/* out += x; nothing in a step with defer 0. What experts over a late routing gave joins the others here. */
KT_API int kt_program_carry(kt_program *program, kt_view out, kt_view x);

/* The caller writes this view before the run of the part that is recorded next, or of the whole program: what
 * was converted from it for products before is not used any more. */
KT_API int kt_program_input(kt_program *program, kt_view x);

/* What is recorded from here on forms the next part; its number (part 0 begins by itself) or KT_ERR_*. A part can
 * run by itself, at any time when what it reads is there: what earlier parts wrote, and the activations that the
 * part right before it converted, unless kt_program_input came between. */
KT_API int32_t kt_program_part(kt_program *program);

/* Output rows: out[i] = in[first_output + i] */
KT_API int kt_program_select(kt_program *program, kt_view out, kt_view in);

/* What choosing a token needs to know of each row of logits; B = ceil(logits.width / 64) blocks of 64
 * columns, the last perhaps shorter. The same bits for any number of threads.
 *   best  [1]  column of the greatest value, the first of equals (a whole number; at most 2^24 columns);
 *              a column of NaN or +Inf if there is any, so that the value there says whether all is well
 *   peaks [B]  greatest value of each block; +Inf if it holds NaN
 *   sums  [B]  sum of e^((value - peak) / step.temperature) over each block, in 1..64; a number without
 *              meaning where the peak is infinite, not written if the temperature is 0 */
KT_API int kt_program_summary(kt_program *program, kt_view best, kt_view peaks, kt_view sums, kt_view logits);

/* Everything that changes from step to step. */
typedef struct kt_step {
    int64_t n_tokens;       /* 1..max_tokens */
    int64_t start;          /* position of the first token */
    int64_t first_output;   /* tokens first_output..n_tokens-1 give outputs; n_tokens: none */
    const int32_t *ids;     /* [n_tokens] */
    const int32_t *pages;   /* [n_pages] cache page of each run of 64 positions */
    int64_t n_pages;        /* >= ceil((start + n_tokens) / 64) */
    void *cache;            /* [cache_pages][page_bytes] */
    int64_t cache_pages;
    size_t page_bytes;      /* multiple of 64, no less than the last layer's end */
    float temperature;      /* of the sums of kt_program_summary, finite; 0: none are wanted */
    int32_t defer;          /* how many experts per token kt_program_split defers, at most; 0: none */
    /* What operations with a state keep of a sequence: left before `start`, and after this step. The first is not
     * written, so that a step that counts for nothing leaves no trace. */
    const float *state;     /* [state_bytes]; NULL, only at start 0: zeros */
    float *next_state;      /* [state_bytes], elsewhere */
    size_t state_bytes;     /* no less than the last operation's end */
} kt_step;

/* Run all operations for one step. */
KT_API int kt_program_run(kt_program *program, const kt_step *step);
/* Run the operations of one part. The parts in turn give what kt_program_run gives. */
KT_API int kt_program_run_part(kt_program *program, const kt_step *step, int32_t part);

/* Nanoseconds spent in each operation since the program was made, in recording order (added up over
 * steps). Writes at most `capacity` and returns the number of operations. */
KT_API int32_t kt_program_profile(const kt_program *program, int64_t *nanoseconds, int32_t capacity);

/* ---- offload ---------------------------------------------------------------------------------
 *
 * A thread that runs parts of a program for a stream of another device: the stream hands over layer after layer
 * and waits for each. For a layer it runs part now[layer], lets the stream go on, then runs part late[layer]
 * (not in a step with defer 0), one layer after the other in the order of their arrival. It runs as the pool's
 * thread 0; from kt_offload_begin until kt_offload_result nobody else uses the pool or the program.
 *
 * Two ways in. By calls: the stream calls kt_offload_submit and kt_offload_wait, which have the signature of
 * cudaHostFn_t, call nothing of CUDA and allocate nothing; who waits, and the idle thread, spins for spin_us, then
 * sleeps. By flags: the stream writes flags[layer] = 1, which the thread looks for (it sets it back to 0): all the
 * time until spin_us after the last event, then about every 0.1 ms; between steps it sleeps. When the layer is
 * done it writes flags[layers + layer] = 1, for which the stream waits and which it sets back.
 *
 * Nothing ever keeps the stream waiting: after an error - of a part, or because nothing happened for timeout_ms
 * while somebody waited, a part ran, or layers were to come by flags - the layers left in the step are done at
 * once, without computing. The first error is kept until the next step begins.
 *
 * While late[layer] runs, the stream may already write what layer + 1 reads: such neighbours read views and given
 * routings of their own (two of each, in turn, are enough).
 */
typedef struct kt_offload kt_offload;

typedef struct kt_offload_options {
    int32_t layers;
    const int32_t *now;     /* [layers] parts; copied */
    const int32_t *late;    /* [layers] parts, or -1: none; copied */
    int32_t timeout_ms;     /* >= 1 */
    int32_t spin_us;
    int32_t *flags;         /* [2 * layers], which must outlive the handle; NULL: by calls */
} kt_offload_options;

/* The program is finished, has neither embeddings nor attention (a step gives it no ids and no cache), and must
 * outlive the handle. */
KT_API kt_offload *kt_offload_create(kt_program *program, const kt_offload_options *options, char *error,
                                     size_t error_size);
/* In the middle of a step too: whoever waits goes on, and the part that runs ends. */
KT_API void kt_offload_free(kt_offload *offload);
KT_API const char *kt_offload_error(const kt_offload *offload);

/* A step of so many tokens will be launched: forget the last one. Each layer comes once. KT_ERR_RANGE;
 * KT_ERR_TIMEOUT: the last step still runs. After an error nothing is computed until the next begin. */
KT_API int kt_offload_begin(kt_offload *offload, int64_t n_tokens, int32_t defer);
/* The step is over: when nothing runs any more, KT_OK or its first error. */
KT_API int kt_offload_result(kt_offload *offload);

/* What submit and wait take for a layer; NULL: there is no such layer. Valid as long as the handle. */
KT_API void *kt_offload_ticket(kt_offload *offload, int32_t layer);
/* The layer's input is there. Returns at once; from any thread. */
KT_API void kt_offload_submit(void *ticket);
/* Returns when the layer's part now is done, or the step has failed; from any thread. */
KT_API void kt_offload_wait(void *ticket);

/* A part as it ran. */
typedef struct kt_span {
    int32_t layer, late;        /* late: 1: it was part late[layer] */
    int64_t start_ns, end_ns;   /* CLOCK_MONOTONIC */
} kt_span;

/* Fill out[0..min(capacity, n)) with the parts of the last step, in order; return n. After kt_offload_result. */
KT_API int32_t kt_offload_spans(const kt_offload *offload, kt_span *out, int32_t capacity);

/* ---- ceilings --------------------------------------------------------------------------------- */

enum kt_ceiling { KT_CEILING_READ = 0, KT_CEILING_INT8 = 1, KT_CEILING_BF16 = 2 };

/* The best this pool reaches in a plain loop, per second: bytes read (READ) from data [nodes], `size` bytes of
 * each node, which its own threads read in disjoint parts and several passes; or operations (multiply and add
 * count as two) from registers (INT8, BF16; data unused). Runs for about `seconds`. */
KT_API int kt_ceiling(kt_pool *pool, int32_t kind, const void *const *data, size_t size, double seconds,
                      double *rate);

#ifdef __cplusplus
}
#endif
#endif
