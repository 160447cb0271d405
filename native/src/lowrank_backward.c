/* lowrank_backward.c - gradients of adapters' updates: B^T dy of rows, what A makes of it for dx, and the sums over rows that
 * are the gradients of A and B. */
#include "lowrank_backward.h"

/* The rows from i on of columns that are row by row, or each where its row says. */
static int64_t first_row(const adapted_output *y, int64_t i)
{
    return y->y_rows ? 0 : i * y->y_stride;
}

void lowrank_back(const worker *w, const adapted_rows *rows, const adapted_output *dy)
{
    int64_t end, first;
    for (int64_t i = 0; i < rows->n; i = end) {
        const adapted *its = updates_of(w, rows, i, &end);
        float *inner = rows->inner + i * rows->inner_stride;
        for (int32_t u = 0; its && u < its->n; inner += its->updates[u++].rank) {
            const kt_update *one = &its->updates[u];
            int64_t panels = max64(0, panels_among(one, dy->panel, dy->last_panel, &first));
            int64_t column = (one->first_panel + first * one->panel_step - dy->panel) * KT_PANEL_ROWS;
            int64_t at = ((one->one_b ? 0 : rows->matrix) * one->panels + first) * one->rank * KT_PANEL_ROWS;
            inner_product p = {.n_rows = end - i, .ranks = one->rank, .panels = panels,
                               .x = dy->y + (panels ? column : 0) + first_row(dy, i), .x_stride = dy->y_stride,
                               .step = one->panel_step * KT_PANEL_ROWS, .columns = dy->columns - column,
                               .x_rows = dy->y_rows ? dy->y_rows + i : NULL, .a = factor_number(one->b, at, one->in_f32),
                               .rank_stride = KT_PANEL_ROWS, .panel_stride = one->rank * KT_PANEL_ROWS,
                               .in_f32 = one->in_f32, .scale = one->scale, .out = inner,
                               .out_stride = rows->inner_stride};
            w->kernels->inner(&p);
        }
    }
}

void lowrank_back_outer(const worker *w, const adapted_rows *rows, const adapted_output *dx)
{
    int64_t stride = columns_of_a(w, rows), end;
    for (int64_t i = 0; i < rows->n; i = end) {
        const adapted *its = updates_of(w, rows, i, &end);
        const float *inner = rows->inner + i * rows->inner_stride;
        for (int32_t u = 0; its && u < its->n; inner += its->updates[u++].rank) {
            const kt_update *one = &its->updates[u];
            int64_t at = (one->one_a ? 0 : rows->matrix) * one->rank * stride + dx->panel * KT_PANEL_ROWS;
            outer_product p = {.n_rows = end - i, .ranks = one->rank, .panels = dx->last_panel - dx->panel, .x = inner,
                               .x_stride = rows->inner_stride, .b = factor_number(one->a, at, one->in_f32),
                               .rank_stride = stride, .panel_stride = KT_PANEL_ROWS, .in_f32 = one->in_f32,
                               .y = dx->y + first_row(dx, i), .y_stride = dx->y_stride, .step = KT_PANEL_ROWS,
                               .columns = dx->columns, .y_rows = dx->y_rows ? dx->y_rows + i : NULL,
                               .gate = dx->gate ? dx->gate + i : NULL};
            w->kernels->outer(&p);
        }
    }
}

void lowrank_gradient_a(const worker *w, const adapted_rows *rows, const adapted_output *x)
{
    int64_t stride = columns_of_a(w, rows), end;
    for (int64_t i = 0; i < rows->n; i = end) {
        const adapted *its = updates_of(w, rows, i, &end);
        const float *inner = rows->inner + i * rows->inner_stride;
        for (int32_t u = 0; its && u < its->n; inner += its->updates[u++].rank) {
            const kt_update *one = &its->updates[u];
            if (!its->gradients[u].a)
                continue;
            int64_t at = (one->one_a ? 0 : rows->matrix) * one->rank * stride + x->panel * KT_PANEL_ROWS;
            factor_sums p = {.n_rows = end - i, .ranks = one->rank, .panels = x->last_panel - x->panel, .x = inner,
                             .x_stride = rows->inner_stride, .y = x->y + first_row(x, i), .y_stride = x->y_stride,
                             .step = KT_PANEL_ROWS, .columns = x->columns, .y_rows = x->y_rows ? x->y_rows + i : NULL,
                             .gate = x->gate ? x->gate + i : NULL, .scale = 1.0f, .sums = its->gradients[u].a + at,
                             .rank_stride = stride, .panel_stride = KT_PANEL_ROWS};
            w->kernels->factor_sums(&p);
        }
    }
}

void lowrank_gradient_b(const worker *w, const adapted_rows *rows, const adapted_output *dy)
{
    int64_t end, first;
    for (int64_t i = 0; i < rows->n; i = end) {
        const adapted *its = updates_of(w, rows, i, &end);
        const float *inner = rows->inner + i * rows->inner_stride;
        for (int32_t u = 0; its && u < its->n; inner += its->updates[u++].rank) {
            const kt_update *one = &its->updates[u];
            int64_t panels = panels_among(one, dy->panel, dy->last_panel, &first);
            if (panels <= 0 || !its->gradients[u].b)
                continue;
            int64_t column = (one->first_panel + first * one->panel_step - dy->panel) * KT_PANEL_ROWS;
            int64_t at = ((one->one_b ? 0 : rows->matrix) * one->panels + first) * one->rank * KT_PANEL_ROWS;
            factor_sums p = {.n_rows = end - i, .ranks = one->rank, .panels = panels, .x = inner,
                             .x_stride = rows->inner_stride, .y = dy->y + column + first_row(dy, i),
                             .y_stride = dy->y_stride, .step = one->panel_step * KT_PANEL_ROWS,
                             .columns = dy->columns - column, .y_rows = dy->y_rows ? dy->y_rows + i : NULL,
                             .gate = dy->gate ? dy->gate + i : NULL, .scale = 1.0f, .sums = its->gradients[u].b + at,
                             .rank_stride = KT_PANEL_ROWS, .panel_stride = one->rank * KT_PANEL_ROWS};
            w->kernels->factor_sums(&p);
        }
    }
}
