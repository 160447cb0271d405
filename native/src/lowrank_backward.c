/* lowrank_backward.c - gradients of adapters' updates: B^T dy of rows, its product with A for
 * dx, and the sums over rows that are the gradients of A and B. */
#include "lowrank_backward.h"

void lowrank_back(const worker *w, const adapted_rows *rows, const adapted_output *dy)
{
    for (found_update u = {0}; next_update(w, rows, &u);) {
        const kt_update *one = u.update;
        panels_of_b b = panels_among(one, rows->matrix, dy->panel, dy->last_panel);
        inner_product p = {.n_rows = u.last_row - u.row, .ranks = one->rank, .panels = b.n,
                           .x = dy->y + b.column + begin_of_row(dy->y_rows, u.row, dy->y_stride), .x_stride = dy->y_stride,
                           .step = one->panel_step * KT_PANEL_ROWS, .columns = dy->columns - b.column,
                           .x_rows = dy->y_rows ? dy->y_rows + u.row : NULL,
                           .a = factor_number(one->b, b.at, one->in_f32), .rank_stride = KT_PANEL_ROWS,
                           .panel_stride = one->rank * KT_PANEL_ROWS, .in_f32 = one->in_f32, .scale = one->scale,
                           .out = rows->inner + u.row * rows->inner_stride + u.rank, .out_stride = rows->inner_stride};
        w->kernels->inner(&p);
    }
}

void lowrank_back_outer(const worker *w, const adapted_rows *rows, const adapted_output *dx)
{
    int64_t stride = rank_stride_of_a(w, rows);
    for (found_update u = {0}; next_update(w, rows, &u);) {
        const kt_update *one = u.update;
        int64_t at = number_of_a(one, rows->matrix, stride, dx->panel * KT_PANEL_ROWS);
        outer_product p = {.n_rows = u.last_row - u.row, .ranks = one->rank, .panels = dx->last_panel - dx->panel,
                           .x = rows->inner + u.row * rows->inner_stride + u.rank, .x_stride = rows->inner_stride,
                           .b = factor_number(one->a, at, one->in_f32), .rank_stride = stride,
                           .panel_stride = KT_PANEL_ROWS, .in_f32 = one->in_f32,
                           .y = dx->y + begin_of_row(dx->y_rows, u.row, dx->y_stride), .y_stride = dx->y_stride,
                           .step = KT_PANEL_ROWS, .columns = dx->columns,
                           .y_rows = dx->y_rows ? dx->y_rows + u.row : NULL, .gate = dx->gate ? dx->gate + u.row : NULL};
        w->kernels->outer(&p);
    }
}

/* What the sums of x or dy by rows' inner values have in common; y: of the first column. */
static factor_sums sums_of(const adapted_rows *rows, const found_update *u, const adapted_output *y, int64_t column)
{
    return (factor_sums){.n_rows = u->last_row - u->row, .ranks = u->update->rank,
                         .x = rows->inner + u->row * rows->inner_stride + u->rank, .x_stride = rows->inner_stride,
                         .y = y->y + column + begin_of_row(y->y_rows, u->row, y->y_stride), .y_stride = y->y_stride,
                         .columns = y->columns - column, .y_rows = y->y_rows ? y->y_rows + u->row : NULL,
                         .gate = y->gate ? y->gate + u->row : NULL, .scale = 1.0f};
}

void lowrank_gradient_a(const worker *w, const adapted_rows *rows, const adapted_output *x)
{
    int64_t stride = rank_stride_of_a(w, rows);
    for (found_update u = {0}; next_update(w, rows, &u);) {
        if (!u.gradient->a)
            continue;
        factor_sums p = sums_of(rows, &u, x, 0);
        p.panels = x->last_panel - x->panel;
        p.step = p.panel_stride = KT_PANEL_ROWS;
        p.rank_stride = stride;
        p.sums = u.gradient->a + number_of_a(u.update, rows->matrix, stride, x->panel * KT_PANEL_ROWS);
        w->kernels->factor_sums(&p);
    }
}

void lowrank_gradient_b(const worker *w, const adapted_rows *rows, const adapted_output *dy)
{
    for (found_update u = {0}; next_update(w, rows, &u);) {
        panels_of_b b = panels_among(u.update, rows->matrix, dy->panel, dy->last_panel);
        if (b.n == 0 || !u.gradient->b)
            continue;
        factor_sums p = sums_of(rows, &u, dy, b.column);
        p.panels = b.n;
        p.step = u.update->panel_step * KT_PANEL_ROWS;
        p.rank_stride = KT_PANEL_ROWS;
        p.panel_stride = u.update->rank * KT_PANEL_ROWS;
        p.sums = u.gradient->b + b.at;
        w->kernels->factor_sums(&p);
    }
}
