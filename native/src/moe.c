/* moe.c - the routed experts: group the token slots by expert, gate and up, swiglu, down, weighted sum.
 *
 * A *slot* is one (token, k) pair of the routing, number t * top_k + k. Each thread sorts the slots by
 * expert for itself (a counting sort: cheaper than letting one do it and waiting). The first phase
 * shares out (expert, block of gate and up panels); its rows of hidden values lie in sorted order, so
 * that an expert's rows are neighbours. The last phase shares out blocks of *output columns*: a thread
 * takes its columns of every expert, in ascending order, and the product adds each slot's result, times its
 * gate, to the token's output. So the sum needs neither atomics nor a second pass, and its order depends
 * neither on threads nor on token counts.
 *
 * Nodes share the *width*: each has some of the hidden columns, with the rows of gate and up and the columns
 * of down that belong to them, and does all of the above with its own threads, for its columns alone. Two
 * things cross between nodes: the largest hidden value of each row, where all its columns have one
 * activation scale, and the sums over each node's columns, which a last phase adds up in the nodes' order.
 */
#include "moe.h"

#include <stdatomic.h>
#include <string.h>

#define TASKS_PER_THREAD 8
#define SUM_BYTES ((int64_t)4 << 20)    /* outputs of a task, to which all experts add: they are fetched in time, */
#define SUM_PANELS 4                    /* or, with very many tokens, this many panels */
#define QUANTIZE_RUN 8                  /* rows */
#define TILE_PANELS 2                   /* tiles are two panels wide: a task of one would leave half of them unused */
#define REDUCE_COLUMNS 512              /* of a task that adds up the nodes' sums */

static act hidden_act(const moe *o, const worker *w)
{
    const part *own = own_part(o, w);
    uint8_t *at = node_scratch(w, w->own.node) + own->act_offset;
    return act_for(&own->down, at, o->max_slots, own->width);
}

/* Row t of a node's sums; with one node, of the output. */
static float *sum_row(const moe *o, const worker *w, int node, int64_t t)
{
    if (o->nodes == 1)
        return view_row(w, o->out, t);
    return (float *)(void *)(node_scratch(w, node) + o->parts[node].sum_offset) + t * o->sum_stride;
}

/* ---- adapters ------------------------------------------------------------------------------------ */

adapted_rows updated_rows(const moe *o, const worker *w, const groups *g, int32_t product, int32_t expert,
                                 int64_t row, int64_t last_row)
{
    float *inner = (float *)(void *)(node_scratch(w, w->own.node) + own_part(o, w)->inner_offset);
    int64_t stride = w->program->ranks;
    return (adapted_rows){.product = product, .domain = o->domain, .matrix = expert, .n = last_row - row,
                          .tokens = g->token + row, .inner = inner + row * stride, .inner_stride = stride};
}

/* A x of all slots, for gate_up or for down. */
static void inner_of_slots(const moe *o, worker *w, const groups *g, int down)
{
    const part *own = own_part(o, w);
    int64_t ranks = ranks_of_task(w, g->n_active), parts = (w->program->ranks + ranks - 1) / ranks;
    for (int64_t i; own->width && (i = worker_take_own(w, 1)) < g->n_active * parts;) {
        int32_t expert = g->active[i / parts];
        int64_t row = g->first[expert], rank = i % parts * ranks;
        adapted_rows rows = updated_rows(o, w, g, down ? o->down_updates : o->gate_up_updates, expert, row,
                                         g->first[expert + 1]);
        adapted_input in = {.k = o->out.width, .x = view_row(w, o->x, 0), .x_stride = view_stride(w, o->x),
                            .x_rows = rows.tokens};
        if (down)
            in = (adapted_input){.k = own->width, .column = own->column, .x = hidden(w) + row * own->h_stride,
                                 .x_stride = own->h_stride};
        lowrank_inner(w, &rows, &in, rank, rank + ranks);
    }
}

void gate_up_inner_run(const void *arg, worker *w)
{
    const moe *o = arg;
    const routing *r = &w->program->routings.at[o->routing];
    groups g = own_groups(o, w);
    if (!w->batch->adapted)
        return;
    group_slots(&g, r->ids, r->gate, rows_of(w, o->domain), o->top_k);
    inner_of_slots(o, w, &g, 0);
}

void down_inner_run(const void *arg, worker *w)
{
    const moe *o = arg;
    groups g = own_groups(o, w);
    if (!w->batch->adapted)
        return;
    groups_again(&g);
    inner_of_slots(o, w, &g, 1);
}

