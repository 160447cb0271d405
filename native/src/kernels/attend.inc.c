/* attend.inc.c - one step of flash attention: queries against the 64 keys of a page.
 *
 * For each query: scores s[j] = scale * q . k[j]; the maximum m' over them and the running m; then with
 * p[j] = e^(s[j] - m'):  sum = sum * e^(m - m') + sum of p,  acc = acc * e^(m - m') + sum of p[j] * v[j].
 * Source: Dao et al., FlashAttention, algorithm 1.
 *
 * Tiles of ATTEND_QUERIES queries share the loads of K and V. Each score is one chain of fma over ascending
 * columns and lanes summed as vf_sum does, each value one chain over ascending keys: the tiling, and so the
 * number of queries in a call, does not change a bit.
 */

enum { KEYS = 4, KEYS_AHEAD = 12 };      /* keys of one tile of scores; how far ahead K is fetched */

INLINE vf load_kv(const void *base, int64_t at, int is_f32)
{
    return is_f32 ? vf_load((const float *)base + at) : vf_from_bf16((const uint16_t *)base + at);
}

/* As load_kv, of the first n elements; the rest reads as 0. */
INLINE vf load_kv_n(const void *base, int64_t at, int64_t n, int is_f32)
{
    uint16_t tail[LANES] = {0};
    if (n >= LANES)
        return load_kv(base, at, is_f32);
    if (is_f32)
        return vf_load_n((const float *)base + at, (int)n);
    memcpy(tail, (const uint16_t *)base + at, (size_t)n * 2);
    return vf_from_bf16(tail);
}

/* s[i][key..key + KEYS) = q[i] . k[key..], where no key from `seen` on is read. */
INLINE void score_tile(const page_attention *a, const float *const *q, int queries, int64_t key, int64_t seen,
                       int is_f32, float (*s)[KT_PAGE_TOKENS])
{
    vf sum[ATTEND_QUERIES][KEYS];
    int64_t at[KEYS], c = 0;
    for (int j = 0; j < KEYS; j++) {
        at[j] = (key + j < seen ? key + j : seen - 1) * a->k_stride;
        for (int i = 0; i < queries; i++)
            sum[i][j] = vf_set1(0.0f);
    }
    for (; c + LANES <= a->dk; c += LANES) {
        vf k[KEYS];
        for (int j = 0; j < KEYS; j++)
            k[j] = load_kv(a->k, at[j] + c, is_f32);
        for (int i = 0; i < queries; i++) {
            vf one = vf_load(q[i] + c);
            for (int j = 0; j < KEYS; j++)
                sum[i][j] = vf_fma(one, k[j], sum[i][j]);
        }
    }
    if (c < a->dk)
        for (int j = 0; j < KEYS; j++) {
            vf k = load_kv_n(a->k, at[j] + c, a->dk - c, is_f32);
            for (int i = 0; i < queries; i++)
                sum[i][j] = vf_fma(vf_load_n(q[i] + c, (int)(a->dk - c)), k, sum[i][j]);
        }
    for (int i = 0; i < queries; i++)
        vf_sum4(sum[i], s[i] + key);
}

