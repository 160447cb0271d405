/* numbers.c - the rows of a matrix as f32, one at a time, for every type in a checkpoint: a
 * table of types with a loop for each. A row is decoded where it is used, by the thread that
 * uses it, so that a tensor never stands in memory as f32; one that lies there already is not
 * copied. */
#include "numbers.h"

#include <inttypes.h>
#include <math.h>

#include "blocks.h"
#include "kernels/formats.h"

static float value_f32(const uint8_t *at)
{
    float x;
    memcpy(&x, at, sizeof x);
    return x;
}

static float value_bf16(const uint8_t *at)
{
    uint16_t x;
    memcpy(&x, at, sizeof x);
    return float_of_bf16(x);
}

static float value_f16(const uint8_t *at)
{
    uint16_t x;
    memcpy(&x, at, sizeof x);
    return float_of_f16(x);
}

static void row_f32(const kt_kernels *kernels, const uint8_t *at, int64_t k, float *out)
{
    (void)kernels;
    memcpy(out, at, (size_t)k * sizeof *out);
}

static void row_bf16(const kt_kernels *kernels, const uint8_t *at, int64_t k, float *out)
{
    kernels->from_bf16((const uint16_t *)(const void *)at, k, out);
}

static void row_f16(const kt_kernels *kernels, const uint8_t *at, int64_t k, float *out)
{
    kernels->from_f16((const uint16_t *)(const void *)at, k, out);
}

/* Types whose numbers stand alone: bytes of one, one of them, and a row of neighbours. */
typedef struct plain_type {
    int32_t dtype, bytes;
    float (*value)(const uint8_t *at);
    void (*row)(const kt_kernels *kernels, const uint8_t *at, int64_t k, float *out);
} plain_type;

static const plain_type *plain_type_of(int32_t dtype)
{
    static const plain_type types[] = {
        {KT_F32, 4, value_f32, row_f32},
        {KT_BF16, 2, value_bf16, row_bf16},
        {KT_F16, 2, value_f16, row_f16},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].dtype == dtype)
            return &types[i];
    return NULL;
}

static void decode_codes(const kt_codes *d, const uint8_t *code, int64_t row, int64_t k, float *out)
{
    const float *table = d->table;
    int64_t block = d->block_columns, blocks = (k + block - 1) / block, at = (d->row + row) / d->block_rows * blocks;
    for (int64_t b = 0, c = 0; b < blocks; b++) {
        float scale = d->scale[at + b], zero = d->zero ? d->zero[at + b] : 0.0f;
        int64_t end = c + block < k ? c + block : k;
        if (d->bits == 8)
            for (; c < end; c++)
                out[c] = (table[code[c]] - zero) * scale;
        else
            for (; c < end; c++)
                out[c] = (table[code[c / 2] >> 4 * (c & 1) & 15] - zero) * scale;
    }
}

static const float *numbers_row(const kt_kernels *kernels, const kt_numbers *s, int64_t row, int64_t k, float *buffer)
{
    const uint8_t *at = (const uint8_t *)s->data + row * s->row_bytes;
    const plain_type *plain = plain_type_of(s->dtype);
    const block_format *blocks = plain ? NULL : block_format_of(s->dtype);
    if (plain && s->column_bytes != plain->bytes)
        for (int64_t c = 0; c < k; c++)
            buffer[c] = plain->value(at + c * s->column_bytes);
    else if (s->dtype == KT_F32)
        return (const float *)(const void *)at;
    else if (plain)
        plain->row(kernels, at, k, buffer);
    else if (blocks)
        for (int64_t c = 0; c < k; c += blocks->elements, at += blocks->bytes)
            blocks->decode(at, buffer + c);
    else
        decode_codes(s->codes, at, row, k, buffer);
    return buffer;
}

const float *gathered_row(const kt_kernels *kernels, const kt_gathered *m, int64_t i, float *buffer)
{
    int32_t source = m->rows[2 * i];
    return source < 0 ? NULL : numbers_row(kernels, &m->sources[source], m->rows[2 * i + 1], m->k, buffer);
}

int64_t first_bad(const float *x, int64_t k)
{
    uint32_t any = 0;
    for (int64_t c = 0; c < k; c++)
        any |= ((bits_of_float(x[c]) & 0x7f800000u) + 0x00800000u) & 0x80000000u;
    for (int64_t c = 0; any && c < k; c++)
        if (!isfinite(x[c]))
            return c;
    return k;
}

/* ---- what is given ------------------------------------------------------------------------------ */

static int codes_are_valid(const kt_codes *d)
{
    return d && (d->bits == 8 || d->bits == 4) && d->block_rows > 0 && d->block_columns > 0 && d->row >= 0;
}

static int numbers_are_valid(const kt_numbers *s, int64_t k)
{
    const plain_type *plain = plain_type_of(s->dtype);
    const block_format *blocks = block_format_of(s->dtype);
    if (s->n < 0 || s->row_bytes < 0)
        return 0;
    if (plain)
        return s->column_bytes >= 0 && (s->row_bytes | s->column_bytes | (int64_t)(uintptr_t)s->data) % plain->bytes == 0;
    return blocks ? k % blocks->elements == 0 : s->dtype == KT_CODES && codes_are_valid(s->codes);
}

int gathered_check(kt_pool *pool, const kt_gathered *m)
{
    if (m->n <= 0 || m->k <= 0 || m->n > INT32_MAX || m->k > INT32_MAX) {
        pool_set_error(pool, "a [%" PRId64 ", %" PRId64 "] matrix cannot be gathered", m->n, m->k);
        return KT_ERR_SHAPE;
    }
    for (int64_t i = 0; i < m->n_sources; i++)
        if (!numbers_are_valid(&m->sources[i], m->k)) {
            const kt_numbers *s = &m->sources[i];
            pool_set_error(pool, "source %" PRId64 " cannot be read: dtype %d, rows of %" PRId64 " columns and %" PRId64
                           " bytes", i, (int)s->dtype, m->k, s->row_bytes);
            return KT_ERR_SHAPE;
        }
    for (int64_t i = 0; i < m->n; i++) {
        int32_t source = m->rows[2 * i], row = m->rows[2 * i + 1];
        if (source >= 0 && (source >= m->n_sources || row < 0 || row >= m->sources[source].n)) {
            pool_set_error(pool, "row %" PRId64 " is row %d of source %d, which does not exist", i, (int)row, (int)source);
            return KT_ERR_RANGE;
        }
    }
    return KT_OK;
}