/* ---- gate, up and swiglu ------------------------------------------------------------------------ */

/* A row's largest value is at least that of x[0..n): bits of floats that are not negative compare as they do. */
static void raise_largest(const moe *o, const worker *w, int64_t row, const float *x, int64_t n)
{
    float top = w->kernels->largest(x, n);
    uint32_t bits, seen = atomic_load_explicit(&o->largest[row], memory_order_relaxed);
    memcpy(&bits, &top, sizeof bits);
    while (seen < bits && !atomic_compare_exchange_weak_explicit(&o->largest[row], &seen, bits, memory_order_relaxed,
                                                                 memory_order_relaxed))
        ;
}

static float largest_of(const moe *o, int64_t row)
{
    uint32_t bits = atomic_load_explicit(&o->largest[row], memory_order_relaxed);
    float top;
    memcpy(&top, &bits, sizeof top);
    return top;
}

/* What adapters add to y, gate and up of a piece. */
static void update_gate_up(const moe *o, const worker *w, const groups *g, const piece *b, float *y, int64_t columns)
{
    int64_t first = own_part(o, w)->column / KT_PANEL_ROWS;
    adapted_rows rows = updated_rows(o, w, g, o->gate_up_updates, b->expert, b->row, b->last_row);
    adapted_output out = {.y = y, .y_stride = columns, .columns = columns,
                          .panel = o->per_pair * (first + b->pair), .last_panel = o->per_pair * (first + b->last_pair)};
    lowrank_outer(w, &rows, &out);
}

void gate_up_product(const moe *o, const worker *w, const groups *g, const piece *b, float *y)
{
    const part *own = own_part(o, w);
    int64_t columns = (b->last_pair - b->pair) * o->per_pair * KT_PANEL_ROWS;
    act a;
    product p = {.n_tokens = b->last_row - b->row, .x_rows = g->token + b->row, .y = y, .y_stride = columns};
    source_bind(w, &o->in, &a, &p);
    matrices_bind(w, &own->gate_up, b->expert, o->per_pair * b->pair, o->per_pair * b->last_pair, &p);
    p.next = b->next;
    if (own->gate_up_bias)
        p.bias = own->gate_up_bias + b->expert * o->bias_stride + b->pair * o->per_pair * KT_PANEL_ROWS;
    product_run(w, own->gate_up.kind, &p);
    if (o->gate_up_updates >= 0 && w->batch->adapted)
        update_gate_up(o, w, g, b, y, columns);
}

/* h, whose first row and column are those of the piece, = swiglu of gate and up. */
static void gate_up_block(const moe *o, const worker *w, const groups *g, const piece *b, float *h)
{
    const part *own = own_part(o, w);
    float *y = (float *)(void *)(local_scratch(w) + groups_size(o));
    int64_t columns = (b->last_pair - b->pair) * o->per_pair * KT_PANEL_ROWS;
    int64_t width = min64(columns / o->per_pair, own->width - b->pair * KT_PANEL_ROWS);
    gate_up_product(o, w, g, b, y);
    for (int64_t i = 0; i < b->last_row - b->row; i++) {
        w->kernels->swiglu(y + i * columns, width, &o->glu, h + i * own->h_stride);
        if (o->largest && !o->down->rotation)
            raise_largest(o, w, b->row + i, h + i * own->h_stride, width);
    }
}

/* All rows of one expert: as many panels in one product as the scratch holds, since it fetches ahead. Rows that
 * are whole are converted for down while they are in the cache; else quantize_run does it later. */
static void gate_up(const moe *o, const worker *w, const groups *g, const piece *all, int whole)
{
    const part *own = own_part(o, w);
    float *rows = (float *)(void *)(local_scratch(w) + groups_size(o)) + BLOCK_FLOATS;
    act a = hidden_act(o, w);
    piece b = *all;
    for (b.row = all->row; b.row < all->last_row; b.row = b.last_row) {
        b.last_row = min64(b.row + BLOCK_TOKENS, all->last_row);
        int64_t most = BLOCK_FLOATS / (o->per_pair * KT_PANEL_ROWS * (b.last_row - b.row));
        float *h = whole ? rows : hidden(w) + b.row * own->h_stride;
        for (b.pair = all->pair; b.pair < all->last_pair; b.pair = b.last_pair) {
            b.last_pair = min64(b.pair + most, all->last_pair);
            int64_t then = b.last_pair < all->last_pair ? b.last_pair : all->pair;
            int ends = then == all->pair && b.last_row == all->last_row;
            b.next = ends ? all->next : panel_at(&own->gate_up, b.expert, o->per_pair * then);
            gate_up_block(o, w, g, &b, h + b.pair * KT_PANEL_ROWS);
        }
        for (int64_t i = b.row; whole && i < b.last_row; i++)
            act_convert(w, &a, rows + (i - b.row) * own->h_stride, own->width, -1.0f, i);
    }
}

