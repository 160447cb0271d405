/* encode.inc.c - f32 rows to one packed panel. The algorithm and its order of operations are specified
 * in formats.h; here they are run 16 columns at a time, with nothing that changes a result.
 */

typedef struct codebook {
    float value[16], mid[16];       /* mid[15] is not used */
    int is_linear;                  /* value[i] = value[0] + i: nearest by rounding */
} codebook;

static codebook codebook_of(const kt_format *f)
{
    codebook b = {.is_linear = 1};
    for (int i = 0; i < 16; i++) {
        b.value[i] = f->codebook[i];
        b.is_linear &= b.value[i] == b.value[0] + (float)i;
    }
    for (int i = 0; i < 15; i++)
        b.mid[i] = (b.value[i] + b.value[i + 1]) / 2.0f;
    return b;
}

/* The codebook's value nearest to v, ties to the lower. */
INLINE vf nearest_value(const codebook *b, int is_linear, vf v)
{
    if (!is_linear)
        return vf_lookup(b->value, vf_nearest(v, b->mid));
    vf c = vf_fix_tie(vf_rint(v), v);
    return vf_min(vf_max(c, vf_set1(b->value[0])), vf_set1(b->value[15]));
}

/* Sum over the group of (x - nearest * s)^2, in the specified order. */
INLINE float group_error(const codebook *b, int is_linear, const float *x, int64_t valid, int64_t g, float s)
{
    vf inv = vf_set1(1.0f / s), scale = vf_set1(s), sum = vf_set1(0.0f);
    for (int64_t c = 0; c < g; c += LANES) {
        vf value = vf_load_upto(x, c, valid);
        vf e = vf_sub(value, vf_mul(nearest_value(b, is_linear, vf_mul(value, inv)), scale));
        sum = vf_add(sum, vf_mul(e, e));
    }
    return vf_sum(sum);
}

/* 1 if every value of the group is codebook * s exactly. */
static int group_is_exact(const codebook *b, const float *x, int64_t valid, int64_t g, float s)
{
    vf inv = vf_set1(1.0f / s), scale = vf_set1(s);
    for (int64_t c = 0; c < g; c += LANES) {
        vf value = vf_load_upto(x, c, valid);
        vf e = vf_sub(value, vf_mul(nearest_value(b, 0, vf_mul(value, inv)), scale));
        if (!(vf_top(vf_abs(e)) == 0.0f))
            return 0;
    }
    return 1;
}

INLINE float round_scale(int32_t type, float s)
{
    return type == KT_SCALE_BF16 ? float_of_bf16(bf16_of_float(s)) : s;
}

static void consider(const codebook *b, const float *x, int64_t valid, int64_t g, float s, float *best,
                     float *chosen)
{
    if (s == 0.0f)
        return;
    /* group sizes as constants: the loops over a group unroll and x stays in registers */
    float error = !b->is_linear ? group_error(b, 0, x, valid, g, s)
                  : valid < g   ? group_error(b, 1, x, valid, g, s)
                  : g == 32     ? group_error(b, 1, x, 32, 32, s)
                  : g == 64     ? group_error(b, 1, x, 64, 64, s)
                  : g == 128    ? group_error(b, 1, x, 128, 128, s)
                                : group_error(b, 1, x, valid, g, s);
    if (error < *best) {
        *best = error;
        *chosen = s;
    }
}

/* The scale of a 4-bit group, 0 if it encodes as zero. Steps 1 to 4 of the specification. */
static float search_scale(const codebook *b, int32_t type, const float *x, int64_t valid, int64_t g)
{
    vf high = vf_set1(0.0f), low = vf_set1(0.0f);
    for (int64_t c = 0; c < valid; c += LANES) {
        high = vf_max(high, vf_load_upto(x, c, valid));
        low = vf_max(low, vf_sub(vf_set1(0.0f), vf_load_upto(x, c, valid)));
    }
    float hi = vf_top(high), lo = vf_top(low), m = hi >= lo ? hi : -lo, best = INFINITY, s = 0.0f;
    if (fabsf(m) < GROUP_TINY)
        return 0.0f;
    if (type == KT_SCALE_E8M0) {
        int p = (int)(bits_of_float(m) >> 23 & 255) - 127;
        float end = fmaxf(fabsf(b->value[0]), fabsf(b->value[15]));
        int span = end >= 1.0f ? (int)(bits_of_float(end) >> 23 & 255) - 127 : 0;
        for (int e = p; e >= p - span; e--)
            if (e >= -126 && e <= 127)
                consider(b, x, valid, g, float_of_bits((uint32_t)(e + 127) << 23), &best, &s);
        return s;
    }
    for (int i = 0; i < 16; i++) {
        float exact = b->value[i] == 0.0f ? 0.0f : round_scale(type, m / b->value[i]);
        if (exact != 0.0f && group_is_exact(b, x, valid, g, exact))
            return exact;
    }
    for (int j = SEARCH_FIRST; j <= SEARCH_LAST; j++)
        for (int end = 0; end < 16; end += 15)
            if (b->value[end] != 0.0f)
                consider(b, x, valid, g, round_scale(type, m / (b->value[end] * ((float)j / 32.0f))), &best,
                         &s);
    return s;
}

