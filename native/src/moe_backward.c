/* moe_backward.c - the gradients of the routed experts, with the slots of moe.c, each node for
 * its hidden columns.
 *
 * With a = glu(z), z = gate_up x + bias, and the slot's result y = down a + bias times its weight w:
 *     dh = down^T dout         dweight = <dh, a> + <dout, bias>        dz = w * glu'(z) dh        dx += gate_up^T dz
 * y itself is not needed. dh lies where the forward has hidden values, and becomes a again in the phase that makes dz.
 * Blocks of 64 columns of a weight are decoded once for a task, which multiplies them with all rows: of dh a task is a
 * block of one expert; of dx, to which all experts add, a block of every one, in ascending order.
 */
#include "experts_backward.h"

#include "lowrank_backward.h"

#include <string.h>

#define CONVERT_RUN 8                   /* rows */
#define SUM_PANELS 4                    /* of a task that adds up gradients of factors */

static const backward_part *backward_of(const experts_backward *o, const worker *w)
{
    return &o->parts[w->own.node];
}

static float *at_node(const worker *w, int node, size_t offset)
{
    return (float *)(void *)(node_scratch(w, node) + offset);
}

static float *dz_row(const experts_backward *o, const worker *w, int node, int64_t row)
{
    return at_node(w, node, o->parts[node].dz) + row * o->parts[node].z_stride;
}

/* A block of values behind the groups in the thread's scratch, and turned columns behind that. */
static float *local_block(const experts_backward *o, const worker *w)
{
    return (float *)(void *)(local_scratch(w) + groups_size(&o->forward));
}

static void *turned(const experts_backward *o, const worker *w)
{
    return local_block(o, w) + BLOCK_FLOATS;
}

static groups sorted(const experts_backward *o, const worker *w)
{
    const routing *r = &w->program->routings.at[o->forward.routing];
    groups g = own_groups(&o->forward, w);
    group_slots(&g, r->ids, r->gate, rows_of(w, o->forward.domain), o->forward.top_k);
    return g;
}

static groups sorted_again(const experts_backward *o, const worker *w)
{
    groups g = own_groups(&o->forward, w);
    groups_again(&g);
    return g;
}

static int64_t blocks_of(int64_t columns, int64_t block)
{
    return (columns + block - 1) / block;
}

/* ---- dh ----------------------------------------------------------------------------------------- */

/* dh, a block of hidden columns of one expert. */
static void hidden_block(const experts_backward *o, const worker *w, const groups *g, int32_t expert, int64_t column)
{
    const moe *f = &o->forward;
    const part *own = own_part(f, w);
    int64_t row = g->first[expert];
    act a;
    product p = {.n_tokens = g->first[expert + 1] - row, .x_rows = g->token + row, .y_stride = own->h_stride,
                 .y = hidden(w) + row * own->h_stride + column};
    source_bind(w, &o->in, &a, &p);
    transpose_multiply(w, &own->down, &backward_of(o, w)->down, expert, column, own->h_stride - column, 0, turned(o, w), &p);
}

void hidden_backward_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    const moe *f = &o->forward;
    int64_t row, last;
    routing_check(w, f->routing, 0);
    groups g = sorted(o, w);
    for (own_rows(w, f->domain, &row, &last); row < last; row++)
        memset(view_row(w, o->dgate, row), 0, (size_t)f->top_k * sizeof(float));
    if (own_part(f, w)->width == 0)
        return;
    int64_t blocks = blocks_of(backward_of(o, w)->down.columns, TURNED_COLUMNS);
    for (int64_t i; (i = worker_take_own(w, 1)) < blocks * g.n_active;)
        hidden_block(o, w, &g, g.active[i / blocks], i % blocks * TURNED_COLUMNS);
}

void hidden_rotate_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    const part *own = own_part(&o->forward, w);
    groups g = sorted_again(o, w);
    int64_t n = own->width ? g.n_slots : 0;
    for (int64_t row; (row = worker_take_own(w, CONVERT_RUN)) < n;)
        for (int64_t i = row; i < min64(row + CONVERT_RUN, n); i++) {
            float *dh = hidden(w) + i * own->h_stride;
            w->kernels->rotate(dh, own->rotated, own->down.rotation, dh);
        }
}