/* Panels of gate and of up, a pair each, or without a gate those of up. */
static int64_t pairs_of(const moe *o, const worker *w)
{
    return own_part(o, w)->gate_up.panels / o->per_pair;
}

/* Pairs of panels of one task of the first phase. */
static int64_t pairs_per_task(const moe *o, const worker *w, const groups *g)
{
    int64_t pairs = pairs_of(o, w), least = max64(1, min64(pairs, TILE_PANELS / o->per_pair));
    return max64(least, min64(pairs, pairs * g->n_active / ((int64_t)w->own.threads * TASKS_PER_THREAD)));
}

/* A task has all that a row's conversion needs to know, so it can convert the rows itself. */
static int has_whole_rows(const moe *o, const worker *w, const groups *g)
{
    int updated = o->down_updates >= 0 && w->batch->adapted;    /* A reads the rows as they are */
    return o->kind != ACT_F32 && !o->largest && !o->down->rotation && !updated && !w->program->keeps_hidden &&
           pairs_per_task(o, w, g) == pairs_of(o, w);
}

void gate_up_run(const void *arg, worker *w)
{
    const moe *o = arg;
    const part *own = own_part(o, w);
    const routing *r = &w->program->routings.at[o->routing];
    groups g = own_groups(o, w);
    routing_check(w, o->routing, 0);
    group_slots(&g, r->ids, r->gate, rows_of(w, o->domain), o->top_k);
    int64_t pairs = pairs_of(o, w), run = pairs_per_task(o, w, &g), blocks = (pairs + run - 1) / run;
    int64_t tasks = blocks * g.n_active;
    int whole = has_whole_rows(o, w, &g);
    for (int64_t i = worker_take_own(w, 1), ahead; i < tasks; i = worker_go_on(w, ahead, 1)) {
        ahead = worker_take_ahead(w, i, tasks, 1);
        int32_t expert = g.active[i / blocks];
        piece b = {.expert = expert, .row = g.first[expert], .last_row = g.first[expert + 1], .pair = i % blocks * run};
        b.last_pair = min64(b.pair + run, pairs);
        int64_t soon = worker_soon(w, i, ahead, 1);
        if (soon < tasks)
            b.next = panel_at(&own->gate_up, g.active[soon / blocks], o->per_pair * (soon % blocks * run));
        gate_up(o, w, &g, &b, whole);
    }
}

/* Rows of hidden values are rotated where they lie, before down or its conversion reads them. */
void rotate_run(const void *arg, worker *w)
{
    const moe *o = arg;
    const part *own = own_part(o, w);
    groups g = own_groups(o, w);
    groups_again(&g);
    int64_t n = own->width ? g.n_slots : 0;
    for (int64_t row; (row = worker_take_own(w, QUANTIZE_RUN)) < n;)
        for (int64_t i = row; i < min64(row + QUANTIZE_RUN, n); i++) {
            float *h = hidden(w) + i * own->h_stride;
            w->kernels->rotate(h, own->width, own->down.rotation, h);
            if (o->largest)
                raise_largest(o, w, i, h, own->rotated);
        }
}

void quantize_run(const void *arg, worker *w)
{
    const moe *o = arg;
    const part *own = own_part(o, w);
    groups g = own_groups(o, w);
    groups_again(&g);
    act a = hidden_act(o, w);
    int64_t n = own->width == 0 || has_whole_rows(o, w, &g) ? 0 : g.n_slots;
    for (int64_t row; (row = worker_take_own(w, QUANTIZE_RUN)) < n;) {
        for (int64_t i = row; i < min64(row + QUANTIZE_RUN, n); i++)
            act_convert(w, &a, hidden(w) + i * own->h_stride, own->rotated, o->largest ? largest_of(o, i) : -1.0f, i);
    }
}

/* ---- down and the weighted sum ------------------------------------------------------------------ */