/* The scale of an 8-bit group. */
static float amax_scale(const kt_format *f, const float *x, int64_t valid)
{
    int32_t type = f->scale;
    vf top = vf_set1(0.0f);
    for (int64_t c = 0; c < valid; c += LANES)
        top = vf_max(top, vf_abs(vf_load_upto(x, c, valid)));
    float amax = vf_top(top), s = amax / (f->codes == KT_CODE_E4M3 ? E4M3_MOST : 127.0f);
    if (amax < GROUP_TINY)
        return 0.0f;
    if (type == KT_SCALE_E8M0) {
        uint32_t u = bits_of_float(s);
        s = float_of_bits((u + 0x7fffffu) & 0x7f800000u);      /* up to a power of two */
    }
    return round_scale(type, s);
}

/* Codes of 16 columns from column c of row r on, 4 bytes (columns) per code line. */
INLINE void store_codes(int bits, uint8_t *panel, const layout *l, int64_t c, int r, vi codes)
{
    uint8_t byte[LANES];
    uint8_t *at = panel + (size_t)(c / 64) * l->step_bytes + 4 * r;
    int64_t in = c % 64;
    vi_store8(byte, codes);
    for (int q = 0; q < 4; q++) {
        uint8_t *to = at + 16 * ((bits == 4 ? in % 32 : in) + 4 * q);
        for (int j = 0; j < 4; j++)
            to[j] = bits == 8 || in < 32 ? byte[4 * q + j] : (uint8_t)(to[j] | byte[4 * q + j] << 4);
    }
}

/* The codes nearest to v; *value what they mean. */
static vi nearest_e4m3(vf v, vf *value)
{
    float lane[LANES];
    int32_t code[LANES];
    vf_store(lane, v);
    for (int i = 0; i < LANES; i++) {
        uint8_t byte = e4m3_of_float(lane[i]);
        code[i] = (int8_t)byte;
        lane[i] = float_of_e4m3(byte);
    }
    *value = vf_load(lane);
    return vi_load(code);
}

/* One group of one row: its codes, its error; `c` is its first column; `given` its scale, 0 to choose one. */
static float encode_group(const kt_format *f, const layout *l, const codebook *b, const float *x, int64_t valid,
                          int64_t c, int r, float given, uint8_t *panel, double error[2])
{
    float s = given != 0.0f  ? given
              : f->bits == 8 ? amax_scale(f, x, valid)
                             : search_scale(b, f->scale, x, valid, l->group);
    vf inv = vf_set1(s == 0.0f ? 0.0f : 1.0f / s), wrong = vf_set1(0.0f), square = vf_set1(0.0f);
    for (int64_t i = 0; i < l->group; i += LANES) {
        vf value = vf_load_upto(x, i, valid), v = vf_mul(value, inv), code;
        vi index;
        if (f->codes == KT_CODE_E4M3) {
            index = nearest_e4m3(v, &code);
        } else if (f->bits == 8) {
            code = vf_min(vf_max(vf_rint(v), vf_set1(-127.0f)), vf_set1(127.0f));
            index = vi_of_vf(code);
        } else {
            index = vf_nearest(v, b->mid);
            code = vf_lookup(b->value, index);
        }
        store_codes(f->bits, panel, l, c + i, r, index);
        vf e = vf_sub(value, vf_mul(code, vf_set1(s)));
        if (i >= valid)
            continue;
        if (i + LANES > valid) {            /* padding columns have no error */
            float tail[LANES];
            vf_store(tail, e);
            e = vf_load_n(tail, (int)(valid - i));
        }
        wrong = vf_add(wrong, vf_mul(e, e));
        square = vf_add(square, vf_mul(value, value));
    }
    error[0] += (double)vf_sum(wrong);
    error[1] += (double)vf_sum(square);
    return s;
}

/* bits 16 and 32: the values themselves. */
static void encode_plain(int bits, const layout *l, int64_t k, const float *x, int r, uint8_t *panel,
                         double error[2])
{
    for (int64_t c = 0; c < l->k_padded; c++) {
        float value = c < k ? x[c] : 0.0f;
        uint16_t half = bf16_of_float(value);
        if (bits == 32)
            memcpy(panel + 64 * c + 4 * r, &value, 4);
        else
            memcpy(panel + 64 * (c / 2) + 4 * r + 2 * (c % 2), &half, 2);
        double e = bits == 32 ? 0.0 : (double)value - (double)float_of_bf16(half);
        error[0] += e * e;
        error[1] += (double)value * (double)value;
    }
}

/* The scale that a group was given, 0 if there is none that can be used. */
static float usable_scale(const float *given)
{
    float size = given ? fabsf(*given) : 0.0f;
    return size >= GROUP_TINY && size <= 1.0f / GROUP_TINY ? *given : 0.0f;
}

static void encode_panel(const kt_format *f, int64_t n, int64_t k, const float *src, const float *scales,
                         int64_t row, uint8_t *dst, double error[2])
{
    layout l = layout_of(f, k);
    codebook b = codebook_of(f);
    memset(dst + l.scale_offset, 0, l.panel_bytes - l.scale_offset);
    for (int r = 0; r < LANES; r++) {
        int64_t columns = row + r < n ? k : 0;
        const float *x = columns ? src + (row + r) * k : src;
        if (f->bits >= 16) {
            encode_plain(f->bits, &l, columns, x, r, dst, error);
            continue;
        }
        for (int64_t g = 0; g < l.groups; g++) {
            int64_t c = g * l.group, valid = columns < c ? 0 : columns - c < l.group ? columns - c : l.group;
            float given = usable_scale(scales && valid ? scales + (row + r) * l.groups + g : NULL);
            float s = encode_group(f, &l, &b, valid ? x + c : src, valid, c, r, given, dst, error);
            scale_store(f->scale, s, dst + l.scale_offset, 16 * g + r);
        }
    }
}
