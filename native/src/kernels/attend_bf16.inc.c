/* attend_bf16.inc.c - one step of flash attention on a bf16 cache: queries against the 64 keys of a page.
 *
 * For each query: scores s[j] = scale * q . k[j]; the maximum m' over them and the running m; then with
 * p[j] = e^(s[j] - m'):  sum = sum * e^(m - m') + sum of p,  acc = acc * e^(m - m') + sum of p[j] * v[j].
 * Source: Dao et al., FlashAttention, algorithm 1.
 *
 * Both products are dot products of bf16 pairs. Scores: keys lie in panels, the lanes are 16 keys and a pair
 * of a query's columns is the same for all, so nothing is summed across lanes. Values: rows of two keys are
 * interleaved as they are read, the lanes are columns and the pair is a query's two weights. p is rounded
 * to bf16 before it is summed, so the weights add up to 1 as they are used.
 *
 * A score is one chain over ascending pairs of columns, a value one chain over ascending pairs of keys, the
 * sum of p a fixed tree: neither the tiles nor the number of queries in a call change a bit.
 */

enum { CHUNK = 8, PAGE_PANELS = KT_PAGE_TOKENS / LANES };    /* queries that go through a page together, at most */

#define LOG2_E 1.44269504088896341f

/* Scores of queries [0, queries) of q against `panels` panels of keys from k on, rows of a page's at s.
 * Meanwhile the same lines of the next page are fetched, `fetch` panels of them from fetch_k on. */
INLINE void score_tile(const page_attention *a, const uint16_t *q, int queries, const uint16_t *k, int panels,
                       const uint16_t *fetch_k, int fetch, float *s)
{
    vf sum[SCORE_QUERIES][SCORE_PANELS];
    int64_t pairs = (a->dk + 1) / 2, panel = pairs * 2 * LANES;
    for (int i = 0; i < queries; i++)
        for (int h = 0; h < panels; h++)
            sum[i][h] = vf_set1(0.0f);
    for (int64_t c = 0; c < pairs; c++) {
        vi key[SCORE_PANELS];
        for (int h = 0; h < panels; h++)
            key[h] = vi_load(k + h * panel + 2 * LANES * c);
        for (int h = 0; h < fetch; h++)
            prefetch_l2(fetch_k + h * panel + 2 * LANES * c);
        for (int i = 0; i < queries; i++) {
            vx two = vx_load(q + i * a->q_stride + 2 * c);
            for (int h = 0; h < panels; h++)
                sum[i][h] = vf_dot_bf16(sum[i][h], key[h], two);
        }
    }
    for (int i = 0; i < queries; i++)
        for (int h = 0; h < panels; h++)
            vf_store(s + i * KT_PAGE_TOKENS + LANES * h, sum[i][h]);
}

/* All scores of a chunk. Each tile fetches its part of the next page's panels. */
INLINE void score_chunk(const page_attention *a, const uint16_t *q, int queries, int fetches,
                        float (*s)[KT_PAGE_TOKENS])
{
    int64_t panel = (a->dk + 1) / 2 * 2 * LANES;
    int some = queries < SCORE_QUERIES ? queries : SCORE_QUERIES, part = SCORE_PANELS * some / queries;
    for (int i = 0; i < queries; i += some)
        for (int h = 0; h < PAGE_PANELS; h += SCORE_PANELS) {
            const uint16_t *fetch = fetches ? (const uint16_t *)a->next_k + (h + i / some * part) * panel : NULL;
            score_tile(a, q + i * a->q_stride, some, (const uint16_t *)a->k + h * panel, SCORE_PANELS, fetch,
                       fetches ? part : 0, s[i] + LANES * h);
        }
}

/* Scores of query i to weights p, rounded; the running maximum. Lanes of *total: the sum of the weights.
 * Returns e^(m - m'), which is 1 where the maximum stays (most pages of a long context). */
