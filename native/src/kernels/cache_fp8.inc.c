/* cache_fp8.inc.c - rows of an fp8 cache: E4M3 codes with a scale byte for each head and
 * position (kt_program.h).
 *
 * Decoding makes the bf16 numbers that attend_bf16 reads, exactly: a code has four bits, a scale is a power of two. Only
 * numbers below 2^-126 lose bits, which are cut off. A code's bits, moved to their place in a float, mean 2^-120 of it;
 * one multiplication by 2^120 and the scale makes them right as long as that is a float, which it is unless a head holds
 * numbers above 57,344. Those go one by one, as do NaN: they occur only with the largest scale there is, because a NaN
 * counts as infinity in the maximum.
 */

enum { FP8_TOP = 247, FP8_USUAL = 134 };    /* the scale byte of infinity; the last one with 2^(120 + scale - 127) */

/* What a code in its place is multiplied with: of usual scales. */
INLINE float fp8_factor(uint8_t scale)
{
    return float_of_bits(((uint32_t)(scale < FP8_USUAL ? scale : FP8_USUAL) + 120) << 23);
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

/* Sixteen pairs of codes from p on to bf16; lane i is multiplied by lane i. */
INLINE vi fp8_pairs(const uint8_t *p, vf factor)
{
    uint16_t pair[LANES];
    memcpy(pair, p, sizeof pair);                   /* a row of an odd number of columns is at an odd address */
    vi pairs = vi_bits(vf_from_bf16(pair));         /* in the upper half of each lane */
    vi odd = vi_and(vi_sar(pairs, 4), (int32_t)0x87f00000u);
    vi even = vi_and(vi_sar(vi_shl(pairs, 8), 4), (int32_t)0x87f00000u);
    even = vi_bits(vf_mul(vf_bits(even), factor));
    odd = vi_bits(vf_mul(vf_bits(odd), factor));
    return vi_add(vi_shr(even, 16), vi_and(odd, (int32_t)0xffff0000u));
}

INLINE uint16_t fp8_one(uint8_t code, uint8_t scale)
{
    float in_place = float_of_bits((uint32_t)(code & 128) << 24 | (uint32_t)(code & 127) << 20);
    if (scale <= FP8_USUAL)
        return (uint16_t)(bits_of_float(in_place * fp8_factor(scale)) >> 16);
    float v = scale < FP8_TOP ? in_place * 0x1p120f : float_of_e4m3(code);
    return bf16_of_float(v * float_of_bits((uint32_t)scale << 23));
}

/* out [columns] bf16 of the codes of one row; as many bytes from `next` on are fetched, if it is not NULL. */
static void from_fp8(const uint8_t *codes, int64_t columns, uint8_t scale, const uint8_t *next, uint16_t *out)
{
    vf factor = vf_set1(fp8_factor(scale));
    int64_t c = 0;
    for (; next && c < columns; c += 64)
        prefetch_l2(next + c);
    for (c = 0; c + 2 * LANES <= columns && scale <= FP8_USUAL; c += 2 * LANES)
        vi_store(out + c, fp8_pairs(codes + c, factor));
    for (; c < columns; c++)
        out[c] = fp8_one(codes[c], scale);
}

/* Panels of keys, for attend_bf16, of panels of codes [4][dk / 2][16][2]; dk is even. The scale of key j is
 * scales[j * stride]. Of the panels those that hold the first n_keys; all of those at `next` are fetched. */
static void panels_fp8(const uint8_t *codes, int64_t n_keys, int64_t dk, const uint8_t *scales, int64_t stride,
                       const uint8_t *next, uint16_t *out)
{
    for (int64_t i = 0; next && i < dk * KT_PAGE_TOKENS; i += 64)
        prefetch_l2(next + i);
    for (int64_t key = 0; key < n_keys; key += LANES, codes += dk * LANES, out += dk * LANES) {
        uint8_t scale[LANES];
        float factor[LANES];
        int usual = 1;
        for (int j = 0; j < LANES; j++) {
            scale[j] = key + j < n_keys ? scales[(key + j) * stride] : 0;
            factor[j] = fp8_factor(scale[j]);
            usual &= scale[j] <= FP8_USUAL;
        }
        vf factors = vf_load(factor);
        for (int64_t c = 0; c < dk && usual; c += 2)
            vi_store(out + LANES * c, fp8_pairs(codes + LANES * c, factors));
        for (int64_t i = 0; i < dk * LANES && !usual; i++)
            out[i] = fp8_one(codes[i], scale[i / 2 % LANES]);
    }
}
