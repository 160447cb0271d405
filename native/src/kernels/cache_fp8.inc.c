/* cache_fp8.inc.c - rows of an fp8 cache: E4M3 codes with a scale byte of each head and position (kt_program.h).
 *
 * Decoding makes the bf16 numbers that attend_bf16 reads, exactly: a code has four bits, a scale is a power of two. Only
 * numbers below 2^-126 lose bits, which are cut off. NaN occurs only with the largest scale there is, because a NaN counts
 * as infinity in the maximum: so the usual way need not look for it.
 */

enum { FP8_TOP = 247 };     /* the scale byte of infinity */

INLINE float fp8_unit(uint8_t scale)
{
    return float_of_bits(scale ? (uint32_t)scale << 23 : 0x400000u);
}

/* The columns x[0..n) of a head at one position to codes; returns their scale byte. */
static uint8_t to_fp8(const float *x, int64_t n, uint8_t *codes)
{
    vf top = vf_set1(0.0f), value;
    for (int64_t c = 0; c < n; c += LANES)
        top = vf_max(top, vf_min(vf_abs(vf_load_upto(x, c, n)), vf_set1(INFINITY)));
    uint32_t u = bits_of_float(vf_top(top));
    if (u == 0) {
        memset(codes, 0, (size_t)n);
        return 0;
    }
    int32_t e = (int32_t)(u >> 23) - 126 - 9 + ((u & 0x7fffff) > 0x600000) + 127;
    uint8_t scale = (uint8_t)(e < 0 ? 0 : e);
    vf factor = vf_set1(float_of_bits((uint32_t)(254 - scale) << 23));
    for (int64_t c = 0; c < n; c += LANES) {
        uint8_t tail[LANES];
        vi code = nearest_e4m3(vf_mul(vf_load_upto(x, c, n), factor), &value);
        vi_store8(c + LANES <= n ? codes + c : tail, code);
        if (c + LANES > n)
            memcpy(codes + c, tail, (size_t)(n - c));
    }
    for (int64_t c = 0; c < n && scale == FP8_TOP; c++)
        codes[c] = isnan(x[c]) ? 0x7f : codes[c];
    return scale;
}

/* Sixteen pairs of codes from p on to bf16; lane i is of the scale in lane i. */
INLINE vi fp8_pairs(const uint8_t *p, vf unit)
{
    vi pairs = vi_bits(vf_from_bf16((const uint16_t *)(const void *)p));    /* in the upper half of each lane */
    vi even = vi_bits(vf_mul(vf_e4m3(pairs, 2), unit)), odd = vi_bits(vf_mul(vf_e4m3(pairs, 3), unit));
    return vi_add(vi_shr(even, 16), vi_and(odd, (int32_t)0xffff0000u));
}

INLINE uint16_t fp8_one(uint8_t code, uint8_t scale)
{
    if (scale == FP8_TOP)
        return bf16_of_float(float_of_e4m3(code) * fp8_unit(scale));
    float v = float_of_bits((uint32_t)(code & 128) << 24 | (uint32_t)(code & 127) << 20) * 0x1p120f;
    return (uint16_t)(bits_of_float(v * fp8_unit(scale)) >> 16);
}

/* out [columns] bf16 of the codes of one row. */
static void from_fp8(const uint8_t *codes, int64_t columns, uint8_t scale, uint16_t *out)
{
    vf unit = vf_set1(fp8_unit(scale));
    int64_t c = 0;
    for (; c + 2 * LANES <= columns && scale != FP8_TOP; c += 2 * LANES)
        vi_store(out + c, fp8_pairs(codes + c, unit));
    for (; c < columns; c++)
        out[c] = fp8_one(codes[c], scale);
}

/* Panels of keys, for attend_bf16, of panels of codes [4][dk / 2][16][2]; dk is even. The scale of key j is
 * scales[j * stride]. Of the panels those that hold the first n_keys. */
static void panels_fp8(const uint8_t *codes, int64_t n_keys, int64_t dk, const uint8_t *scales, int64_t stride,
                       uint16_t *out)
{
    for (int64_t key = 0; key < n_keys; key += LANES, codes += dk * LANES, out += dk * LANES) {
        float unit[LANES];
        int plain = 1;
        for (int j = 0; j < LANES; j++) {
            uint8_t scale = key + j < n_keys ? scales[(key + j) * stride] : 0;
            unit[j] = fp8_unit(scale);
            plain &= scale != FP8_TOP;
        }
        vf units = vf_load(unit);
        for (int64_t c = 0; c < dk && plain; c += 2)
            vi_store(out + LANES * c, fp8_pairs(codes + LANES * c, units));
        for (int64_t i = 0; i < dk * LANES && !plain; i++)
            out[i] = fp8_one(codes[i], scales[(key + i / 2 % LANES < n_keys ? key + i / 2 % LANES : key) * stride]);
    }
}
