/* attend_f32.inc.c - one step of flash attention (see attend_bf16.inc.c for the formula) on an
 * f32 cache, entirely in f32: the exact mode, with which the fast one is compared.
 *
 * Tiles of EXACT_QUERIES queries share the loads of K and V. Each score is one chain of fma over ascending
 * columns and lanes summed as vf_sum does, each value one chain over ascending keys: the tiling, and so the
 * number of queries in a call, does not change a bit.
 */

enum { KEYS = 4 };      /* of one tile of scores */

/* s[i][key..key + KEYS) = q[i] . k[key..], where no key from `seen` on is read. */
INLINE void exact_scores(const page_attention *a, const float *const *q, int queries, int64_t key, int64_t seen,
                             float (*s)[KT_PAGE_TOKENS])
{
    vf sum[EXACT_QUERIES][KEYS];
    const float *k0 = a->k;
    int64_t at[KEYS], c = 0;
    for (int j = 0; j < KEYS; j++) {
        at[j] = (key + j < seen ? key + j : seen - 1) * a->k_stride;
        for (int i = 0; i < queries; i++)
            sum[i][j] = vf_set1(0.0f);
    }
    for (; c + LANES <= a->dk; c += LANES) {
        vf k[KEYS];
        for (int j = 0; j < KEYS; j++)
            k[j] = vf_load(k0 + at[j] + c);
        for (int i = 0; i < queries; i++) {
            vf one = vf_load(q[i] + c);
            for (int j = 0; j < KEYS; j++)
                sum[i][j] = vf_fma(one, k[j], sum[i][j]);
        }
    }
    if (c < a->dk)
        for (int j = 0; j < KEYS; j++) {
            vf k = vf_load_n(k0 + at[j] + c, (int)(a->dk - c));
            for (int i = 0; i < queries; i++)
                sum[i][j] = vf_fma(vf_load_n(q[i] + c, (int)(a->dk - c)), k, sum[i][j]);
        }
    for (int i = 0; i < queries; i++)
        vf_sum4(sum[i], s[i] + key);
}

/* Scores of query i to weights, in place; its running maximum and sum. Returns e^(m - m'). */
INLINE float exact_weigh(const page_attention *a, int64_t i, float *s)
{
    int32_t limit = a->limit[i], from = a->from ? a->from[i] : 0;
    vf p[KT_PAGE_TOKENS / LANES], top = vf_set1(a->max[i]), total = vf_set1(0.0f), scale = vf_set1(a->scale);
    for (int j = 0; j < from; j++)
        s[j] = -INFINITY;
    for (int j = 0; j < KT_PAGE_TOKENS / LANES; j++) {
        for (int c = LANES * j; c < LANES * (j + 1) && LANES * (j + 1) > limit; c++)
            s[c] = c < limit ? s[c] : -INFINITY;        /* the scale is positive */
        p[j] = vf_mul(vf_load(s + LANES * j), scale);
        top = vf_max(top, p[j]);
    }
    vf m = vf_set1(vf_top(top));
    for (int j = 0; j < KT_PAGE_TOKENS / LANES; j++) {
        vf_store(s + LANES * j, vf_exp(vf_sub(p[j], m)));
        for (int c = LANES * j; c < LANES * (j + 1) && c < from; c++)
            s[c] = 0.0f;
        p[j] = vf_load_upto(s, LANES * j, limit);       /* exactly 0 beyond the limit */
        vf_store(s + LANES * j, p[j]);
        total = vf_add(total, p[j]);
    }
    float shrink[LANES], new_max[LANES];
    vf_store(shrink, vf_exp(vf_sub(vf_set1(a->max[i]), m)));
    vf_store(new_max, m);
    a->sum[i] = a->sum[i] * shrink[0] + vf_sum(total);
    a->max[i] = new_max[0];
    return shrink[0];
}

/* acc[i][c..] = acc * shrink[i] + sum over the keys of s[i][j] * v[j], `vectors` times 16 columns; a single
 * vector may be cut by dv. */
INLINE void exact_values(const page_attention *a, int64_t first, int queries, int64_t c, int vectors, int64_t seen,
                         const float (*s)[KT_PAGE_TOKENS], const float *shrink)
{
    vf out[EXACT_QUERIES][EXACT_VECTORS];
    for (int i = 0; i < queries; i++)
        for (int h = 0; h < vectors; h++)
            out[i][h] = vf_mul(vf_load_upto(a->acc + (first + i) * a->acc_stride, c + LANES * h, a->dv),
                               vf_set1(shrink[i]));
    for (int64_t j = 0; j < seen; j++) {
        vf v[EXACT_VECTORS];
        for (int h = 0; h < vectors; h++)
            v[h] = vf_load_upto((const float *)a->v + j * a->v_stride, c + LANES * h, a->dv);
        for (int i = 0; i < queries; i++) {
            vf p = vf_set1(s[i][j]);
            for (int h = 0; h < vectors; h++)
                out[i][h] = vf_fma(p, v[h], out[i][h]);
        }
    }
    for (int i = 0; i < queries; i++)
        for (int h = 0; h < vectors; h++)
            vf_store_upto(a->acc + (first + i) * a->acc_stride, c + LANES * h, a->dv, out[i][h]);
}

INLINE void exact_tile(const page_attention *a, int64_t first, int queries)
{
    float s[EXACT_QUERIES][KT_PAGE_TOKENS] ALIGNED, shrink[EXACT_QUERIES];
    const float *q[EXACT_QUERIES];
    int64_t seen = 0, c = 0;
    for (int i = 0; i < queries; i++) {
        q[i] = (const float *)a->q + (first + i) * a->q_stride;
        seen = a->limit[first + i] > seen ? a->limit[first + i] : seen;
    }
    if (seen == 0)
        return;
    for (int64_t j = 0; j < seen; j += KEYS)
        exact_scores(a, q, queries, j, seen, s);
    for (int i = 0; i < queries; i++) {
        shrink[i] = a->limit[first + i] > 0 ? exact_weigh(a, first + i, s[i]) : 1.0f;
        if (a->limit[first + i] == 0)
            memset(s[i], 0, sizeof s[i]);
    }
    for (; c + LANES * EXACT_VECTORS <= a->dv; c += LANES * EXACT_VECTORS)
        exact_values(a, first, queries, c, EXACT_VECTORS, seen, (const float (*)[KT_PAGE_TOKENS])s, shrink);
    for (; c < a->dv; c += LANES)
        exact_values(a, first, queries, c, 1, seen, (const float (*)[KT_PAGE_TOKENS])s, shrink);
}

static void attend_f32(const page_attention *a)
{
    for (int64_t i = 0; i < a->n_queries;) {
        int whole = a->n_queries - i >= EXACT_QUERIES;
        whole ? exact_tile(a, i, EXACT_QUERIES) : exact_tile(a, i, 1);
        i += whole ? EXACT_QUERIES : 1;
    }
}
