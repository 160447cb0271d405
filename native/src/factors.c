/* factors.c - the factors of an adapter as kernels read them, from the layout of its files: what a server does while other
 * threads compute, so each number is read once and written once, and nothing is allocated. */
#include "kt.h"

#include <string.h>

#include "kernels/formats.h"

#define BLOCK 256               /* numbers of A that are decoded at a time */
#define INLINE static inline __attribute__((always_inline))

INLINE float number_at(const uint8_t *at, int32_t dtype)
{
    float x;
    uint16_t half;
    if (dtype == KT_F32) {
        memcpy(&x, at, sizeof x);
        return x;
    }
    memcpy(&half, at, sizeof half);
    return dtype == KT_BF16 ? float_of_bf16(half) : float_of_f16(half);
}

/* 1 in the sign bit: the number is NaN or Inf. */
INLINE uint32_t is_bad(float x)
{
    return (bits_of_float(x) & 0x7f800000u) + 0x00800000u;
}

INLINE uint16_t rounded(float x)        /* x is finite */
{
    uint32_t bits = bits_of_float(x);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* out[c] = x[c], n of them; the sign bit of what is returned: whether one is NaN or Inf. */
INLINE uint32_t store_numbers(const float *x, int64_t n, int32_t in_f32, void *out)
{
    uint32_t bad = 0;
    for (int64_t c = 0; c < n; c++) {
        bad |= is_bad(x[c]);
        if (in_f32)
            ((float *)out)[c] = x[c];
        else
            ((uint16_t *)out)[c] = rounded(x[c]);
    }
    return bad;
}

INLINE int all_of_a(const kt_factor *a, int32_t dtype, int32_t in_f32, uint8_t *out)
{
    int64_t size = dtype == KT_F32 ? 4 : 2, out_size = in_f32 ? 4 : 2, wide = round_up(a->columns, KT_PANEL_ROWS) * out_size;
    float x[BLOCK];
    uint32_t bad = 0;
    for (int64_t i = 0; i < a->count; i++)
        for (int64_t r = 0; r < a->rows; r++, out += wide)
            for (int64_t c = 0, n; c < a->columns; c += n) {
                const uint8_t *at = (const uint8_t *)a->data + i * a->matrix_bytes + r * a->row_bytes + c * a->column_bytes;
                n = a->columns - c < BLOCK ? a->columns - c : BLOCK;
                if (a->column_bytes == size)    /* a constant: this loop takes vectors */
                    for (int64_t j = 0; j < n; j++)
                        x[j] = number_at(at + j * size, dtype);
                else
                    for (int64_t j = 0; j < n; j++)
                        x[j] = number_at(at + j * a->column_bytes, dtype);
                bad |= store_numbers(x, n, in_f32, out + c * out_size);
            }
    return bad >> 31 ? KT_ERR_VALUE : KT_OK;
}

/* One panel of one matrix, [columns][16]. rows: where each of its rows begins, NULL where there is none. */
INLINE uint32_t panel_of_b(const uint8_t *const *rows, int64_t offset, const kt_factor *b, int32_t dtype, int32_t in_f32,
                           uint8_t *out)
{
    uint32_t bad = 0;
    int whole = 1;
    for (int lane = 0; lane < KT_PANEL_ROWS; lane++)
        whole &= rows[lane] != NULL;
    for (int64_t r = 0; r < b->columns; r++, offset += b->column_bytes, out += KT_PANEL_ROWS * (in_f32 ? 4 : 2)) {
        float x[KT_PANEL_ROWS];
        if (whole)
            for (int lane = 0; lane < KT_PANEL_ROWS; lane++)
                x[lane] = number_at(rows[lane] + offset, dtype);
        else
            for (int lane = 0; lane < KT_PANEL_ROWS; lane++)
                x[lane] = rows[lane] ? number_at(rows[lane] + offset, dtype) : 0.0f;
        bad |= store_numbers(x, KT_PANEL_ROWS, in_f32, out);
    }
    return bad;
}

/* Panels outside: where experts alternate in the file, the sixteen rows of all of them stay in the cache. */
INLINE int all_of_b(const kt_factor *b, const int32_t *lanes, int32_t panels, int32_t dtype, int32_t in_f32, uint8_t *out)
{
    int64_t panel_bytes = b->columns * KT_PANEL_ROWS * (in_f32 ? 4 : 2);
    uint32_t bad = 0;
    for (int32_t p = 0; p < panels; p++, lanes += KT_PANEL_ROWS) {
        const uint8_t *rows[KT_PANEL_ROWS];
        for (int lane = 0; lane < KT_PANEL_ROWS; lane++)
            rows[lane] = lanes[lane] < 0 ? NULL : (const uint8_t *)b->data + lanes[lane] * b->row_bytes;
        for (int64_t i = 0; i < b->count; i++)
            bad |= panel_of_b(rows, i * b->matrix_bytes, b, dtype, in_f32, out + (i * panels + p) * panel_bytes);
    }
    return bad >> 31 ? KT_ERR_VALUE : KT_OK;
}

static int has_numbers(const kt_factor *f)
{
    return f->count > 0 && f->rows > 0 && f->columns > 0 && f->data &&
           (f->dtype == KT_F32 || f->dtype == KT_BF16 || f->dtype == KT_F16);
}

/* The same call for each type, which is then a constant. */
#define OF_TYPE(type, call) ((type) == KT_F32 ? call(KT_F32) : (type) == KT_BF16 ? call(KT_BF16) : call(KT_F16))

int kt_factor_a(const kt_factor *a, int32_t in_f32, void *out)
{
    if (!has_numbers(a))
        return KT_ERR_SHAPE;
#define CALL(dtype) (in_f32 ? all_of_a(a, dtype, 1, out) : all_of_a(a, dtype, 0, out))
    return OF_TYPE(a->dtype, CALL);
#undef CALL
}

int kt_factor_b(const kt_factor *b, const int32_t *lanes, int32_t panels, int32_t in_f32, void *out)
{
    if (!has_numbers(b) || panels < 1)
        return KT_ERR_SHAPE;
    for (int64_t i = 0; i < (int64_t)panels * KT_PANEL_ROWS; i++)
        if (lanes[i] >= b->rows)
            return KT_ERR_SHAPE;
#define CALL(dtype) (in_f32 ? all_of_b(b, lanes, panels, dtype, 1, out) : all_of_b(b, lanes, panels, dtype, 0, out))
    return OF_TYPE(b->dtype, CALL);
#undef CALL
}
