/* decode.c - the numbers of a checkpoint's tensors to f32. Rows are independent; the team shares them out by a counter.
 */
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>

#include "blocks.h"
#include "kernels/formats.h"
#include "pool.h"

typedef struct decode_task {
    kt_pool *pool;
    int32_t dtype;
    const block_format *blocks;     /* GGUF's blocks; NULL: others */
    const kt_codes *codes;          /* codes with scales; NULL: others */
    const uint8_t *src;
    int64_t n, k;
    float *dst;
    atomic_int_fast64_t bad;        /* least index of a NaN or Inf, n * k if there is none */
} decode_task;

static void decode_plain(const decode_task *t, const kt_kernels *kernels, int64_t row)
{
    float *dst = t->dst + row * t->k;
    const uint16_t *half = (const uint16_t *)t->src + row * t->k;
    if (t->dtype == KT_F32)
        memcpy(dst, (const float *)t->src + row * t->k, (size_t)t->k * sizeof *dst);
    else if (t->dtype == KT_BF16)
        kernels->from_bf16(half, t->k, dst);
    else
        for (int64_t c = 0; c < t->k; c++)
            dst[c] = float_of_f16(half[c]);
}

static void decode_blocks(const decode_task *t, int64_t row)
{
    const block_format *b = t->blocks;
    const int64_t count = t->k / b->elements;
    for (int64_t i = 0; i < count; i++)
        b->decode(t->src + (row * count + i) * b->bytes, t->dst + row * t->k + i * b->elements);
}

static void decode_codes(const decode_task *t, int64_t row)
{
    const kt_codes *d = t->codes;
    const float *table = d->table;
    int64_t block = d->block_columns, blocks = (t->k + block - 1) / block, at = (d->row + row) / d->block_rows * blocks;
    const uint8_t *code = t->src + row * (d->bits == 8 ? t->k : (t->k + 1) / 2);
    float *dst = t->dst + row * t->k;
    for (int64_t b = 0, c = 0; b < blocks; b++) {
        float scale = d->scale[at + b], zero = d->zero ? d->zero[at + b] : 0.0f;
        int64_t end = c + block < t->k ? c + block : t->k;
        if (d->bits == 8)
            for (; c < end; c++)
                dst[c] = (table[code[c]] - zero) * scale;
        else
            for (; c < end; c++)
                dst[c] = (table[code[c / 2] >> 4 * (c & 1) & 15] - zero) * scale;
    }
}

/* Index of the first NaN or Inf of x[0..k), k if all are finite. */
static int64_t first_bad(const float *x, int64_t k)
{
    uint32_t any = 0;
    for (int64_t c = 0; c < k; c++)
        any |= ((bits_of_float(x[c]) & 0x7f800000u) + 0x00800000u) & 0x80000000u;
    if (!any)
        return k;
    for (int64_t c = 0; c < k; c++)
        if (!isfinite(x[c]))
            return c;
    return k;
}

static void decode_rows(void *arg, int thread, int threads)
{
    decode_task *t = arg;
    const kt_kernels *kernels = pool_kernels(t->pool);
    (void)threads;
    for (int64_t row; (row = pool_take(t->pool, thread, 16)) < t->n;)
        for (int64_t end = row + 16 < t->n ? row + 16 : t->n; row < end; row++) {
            if (t->codes)
                decode_codes(t, row);
            else if (t->blocks)
                decode_blocks(t, row);
            else
                decode_plain(t, kernels, row);
            int64_t c = first_bad(t->dst + row * t->k, t->k);
            int_fast64_t bad = atomic_load(&t->bad), at = row * t->k + c;
            while (c < t->k && at < bad && !atomic_compare_exchange_weak(&t->bad, &bad, at))
                continue;
        }
}

static int decode_all(decode_task *t)
{
    pool_run(t->pool, decode_rows, t);
    int64_t bad = atomic_load(&t->bad);
    if (bad == t->n * t->k)
        return KT_OK;
    pool_set_error(t->pool, "value at row %" PRId64 ", column %" PRId64 " is %s", bad / t->k, bad % t->k,
                   isnan(t->dst[bad]) ? "NaN" : "infinite");
    return KT_ERR_VALUE;
}

int kt_decode(kt_pool *pool, int32_t dtype, const void *src, int64_t n, int64_t k, float *dst)
{
    const block_format *blocks = block_format_of(dtype);
    if (n <= 0 || k <= 0 || (blocks ? k % blocks->elements != 0 : dtype < KT_F32 || dtype > KT_F16)) {
        pool_set_error(pool, "cannot decode a [%" PRId64 ", %" PRId64 "] tensor of dtype %d", n, k, (int)dtype);
        return KT_ERR_SHAPE;
    }
    decode_task t = {pool, dtype, blocks, NULL, src, n, k, dst, n * k};
    return decode_all(&t);
}

int kt_decode_codes(kt_pool *pool, const kt_codes *codes, const void *src, int64_t n, int64_t k, float *dst)
{
    if (n <= 0 || k <= 0 || (codes->bits != 8 && codes->bits != 4) || codes->block_rows <= 0 ||
        codes->block_columns <= 0 || codes->row < 0) {
        pool_set_error(pool, "cannot decode a [%" PRId64 ", %" PRId64 "] tensor of %d bits in blocks of %" PRId64
                       " x %" PRId64, n, k, (int)codes->bits, codes->block_rows, codes->block_columns);
        return KT_ERR_SHAPE;
    }
    decode_task t = {pool, 0, NULL, codes, src, n, k, dst, n * k};
    return decode_all(&t);
}