INLINE float weigh(const page_attention *a, int64_t i, float *s, uint16_t *p, vf *total)
{
    static const uint16_t ones[2] = {0x3f80, 0x3f80};
    int32_t limit = a->limit[i], from = a->from ? a->from[i] : 0;
    float shrink[LANES] = {1.0f};
    for (int j = 0; j < from; j++)
        s[j] = -INFINITY;                               /* what lies before the window, */
    for (int j = limit; j < KT_PAGE_TOKENS; j++)
        s[j] = -INFINITY;                               /* and whatever beyond the limit; the scale is positive */
    vf top = vf_max(vf_max(vf_load(s), vf_load(s + LANES)), vf_max(vf_load(s + 2 * LANES), vf_load(s + 3 * LANES)));
    top = vf_mul(top, vf_set1(a->scale));
    if (vf_any_above(top, vf_set1(a->max[i]))) {
        float max = vf_top(top);
        vf_store(shrink, vf_exp2_short(vf_set1((a->max[i] - max) * LOG2_E)));
        a->max[i] = max;
    }
    vf factor = vf_set1(a->scale * LOG2_E), offset = vf_set1(-a->max[i] * LOG2_E);
    for (int j = 0; j < KT_PAGE_TOKENS; j += LANES)
        vf_store_bf16_normal(p + j, vf_exp2_short(vf_fma(vf_load(s + j), factor, offset)));
    if (limit < KT_PAGE_TOKENS)
        memset(p + limit, 0, (size_t)(KT_PAGE_TOKENS - limit) * sizeof *p);
    if (from > 0)
        memset(p, 0, (size_t)from * sizeof *p);
    vx one = vx_load(ones);
    *total = vf_dot_bf16(vf_dot_bf16(vf_set1(0.0f), vi_load(p), one), vi_load(p + 2 * LANES), one);
    return shrink[0];
}

INLINE void weigh_chunk(const page_attention *a, int64_t first, int queries, float (*s)[KT_PAGE_TOKENS],
                        uint16_t (*p)[KT_PAGE_TOKENS], float *shrink)
{
    vf total[CHUNK];
    float sum[CHUNK];
    for (int i = 0; i < queries; i++) {
        shrink[i] = 1.0f;
        total[i] = vf_set1(0.0f);
        if (a->limit[first + i] > 0)
            shrink[i] = weigh(a, first + i, s[i], p[i], &total[i]);
        else
            memset(p[i], 0, sizeof p[i]);
    }
    for (int i = 0; i < queries; i += 4) {
        if (queries >= 4)
            vf_sum4(total + i, sum + i);
        else
            for (int j = i; j < queries; j++)
                sum[j] = vf_sum(total[j]);
    }
    for (int i = 0; i < queries; i++)
        a->sum[first + i] = a->sum[first + i] * shrink[i] + sum[i];
}

/* 32 columns of a row of values; of the last ones (n < 32) the rest reads as 0. */
INLINE vi load_row(const uint16_t *row, int64_t n)
{
    uint16_t tail[2 * LANES] = {0};
    if (n >= 2 * LANES)
        return vi_load(row);
    memcpy(tail, row, (size_t)n * sizeof *row);
    return vi_load(tail);
}

INLINE void load_acc(const float *acc, int64_t n, vf *out)
{
    float tail[2 * LANES] = {0};
    if (n >= 2 * LANES) {
        vf_load_pairs(acc, out);
        return;
    }
    memcpy(tail, acc, (size_t)n * sizeof *acc);
    vf_load_pairs(tail, out);
}

INLINE void store_acc(float *acc, int64_t n, const vf *x)
{
    float tail[2 * LANES];
    if (n >= 2 * LANES) {
        vf_store_pairs(acc, x);
        return;
    }
    vf_store_pairs(tail, x);
    memcpy(acc, tail, (size_t)n * sizeof *acc);
}

/* acc[i][c..] = acc * shrink[i] + sum over the keys of p[i][j] * v[j], `blocks` times 32 columns, of which
 * n exist. No key from `seen` on is read: it may be NaN, and 0 * NaN is NaN. */
INLINE void value_tile(const page_attention *a, int64_t first, int queries, int64_t c, int blocks, int64_t n,
                       int64_t seen, const uint16_t (*p)[KT_PAGE_TOKENS], const float *shrink, int fetches)
{
    vf out[VALUE_QUERIES][2 * VALUE_BLOCKS];
    float *acc = a->acc + first * a->acc_stride + c;
    for (int i = 0; i < queries; i++)
        for (int b = 0; b < blocks; b++) {
            load_acc(acc + i * a->acc_stride + 32 * b, n - 32 * b, &out[i][2 * b]);
            for (int h = 2 * b; h < 2 * b + 2; h++)
                out[i][h] = vf_mul(out[i][h], vf_set1(shrink[i]));
        }
    for (int64_t j = 0; j < seen; j += 2) {
        const uint16_t *row = (const uint16_t *)a->v + j * a->v_stride + c;
        vi v[2 * VALUE_BLOCKS];
        for (int b = 0; b < blocks; b++) {
            vi odd = j + 1 < seen ? load_row(row + a->v_stride + 32 * b, n - 32 * b) : vi_set1(0);
            vi_pairs(load_row(row + 32 * b, n - 32 * b), odd, &v[2 * b]);
            if (fetches) {
                const uint16_t *next = (const uint16_t *)a->next_v + j * a->v_stride + c + 32 * b;
                prefetch_l2(next);
                prefetch_l2(next + a->v_stride);
            }
        }
        for (int i = 0; i < queries; i++) {
            vx two = vx_load(p[i] + j);
            for (int h = 0; h < 2 * blocks; h++)
                out[i][h] = vf_dot_bf16(out[i][h], v[h], two);
        }
    }
    for (int i = 0; i < queries; i++)
        for (int b = 0; b < blocks; b++)
            store_acc(acc + i * a->acc_stride + 32 * b, n - 32 * b, &out[i][2 * b]);
}