/* Output panels of one task: what stays in the cache for so many tokens, and enough tasks for all. */
static int64_t panels_per_task(const matrices *down, int64_t tokens, int threads)
{
    int64_t fit = max64(SUM_PANELS, SUM_BYTES / (tokens * KT_PANEL_ROWS * (int64_t)sizeof(float)));
    int64_t fair = tokens > 1 ? max64(TILE_PANELS, down->panels / ((int64_t)threads * 4))
                              : max64(1, down->panels / ((int64_t)threads * TASKS_PER_THREAD));
    return min64(fit, fair);
}

/* sum += gate * down of the slots' hidden values, for the output panels [panel, last_panel); `next`: where the
 * thread goes on. */
static void down(const moe *o, const worker *w, const groups *g, int64_t panel, int64_t last_panel,
                 const uint8_t *next)
{
    const part *own = own_part(o, w);
    act all = hidden_act(o, w), some;
    product p = {.y = sum_row(o, w, w->own.node, 0) + panel * KT_PANEL_ROWS};
    p.y_stride = o->nodes == 1 ? view_stride(w, o->out) : o->sum_stride;
    for (int32_t i = 0; i < g->n_active; i++) {
        int32_t expert = g->active[i], row = g->first[expert];
        matrices_bind(w, &own->down, expert, panel, last_panel, &p);
        p.n_tokens = g->first[expert + 1] - row;
        p.y_rows = g->token + row;
        p.y_gate = g->gate + row;
        if (own->down_bias)
            p.bias = own->down_bias + (int64_t)expert * o->out.width + panel * KT_PANEL_ROWS;
        some = act_rows(&all, row);
        act_bind(&some, &p);
        if (o->kind == ACT_F32) {
            p.xf = hidden(w) + row * own->h_stride;
            p.x_stride = own->h_stride;
        }
        p.next = i + 1 < g->n_active ? panel_at(&own->down, g->active[i + 1], panel) : next;
        product_run(w, o->kind, &p);
        if (o->down_updates >= 0 && w->batch->adapted) {
            adapted_rows rows = updated_rows(o, w, g, o->down_updates, expert, row, g->first[expert + 1]);
            adapted_output out = {.y = p.y, .y_stride = p.y_stride, .columns = p.n, .panel = panel,
                                  .last_panel = last_panel, .y_rows = p.y_rows, .gate = p.y_gate};
            lowrank_outer(w, &rows, &out);
        }
    }
}

void down_run(const void *arg, worker *w)
{
    const moe *o = arg;
    const matrices *m = &own_part(o, w)->down;
    groups g = own_groups(o, w);
    groups_again(&g);
    int64_t rows = rows_of(w, o->domain), run = panels_per_task(m, max64(1, rows), w->own.threads);
    for (int64_t panel = worker_take_own(w, run), ahead; panel < m->panels; panel = worker_go_on(w, ahead, run)) {
        ahead = worker_take_ahead(w, panel, m->panels, run);
        int64_t soon = worker_soon(w, panel, ahead, run), last = min64(panel + run, m->panels);
        int64_t width = min64((last - panel) * KT_PANEL_ROWS, o->out.width - panel * KT_PANEL_ROWS);
        for (int64_t t = 0; t < rows; t++)
            memset(sum_row(o, w, w->own.node, t) + panel * KT_PANEL_ROWS, 0, (size_t)width * sizeof(float));
        down(o, w, &g, panel, last, g.n_active > 0 && soon < m->panels ? panel_at(m, g.active[0], soon) : NULL);
    }
}

/* out = the nodes' sums, added up in their order. */
void reduce_run(const void *arg, worker *w)
{
    const moe *o = arg;
    int64_t rows = rows_of(w, o->domain), blocks = (o->out.width + REDUCE_COLUMNS - 1) / REDUCE_COLUMNS, row, last;
    for (int64_t i; (i = worker_take(w, 1)) < rows * blocks;) {
        int64_t t = i / blocks, column = i % blocks * REDUCE_COLUMNS, n = min64(REDUCE_COLUMNS, o->out.width - column);
        float *out = view_row(w, o->out, t) + column;
        int added = 0;
        for (int32_t node = 0; node < o->nodes; node++) {
            if (o->parts[node].width == 0)
                continue;
            const float *sum = sum_row(o, w, node, t) + column;
            if (added++)
                w->kernels->add(out, sum, n, out);
            else
                memcpy(out, sum, (size_t)n * sizeof *out);
        }
    }
    own_rows(w, o->domain, &row, &last);
    for (int64_t i = row * o->top_k; o->largest && i < last * o->top_k; i++)
        atomic_store_explicit(&o->largest[i], 0, memory_order_relaxed);
}