/* ---- the activation ----------------------------------------------------------------------------- */

/* What down's updates add to dh of a piece. */
static void update_hidden(const experts_backward *o, const worker *w, const groups *g, const piece *b, float *h)
{
    const moe *f = &o->forward;
    int64_t stride = w->program->ranks, first = own_part(f, w)->column / KT_PANEL_ROWS;
    adapted_rows rows = updated_rows(f, w, g, f->down_updates, b->expert, b->row, b->last_row);
    rows.inner = at_node(w, w->own.node, backward_of(o, w)->down_v) + b->row * stride;
    adapted_output dh = {.y = h, .y_stride = own_part(f, w)->h_stride, .panel = first + b->pair,
                         .last_panel = first + b->last_pair,
                         .columns = own_part(f, w)->width - b->pair * KT_PANEL_ROWS};
    lowrank_back_outer(w, &rows, &dh);
}

static void glu_piece(const experts_backward *o, const worker *w, const groups *g, const piece *b)
{
    const moe *f = &o->forward;
    const part *own = own_part(f, w);
    const backward_part *back = backward_of(o, w);
    int64_t first = b->pair * KT_PANEL_ROWS, width = min64(b->last_pair * KT_PANEL_ROWS, own->width) - first;
    int64_t columns = (b->last_pair - b->pair) * f->per_pair * KT_PANEL_ROWS;
    float *z = local_block(o, w), *h = hidden(w) + b->row * own->h_stride + first;
    gate_up_product(f, w, g, b, z);
    if (f->down_updates >= 0 && w->batch->adapted)
        update_hidden(o, w, g, b, h);
    for (int64_t row = b->row; row < b->last_row; row++) {
        float *sum = at_node(w, w->own.node, back->sums) + row * back->blocks + first / TURNED_COLUMNS;
        glu_backward of = {.gate_up = z + (row - b->row) * columns, .width = width, .glu = &f->glu,
                           .weight = g->gate[row], .h = h + (row - b->row) * own->h_stride,
                           .out = dz_row(o, w, w->own.node, row) + first * f->per_pair};
        *sum = w->kernels->glu_backward(&of);
    }
}

void glu_backward_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    const moe *f = &o->forward;
    const part *own = own_part(f, w);
    groups g = sorted_again(o, w);
    int64_t blocks = backward_of(o, w)->blocks, pairs = own->width ? own->gate_up.panels / f->per_pair : 0;
    for (int64_t i; own->width && (i = worker_take_own(w, 1)) < blocks * g.n_active;) {
        int32_t expert = g.active[i / blocks];
        piece b = {.expert = expert, .pair = i % blocks * (TURNED_COLUMNS / KT_PANEL_ROWS)};
        b.last_pair = min64(b.pair + TURNED_COLUMNS / KT_PANEL_ROWS, pairs);
        for (b.row = g.first[expert]; b.row < g.first[expert + 1]; b.row = b.last_row) {
            b.last_row = min64(b.row + BLOCK_TOKENS, g.first[expert + 1]);
            glu_piece(o, w, &g, &b);
        }
    }
}

void convert_dz_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    const backward_part *back = backward_of(o, w);
    groups g = sorted_again(o, w);
    int64_t n = own_part(&o->forward, w)->width ? g.n_slots : 0;
    act a = act_for(&back->gate_up.as, node_scratch(w, w->own.node) + back->act, o->forward.max_slots, back->z_stride);
    for (int64_t row; (row = worker_take_own(w, CONVERT_RUN)) < n;)
        for (int64_t i = row; i < min64(row + CONVERT_RUN, n); i++)
            act_convert(w, &a, dz_row(o, w, w->own.node, i), back->z_stride, -1.0f, i);
}

/* ---- dx ----------------------------------------------------------------------------------------- */

