/* body.inc.c - all kernels of one row. The stub that includes it sets
 *   KT_ISA   name of the row
 *   KT_VEC   the header that defines its vocabulary
 * and is compiled with the flags of the row. Here: the table and the small kernels; the large ones are
 * in the files included below. Nothing is written for one ISA except where a file says so.
 */
#include <math.h>

#include "formats.h"
#include "kernels.h"
#include "vec.h"

#include "product.inc.c"
#include "codes.inc.c"
#include "product_int8.inc.c"
#include "product_float.inc.c"
#include "attend_f32.inc.c"
#include "attend_bf16.inc.c"
#include "recurrent.inc.c"
#include "index.inc.c"
#include "search.inc.c"
#include "feedback.inc.c"
#include "encode.inc.c"
#include "cache_fp8.inc.c"
#include "rotate.inc.c"
#include "lowrank.inc.c"
#include "turn.inc.c"
#include "chances.inc.c"
#include "ceiling.inc.c"

/* Values to quantise: x, or what the multiples of `scale` leave over of it. */
typedef struct values {
    const float *x;
    int64_t k;
    vf inv, scale;          /* 127 / amax and amax / 127 of x, where `rest` */
    int rest;
} values;

INLINE vf to_codes(vf v, vf inv)
{
    return vf_min(vf_max(vf_rint(vf_mul(v, inv)), vf_set1(-127.0f)), vf_set1(127.0f));
}

INLINE vf value_at(const values *v, int64_t c)
{
    vf x = vf_load_upto(v->x, c, v->k);
    return v->rest ? vf_sub(x, vf_mul(to_codes(x, v->inv), v->scale)) : x;
}

/* Of columns [c, end), as far as there are any. */
INLINE float largest_value(const values *v, int64_t c, int64_t end)
{
    vf top = vf_set1(0.0f);
    for (; c < end && c < v->k; c += LANES)
        top = vf_max(top, vf_abs(value_at(v, c)));
    return vf_top(top);
}

static float largest(const float *x, int64_t n)
{
    values v = {.x = x, .k = n};
    return largest_value(&v, 0, n);
}

/* Codes and sums of columns [c, end), whose largest magnitude is amax, and their scale, number `index` of the row.
 * Columns under 2^-100 count as zero: 127 / amax must be finite. Returns 127 / amax, or 0. */
INLINE float quantize_values(const values *v, int64_t c, int64_t end, float amax, const act8 *out, int64_t row,
                             int64_t index)
{
    int8_t *q = out->q + row * out->stride;
    int32_t *sum = out->sum + row * (out->stride / 32);
    if (amax < 0x1p-100f)
        amax = 0.0f;
    out->scale[row * out->scales + index] = amax / 127.0f;
    float inv = amax == 0.0f ? 0.0f : 127.0f / amax;
    for (; c < end; c += 32) {
        vi code[2];
        for (int h = 0; h < 2; h++) {
            code[h] = vi_of_vf(to_codes(value_at(v, c + 16 * h), vf_set1(inv)));
            vi_store8(q + c + 16 * h, code[h]);
        }
        sum[c / 32] = vi_sum(vi_add(code[0], code[1]));
    }
    return inv;
}

static void quantize(const float *x, int64_t k, float amax, const act8 *out, int64_t row)
{
    int64_t width = out->stride / out->scales;
    values v = {.x = x, .k = k};
    for (int64_t i = 0, c = 0; i < out->scales; i++, c += width)
        quantize_values(&v, c, c + width, amax < 0.0f ? largest_value(&v, c, c + width) : amax, out, row, i);
}

static void quantize_wide(const float *x, int64_t k, const act8 *out, int64_t row)
{
    int64_t width = out->stride / out->scales;
    values first = {.x = x, .k = k}, second = {.x = x, .k = k, .rest = 1};
    for (int64_t i = 0, c = 0; i < out->scales; i++, c += width) {
        second.inv = vf_set1(quantize_values(&first, c, c + width, largest_value(&first, c, c + width), out, row, i));
        second.scale = vf_set1(out->scale[row * out->scales + i]);
        quantize_values(&second, c, c + width, largest_value(&second, c, c + width), out, row + 1, i);
    }
}

static void to_bf16(const float *x, int64_t k, int64_t k_padded, uint16_t *out)
{
    int64_t c = 0;
    for (; c + LANES <= k; c += LANES)
        vf_store_bf16(out + c, vf_load(x + c));
    for (; c < k_padded; c++)
        out[c] = c < k ? bf16_of_float(x[c]) : 0;
}

