/* moe.c - the routed experts: group the token slots by expert, gate and up, swiglu, down, weighted sum.
 *
 * A *slot* is one (token, k) pair of the routing, number t * top_k + k. Each thread sorts the slots by
 * expert for itself (a counting sort: cheaper than letting one do it and waiting). The first phase
 * shares out (expert, block of gate and up panels); its rows of hidden values lie in sorted order, so
 * that an expert's rows are neighbours. The last phase shares out blocks of *output columns*: a thread
 * takes its columns of every expert, in ascending order, and the product adds each slot's result, times its
 * gate, to the token's output. So the sum needs neither atomics nor a second pass, and its order depends
 * neither on threads nor on token counts.
 */
#include "program.h"

#include <string.h>

#define TASKS_PER_THREAD 8
#define BLOCK_TOKENS 240                /* most rows of gate and up that a task holds at once, */
#define BLOCK_FLOATS 65536              /* and most values: 256 kB, a part of a usual second cache */
#define SUM_BYTES ((int64_t)4 << 20)    /* outputs of a task, to which all experts add: they are fetched in time, */
#define SUM_PANELS 4                    /* or, with very many tokens, this many panels */
#define QUANTIZE_RUN 8                  /* rows */

typedef struct moe {
    kt_view out;
    source in;
    int32_t routing, domain;
    int64_t top_k, experts, width;      /* width: I */
    int64_t h_stride;                   /* floats of a row of hidden values */
    int64_t max_slots;
    matrices gate_up, down;
} moe;

/* The step's slots by expert; arrays in this thread's scratch. */
typedef struct groups {
    int32_t n_active, n_slots;
    int32_t *active;                    /* [n_active] experts that have slots, ascending */
    int32_t *first;                     /* [experts + 1] expert e has sorted rows first[e]..first[e+1] */
    int32_t *token;                     /* [n_slots] of each sorted row, */
    float *gate;                        /* [n_slots] and its weight */
} groups;

static size_t groups_bytes(const moe *o)
{
    size_t size = size_mul((size_t)o->max_slots * 2 + (size_t)o->experts * 2 + 1, sizeof(int32_t));
    return (size + 63) / 64 * 64;
}

static groups groups_at(const moe *o, const worker *w)
{
    groups g = {.active = (int32_t *)(void *)local_scratch(w)};
    g.first = g.active + o->experts;
    g.token = g.first + o->experts + 1;
    g.gate = (float *)(void *)(g.token + o->max_slots);
    return g;
}

/* What the first phase of the step left in this thread's scratch. */
static groups groups_again(const moe *o, const worker *w)
{
    groups g = groups_at(o, w);
    g.n_slots = g.first[o->experts];
    for (int64_t e = 0; e < o->experts; e++)
        g.n_active += g.first[e + 1] > g.first[e];
    return g;
}

static groups group_slots(const moe *o, const worker *w)
{
    groups g = groups_at(o, w);
    const routing *r = &w->program->routings.at[o->routing];
    const int32_t *ids = r->ids;
    int64_t n = rows_of(w, o->domain) * o->top_k;
    memset(g.first, 0, (size_t)(o->experts + 1) * sizeof *g.first);
    for (int64_t s = 0; s < n; s++) {
        if (ids[s] >= 0)
            g.first[ids[s] + 1]++;
    }
    for (int64_t e = 0; e < o->experts; e++) {
        if (g.first[e + 1] > 0)
            g.active[g.n_active++] = (int32_t)e;
        g.first[e + 1] += g.first[e];
    }
    /* first[e] walks through its rows here; afterwards it stands at the next expert's first. */
    for (int64_t s = 0; s < n; s++) {
        if (ids[s] >= 0) {
            int32_t row = g.first[ids[s]]++;
            g.token[row] = (int32_t)(s / o->top_k);
            g.gate[row] = r->gate[s];
        }
    }
    memmove(g.first + 1, g.first, (size_t)o->experts * sizeof *g.first);
    g.first[0] = 0;
    g.n_slots = g.first[o->experts];
    return g;
}