/* Columns [column, column + TURNED_COLUMNS) of the sums over all experts. */
static void dx_block(const experts_backward *o, const worker *w, const groups *g, int64_t column)
{
    const moe *f = &o->forward;
    const backward_part *back = backward_of(o, w);
    act all = act_for(&back->gate_up.as, node_scratch(w, w->own.node) + back->act, f->max_slots, back->z_stride), some;
    product p = {.y = sums_row(&o->dx, w, w->own.node, 0) + column, .y_stride = sums_stride(&o->dx, w)};
    int64_t most = o->dx.direct ? f->out.width - column : TURNED_COLUMNS;
    for (int32_t i = 0; i < g->n_active; i++) {
        int32_t expert = g->active[i], row = g->first[expert];
        p.n_tokens = g->first[expert + 1] - row;
        p.y_rows = g->token + row;
        some = act_rows(&all, row);
        act_bind(&some, &p);
        if (back->gate_up.as.kind == ACT_F32) {
            p.xf = dz_row(o, w, w->own.node, row);
            p.x_stride = back->z_stride;
        }
        transpose_multiply(w, &own_part(f, w)->gate_up, &back->gate_up, expert, column, most, 1, turned(o, w), &p);
    }
}

/* What gate_up's updates add to columns [column, last) of dx. */
static void update_dx(const experts_backward *o, const worker *w, const groups *g, int64_t column, int64_t last)
{
    const moe *f = &o->forward;
    int64_t stride = w->program->ranks;
    adapted_output dx = {.y = sums_row(&o->dx, w, w->own.node, 0) + column, .y_stride = sums_stride(&o->dx, w),
                         .panel = column / KT_PANEL_ROWS, .columns = last - column};
    dx.last_panel = (last + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS;
    for (int32_t i = 0; i < g->n_active; i++) {
        int32_t expert = g->active[i], row = g->first[expert];
        adapted_rows rows = updated_rows(f, w, g, f->gate_up_updates, expert, row, g->first[expert + 1]);
        rows.inner = at_node(w, w->own.node, backward_of(o, w)->gate_up_v) + row * stride;
        dx.y_rows = g->token + row;
        lowrank_back_outer(w, &rows, &dx);
    }
}

void dx_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    const moe *f = &o->forward;
    const transpose *t = &backward_of(o, w)->gate_up;
    const matrices *m = &own_part(f, w)->gate_up;
    groups g = sorted_again(o, w);
    int64_t rows = rows_of(w, f->domain), width = o->dx.direct ? f->out.width : t->columns;
    for (int64_t i; own_part(f, w)->width && (i = worker_take_own(w, 1)) < blocks_of(t->columns, t->run);) {
        int64_t first = i * t->run, last = min64(first + t->run, width);
        for (int64_t row = 0; row < rows; row++)
            memset(sums_row(&o->dx, w, w->own.node, row) + first, 0, (size_t)(last - first) * sizeof(float));
        for (int64_t column = first; column < last; column += TURNED_COLUMNS)
            dx_block(o, w, &g, column);
        if (m->rotation)
            rotate_block(w, m->rotation, sums_row(&o->dx, w, w->own.node, 0) + first, sums_stride(&o->dx, w), rows);
        if (f->gate_up_updates >= 0 && w->batch->adapted)
            update_dx(o, w, &g, first, min64(last, f->out.width));
    }
}

/* ---- the gates ---------------------------------------------------------------------------------- */

/* <dout, bias> of a row, in f64: it is added up once. */
static float biased(const experts_backward *o, const worker *w, int32_t expert, int64_t token)
{
    const moe *f = &o->forward;
    const float *bias = NULL, *dout = view_row(w, o->dout, token);
    for (int32_t node = 0; node < f->nodes && !bias; node++)
        bias = f->parts[node].down_bias;
    double sum = 0;
    for (int64_t c = 0; bias && c < f->out.width; c++)
        sum += (double)dout[c] * (double)bias[(int64_t)expert * f->out.width + c];
    return (float)sum;
}

/* The gradient of the weight of the slot in a sorted row: sums over blocks, ascending, node after node. */
static float gate_gradient(const experts_backward *o, const worker *w, int32_t expert, int64_t row, int64_t token)
{
    float sum = biased(o, w, expert, token);
    for (int32_t node = 0; node < o->forward.nodes; node++) {
        const backward_part *back = &o->parts[node];
        const float *sums = at_node(w, node, back->sums) + row * back->blocks;
        for (int64_t i = 0; o->forward.parts[node].width && i < back->blocks; i++)
            sum += sums[i];
    }
    return sum;
}

