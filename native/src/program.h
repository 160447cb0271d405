/* program.h - how operations are recorded and run; shared by the drivers.
 *
 * An operation is one or more *phases*. A phase is a function that every thread of the team calls
 * once per step and that shares out its work itself. While recording, each phase says what it reads
 * and writes; where that meets something touched since the last barrier, a barrier is put before the
 * phase. Two kinds of sharing are known:
 *
 *   OWN_ROWS   row t is touched only by the thread that own_rows() gives it, in every such phase; so
 *              chains of norm, add, rope, ... over the same rows need no barrier between them;
 *   ANY_ROWS   any thread touches any row: a product's outputs, the cache, the scratch memory.
 *
 * Products read activations as int8, bf16 or f32 (a *source*); the conversion of a view is recorded
 * once and reused by every later product until something writes to that view.
 */
#ifndef KT_PROGRAM_H
#define KT_PROGRAM_H

#include "batch.h"
#include "pool.h"

#include <stdatomic.h>

#define MAX_COLUMNS ((int64_t)1 << 28)      /* of a buffer or matrix; keeps all size arithmetic in range */
#define MAX_ROWS ((int64_t)1 << 24)

enum { OWN_ROWS = 0, ANY_ROWS = 1, WRITES = 2 };
/* What a product reads its activations as. INT8: with one scale for the row; GROUPS: with a scale for 64 columns, for
 * weights that have scales for groups of columns too, or whose product asks for it. WIDE: a row is two rows of int8, 2t
 * and 2t + 1, the second what the first leaves over; the product of the row is the sum of theirs. ROTATED: f32, kept in a
 * slot because a rotation went before; products read it as F32. ROUNDED: f32 too, what another kind leaves of a row (a
 * *rounding*). */
enum { ACT_F32, ACT_ROTATED, ACT_ROUNDED, ACT_BF16, ACT_INT8, ACT_INT8_GROUPS, ACT_WIDE, ACT_WIDE_GROUPS };

static inline int act_is_wide(int32_t kind)
{
    return kind >= ACT_WIDE;
}

/* What a row of ROUNDED was converted to and back. */
typedef struct rounding {
    int32_t kind;                   /* ACT_BF16 or later; ACT_F32: nothing is rounded */
    int64_t rotation;               /* columns of a block rotated before, and back after; 0: none */
} rounding;

typedef struct buffer {
    int64_t width, stride;          /* floats */
    int32_t domain;
    int32_t resource;
    float *data;                    /* from finish on */
} buffer;

/* Memory for the rows of one view at a time, converted. */
typedef struct slot {
    int32_t kind, domain, resource;
    int64_t rotation;               /* columns of a block rotated before; 0: none */
    rounding rounds;
    int32_t valid;                  /* while recording: holds `view` as it is now, */
    int32_t part;                   /* since this part */
    kt_view view;
    int64_t used;                   /* phase number of the last use: the oldest is given away */
    int64_t stride;                 /* largest of its views, elements */
    uint8_t *data;
} slot;

typedef struct source {
    int32_t kind;                   /* ACT_* */
    int32_t slot;                   /* -1: f32, straight from the view */
    int64_t rotation;
    rounding rounds;
    kt_view view;
    int64_t stride;                 /* elements of a converted row */
} source;

/* A weight, checked, with what is needed to cut it. */
typedef struct matrices {
    kt_weight weight;
    int32_t kind;                   /* ACT_* that its product reads */
    int64_t rotation;               /* columns of a block that is rotated; 0: none */
    rounding rounds;                /* of ROUNDED */
    int64_t panels;
    size_t panel_bytes, bytes;      /* of a panel and of one matrix */
} matrices;

/* Both read the same conversion of a view. */
static inline int matrices_read_alike(const matrices *a, const matrices *b)
{
    return a->kind == b->kind && a->rotation == b->rotation && a->rounds.kind == b->rounds.kind &&
           a->rounds.rotation == b->rounds.rotation;
}

typedef struct rope_table {
    int64_t dim;
    float scale;
    int64_t shift;                  /* of the position */
    const float *inv_freq;          /* [dim/2] */
    int32_t resource, recorded;
    float *data;                    /* [max_tokens][dim]: dim/2 cosines, dim/2 sines */
} rope_table;

typedef struct routing {
    int32_t experts, top_k, domain, resource;
    int32_t gates;                  /* the routing whose gate it shares; usually itself */
    int32_t given, late;            /* the caller writes it; its experts are not computed in a step with defer 0 */
    _Atomic int64_t *chosen;        /* [experts]; NULL: split made it */
    int32_t *ids;                   /* [rows][top_k] */
    float *gate;
} routing;

