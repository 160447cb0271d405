/* lowrank.c - adapters' updates: the registered updates, and the two pieces of work that they
 * add to a product. */
#include "lowrank.h"

#include <math.h>

#define INNER_ROWS 8            /* of a task */
#define OWN_ROWS_AT_ONCE 16

/* ---- recording ---------------------------------------------------------------------------------- */

int kt_program_adapters(kt_program *p, int32_t most, int32_t ranks)
{
    int failed = program_open(p);
    if (failed)
        return failed;
    if (p->operations)
        return program_fail(p, KT_ERR_SHAPE, "adapters must be asked for before operations are recorded");
    if (most < 1 || most > MAX_ADAPTERS || ranks < 1 || ranks > MAX_RANKS)
        return program_fail(p, KT_ERR_RANGE, "%d adapters of %d ranks; 1..%d of 1..%d are possible", most, ranks,
                            MAX_ADAPTERS, MAX_RANKS);
    p->adapters = most;
    p->ranks = ranks;
    return KT_OK;
}

int32_t lowrank_product(kt_program *p, int32_t part, int64_t count, int64_t k, int64_t panels)
{
    if (!p->adapters || !ROOM(p, p->adaptables))
        return -1;
    adapted *of = program_new(p, (size_t)p->adapters * sizeof *of);
    if (!of)
        return -1;
    p->adaptables.at[p->adaptables.n] = (adaptable){.operation = p->operations - 1, .part = part, .count = count,
                                                    .k = k, .panels = panels, .of = of};
    return p->adaptables.n++;
}

int32_t lowrank_gain(kt_program *p)
{
    if (!p->adapters || !ROOM(p, p->gains))
        return -1;
    const float **of = program_new(p, (size_t)p->adapters * sizeof *of);
    if (!of)
        return -1;
    p->gains.at[p->gains.n] = (adaptable_gain){.operation = p->operations, .of = of};
    return p->gains.n++;
}

kt_view lowrank_inner_view(kt_program *p, int32_t domain)
{
    if (p->inner[domain] < 0)
        p->inner[domain] = kt_program_buffer(p, p->ranks, domain);
    return (kt_view){.buffer = max64(0, p->inner[domain]), .width = p->ranks};
}

/* ---- attaching ---------------------------------------------------------------------------------- */

static int check_update(kt_program *p, const adaptable *a, const kt_update *u, int64_t *ranks)
{
    int64_t last = u->first_panel + (int64_t)u->panel_step * (u->panels - 1);
    if (u->rank < 1 || u->rank > p->ranks || (*ranks += u->rank) > p->ranks)
        return program_fail(p, KT_ERR_RANGE, "operation %d: an update of rank %d, %lld in all; %d are possible",
                            a->operation, u->rank, (long long)*ranks, p->ranks);
    if (u->first_panel < 0 || u->panel_step < 1 || u->panels < 1 || last >= a->panels)
        return program_fail(p, KT_ERR_RANGE, "operation %d: an update of %d panels from %d on, every %d-th, of %lld",
                            a->operation, u->panels, u->first_panel, u->panel_step, (long long)a->panels);
    if (!isfinite(u->scale) || !u->a || !u->b)
        return program_fail(p, KT_ERR_RANGE, "operation %d: an update with the scale %g, or without a factor",
                            a->operation, (double)u->scale);
    return KT_OK;
}

/* The product of an operation that an adapter may update, or NULL with the error set. */
static adaptable *find_product(kt_program *p, int32_t adapter, int32_t operation, int32_t part, int32_t n)
{
    adaptable *found = NULL;
    for (int32_t i = 0; i < p->adaptables.n && !found; i++)
        if (p->adaptables.at[i].operation == operation && p->adaptables.at[i].part == part)
            found = &p->adaptables.at[i];
    if (adapter >= 1 && adapter <= p->adapters && found && n >= 0 && n <= MAX_UPDATES)
        return found;
    program_fail(p, KT_ERR_RANGE, "adapter %d of %d: part %d of operation %d is not a product with %d updates", adapter,
                 p->adapters, part, operation, n);
    return NULL;
}