INLINE void value_chunk(const page_attention *a, int64_t first, int queries, int64_t seen,
                        const uint16_t (*p)[KT_PAGE_TOKENS], const float *shrink, int fetches)
{
    int some = queries < VALUE_QUERIES ? queries : VALUE_QUERIES;
    int blocks = queries < VALUE_QUERIES ? VALUE_BLOCKS : 1;
    for (int i = 0; i < queries; i += some) {
        int64_t c = 0;
        for (; c + 32 * blocks <= a->dv; c += 32 * blocks)
            value_tile(a, first + i, some, c, blocks, 32 * blocks, seen, p + i, shrink + i, fetches && i == 0);
        for (; c < a->dv; c += 32)
            value_tile(a, first + i, some, c, 1, a->dv - c, seen, p + i, shrink + i, 0);
    }
}

/* Queries [first, first + queries); with `fetches` the next page is fetched, if there is one. */
INLINE void attend_chunk(const page_attention *a, int64_t first, int queries, int fetches)
{
    float s[CHUNK][KT_PAGE_TOKENS] ALIGNED, shrink[CHUNK];
    uint16_t p[CHUNK][KT_PAGE_TOKENS] ALIGNED;
    int64_t seen = 0;
    for (int i = 0; i < queries; i++)
        seen = a->limit[first + i] > seen ? a->limit[first + i] : seen;
    if (seen == 0)
        return;
    score_chunk(a, (const uint16_t *)a->q + first * a->q_stride, queries, fetches && a->next_k, s);
    weigh_chunk(a, first, queries, s, p, shrink);
    value_chunk(a, first, queries, seen, (const uint16_t (*)[KT_PAGE_TOKENS])p, shrink, fetches && a->next_v);
}

static void attend_bf16(const page_attention *a)
{
    int64_t i = 0;
    for (; i + 8 <= a->n_queries; i += 8)
        attend_chunk(a, i, 8, i == 0);
    if (a->n_queries - i >= 4) {
        attend_chunk(a, i, 4, i == 0);
        i += 4;
    }
    if (a->n_queries - i >= 2) {
        attend_chunk(a, i, 2, i == 0);
        i += 2;
    }
    if (a->n_queries > i)
        attend_chunk(a, i, 1, i == 0);
}

/* ---- keys to panels ----------------------------------------------------------------------------- */

/* out [4][(dk + 1) / 2][16][2]: panels of n keys, rows of dk columns; lanes from n on repeat the last key. */
static void pack_keys(const uint16_t *rows, int64_t stride, int64_t n, int64_t dk, uint16_t *out)
{
    int64_t pairs = (dk + 1) / 2;
    for (int64_t panel = 0; panel < (n + LANES - 1) / LANES; panel++, out += pairs * 2 * LANES) {
        const uint8_t *key[LANES], *at[LANES];
        for (int j = 0; j < LANES; j++)
            key[j] = (const uint8_t *)(rows + (panel * LANES + j < n ? panel * LANES + j : n - 1) * stride);
        int64_t c = 0;
        for (; c + LANES <= dk / 2; c += LANES) {
            for (int j = 0; j < LANES; j++)
                at[j] = key[j] + 4 * c;
            transpose16(at, (uint8_t *)(out + 2 * LANES * c));
        }
        for (; c < pairs; c++)
            for (int j = 0; j < LANES; j++) {
                uint16_t *to = out + 2 * (LANES * c + j);
                to[1] = 0;
                memcpy(to, key[j] + 4 * c, 2 * c + 1 < dk ? 4 : 2);
            }
    }
}