static void from_bf16(const uint16_t *x, int64_t k, float *out)
{
    int64_t c = 0;
    for (; c + LANES <= k; c += LANES)
        vf_store(out + c, vf_from_bf16(x + c));
    for (; c < k; c++)
        out[c] = float_of_bf16(x[c]);
}

static void from_f16(const uint16_t *x, int64_t k, float *out)
{
    int64_t c = 0;
    for (; c + LANES <= k; c += LANES)
        vf_store(out + c, vf_from_f16(x + c));
    for (; c < k; c++)
        out[c] = float_of_f16(x[c]);
}

static void norm(const float *x, const float *gain, int64_t n, float eps, float *out)
{
    vf square[2] = {vf_set1(0.0f), vf_set1(0.0f)};
    for (int64_t c = 0; c < n; c += 2 * LANES)
        for (int h = 0; h < 2; h++) {
            vf v = vf_load_upto(x, c + LANES * h, n);
            square[h] = vf_fma(v, v, square[h]);
        }
    float mean = vf_sum(vf_add(square[0], square[1])) / (float)n;
    vf inv = vf_set1(1.0f / sqrtf(mean + eps));
    for (int64_t c = 0; c < n; c += LANES)
        vf_store_upto(out, c, n, vf_mul(vf_mul(vf_load_upto(x, c, n), inv), vf_load_upto(gain, c, n)));
}

/* Pairs (2i, 2i+1): x * cos + (swapped x) * (-sin, +sin). */
static void rope_interleaved(float *x, const float *cosine, const float *sine, int64_t dim)
{
    static const float sign[LANES] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    int64_t c = 0;
    for (; c + LANES <= dim; c += LANES) {
        vf v = vf_load(x + c), s = vf_mul(vf_load_twice(sine + c / 2), vf_load(sign));
        vf_store(x + c, vf_fma(v, vf_load_twice(cosine + c / 2), vf_mul(vf_swap(v, 1), s)));
    }
    for (; c < dim; c += 2) {
        float a = x[c], b = x[c + 1], co = cosine[c / 2], si = sine[c / 2];
        x[c] = fmaf(a, co, -(b * si));
        x[c + 1] = fmaf(b, co, a * si);
    }
}

static void rope(float *x, const float *cosine, const float *sine, int64_t dim, int32_t interleaved)
{
    if (interleaved) {
        rope_interleaved(x, cosine, sine, dim);
        return;
    }
    int64_t half = dim / 2;
    for (int64_t c = 0; c < half; c += LANES) {
        vf a = vf_load_upto(x, c, half), b = vf_load_upto(x + half, c, half);
        vf co = vf_load_upto(cosine, c, half), si = vf_load_upto(sine, c, half);
        vf_store_upto(x, c, half, vf_sub(vf_mul(a, co), vf_mul(b, si)));
        vf_store_upto(x + half, c, half, vf_fma(b, co, vf_mul(a, si)));
    }
}

static void squared_relu(const float *up, int64_t width, float *out)
{
    for (int64_t c = 0; c < width; c += LANES) {
        vf positive = vf_max(vf_set1(0.0f), vf_load_upto(up, c, width));
        vf_store_upto(out, c, width, vf_mul(positive, positive));
    }
}

/* The limits come first in minimum and maximum: so NaN stays NaN. */
static void swiglu(const float *gate_up, int64_t width, const kt_glu *glu, float *out)
{
    if (glu->ungated) {
        squared_relu(gate_up, width, out);
        return;
    }
    vf most = vf_set1(glu->limit), least = vf_set1(-glu->limit), top = vf_set1(glu->gate_limit);
    vf steep = vf_set1(-glu->alpha), bend = vf_set1(-glu->alpha * glu->cubic), shift = vf_set1(glu->shift);
    for (int64_t c = 0; c < width; c += LANES) {
        vf gate = vf_min(top, vf_load(gate_up + 2 * c));
        vf up = vf_max(least, vf_min(most, vf_load(gate_up + 2 * c + LANES)));
        vf slope = vf_fma(bend, vf_mul(gate, gate), steep);
        vf below = vf_add(vf_set1(1.0f), vf_exp(vf_mul(slope, gate)));
        vf_store_upto(out, c, width, vf_mul(vf_div(gate, below), vf_add(up, shift)));
    }
}

/* x / (1 + e^-by), times by for silu. */
static void gate(const float *x, const float *by, int64_t n, const gate_by *how, float *out)
{
    for (int64_t c = 0; c < n; c += LANES) {
        vf v = how->one ? vf_set1(by[0]) : vf_load_upto(by, c, n), a = vf_load_upto(x, c, n);
        vf below = vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_set1(0.0f), v)));
        vf_store_upto(out, c, n, vf_div(how->kind == KT_GATE_SILU ? vf_mul(a, v) : a, below));
    }
}