int kt_program_gradients(kt_program *p, int32_t adapter, int32_t operation, int32_t part, const kt_gradient *gradients,
                         int32_t n)
{
    adaptable *found = find_product(p, adapter, operation, part, n);
    if (!found || (n && !gradients))
        return found ? program_fail(p, KT_ERR_RANGE, "%d gradients, but none is given", n) : KT_ERR_RANGE;
    adapted *its = &found->of[adapter - 1];
    if (its->n != n)
        return program_fail(p, KT_ERR_RANGE, "part %d of operation %d has %d updates, not %d", part, operation, its->n, n);
    for (int32_t i = 0; i < n; i++)
        its->gradients[i] = gradients[i];
    return KT_OK;
}

int kt_program_adapt(kt_program *p, int32_t adapter, int32_t operation, int32_t part, const kt_update *updates, int32_t n)
{
    adaptable *found = find_product(p, adapter, operation, part, n);
    if (!found || (n && !updates))
        return found ? program_fail(p, KT_ERR_RANGE, "%d updates, but none is given", n) : KT_ERR_RANGE;
    int64_t ranks = 0;
    for (int32_t i = 0; i < n; i++) {
        int failed = check_update(p, found, &updates[i], &ranks);
        if (failed)
            return failed;
    }
    adapted *its = &found->of[adapter - 1];
    *its = (adapted){.n = n};
    for (int32_t i = 0; i < n; i++)
        its->updates[i] = updates[i];
    return KT_OK;
}

int kt_program_adapt_gain(kt_program *p, int32_t adapter, int32_t operation, const float *gain)
{
    for (int32_t i = 0; adapter >= 1 && adapter <= p->adapters && i < p->gains.n; i++)
        if (p->gains.at[i].operation == operation) {
            p->gains.at[i].of[adapter - 1] = gain;
            return KT_OK;
        }
    return program_fail(p, KT_ERR_RANGE, "adapter %d of %d: operation %d is not a norm with a gain", adapter, p->adapters,
                        operation);
}

/* ---- running ------------------------------------------------------------------------------------ */

const float *lowrank_gain_of(const worker *w, int32_t gain, const float *own, int32_t domain, int64_t row)
{
    int32_t adapter = gain < 0 || !w->batch->adapted ? 0 : run_of(w, token_row(w, domain, row))->adapter;
    const float *its = adapter > 0 ? w->program->gains.at[gain].of[adapter - 1] : NULL;
    return its ? its : own;
}

static const adaptable *product_of(const worker *w, const adapted_rows *rows)
{
    return &w->program->adaptables.at[rows->product];
}

/* The updates of row i; *last: the end of the rows from there on that have the same. NULL: none. */
static const adapted *updates_of(const worker *w, const adapted_rows *rows, int64_t i, int64_t *last)
{
    int32_t adapter = rows->run ? rows->run->adapter : -1;
    for (*last = rows->run ? rows->n : i; *last < rows->n; ++*last) {
        int64_t row = rows->tokens ? rows->tokens[*last] : rows->first + *last;
        int32_t its = run_of(w, token_row(w, rows->domain, row))->adapter;
        if (adapter >= 0 && its != adapter)
            break;
        adapter = its;
    }
    const adapted *found = adapter > 0 ? &product_of(w, rows)->of[adapter - 1] : NULL;
    return found && found->n ? found : NULL;
}

int next_update(const worker *w, const adapted_rows *rows, found_update *u)
{
    if (u->its && u->number + 1 < u->its->n) {
        u->rank += u->update->rank;
        u->number++;
    } else {
        u->its = NULL;
        for (u->row = u->last_row; !u->its && u->row < rows->n;) {
            u->its = updates_of(w, rows, u->row, &u->last_row);
            u->row = u->its ? u->row : u->last_row;
        }
        u->rank = u->number = 0;
    }
    if (!u->its)
        return 0;
    u->update = &u->its->updates[u->number];
    u->gradient = &u->its->gradients[u->number];
    return 1;
}

panels_of_b panels_among(const kt_update *u, int64_t matrix, int64_t panel, int64_t last_panel)
{
    int64_t step = u->panel_step, first = panel > u->first_panel ? (panel - u->first_panel + step - 1) / step : 0;
    int64_t until = last_panel > u->first_panel ? min64(u->panels, (last_panel - u->first_panel + step - 1) / step) : 0;
    if (until <= first)
        return (panels_of_b){0};
    return (panels_of_b){.n = until - first, .column = (u->first_panel + first * step - panel) * KT_PANEL_ROWS,
                         .at = ((u->one_b ? 0 : matrix) * u->panels + first) * u->rank * KT_PANEL_ROWS};
}