void backward_finish_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    const moe *f = &o->forward;
    const routing *r = &w->program->routings.at[f->routing];
    groups g = sorted_again(o, w);
    int64_t first, last;
    own_rows(w, f->domain, &first, &last);
    for (int32_t i = 0; i < g.n_active; i++)
        for (int64_t row = g.first[g.active[i]]; row < g.first[g.active[i] + 1]; row++) {
            int64_t token = g.token[row], slot = 0;
            if (token < first || token >= last)
                continue;
            while (r->ids[token * f->top_k + slot] != g.active[i])
                slot++;
            view_row(w, o->dgate, token)[slot] = gate_gradient(o, w, g.active[i], row, token);
        }
    sums_finish(&o->dx, w);
}

/* ---- adapters ----------------------------------------------------------------------------------- */

/* v of all slots' rows: of down from dout, of gate_up from dz. */
static void back_inner(const experts_backward *o, worker *w, const groups *g, int down)
{
    const moe *f = &o->forward;
    const part *own = own_part(f, w);
    const backward_part *back = backward_of(o, w);
    int64_t stride = w->program->ranks;
    for (int64_t i; own->width && (i = worker_take_own(w, 1)) < g->n_active;) {
        int32_t expert = g->active[i], row = g->first[expert];
        adapted_rows rows = updated_rows(f, w, g, down ? f->down_updates : f->gate_up_updates, expert, row,
                                         g->first[expert + 1]);
        int64_t first = f->per_pair * own->column / KT_PANEL_ROWS;
        adapted_output dz = {.y = dz_row(o, w, w->own.node, row), .y_stride = back->z_stride, .columns = back->z_stride,
                             .panel = first, .last_panel = first + own->gate_up.panels};
        adapted_output dout = {.y = view_row(w, o->dout, 0), .y_stride = view_stride(w, o->dout),
                               .columns = o->dout.width, .last_panel = own->down.panels, .y_rows = rows.tokens};
        rows.inner = at_node(w, w->own.node, down ? back->down_v : back->gate_up_v) + row * stride;
        lowrank_back(w, &rows, down ? &dout : &dz);
    }
}

void down_back_inner_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    if (!w->batch->adapted)
        return;
    groups g = sorted(o, w);
    back_inner(o, w, &g, 1);
}

void gate_up_back_inner_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    groups g = sorted_again(o, w);
    if (w->batch->adapted)
        back_inner(o, w, &g, 0);
}

/* Rows of an expert as updates see them, with the inner values that lie at an offset of a node's scratch. */
static adapted_rows inner_rows(const experts_backward *o, const worker *w, const groups *g, int32_t product,
                               int32_t expert, int node, size_t offset)
{
    int32_t row = g->first[expert];
    adapted_rows rows = updated_rows(&o->forward, w, g, product, expert, row, g->first[expert + 1]);
    rows.inner = at_node(w, node, offset) + (int64_t)row * w->program->ranks;
    return rows;
}

/* Panels [panel, last) of the gradients of gate_up's A, which is of x, or of its B. */
static void gate_up_gradients(const experts_backward *o, const worker *w, const groups *g, int of_a, int64_t panel,
                              int64_t last)
{
    const moe *f = &o->forward;
    for (int32_t i = 0; i < g->n_active; i++)
        for (int32_t node = 0; node < f->nodes; node++) {
            int32_t expert = g->active[i], row = g->first[expert];
            const part *its = &f->parts[node];
            int64_t first = f->per_pair * its->column / KT_PANEL_ROWS;
            int64_t from = max64(panel, first), to = min64(last, first + its->gate_up.panels);
            if (its->width == 0 || (!of_a && from >= to))
                continue;
            adapted_rows rows = inner_rows(o, w, g, f->gate_up_updates, expert, of_a ? node : w->own.node,
                                           of_a ? o->parts[node].gate_up_v : own_part(f, w)->inner_offset);
            adapted_output x = {.y = view_row(w, f->x, 0) + panel * KT_PANEL_ROWS, .y_stride = view_stride(w, f->x),
                                .columns = f->x.width - panel * KT_PANEL_ROWS, .panel = panel, .last_panel = last,
                                .y_rows = rows.tokens};
            adapted_output dz = {.y = dz_row(o, w, node, row) + (from - first) * KT_PANEL_ROWS,
                                 .y_stride = o->parts[node].z_stride, .panel = from, .last_panel = to,
                                 .columns = (to - from) * KT_PANEL_ROWS};
            of_a ? lowrank_gradient_a(w, &rows, &x) : lowrank_gradient_b(w, &rows, &dz);
        }
}