/* Shared scratch: hidden values f32, then the same as down reads them. */
static float *hidden(const worker *w)
{
    return (float *)(void *)shared_scratch(w);
}

static act hidden_act(const moe *o, const worker *w)
{
    uint8_t *at = shared_scratch(w) + (size_t)o->max_slots * (size_t)o->h_stride * sizeof(float);
    return act_at(o->down.kind, at, o->max_slots, act_stride(o->down.kind, o->width));
}

/* ---- gate, up and swiglu ------------------------------------------------------------------------ */

/* Rows [row, last_row) of one expert and hidden columns [16 * pair, 16 * last_pair). */
typedef struct piece {
    int32_t expert;
    int64_t row, last_row, pair, last_pair;
    const uint8_t *next;                /* weights this thread will read after it */
} piece;

/* h, whose first row and column are those of the piece, = swiglu of gate and up. */
static void gate_up_block(const moe *o, const worker *w, const groups *g, const piece *b, float *h)
{
    float *y = (float *)(void *)(local_scratch(w) + groups_bytes(o));
    int64_t columns = (b->last_pair - b->pair) * 2 * KT_PANEL_ROWS;
    int64_t width = min64(columns / 2, o->width - b->pair * KT_PANEL_ROWS);
    act a;
    product p = {.n_tokens = b->last_row - b->row, .x_rows = g->token + b->row, .y = y, .y_stride = columns};
    source_bind(w, &o->in, &a, &p);
    matrices_bind(w, &o->gate_up, b->expert, 2 * b->pair, 2 * b->last_pair, &p);
    p.next = b->next;
    product_run(w, o->gate_up.kind, &p);
    for (int64_t i = 0; i < p.n_tokens; i++)
        w->kernels->swiglu(y + i * columns, width, h + i * o->h_stride);
}

/* All rows of one expert: as many panels in one product as the scratch holds, since it fetches ahead. Rows that
 * are whole are converted for down while they are in the cache; else quantize_run does it later. */
static void gate_up(const moe *o, const worker *w, const groups *g, const piece *all, int whole)
{
    float *own = (float *)(void *)(local_scratch(w) + groups_bytes(o)) + BLOCK_FLOATS;
    act a = hidden_act(o, w);
    piece b = *all;
    for (b.row = all->row; b.row < all->last_row; b.row = b.last_row) {
        b.last_row = min64(b.row + BLOCK_TOKENS, all->last_row);
        int64_t most = BLOCK_FLOATS / (2 * KT_PANEL_ROWS * (b.last_row - b.row));
        float *h = whole ? own : hidden(w) + b.row * o->h_stride;
        for (b.pair = all->pair; b.pair < all->last_pair; b.pair = b.last_pair) {
            b.last_pair = min64(b.pair + most, all->last_pair);
            int64_t then = b.last_pair < all->last_pair ? b.last_pair : all->pair;
            int ends = then == all->pair && b.last_row == all->last_row;
            b.next = ends ? all->next : panel_at(&o->gate_up, b.expert, 2 * then);
            gate_up_block(o, w, g, &b, h + b.pair * KT_PANEL_ROWS);
        }
        for (int64_t i = b.row; whole && i < b.last_row; i++)
            act_convert(w, &a, own + (i - b.row) * o->h_stride, o->width, i);
    }
}

/* Pairs of panels of one task of the first phase. */
static int64_t pairs_per_task(const moe *o, const worker *w, const groups *g)
{
    int64_t pairs = o->gate_up.panels / 2;
    return max64(1, min64(pairs, pairs * g->n_active / ((int64_t)w->threads * TASKS_PER_THREAD)));
}

/* A task has all columns of an expert, so it can convert the rows itself. */
static int has_whole_rows(const moe *o, const worker *w, const groups *g)
{
    return o->down.kind != ACT_F32 && pairs_per_task(o, w, g) == o->gate_up.panels / 2;
}