/* Where each token attends: of each of its lists the chosen places, ascending. */
typedef struct selection {
    int32_t lists, top_k, resource;
    int32_t block;                  /* positions of a place */
    int32_t every;                  /* positions of a window that is a place */
    int32_t *at;                    /* [max_tokens][lists][top_k] */
    int32_t *count;                 /* [max_tokens][lists] */
} selection;

/* The most positions that a token attends to; one that sees no more is not scored. */
static inline int64_t selection_reach(const selection *s)
{
    return (int64_t)s->top_k * s->block * s->every;
}

/* Whether every token of the run attends to all that it sees. */
static inline int selection_is_all(const selection *s, const kt_run *run)
{
    return chunk_end(run) <= selection_reach(s);
}

static inline const int32_t *selection_row(const selection *s, int64_t token, int64_t list, int32_t *count)
{
    int64_t row = token * s->lists + list;
    *count = s->count[row];
    return s->at + row * s->top_k;
}

/* The first id of a given routing that this run could not use. */
typedef struct stray {
    _Atomic int32_t found;
    int32_t routing, id;
    int64_t row;
} stray;

/* Memory of one node, for its own threads. */
typedef struct node_memory {
    kt_arena *arena;
    uint8_t *scratch;               /* of all its threads */
    uint8_t *local;                 /* [threads][local_stride] */
} node_memory;

typedef struct worker {
    const struct kt_program *program;
    kt_pool *pool;
    const kt_kernels *kernels;
    const kt_step *step;
    const struct batch *batch;      /* the rows of the step */
    int thread, threads;
    pool_place own;                 /* its node, and its place in that node's team */
    uint8_t *local;                 /* this thread's scratch: product scratch, then what phases asked for */
} worker;

typedef void phase_run(const void *arg, worker *w);

typedef struct phase {
    phase_run *run;
    const void *arg;
    int32_t operation;              /* whose time this is */
    int32_t barrier;                /* 1: wait for all before it */
    int32_t late;                   /* 1: not in a step with defer 0 */
    const kt_kernels *kernels;      /* its row */
} phase;

struct adaptable;
struct adaptable_gain;

typedef struct access {
    int32_t resource, how;
    int64_t first, last;
} access;

/* A growing array while recording. */
#define LIST(type) struct { type *at; int32_t n, capacity; }

struct kt_program {
    kt_pool *pool;
    kt_program_options options;
    char error[256];
    LIST(buffer) buffers;
    LIST(slot) slots;
    LIST(rope_table) tables;
    LIST(routing) routings;
    LIST(selection) selections;
    LIST(struct adaptable) adaptables;  /* products that adapters may update (lowrank.h) */
    LIST(struct adaptable_gain) gains;  /* norms that they may replace */
    int32_t keeps_hidden;           /* experts leave what down reads in the scratch of their node, as f32 */
    int32_t adapters, ranks;        /* that runs may name, and the most ranks of one product's updates; 0: none */
    int32_t inner[2];               /* buffers of what their A make of rows, one for each domain; -1: none yet */
    LIST(phase) phases;
    LIST(int32_t) parts;            /* first phases of parts 1, 2, ... */
    LIST(access) recent;            /* touched since the last barrier */
    LIST(void *) owned;             /* freed with the program */
    int32_t phase_first;            /* recent.at[phase_first..]: the phase being recorded */
    int32_t loops;                  /* phases since the last barrier */
    int32_t resources, operations;
    int32_t late;                   /* while recording: phases are for steps that defer only */
    const kt_kernels *kernels;      /* while recording: the row of what comes next */
    int32_t finished, failed;       /* failed: memory ran out while recording */
    size_t scratch_bytes, node_bytes, product_bytes, local_bytes;
    stray *stray;                   /* NULL: no routing is given */
    int64_t vocab;                  /* smallest of all embeddings; INT64_MAX: none */
    int64_t positions;              /* that a sequence may have; INT64_MAX: any number */
    size_t page_bytes;              /* that a page must have; 0: no cache is used */
    size_t window_bytes;            /* that a window page must have; 0: none are used */
    int64_t window;                 /* the widest window over them */
    size_t state_bytes;             /* that a state must have; 0: none is used */
    kt_arena *arena;
    batch batch;                    /* of the step that runs */
    uint8_t *scratch;
    int32_t n_nodes;
    node_memory *nodes;
    size_t local_stride;
    int64_t *profile;               /* [operations] ns */
};

/* ---- recording ---------------------------------------------------------------------------------- */

