/* feedback.c - how the columns of rotated blocks make up for each other's errors, see kernels/formats.h. */
#include "feedback.h"

#include "kernels/formats.h"

enum { SIDE = ROTATION_UNIT };

typedef struct feedback_task {
    kt_pool *pool;
    const float *importance;
    int64_t k;
    float *feedback;
} feedback_task;

/* v[0..64) = what each column of a block counts, of which the first n are columns of the matrix. */
static void count_columns(const float *importance, int64_t n, double *v)
{
    double least = importance[0], sum = 0.0;
    for (int64_t c = 0; c < n; c++)
        least = importance[c] < least ? importance[c] : least;
    for (int64_t c = 0; c < SIDE; c++) {
        v[c] = c < n ? importance[c] : least;
        sum += v[c];
    }
    for (int64_t c = 0; c < SIDE; c++)
        v[c] += sum / (SIDE * SIDE);
}

static void transform(double *w)
{
    for (int h = 1; h < SIDE; h *= 2)
        for (int i = 0; i < SIDE; i++)
            if (!(i & h)) {
                double a = w[i], b = w[i + h];
                w[i] = a + b;
                w[i + h] = a - b;
            }
    for (int i = 0; i < SIDE; i++)
        w[i] /= SIDE;
}

/* One block's L. */
static void factor(const float *importance, int64_t n, float *feedback)
{
    double w[SIDE], a[SIDE][SIDE], l[SIDE];
    count_columns(importance, n, w);
    transform(w);
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j <= i; j++)
            a[i][j] = w[i ^ j];
    for (int i = SIDE - 1; i >= 0; i--) {
        for (int j = 0; j < i; j++) {
            l[j] = a[i][j] / a[i][i];
            feedback[i * SIDE + j] = (float)l[j];
        }
        for (int j = 0; j < i; j++)
            for (int c = 0; c <= j; c++)
                a[j][c] -= a[i][j] * l[c];
    }
}

static void fill_blocks(void *arg, int thread, int threads)
{
    const feedback_task *t = arg;
    (void)threads;
    for (int64_t i; (i = pool_take(t->pool, thread, 1)) * SIDE < t->k;) {
        int64_t first = i * SIDE, left = t->k - first;
        factor(t->importance + first, left < SIDE ? left : SIDE, t->feedback + first * SIDE);
    }
}

void feedback_fill(kt_pool *pool, const float *importance, int64_t k, float *feedback)
{
    pool_run(pool, fill_blocks, &(feedback_task){pool, importance, k, feedback});
}
