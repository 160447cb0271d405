/* transposed.c - out = x W: the gradient of a linear product's input.
 *
 * A task is some columns of W, with all of its rows, for all rows of x, or with few columns for a part of them: they are
 * decoded once for a task. Each node multiplies with its own rows of W, that is, with its own columns of x.
 */
#include "transposed.h"

#include "kernels/formats.h"
#include "linear.h"

#include <string.h>

#define TASKS_PER_THREAD 4
#define FEWEST_TOKENS 256               /* of a task, which has turned its columns for itself */
#define REDUCE_COLUMNS 512

static const kt_format in_bf16 = {.bits = 16}, in_32 = {.bits = 32};

int transpose_of(kt_program *p, const matrices *m, int64_t row, int32_t in_f32, int64_t rows, transpose *t)
{
    int64_t unit = m->rotation ? ROTATION_UNIT : 16;
    kt_weight w = {.format = in_f32 ? in_32 : in_bf16, .n = TURNED_COLUMNS, .k = TURNED_PANELS * KT_PANEL_ROWS, .count = 1,
                   .data = m->weight.data};
    *t = (transpose){.columns = round_up(m->weight.k, unit), .run = max64(TURNED_COLUMNS, m->rotation),
                     .before = !in_f32 && row % 32 ? 1 : 0, .ones = program_constant(p, rows, 1.0)};
    return t->ones ? program_matrices(p, "transposed weight", &w, (int64_t[3]){w.n, w.k, 1}, 0, &t->as) : KT_ERR_MEMORY;
}

