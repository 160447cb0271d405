/* decode.c - reads the numbers of a checkpoint's tensors, row by row, as f32 or bf16. Rows are
 * independent; the team shares them out by a counter. */
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "kernels/formats.h"
#include "numbers.h"

typedef struct decode_task {
    kt_pool *pool;
    const kt_gathered *src;
    uint16_t *half;                 /* dst as bf16, or NULL */
    float *dst;                     /* dst as f32; with `half` a row of each thread */
    atomic_int_fast64_t bad;        /* least index of a NaN or Inf, n * k if there is none */
} decode_task;

/* Index of the first Inf of x[0..k), k if there is none. */
static int64_t first_infinite(const uint16_t *x, int64_t k)
{
    uint16_t any = 0;
    for (int64_t c = 0; c < k; c++)
        any |= ((x[c] & 0x7f80u) + 0x0080u) & 0x8000u;
    for (int64_t c = 0; any && c < k; c++)
        if ((x[c] & 0x7fff) == 0x7f80)
            return c;
    return k;
}

/* Row i to dst; the column of the first number that is not finite there, k if all are. */
static int64_t decode_row(const decode_task *t, const kt_kernels *kernels, int64_t i, int thread)
{
    const kt_gathered *m = t->src;
    int64_t k = m->k;
    float *out = t->dst + (t->half ? thread : i) * k;
    const float *found = gathered_row(kernels, m, i, out);
    if (!found)
        memset(out, 0, (size_t)k * sizeof *out);
    else if (found != out)
        memcpy(out, found, (size_t)k * sizeof *out);
    int64_t bad = first_bad(out, k);
    if (m->divisors)
        kernels->divide(out, m->divisors, k, out);
    if (!t->half || bad < k)
        return bad;
    kernels->to_bf16(out, k, k, t->half + i * k);
    return first_infinite(t->half + i * k, k);
}

static void decode_rows(void *arg, int thread, int threads)
{
    decode_task *t = arg;
    const kt_kernels *kernels = pool_kernels(t->pool);
    int64_t n = t->src->n, k = t->src->k;
    (void)threads;
    for (int64_t row; (row = pool_take(t->pool, thread, 16)) < n;)
        for (int64_t end = row + 16 < n ? row + 16 : n; row < end; row++) {
            int64_t c = decode_row(t, kernels, row, thread);
            int_fast64_t bad = atomic_load(&t->bad), at = row * k + c;
            while (c < k && at < bad && !atomic_compare_exchange_weak(&t->bad, &bad, at))
                continue;
        }
}

/* What the number at index `bad` of the matrix is, as an error. */
static int refuse(const decode_task *t, int64_t bad, float *buffer)
{
    int64_t row = bad / t->src->k, c = bad % t->src->k;
    float value = gathered_row(pool_kernels(t->pool), t->src, row, buffer)[c];
    pool_set_error(t->pool, "value at row %" PRId64 ", column %" PRId64 " is %s", row, c,
                   isnan(value) ? "NaN" : isinf(value) ? "infinite" : "too large");
    return isfinite(value) ? KT_ERR_RANGE : KT_ERR_VALUE;
}

int kt_decode(kt_pool *pool, const kt_gathered *src, int32_t dtype, void *dst, int64_t *bad_row)
{
    int result = gathered_check(pool, src);
    *bad_row = -1;
    if (result == KT_OK && dtype != KT_F32 && dtype != KT_BF16) {
        pool_set_error(pool, "cannot decode to dtype %d", (int)dtype);
        return KT_ERR_SHAPE;
    }
    if (result != KT_OK)
        return result;
    size_t row = (size_t)src->k * sizeof(float);
    float *rows = malloc(row * (dtype == KT_BF16 ? (size_t)kt_pool_threads(pool) : 1));
    if (!rows) {
        pool_set_error(pool, "no memory for rows of %" PRId64 " columns", src->k);
        return KT_ERR_MEMORY;
    }
    decode_task t = {pool, src, dtype == KT_BF16 ? dst : NULL, dtype == KT_BF16 ? rows : dst, src->n * src->k};
    pool_run(pool, decode_rows, &t);
    int64_t bad = atomic_load(&t.bad);
    if (bad < src->n * src->k) {
        *bad_row = bad / src->k;
        result = refuse(&t, bad, rows);
    }
    free(rows);
    return result;
}