/* Scores of query i to weights, in place; its running maximum and sum. Returns e^(m - m'). */
INLINE float weigh(const page_attention *a, int64_t i, float *s)
{
    int32_t limit = a->limit[i];
    vf p[KT_PAGE_TOKENS / LANES], top = vf_set1(a->max[i]), total = vf_set1(0.0f), scale = vf_set1(a->scale);
    for (int j = 0; j < KT_PAGE_TOKENS / LANES; j++) {
        for (int c = LANES * j; c < LANES * (j + 1) && LANES * (j + 1) > limit; c++)
            s[c] = c < limit ? s[c] : -INFINITY;        /* the scale is positive */
        p[j] = vf_mul(vf_load(s + LANES * j), scale);
        top = vf_max(top, p[j]);
    }
    vf m = vf_set1(vf_top(top));
    for (int j = 0; j < KT_PAGE_TOKENS / LANES; j++) {
        vf_store(s + LANES * j, vf_exp(vf_sub(p[j], m)));
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
INLINE void value_tile(const page_attention *a, int64_t first, int queries, int64_t c, int vectors, int64_t seen,
                       int is_f32, const float (*s)[KT_PAGE_TOKENS], const float *shrink)
{
    vf out[ATTEND_QUERIES][ATTEND_VECTORS];
    for (int i = 0; i < queries; i++)
        for (int h = 0; h < vectors; h++)
            out[i][h] = vf_mul(vf_load_upto(a->acc + (first + i) * a->acc_stride, c + LANES * h, a->dv),
                               vf_set1(shrink[i]));
    for (int64_t j = 0; j < seen; j++) {
        vf v[ATTEND_VECTORS];
        for (int h = 0; h < vectors; h++)
            v[h] = vectors > 1 ? load_kv(a->v, j * a->v_stride + c + LANES * h, is_f32)
                               : load_kv_n(a->v, j * a->v_stride + c, a->dv - c, is_f32);
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

/* The page comes from memory: while the first queries' scores are computed, fetch K some keys ahead and V
 * in step (measured at one token, 8 heads per key head: 19 GB/s without, 28 with). */
INLINE void prefetch_tile(const page_attention *a, int64_t key, int64_t seen, int is_f32)
{
    int64_t size = is_f32 ? 4 : 2;
    for (int64_t j = key; j < key + KEYS && j < seen; j++) {
        const uint8_t *k = (const uint8_t *)a->k + (j + KEYS_AHEAD) * a->k_stride * size;
        const uint8_t *v = (const uint8_t *)a->v + j * a->v_stride * size;
        for (int64_t c = 0; c < a->dk * size && j + KEYS_AHEAD < seen; c += 64)
            prefetch(k + c);
        for (int64_t c = 0; c < a->dv * size && a->v != a->k; c += 64)
            prefetch(v + c);
    }
}

INLINE void attend_tile(const page_attention *a, int64_t first, int queries, int is_f32)
{
    float s[ATTEND_QUERIES][KT_PAGE_TOKENS] ALIGNED, shrink[ATTEND_QUERIES];
    const float *q[ATTEND_QUERIES];
    int64_t seen = 0, c = 0;
    for (int i = 0; i < queries; i++) {
        q[i] = a->q + (first + i) * a->q_stride;
        seen = a->limit[first + i] > seen ? a->limit[first + i] : seen;
    }
    if (seen == 0)
        return;
    for (int64_t j = 0; j < seen; j += KEYS) {
        if (first == 0)
            prefetch_tile(a, j, seen, is_f32);
        score_tile(a, q, queries, j, seen, is_f32, s);
    }
    for (int i = 0; i < queries; i++) {
        shrink[i] = a->limit[first + i] > 0 ? weigh(a, first + i, s[i]) : 1.0f;
        if (a->limit[first + i] == 0)
            memset(s[i], 0, sizeof s[i]);
    }
    for (; c + LANES * ATTEND_VECTORS <= a->dv; c += LANES * ATTEND_VECTORS)
        value_tile(a, first, queries, c, ATTEND_VECTORS, seen, is_f32, (const float (*)[KT_PAGE_TOKENS])s, shrink);
    for (; c < a->dv; c += LANES)
        value_tile(a, first, queries, c, 1, seen, is_f32, (const float (*)[KT_PAGE_TOKENS])s, shrink);
}

/* Not inlined: one body per cache type and tile. */
static void attend_bf16(const page_attention *a, int64_t i, int whole)
{
    whole ? attend_tile(a, i, ATTEND_QUERIES, 0) : attend_tile(a, i, 1, 0);
}

static void attend_f32(const page_attention *a, int64_t i, int whole)
{
    whole ? attend_tile(a, i, ATTEND_QUERIES, 1) : attend_tile(a, i, 1, 1);
}

static void attend_page(const page_attention *a)
{
    for (int64_t i = 0; i < a->n_queries;) {
        int whole = a->n_queries - i >= ATTEND_QUERIES;
        (a->kv_f32 ? attend_f32 : attend_bf16)(a, i, whole);
        i += whole ? ATTEND_QUERIES : 1;
    }
}