/* limit * tanh(by * x / limit), which is limit * (2 / (1 + e^(-2 by x / limit)) - 1); NaN stays NaN. */
static void cap(const float *x, int64_t n, float by, float limit, float *out)
{
    vf steep = vf_set1(-2.0f * by / limit), top = vf_set1(2.0f * limit), least = vf_set1(-limit);
    for (int64_t c = 0; c < n; c += LANES) {
        vf v = vf_load_upto(x, c, n), below = vf_add(vf_set1(1.0f), vf_exp(vf_mul(steep, v)));
        vf_store_upto(out, c, n, vf_fma(v, vf_set1(0.0f), vf_add(vf_div(top, below), least)));
    }
}

static void add(const float *a, const float *b, int64_t n, float *out)
{
    for (int64_t c = 0; c < n; c += LANES)
        vf_store_upto(out, c, n, vf_add(vf_load_upto(a, c, n), vf_load_upto(b, c, n)));
}

static void divide(const float *a, const float *b, int64_t n, float *out)
{
    for (int64_t c = 0; c < n; c += LANES)
        vf_store_upto(out, c, n, vf_div(vf_load_upto(a, c, n), vf_load_upto(b, c, n)));
}

enum { BLOCK_VECTORS = KT_BLOCK_COLUMNS / LANES };

/* v[0..4) = x[0..64), of which only x[0..n) exists; the rest reads as -Inf. */
INLINE void load_block(const float *x, int64_t n, vf *v)
{
    float padded[KT_BLOCK_COLUMNS];
    if (n < KT_BLOCK_COLUMNS) {
        for (int i = 0; i < KT_BLOCK_COLUMNS; i++)
            padded[i] = i < n ? x[i] : -INFINITY;
        x = padded;
    }
    for (int i = 0; i < BLOCK_VECTORS; i++)
        v[i] = vf_load(x + LANES * i);
}

static void summarize(const float *x, int64_t n, float temperature, float *peaks, float *sums)
{
    for (int64_t b = 0; b * KT_BLOCK_COLUMNS < n; b++) {
        vf v[BLOCK_VECTORS], top = vf_set1(-INFINITY), sum = vf_set1(0.0f);
        load_block(x + b * KT_BLOCK_COLUMNS, n - b * KT_BLOCK_COLUMNS, v);
        for (int i = 0; i < BLOCK_VECTORS; i++)     /* the minimum turns NaN into +Inf */
            top = vf_max(top, vf_min(v[i], vf_set1(INFINITY)));
        peaks[b] = vf_top(top);
        if (temperature == 0.0f)
            continue;
        for (int i = 0; i < BLOCK_VECTORS; i++)
            sum = vf_add(sum, vf_exp(vf_div(vf_sub(v[i], vf_set1(peaks[b])), vf_set1(temperature))));
        sums[b] = vf_sum(sum);
    }
}

static size_t product_scratch_bytes(const kt_format *format, int64_t k)
{
    return format->bits <= 8 ? int8_scratch_bytes(format, k) : 64;
}

extern const kt_kernels NAME(KT_ISA);
const kt_kernels NAME(KT_ISA) = {
    .name = NAME_TEXT(KT_ISA),
    .product_scratch_bytes = product_scratch_bytes,
    .product_int8 = product_int8,
    .product_bf16 = product_bf16,
    .product_f32 = product_f32,
    .inner = inner,
    .outer = outer,
    .factor_sums = factor_sums_of,
    .turn = turn_columns,
    .glu_backward = glu_backward_of,
    .largest = largest,
    .quantize = quantize,
    .quantize_wide = quantize_wide,
    .to_bf16 = to_bf16,
    .from_bf16 = from_bf16,
    .from_f16 = from_f16,
    .to_fp8 = to_fp8,
    .from_fp8 = from_fp8,
    .panels_fp8 = panels_fp8,
    .norm = norm,
    .rope = rope,
    .swiglu = swiglu,
    .cap = cap,
    .gate = gate,
    .add = add,
    .divide = divide,
    .summarize = summarize,
    .chances = chances,
    .split = split,
    .masked = masked,
    .attend_f32 = attend_f32,
    .attend_bf16 = attend_bf16,
    .index_f32 = index_f32,
    .index_bf16 = index_bf16,
    .pack_keys = pack_keys,
    .conv = conv,
    .delta_rule = delta_rule,
    .scan = scan,
    .encode_panel = encode_panel,
    .rotate = rotate,
    .read_bytes = read_bytes,
    .int8_ops = int8_ops,
    .bf16_ops = bf16_ops,
};
