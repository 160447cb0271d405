/* kt_pool.h - what the CPU supports, teams of threads, memory, and the ceilings of both. */
#ifndef KT_API_POOL_H
#define KT_API_POOL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef KT_API
#define KT_API __attribute__((visibility("default")))
#endif

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

/* A number made of all declarations of these headers (cdef.py): who calls a library that was built of others is
 * told by it before anything is passed wrongly. */
KT_API int32_t kt_api_stamp(void);

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

/* Rows of numbers, by the matrices that read them: matrix i reads rows ends[i - 1] (0 before the first) to ends[i] - 1
 * of the list `rows`, or of x itself where rows is NULL. Row r is x + r * stride, k columns. */
typedef struct kt_squares {
    const float *x;
    int64_t stride, k;
    const int64_t *rows;
    const int64_t *ends;    /* [count], ascending */
    int64_t count;
} kt_squares;

/* sums[i][0..k) += the squares of the rows that matrix i reads, in f64: 64 rows one behind the other, then their sum. */
KT_API int kt_add_squares(kt_pool *pool, const kt_squares *of, double *sums);

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