void transpose_multiply(const worker *w, const matrices *m, const transpose *t, int64_t index, int64_t column,
                        int64_t most, int add, void *memory, product *q)
{
    int in_f32 = t->as.kind == ACT_F32;
    int64_t columns = min64(TURNED_COLUMNS, t->columns - column), all = t->before + m->panels;
    product one = *q;
    for (int64_t panel = 0, last; panel < all; panel = last) {
        last = min64(panel + TURNED_PANELS, all);
        int64_t first = max64(0, panel - t->before), n = last - t->before - first, rows = last * KT_PANEL_ROWS;
        turn what = {.format = &m->weight.format, .k = m->weight.k, .w = panel_at(m, index, first),
                     .panel_bytes = m->panel_bytes, .panels = n, .column = column, .columns = round_up(columns, 16),
                     .in_f32 = in_f32, .before = panel ? 0 : t->before, .out = memory};
        w->kernels->turn(&what);
        matrices_bind(w, &t->as, 0, 0, (columns + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS, &one);
        one.n = min64(columns, most);
        one.w = memory;
        one.k = min64(rows, t->before * KT_PANEL_ROWS + m->weight.n) - panel * KT_PANEL_ROWS;
        one.panel_bytes = (size_t)round_up((last - panel) * KT_PANEL_ROWS, in_f32 ? 16 : 32) * (in_f32 ? 64 : 32);
        one.y_gate = add || panel ? t->ones : NULL;
        one.xf = in_f32 ? q->xf + panel * KT_PANEL_ROWS : NULL;
        one.xh = in_f32 ? NULL : q->xh + panel * KT_PANEL_ROWS;
        product_run(w, t->as.kind, &one);
    }
}

void rotate_block(const worker *w, int64_t block, float *x, int64_t stride, int64_t rows)
{
    for (int64_t i = 0; i < rows; i++)
        w->kernels->rotate(x + i * stride, block, block, x + i * stride);
}

void sums_finish(const sums *s, worker *w)
{
    int64_t rows = rows_of(w, s->domain), blocks = (s->out.width + REDUCE_COLUMNS - 1) / REDUCE_COLUMNS;
    for (int64_t i; !s->direct && (i = worker_take(w, 1)) < rows * blocks;) {
        int64_t t = i / blocks, column = i % blocks * REDUCE_COLUMNS, n = min64(REDUCE_COLUMNS, s->out.width - column);
        float *out = view_row(w, s->out, t) + column;
        int added = 0;
        for (int32_t node = 0; node < s->nodes; node++) {
            if (s->given && !s->given[node])
                continue;
            const float *sum = sums_row(s, w, node, t) + column;
            if (added++)
                w->kernels->add(out, sum, n, out);
            else
                memcpy(out, sum, (size_t)n * sizeof *out);
        }
    }
}

/* ---- the operation ------------------------------------------------------------------------------ */

typedef struct transposed {
    source in;
    linear_part *parts;                 /* [nodes] */
    transpose *how;                     /* [nodes] */
    sums sums;
    int32_t domain;
} transposed;

/* Rows of a task: all, unless threads would have nothing to do. */
static int64_t rows_of_task(const transposed *o, const worker *w, int64_t rows)
{
    const transpose *t = &o->how[w->own.node];
    int64_t blocks = (t->columns + t->run - 1) / t->run, wanted = (int64_t)w->own.threads * TASKS_PER_THREAD;
    int64_t cuts = max64(1, min64(wanted / blocks, rows / FEWEST_TOKENS));
    return (rows + cuts - 1) / cuts;
}

/* Rows [row, row + rows) of the columns from `column` on. */
static void multiply(const transposed *o, const worker *w, int64_t column, int64_t row, int64_t rows)
{
    const linear_part *own = &o->parts[w->own.node];
    const transpose *t = &o->how[w->own.node];
    int64_t last = min64(column + t->run, t->columns), stride = sums_stride(&o->sums, w);
    float *y = sums_row(&o->sums, w, w->own.node, row) + column;
    act all, some;
    product q = {.n_tokens = rows, .y_stride = stride};
    source_bind(w, &o->in, &all, &q);
    if (o->in.slot < 0) {
        q.xf = view_row(w, o->in.view, row) + own->column;
    } else {
        some = act_rows(&all, row);
        act_bind(&some, &q);
        q.xh += own->column - t->before * KT_PANEL_ROWS;
    }
    for (int64_t c = column; c < last; c += TURNED_COLUMNS) {
        q.y = y + (c - column);
        transpose_multiply(w, &own->weight, t, 0, c, o->sums.direct ? o->sums.out.width - c : last, 0, local_scratch(w), &q);
    }
    if (own->weight.rotation)
        rotate_block(w, own->weight.rotation, y, stride, rows);
}

static void transposed_run(const void *arg, worker *w)
{
    const transposed *o = arg;
    const transpose *t = &o->how[w->own.node];
    int64_t rows = rows_of(w, o->domain);
    if (rows == 0 || o->parts[w->own.node].weight.panels == 0)
        return;
    int64_t run = rows_of_task(o, w, rows), cuts = (rows + run - 1) / run, blocks = (t->columns + t->run - 1) / t->run;
    for (int64_t i; (i = worker_take_own(w, 1)) < blocks * cuts;) {
        int64_t row = i % cuts * run;
        multiply(o, w, i / cuts * t->run, row, min64(run, rows - row));
    }
}

static void finish_run(const void *arg, worker *w)
{
    const transposed *o = arg;
    sums_finish(&o->sums, w);
}

/* How each node multiplies, and where its sums lie; *reads: what x is read as. */
static int make_transposes(kt_program *p, transposed *o, const matrices *common, int32_t in_f32, const matrices **reads)
{
    int64_t rows = program_rows(p, o->domain);
    size_t local = 0;
    int32_t *given = program_new(p, (size_t)p->n_nodes * sizeof *given);
    o->sums.offset = program_new(p, (size_t)p->n_nodes * sizeof *o->sums.offset);
    if (!given || !o->sums.offset)
        return KT_ERR_MEMORY;
    for (int32_t i = 0; i < p->n_nodes; i++) {
        const linear_part *own = &o->parts[i];
        given[i] = own->weight.panels > 0;
        int failed = given[i] ? transpose_of(p, &own->weight, own->column, in_f32, rows, &o->how[i]) : KT_OK;
        if (failed)
            return failed;
        *reads = given[i] ? &o->how[i].as : *reads;
        local = given[i] && transpose_bytes(&o->how[i]) > local ? transpose_bytes(&o->how[i]) : local;
    }
    o->sums.given = given;
    o->sums.direct = p->n_nodes == 1 && !common->rotation;
    o->sums.stride = round_up(common->weight.k, TURNED_COLUMNS);
    program_reserve(p, 0, local);
    if (!o->sums.direct)
        program_reserve_node(p, size_mul((size_t)rows, (size_t)o->sums.stride * sizeof(float)));
    return KT_OK;
}

int kt_program_transposed(kt_program *p, kt_view out, kt_view x, const kt_transposed *given)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "transposed x", x, -1);
    if (!failed)
        failed = program_check_view(p, "transposed out", out, program_domain(p, x));
    if (!failed)
        failed = program_check_overlap(p, "transposed", out, x, 0);
    if (failed)
        return failed;
    transposed *o = program_new(p, sizeof *o);
    linear_part *parts = program_new(p, (size_t)p->n_nodes * sizeof *parts);
    transpose *how = program_new(p, (size_t)p->n_nodes * sizeof *how);
    if (!o || !parts || !how)
        return KT_ERR_MEMORY;
    int32_t domain = program_domain(p, x), in_f32 = p->options.exact || given->reads == KT_READ_F32;
    *o = (transposed){.parts = parts, .how = how, .domain = domain,
                      .sums = {.out = out, .domain = domain, .nodes = p->n_nodes}};
    const matrices *common = NULL, *reads = NULL;
    failed = linear_make_parts(p, given->weight, x.width, out.width, 0, parts, &common);
    if (!failed)
        failed = make_transposes(p, o, common, in_f32, &reads);
    if (failed)
        return failed;
    program_operation(p);
    o->in = program_source(p, x, reads);
    program_phase(p, transposed_run, o);
    program_touch_source(p, &o->in);
    if (!o->sums.direct) {
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
        program_phase(p, finish_run, o);
        program_touch_node_scratch(p, ANY_ROWS);
    }
    program_touch_view(p, out, ANY_ROWS | WRITES);
    return KT_OK;
}