static void gate_up_run(const void *arg, worker *w)
{
    const moe *o = arg;
    groups g = group_slots(o, w);
    int64_t pairs = o->gate_up.panels / 2, run = pairs_per_task(o, w, &g), blocks = (pairs + run - 1) / run;
    int64_t tasks = blocks * g.n_active;
    int whole = has_whole_rows(o, w, &g);
    /* A task ahead is taken, so that its first weights come while the one before it computes. */
    for (int64_t i = worker_take(w, 1), ahead; i < tasks; i = ahead) {
        ahead = worker_take(w, 1);
        int32_t expert = g.active[i / blocks];
        piece b = {.expert = expert, .row = g.first[expert], .last_row = g.first[expert + 1], .pair = i % blocks * run};
        b.last_pair = min64(b.pair + run, pairs);
        if (ahead < tasks)
            b.next = panel_at(&o->gate_up, g.active[ahead / blocks], 2 * (ahead % blocks * run));
        gate_up(o, w, &g, &b, whole);
    }
}

static void quantize_run(const void *arg, worker *w)
{
    const moe *o = arg;
    groups g = groups_again(o, w);
    act a = hidden_act(o, w);
    int64_t n = has_whole_rows(o, w, &g) ? 0 : g.n_slots;
    for (int64_t row; (row = worker_take(w, QUANTIZE_RUN)) < n;) {
        for (int64_t i = row; i < min64(row + QUANTIZE_RUN, n); i++)
            act_convert(w, &a, hidden(w) + i * o->h_stride, o->width, i);
    }
}

/* ---- down and the weighted sum ------------------------------------------------------------------ */

/* Output panels of one task: what stays in the cache for so many tokens, and enough tasks for all. */
static int64_t panels_per_task(const moe *o, int64_t tokens, int threads)
{
    int64_t fit = max64(SUM_PANELS, SUM_BYTES / (tokens * KT_PANEL_ROWS * (int64_t)sizeof(float)));
    int64_t fair = max64(1, o->down.panels / ((int64_t)threads * (tokens > 1 ? 4 : TASKS_PER_THREAD)));
    return min64(fit, fair);
}

/* out += gate * down of the slots' hidden values, for the output panels [panel, last_panel); `next`: where the
 * thread goes on. */
static void down(const moe *o, const worker *w, const groups *g, int64_t panel, int64_t last_panel,
                 const uint8_t *next)
{
    act all = hidden_act(o, w), some;
    product p = {.y = view_row(w, o->out, 0) + panel * KT_PANEL_ROWS, .y_stride = view_stride(w, o->out)};
    for (int32_t i = 0; i < g->n_active; i++) {
        int32_t expert = g->active[i], row = g->first[expert];
        matrices_bind(w, &o->down, expert, panel, last_panel, &p);
        p.n_tokens = g->first[expert + 1] - row;
        p.y_rows = g->token + row;
        p.y_gate = g->gate + row;
        some = act_rows(&all, row);
        act_bind(&some, &p);
        if (o->down.kind == ACT_F32) {
            p.xf = hidden(w) + row * o->h_stride;
            p.x_stride = o->h_stride;
        }
        p.next = i + 1 < g->n_active ? panel_at(&o->down, g->active[i + 1], panel) : next;
        product_run(w, o->down.kind, &p);
    }
}

static void down_run(const void *arg, worker *w)
{
    const moe *o = arg;
    groups g = groups_again(o, w);
    int64_t rows = rows_of(w, o->domain), run = panels_per_task(o, max64(1, rows), w->threads);
    for (int64_t panel = worker_take(w, run), ahead; panel < o->down.panels; panel = ahead) {
        ahead = worker_take(w, run);
        int64_t last = min64(panel + run, o->down.panels);
        int64_t width = min64((last - panel) * KT_PANEL_ROWS, o->out.width - panel * KT_PANEL_ROWS);
        for (int64_t t = 0; t < rows; t++)
            memset(view_row(w, o->out, t) + panel * KT_PANEL_ROWS, 0, (size_t)width * sizeof(float));
        down(o, w, &g, panel, last,
             g.n_active > 0 && ahead < o->down.panels ? panel_at(&o->down, g.active[0], ahead) : NULL);
    }
}