void lowrank_inner(const worker *w, const adapted_rows *rows, const adapted_input *in, int64_t first, int64_t last)
{
    int64_t stride = rank_stride_of_a(w, rows);
    for (found_update u = {0}; next_update(w, rows, &u);) {
        const kt_update *one = u.update;
        int64_t from = max64(first, u.rank), to = min64(last, u.rank + one->rank);
        if (from >= to)
            continue;
        int64_t at = number_of_a(one, rows->matrix, stride, in->column) + (from - u.rank) * stride;
        inner_product p = {.n_rows = u.last_row - u.row, .ranks = to - from, .panels = (in->k + 15) / KT_PANEL_ROWS,
                           .x = in->x + begin_of_row(in->x_rows, u.row, in->x_stride), .x_stride = in->x_stride,
                           .step = KT_PANEL_ROWS, .columns = in->k, .x_rows = in->x_rows ? in->x_rows + u.row : NULL,
                           .a = factor_number(one->a, at, one->in_f32), .rank_stride = stride,
                           .panel_stride = KT_PANEL_ROWS, .in_f32 = one->in_f32, .scale = one->scale,
                           .out = rows->inner + u.row * rows->inner_stride + from, .out_stride = rows->inner_stride};
        w->kernels->inner(&p);
    }
}

void lowrank_outer(const worker *w, const adapted_rows *rows, const adapted_output *out)
{
    for (found_update u = {0}; next_update(w, rows, &u);) {
        const kt_update *one = u.update;
        panels_of_b b = panels_among(one, rows->matrix, out->panel, out->last_panel);
        if (b.n == 0)
            continue;
        outer_product p = {.n_rows = u.last_row - u.row, .ranks = one->rank, .panels = b.n,
                           .x = rows->inner + u.row * rows->inner_stride + u.rank, .x_stride = rows->inner_stride,
                           .b = factor_number(one->b, b.at, one->in_f32), .rank_stride = KT_PANEL_ROWS,
                           .panel_stride = one->rank * KT_PANEL_ROWS, .in_f32 = one->in_f32,
                           .y = out->y + b.column + begin_of_row(out->y_rows, u.row, out->y_stride),
                           .y_stride = out->y_stride, .step = one->panel_step * KT_PANEL_ROWS,
                           .columns = out->columns - b.column, .y_rows = out->y_rows ? out->y_rows + u.row : NULL,
                           .gate = out->gate ? out->gate + u.row : NULL};
        w->kernels->outer(&p);
    }
}

size_t lowrank_bytes(const kt_program *p)
{
    return OWN_ROWS_AT_ONCE * (size_t)p->ranks * sizeof(float);
}

void lowrank_add(const worker *w, adapted_rows rows, adapted_input in, adapted_output out, void *memory)
{
    int64_t left = rows.n;
    rows.inner = memory;
    rows.inner_stride = w->program->ranks;
    for (; left > 0; left -= rows.n) {
        rows.n = min64(left, OWN_ROWS_AT_ONCE);
        lowrank_inner(w, &rows, &in, 0, w->program->ranks);
        lowrank_outer(w, &rows, &out);
        rows.first += rows.n;
        in.x += rows.n * in.x_stride;
        out.y += rows.n * out.y_stride;
    }
}

void lowrank_inner_shared(const worker *w, int32_t product, int32_t domain, kt_view x, kt_view inner)
{
    int64_t rows = rows_of(w, domain), run = max64(1, min64(INNER_ROWS, rows / w->threads));
    int64_t blocks = (rows + run - 1) / run, ranks = ranks_of_task(w, blocks);
    int64_t parts = (w->program->ranks + ranks - 1) / ranks;
    adapted_input in = {.x_stride = view_stride(w, x), .k = x.width};
    for (int64_t i; (i = worker_take(w, 1)) < blocks * parts;) {
        int64_t first = i / parts * run, rank = i % parts * ranks;
        adapted_rows some = {.product = product, .domain = domain, .n = min64(run, rows - first), .first = first,
                             .inner = view_row(w, inner, first), .inner_stride = view_stride(w, inner)};
        in.x = view_row(w, x, first);
        lowrank_inner(w, &some, &in, rank, rank + ranks);
    }
}