int program_fail(kt_program *p, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* KT_OK if an operation may be recorded. */
int program_open(kt_program *p);
/* Give back what kt_program_finish reserved. */
void program_release(kt_program *p);
/* KT_OK if v lies inside a buffer of the domain (-1: of any). */
int program_check_view(kt_program *p, const char *name, kt_view v, int32_t domain);
int32_t program_domain(const kt_program *p, kt_view v);
int64_t program_rows(const kt_program *p, int32_t domain);      /* most that a step can have */
/* KT_OK if a and b are apart, or equal and that is allowed. */
int program_check_overlap(kt_program *p, const char *name, kt_view a, kt_view b, int32_t equal_allowed);

/* KT_OK if the activation is one, and what the kernels take for it. */
int program_glu(kt_program *p, const char *name, const kt_glu *given, kt_glu *glu);

/* Check w against [n, k] x count and fill *m; reads: KT_READ_*. Reserves the scratch of its products. */
int program_matrices(kt_program *p, const char *name, const kt_weight *w, const int64_t n_k_count[3],
                     int32_t reads, matrices *m);

/* Room for one more item in a LIST; 0 if there is no memory, and then the program is marked failed. */
int program_room(kt_program *p, void *at, int32_t n, int32_t *capacity, size_t item);
#define ROOM(p, list) program_room(p, &(list).at, (list).n, &(list).capacity, sizeof *(list).at)

/* Zeroed memory that lives as long as the program; NULL with the error set if there is none. */
void *program_new(kt_program *p, size_t size);
/* The same: n times the value. */
float *program_constant(kt_program *p, int64_t n, double value);
int32_t program_resource(kt_program *p);
void program_operation(kt_program *p);
void program_phase(kt_program *p, phase_run *run, const void *arg);
/* The phase just recorded touches [first, last) of a resource; `how`: OWN_ROWS or ANY_ROWS, | WRITES. */
void program_touch(kt_program *p, int32_t resource, int64_t first, int64_t last, int32_t how);
void program_touch_view(kt_program *p, kt_view v, int32_t how);
void program_touch_source(kt_program *p, const source *s);
void program_touch_scratch(kt_program *p, int32_t how);
void program_touch_node_scratch(kt_program *p, int32_t how);
void program_touch_cache(kt_program *p, size_t offset, size_t size, int32_t how);
void program_touch_windows(kt_program *p, size_t offset, size_t size, int32_t how);
/* Most that any operation needs: shared scratch, and local scratch of each thread. */
void program_reserve(kt_program *p, size_t scratch, size_t local);
void program_reserve_node(kt_program *p, size_t scratch);   /* of each node */
/* KT_OK if a state of `size` bytes can lie at `offset`. */
int program_reserve_state(kt_program *p, const char *name, size_t offset, size_t size);
/* What was converted from columns of v is stale. */
void program_forget(kt_program *p, kt_view v);
/* v as m reads it; records the conversion if it is not there already. */
source program_source(kt_program *p, kt_view v, const matrices *m);
int64_t act_stride(int32_t kind, int64_t k);
size_t act_bytes(int32_t kind, int64_t rows, int64_t stride);

/* Products and sums of sizes that stop at SIZE_MAX instead of wrapping. */
size_t size_mul(size_t a, size_t b);
size_t size_add(size_t a, size_t b);

/* ---- running ------------------------------------------------------------------------------------ */

static inline int64_t rows_of(const worker *w, int32_t domain)
{
    return domain == KT_ROWS_TOKENS ? w->batch->rows : w->batch->outputs;
}

/* The run that a row of tokens belongs to, and the row's position in its sequence. */
static inline const kt_run *run_of(const worker *w, int64_t row)
{
    return &w->batch->runs[w->batch->run[row]];
}

static inline int64_t position_of(const worker *w, int64_t row)
{
    return w->batch->position[row];
}

/* The row of tokens that a row of a domain stands for. */
static inline int64_t token_row(const worker *w, int32_t domain, int64_t row)
{
    return domain == KT_ROWS_TOKENS ? row : w->batch->output[row];
}

/* What operations keep of a sequence, from an offset on: before the run, NULL if there is nothing yet, and after it. */
static inline const float *state_before(const worker *w, const kt_run *run, size_t offset)
{
    const uint8_t *states = (const uint8_t *)w->step->states;
    return run->state < 0 ? NULL : (const float *)(const void *)(states + (size_t)run->state * w->step->state_bytes + offset);
}

static inline float *state_after(const worker *w, const kt_run *run, size_t offset)
{
    uint8_t *states = (uint8_t *)w->step->states;
    return (float *)(void *)(states + (size_t)run->next_state * w->step->state_bytes + offset);
}

/* The rows [*first, *last) of a domain that belong to this thread; thread 0 owns a single row. */
static inline void own_rows(const worker *w, int32_t domain, int64_t *first, int64_t *last)
{
    int64_t rows = rows_of(w, domain);
    *first = (rows * w->thread + w->threads - 1) / w->threads;
    *last = (rows * (w->thread + 1) + w->threads - 1) / w->threads;
}

static inline float *view_row(const worker *w, kt_view v, int64_t row)
{
    const buffer *b = &w->program->buffers.at[v.buffer];
    return b->data + row * b->stride + v.column;
}

/* Of a given routing: note an id among the thread's own rows that is no expert; counted: count the others. */
void routing_check(const worker *w, int32_t number, int counted);

static inline int64_t view_stride(const worker *w, kt_view v)
{
    return w->program->buffers.at[v.buffer].stride;
}

/* What program_reserve asked for: memory of all threads, of a node, and of this thread. */
static inline uint8_t *shared_scratch(const worker *w)
{
    return w->program->scratch;
}

static inline uint8_t *node_scratch(const worker *w, int node)
{
    return w->program->nodes[node].scratch;
}

#define ROUNDS_BEHIND 2         /* in which tasks are taken one by one */
#define NONE_AHEAD INT64_MAX    /* like a task that is past the last one */

static inline uint8_t *local_scratch(const worker *w)
{
    return w->local + w->program->product_bytes;
}

static inline int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t worker_take(const worker *w, int64_t run)
{
    return pool_take(w->pool, w->thread, run);
}

/* Among the threads of the node. */
static inline int64_t worker_take_own(const worker *w, int64_t run)
{
    return pool_take_own(w->pool, w->thread, run);
}

/* The task that a node's thread does after task i of `tasks`, taken already, so that its first weights come while task
 * i computes; NONE_AHEAD: it takes one when it is done, as in the last rounds, where a thread that falls behind would
 * keep what another is free to do. */
static inline int64_t worker_take_ahead(const worker *w, int64_t i, int64_t tasks, int64_t run)
{
    return i + ROUNDS_BEHIND * w->own.threads * run < tasks ? worker_take_own(w, run) : NONE_AHEAD;
}

/* Where a thread probably goes on after task i. */
static inline int64_t worker_soon(const worker *w, int64_t i, int64_t ahead, int64_t run)
{
    return ahead == NONE_AHEAD ? i + w->own.threads * run : ahead;
}

/* The next task, given what worker_take_ahead returned. */
static inline int64_t worker_go_on(const worker *w, int64_t ahead, int64_t run)
{
    return ahead == NONE_AHEAD ? worker_take_own(w, run) : ahead;
}

static inline void worker_barrier(const worker *w)
{
    pool_barrier(w->pool, w->thread);
}

/* Bytes of an element of the cache. */
static inline size_t cache_element(const kt_program *p)
{
    int32_t cache = p->options.cache;
    return cache == KT_CACHE_F32 ? sizeof(float) : cache == KT_CACHE_FP8 ? sizeof(uint8_t) : sizeof(uint16_t);
}

/* Converted activations, `rows` rows of `stride` elements laid out at data (act_bytes). */
typedef struct act {
    int32_t kind;
    int64_t stride, rotation;
    rounding rounds;
    act8 x8;
    uint16_t *xh;
    float *xf;
} act;
act act_at(int32_t kind, uint8_t *data, int64_t rows, int64_t stride);
/* The same as m reads rows of k columns, but not rotated. */
act act_for(const matrices *m, uint8_t *data, int64_t rows, int64_t k);
/* Row `row` of a = x[0..k), rotated first where a says so; amax: as kt_kernels.quantize has it. Uses the product
 * scratch of the thread. */
void act_convert(const worker *w, const act *a, const float *x, int64_t k, float amax, int64_t row);
/* The rows of a from `row` on. */
act act_rows(const act *a, int64_t row);
/* Let p read its activations from a, which must live as long as p. */
void act_bind(const act *a, product *p);
/* The same for a source; `a` gives the storage. */
void source_bind(const worker *w, const source *s, act *a, product *p);
/* Let p multiply with rows [first_panel, last_panel) * 16 of matrix `index`, as a matrix of its own. */
void matrices_bind(const worker *w, const matrices *m, int64_t index, int64_t first_panel, int64_t last_panel,
                   product *p);
/* Where panel `panel` of matrix `index` lies. */
static inline const uint8_t *panel_at(const matrices *m, int64_t index, int64_t panel)
{
    return (const uint8_t *)m->weight.data + (size_t)index * m->bytes + (size_t)panel * m->panel_bytes;
}
void product_run(const worker *w, int32_t kind, const product *p);

#endif
