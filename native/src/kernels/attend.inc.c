/* attend.inc.c - one step of flash attention: queries against the 64 keys of a page.
 *
 * For each query: scores s[j] = scale * q . k[j]; the maximum m' over them and the running m; then with
 * p[j] = e^(s[j] - m'):  sum = sum * e^(m - m') + sum of p,  acc = acc * e^(m - m') + sum of p[j] * v[j].
 * Source: Dao et al., FlashAttention, algorithm 1.
 *
 * Queries go in tiles, so that a key or value is loaded (and widened from bf16) once for all of them and
 * the sums stay in registers. A tile only says which sums run side by side: each is the same sequence of
 * operations whatever the tile, so a token alone gets the bits it gets among others.
 */

/* Queries, keys and column vectors of a tile: its squares are the sums held in registers. */
#ifdef __AVX512F__
#define ATTEND_TILE 4
#else
#define ATTEND_TILE 2
#endif
#define UNROLL _Pragma("GCC unroll 4")

INLINE vf load_kv(const void *base, int64_t at, int64_t c, int64_t n, int is_f32)
{
    if (is_f32)
        return vf_load_upto((const float *)base + at, c, n);
    const uint16_t *p = (const uint16_t *)base + at + c;
    if (c + LANES <= n)
        return vf_from_bf16(p);
    uint16_t tail[LANES] = {0};
    if (c < n)
        memcpy(tail, p, (size_t)(n - c) * 2);
    return vf_from_bf16(tail);
}

/* s[q][key + j] for `queries` queries from i on and the next ATTEND_TILE keys. */
INLINE void score_tile(const page_attention *a, int64_t i, int queries, int64_t key, int is_f32,
                       float s[ATTEND_TILE][KT_PAGE_TOKENS])
{
    vf sum[ATTEND_TILE][ATTEND_TILE];
    UNROLL for (int q = 0; q < queries; q++)
        UNROLL for (int j = 0; j < ATTEND_TILE; j++)
            sum[q][j] = vf_set1(0.0f);
    for (int64_t c = 0; c < a->dk; c += LANES) {
        vf k[ATTEND_TILE];
        UNROLL for (int j = 0; j < ATTEND_TILE; j++)
            k[j] = load_kv(a->k, (key + j) * a->k_stride, c, a->dk, is_f32);
        UNROLL for (int q = 0; q < queries; q++) {
            vf x = vf_load_upto(a->q + (i + q) * a->q_stride, c, a->dk);
            UNROLL for (int j = 0; j < ATTEND_TILE; j++)
                sum[q][j] = vf_fma(x, k[j], sum[q][j]);
        }
    }
    UNROLL for (int q = 0; q < queries; q++)
        UNROLL for (int j = 0; j < ATTEND_TILE; j++)
            s[q][key + j] = vf_sum(sum[q][j]) * a->scale;
}

/* Scores to weights p, in place, 0 beyond the limit; updates max and sum. Returns the factor that what
 * was added up before shrinks by. */
INLINE float weigh(const page_attention *a, int64_t i, float s[KT_PAGE_TOKENS])
{
    int32_t limit = a->limit[i];
    vf top = vf_set1(a->max[i]), total = vf_set1(0.0f);
    for (int32_t j = limit; j < KT_PAGE_TOKENS; j++)
        s[j] = -INFINITY;
    for (int j = 0; j < KT_PAGE_TOKENS; j += LANES)
        top = vf_max(top, vf_load(s + j));
    float m = vf_top(top), old[LANES];
    for (int j = 0; j < KT_PAGE_TOKENS; j += LANES) {
        vf p = vf_exp(vf_sub(vf_load(s + j), vf_set1(m)));
        p = vf_load_upto((vf_store(s + j, p), s), j, limit);
        vf_store(s + j, p);
        total = vf_add(total, p);
    }
    vf_store(old, vf_exp(vf_set1(a->max[i] - m)));
    a->sum[i] = a->sum[i] * old[0] + vf_sum(total);
    a->max[i] = m;
    return old[0];
}

/* acc += p . v over the first `keys` keys, columns [c, c + 16 * ATTEND_TILE), after scaling by `keep`. */
INLINE void value_tile(const page_attention *a, int64_t i, int queries, int32_t keys, int64_t c,
                       int is_f32, float p[ATTEND_TILE][KT_PAGE_TOKENS], const float *keep)
{
    vf out[ATTEND_TILE][ATTEND_TILE];
    UNROLL for (int q = 0; q < queries; q++)
        UNROLL for (int n = 0; n < ATTEND_TILE; n++)
            out[q][n] = vf_mul(vf_load_upto(a->acc + (i + q) * a->acc_stride, c + n * LANES, a->dv),
                               vf_set1(keep[q]));
    for (int32_t j = 0; j < keys; j++) {
        vf v[ATTEND_TILE];
        UNROLL for (int n = 0; n < ATTEND_TILE; n++)
            v[n] = load_kv(a->v, j * a->v_stride, c + n * LANES, a->dv, is_f32);
        UNROLL for (int q = 0; q < queries; q++)
            UNROLL for (int n = 0; n < ATTEND_TILE; n++)
                out[q][n] = vf_fma(vf_set1(p[q][j]), v[n], out[q][n]);
    }
    UNROLL for (int q = 0; q < queries; q++)
        UNROLL for (int n = 0; n < ATTEND_TILE; n++)
            vf_store_upto(a->acc + (i + q) * a->acc_stride, c + n * LANES, a->dv, out[q][n]);
}

/* `queries` queries that all see `limit` keys. */
INLINE void attend_tile(const page_attention *a, int64_t i, int queries, int is_f32)
{
    float p[ATTEND_TILE][KT_PAGE_TOKENS], keep[ATTEND_TILE];
    int32_t limit = a->limit[i];
    for (int64_t key = 0; key < limit; key += ATTEND_TILE)
        score_tile(a, i, queries, key, is_f32, p);
    for (int q = 0; q < queries; q++)
        keep[q] = weigh(a, i + q, p[q]);
    for (int64_t c = 0; c < a->dv; c += ATTEND_TILE * LANES)
        value_tile(a, i, queries, limit, c, is_f32, p, keep);
}

/* Is the tile from i on full, and do all its queries see as many keys? */
INLINE int even_tile(const page_attention *a, int64_t i)
{
    if (i + ATTEND_TILE > a->n_queries)
        return 0;
    for (int q = 1; q < ATTEND_TILE; q++)
        if (a->limit[i + q] != a->limit[i])
            return 0;
    return 1;
}

INLINE void attend_queries(const page_attention *a, int is_f32)
{
    for (int64_t i = 0; i < a->n_queries;) {
        int even = even_tile(a, i);
        if (a->limit[i] > 0) {
            if (even)
                attend_tile(a, i, ATTEND_TILE, is_f32);
            else
                attend_tile(a, i, 1, is_f32);
        }
        i += even ? ATTEND_TILE : 1;
    }
}

static void attend_page(const page_attention *a)
{
    if (a->kv_f32)
        attend_queries(a, 1);
    else
        attend_queries(a, 0);
}