/* ---- recording ---------------------------------------------------------------------------------- */

static int check(kt_program *p, kt_view out, kt_view in, int32_t number)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "experts in", in, -1);
    if (!failed)
        failed = program_check_view(p, "experts out", out, program_domain(p, in));
    if (failed)
        return failed;
    if (number < 0 || number >= p->routings.n)
        return program_fail(p, KT_ERR_RANGE, "experts: routing %d of %d", number, p->routings.n);
    if (p->routings.at[number].domain != program_domain(p, in) || in.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "experts: %d columns to %d, rows of domain %d routed in domain %d",
                            in.width, out.width, program_domain(p, in), p->routings.at[number].domain);
    return program_check_overlap(p, "experts", out, in, 1);
}

static void record(kt_program *p, moe *o, kt_view in)
{
    size_t hidden_bytes = size_mul(size_mul((size_t)o->max_slots, (size_t)o->h_stride), sizeof(float));
    size_t act_size = act_bytes(o->down.kind, o->max_slots, act_stride(o->down.kind, o->width));
    size_t rows = size_mul((size_t)min64(BLOCK_TOKENS, o->max_slots), (size_t)o->h_stride);
    size_t local = size_mul(size_add(BLOCK_FLOATS, rows), sizeof(float));
    program_reserve(p, size_add(hidden_bytes, act_size), size_add(groups_bytes(o), local));
    program_operation(p);
    o->in = program_source(p, in, o->gate_up.kind);
    program_phase(p, gate_up_run, o);
    program_touch_source(p, &o->in);
    program_touch(p, p->routings.at[o->routing].resource, 0, 1, ANY_ROWS);
    program_touch_scratch(p, ANY_ROWS | WRITES);
    if (o->down.kind != ACT_F32) {
        program_phase(p, quantize_run, o);
        program_touch_scratch(p, ANY_ROWS | WRITES);
    }
    program_phase(p, down_run, o);
    program_touch_scratch(p, ANY_ROWS);
    program_touch(p, p->routings.at[o->routing].resource, 0, 1, ANY_ROWS);
    program_touch_view(p, o->out, ANY_ROWS | WRITES);
}

int kt_program_experts(kt_program *p, kt_view out, kt_view in, int32_t number, const kt_weight *gate_up,
                       const kt_weight *down)
{
    matrices first, second;
    int failed = check(p, out, in, number);
    if (failed)
        return failed;
    const routing *r = &p->routings.at[number];
    int64_t width = down->k, padded = (width + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS * KT_PANEL_ROWS;
    if (width < 1 || width > MAX_COLUMNS)
        return program_fail(p, KT_ERR_SHAPE, "experts: a width of %lld", (long long)width);
    failed = program_matrices(p, "experts gate_up", gate_up, (int64_t[3]){2 * padded, in.width, r->experts}, 0, &first);
    if (!failed)
        failed = program_matrices(p, "experts down", down, (int64_t[3]){in.width, width, r->experts}, 0, &second);
    moe *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    *o = (moe){.out = out, .routing = number, .domain = r->domain, .top_k = r->top_k, .experts = r->experts,
               .width = width, .h_stride = padded, .max_slots = program_rows(p, r->domain) * r->top_k,
               .gate_up = first, .down = second};
    if (o->max_slots > INT32_MAX)
        return program_fail(p, KT_ERR_SHAPE, "experts: %lld rows of %d experts each",
                            (long long)program_rows(p, r->domain), r->top_k);
    record(p, o, in);
    return KT_OK;
}