/* The same for down's A, which is of hidden values, or its B. */
static void down_gradients(const experts_backward *o, const worker *w, const groups *g, int of_a, int64_t panel,
                           int64_t last)
{
    const moe *f = &o->forward;
    for (int32_t i = 0; i < g->n_active; i++)
        for (int32_t node = 0; node < f->nodes; node++) {
            int32_t expert = g->active[i], row = g->first[expert];
            const part *its = &f->parts[node];
            int64_t first = its->column / KT_PANEL_ROWS, end = first + blocks_of(its->width, KT_PANEL_ROWS);
            int64_t from = max64(panel, first), to = min64(last, end);
            if (its->width == 0 || (of_a && from >= to))
                continue;
            adapted_rows rows = inner_rows(o, w, g, f->down_updates, expert, of_a ? w->own.node : node,
                                           of_a ? backward_of(o, w)->down_v : its->inner_offset);
            const float *h = at_node(w, node, 0) + row * its->h_stride + (from - first) * KT_PANEL_ROWS;
            adapted_output a = {.y = (float *)(uintptr_t)h, .y_stride = its->h_stride, .panel = from, .last_panel = to,
                                .columns = its->width - (from - first) * KT_PANEL_ROWS, .gate = g->gate + row};
            adapted_output dout = {.y = view_row(w, o->dout, 0) + panel * KT_PANEL_ROWS,
                                   .y_stride = view_stride(w, o->dout), .panel = panel, .last_panel = last,
                                   .columns = o->dout.width - panel * KT_PANEL_ROWS, .y_rows = rows.tokens,
                                   .gate = g->gate + row};
            of_a ? lowrank_gradient_a(w, &rows, &a) : lowrank_gradient_b(w, &rows, &dout);
        }
}

typedef void gradients_of(const experts_backward *o, const worker *w, const groups *g, int of_a, int64_t panel,
                          int64_t last);

/* Both gradients of a product, a task being some panels of A or of B over all experts: so whoever adds to a number is one
 * thread, and its order is that of the rows, also where a factor is one for all experts. */
static void share_gradients(const experts_backward *o, worker *w, gradients_of *add, int64_t of_a, int64_t of_b)
{
    int64_t a_blocks = blocks_of(of_a, SUM_PANELS), b_blocks = blocks_of(of_b, SUM_PANELS);
    groups g = sorted_again(o, w);
    if (!w->batch->adapted || own_part(&o->forward, w)->width == 0)
        return;
    for (int64_t i; (i = worker_take(w, 1)) < a_blocks + b_blocks;) {
        int in_a = i < a_blocks;
        int64_t panel = (in_a ? i : i - a_blocks) * SUM_PANELS;
        add(o, w, &g, in_a, panel, min64(panel + SUM_PANELS, in_a ? of_a : of_b));
    }
}

void gate_up_gradients_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    const moe *f = &o->forward;
    share_gradients(o, w, gate_up_gradients, blocks_of(f->x.width, KT_PANEL_ROWS),
                    blocks_of(f->bias_stride, KT_PANEL_ROWS));
}

void down_gradients_run(const void *arg, worker *w)
{
    const experts_backward *o = arg;
    const moe *f = &o->forward;
    share_gradients(o, w, down_gradients, blocks_of(f->width, KT_PANEL_ROWS), blocks_of(f->out.width, KT_PANEL_ROWS));
}
