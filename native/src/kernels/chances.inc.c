/* chances.inc.c - kernels for the choice of a token in a block of logits: the probabilities of
 * its tokens relative to the best one, and the block after a mask.
 *
 * A chance is e^((x - top) / temperature), within 0.502 units in the last place, and the same bits in every row: a
 * number of double precision is rounded once. In 1.1e9 arguments from -150 to 0 it differs once from glibc's expf.
 * Source: expf of Arm's optimized routines; 2^(i/32) from a table, 2^r for |r| <= 1/64 by a polynomial of degree 3.
 */

/* The bits of 2^(i/32), less i << 47, which the bits of the exponent bring back. */
static const uint64_t roots_of_two[32] = {
    UINT64_C(0x3ff0000000000000), UINT64_C(0x3fefd9b0d3158574), UINT64_C(0x3fefb5586cf9890f), UINT64_C(0x3fef9301d0125b51),
    UINT64_C(0x3fef72b83c7d517b), UINT64_C(0x3fef54873168b9aa), UINT64_C(0x3fef387a6e756238), UINT64_C(0x3fef1e9df51fdee1),
    UINT64_C(0x3fef06fe0a31b715), UINT64_C(0x3feef1a7373aa9cb), UINT64_C(0x3feedea64c123422), UINT64_C(0x3feece086061892d),
    UINT64_C(0x3feebfdad5362a27), UINT64_C(0x3feeb42b569d4f82), UINT64_C(0x3feeab07dd485429), UINT64_C(0x3feea47eb03a5585),
    UINT64_C(0x3feea09e667f3bcd), UINT64_C(0x3fee9f75e8ec5f74), UINT64_C(0x3feea11473eb0187), UINT64_C(0x3feea589994cce13),
    UINT64_C(0x3feeace5422aa0db), UINT64_C(0x3feeb737b0cdc5e5), UINT64_C(0x3feec49182a3f090), UINT64_C(0x3feed503b23e255d),
    UINT64_C(0x3feee89f995ad3ad), UINT64_C(0x3feeff76f2fb5e47), UINT64_C(0x3fef199bdd85529c), UINT64_C(0x3fef3720dcef9069),
    UINT64_C(0x3fef5818dcfba487), UINT64_C(0x3fef7c97337b9b5f), UINT64_C(0x3fefa4afa2a490da), UINT64_C(0x3fefd0765b6e4540),
};

typedef union double_bits {
    double number;
    uint64_t bits;
} double_bits;

/* e^x, -150 <= x <= 0: 0 below -104, as it rounds. */
static void exp_chances(const float *x, float *out)
{
    for (int i = 0; i < LANES; i++) {
        double scaled = (double)x[i] * 0x1.71547652b82fep+5, shifted = scaled + 0x1.8p+52;     /* 32 / ln 2 */
        uint64_t n = (double_bits){.number = shifted}.bits;                                  /* to the nearest */
        double r = scaled - (shifted - 0x1.8p+52);
        double power = (double_bits){.bits = roots_of_two[n % 32] + (n << 47)}.number;
        double high = 0x1.c6af84b912394p-20 * r + 0x1.ebfce50fac4f3p-13, low = 0x1.62e42ff0c52d6p-6 * r + 1.0;
        out[i] = (float)((high * (r * r) + low) * power);
    }
}

static void chances(const float *x, int64_t n, float top, float temperature, float *out)
{
    for (int64_t c = 0; c < n; c += LANES) {
        float lower[LANES], found[LANES];
        vf d = vf_div(vf_sub(vf_load_upto(x, c, n), vf_set1(top)), vf_set1(temperature));
        vf_store(lower, vf_max(d, vf_set1(-150.0f)));
        exp_chances(lower, found);
        vf_store_upto(out, c, n, vf_load(found));
    }
}

INLINE void add_lanes(double *sums, vf v)
{
    float x[LANES];
    vf_store(x, v);
    for (int i = 0; i < LANES; i++)
        sums[i] += (double)x[i];
}

/* The sum of all lanes, always in the same order. */
INLINE double sum_lanes(double *sums)
{
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++)
            sums[i] += sums[i + half];
    }
    return sums[0];
}

static chance_split split(const float *x, float low, float high)
{
    double below[LANES] = {0}, above[LANES] = {0};
    vf zero = vf_set1(0.0f);
    int between = 0;
    for (int c = 0; c < KT_BLOCK_COLUMNS; c += LANES) {
        vf v = vf_load(x + c);
        vf less = vf_less(v, vf_set1(low), v, zero), more = vf_less(v, vf_set1(high), zero, v);
        add_lanes(below, less);
        add_lanes(above, more);
        between |= vf_any_above(vf_sub(v, vf_add(less, more)), zero) << c / LANES;
    }
    return (chance_split){sum_lanes(below), sum_lanes(above), between};
}

static const int32_t lane_bits[LANES] = {
    1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7,
    1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15,
};

static void masked(const float *x, int64_t n, uint64_t mask, float *out)
{
    vi lanes = vi_load(lane_bits);
    for (int64_t c = 0; c < n; c += LANES) {
        vf in = vf_of_vi(vi_and(lanes, (int32_t)(mask >> c & 0xffff)));
        vf_store_upto(out, c, n, vf_less(vf_set1(0.0f), in, vf_load_upto(x, c, n), vf_set1(-INFINITY)));
    }
}
