/* rotate.inc.c - rows multiplied by the Hadamard matrix that kt.h specifies: the fast
 * Walsh-Hadamard transform of each block, its first four stages between the lanes of a vector,
 * the others between vectors. */

/* Stage h < 16 of n vectors: lane i without bit h = x[i] + x[i+h], with it x[i-h] - x[i]. */
INLINE void mix_lanes(vf *x, int64_t n, int h)
{
    float sign[LANES];
    for (int i = 0; i < LANES; i++)
        sign[i] = i & h ? -1.0f : 1.0f;
    vf turn = vf_load(sign);
    for (int64_t i = 0; i < n; i++)
        x[i] = vf_fma(x[i], turn, vf_swap(x[i], h));      /* the product is exact */
}

/* Blocks of n vectors. */
INLINE void rotate_blocks(const float *x, int64_t k, int64_t n, float *out)
{
    int64_t block = n * LANES, end = round_up(k, ROTATION_UNIT);
    vf v[16], scale = vf_set1((float)(1.0 / sqrt((double)block)));
    for (int64_t c = 0; c < end; c += block) {
        for (int64_t i = 0; i < n; i++)
            v[i] = vf_load_upto(x, c + LANES * i, k);
        mix_lanes(v, n, 1);
        mix_lanes(v, n, 2);
        mix_lanes(v, n, 4);
        mix_lanes(v, n, 8);
        for (int64_t h = 1; h < n; h *= 2)
            for (int64_t i = 0; i < n; i++)
                if (!(i & h)) {
                    vf a = v[i], b = v[i + h];
                    v[i] = vf_add(a, b);
                    v[i + h] = vf_sub(a, b);
                }
        for (int64_t i = 0; i < n; i++)
            vf_store(out + c + LANES * i, vf_mul(v[i], scale));
    }
}

static void rotate(const float *x, int64_t k, int64_t block, float *out)
{
    if (block == ROTATION_UNIT)
        rotate_blocks(x, k, ROTATION_UNIT / LANES, out);    /* in registers */
    else
        rotate_blocks(x, k, block / LANES, out);
}
