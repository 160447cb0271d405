/* squares.c - sums of the squares of rows, by which a calibration tells which columns of a matrix matter. Threads share
 * matrices and columns; the rows of each are added up in their order, so the sums do not depend on the threads. */
#include "pool.h"

enum {
    COLUMNS = 512,      /* of a task: its sums stay in the first cache */
    ROWS = 64,          /* added up before they are added to the sums */
};

typedef struct squares_task {
    kt_pool *pool;
    const kt_squares *of;
    int64_t pieces;     /* tasks of one matrix */
    double *sums;
} squares_task;

static void add_piece(const kt_squares *of, int64_t first, int64_t last, int64_t column, int64_t n, double *sums)
{
    for (int64_t j = first; j < last; j += ROWS) {
        int64_t end = j + ROWS < last ? j + ROWS : last;
        double own[COLUMNS] = {0};
        for (int64_t i = j; i < end; i++) {
            const float *x = of->x + (of->rows ? of->rows[i] : i) * of->stride + column;
            for (int64_t c = 0; c < n; c++)
                own[c] += (double)x[c] * (double)x[c];
        }
        for (int64_t c = 0; c < n; c++)
            sums[c] += own[c];
    }
}

static void squares_run(void *arg, int thread, int threads)
{
    const squares_task *t = arg;
    const kt_squares *of = t->of;
    (void)threads;
    for (int64_t i; (i = pool_take(t->pool, thread, 1)) < of->count * t->pieces;) {
        int64_t matrix = i / t->pieces, column = i % t->pieces * COLUMNS, left = of->k - column;
        int64_t first = matrix ? of->ends[matrix - 1] : 0;
        add_piece(of, first, of->ends[matrix], column, left < COLUMNS ? left : COLUMNS, t->sums + matrix * of->k + column);
    }
}

int kt_add_squares(kt_pool *pool, const kt_squares *of, double *sums)
{
    squares_task t = {pool, of, (of->k + COLUMNS - 1) / COLUMNS, sums};
    pool_run(pool, squares_run, &t);
    return KT_OK;
}
