/* attend.inc.c - one step of flash attention: queries against the 64 keys of a page.
 *
 * For each query: scores s[j] = scale * q . k[j]; the maximum m' over them and the running m; then with
 * p[j] = e^(s[j] - m'):  sum = sum * e^(m - m') + sum of p,  acc = acc * e^(m - m') + sum of p[j] * v[j].
 * Source: Dao et al., FlashAttention, algorithm 1.
 */

INLINE vf load_kv(const void *base, int64_t at, int64_t c, int64_t n, int is_f32)
{
    if (is_f32)
        return vf_load_upto((const float *)base + at, c, n);
    const uint16_t *p = (const uint16_t *)base + at + c;
    if (c + LANES <= n)
        return vf_from_bf16(p);
    uint16_t tail[LANES] = {0};
    memcpy(tail, p, (size_t)(n - c) * 2);
    return vf_from_bf16(tail);
}

INLINE float score(const page_attention *a, const float *q, int64_t key, int is_f32)
{
    vf sum = vf_set1(0.0f);
    for (int64_t c = 0; c < a->dk; c += LANES)
        sum = vf_fma(vf_load_upto(q, c, a->dk), load_kv(a->k, key * a->k_stride, c, a->dk, is_f32), sum);
    return vf_sum(sum) * a->scale;
}

INLINE void attend_query(const page_attention *a, int64_t i, int is_f32)
{
    float s[KT_PAGE_TOKENS], *acc = a->acc + i * a->acc_stride;
    int32_t limit = a->limit[i];
    vf top = vf_set1(a->max[i]), total = vf_set1(0.0f);
    for (int32_t j = 0; j < KT_PAGE_TOKENS; j++)
        s[j] = j < limit ? score(a, a->q + i * a->q_stride, j, is_f32) : -INFINITY;
    for (int j = 0; j < KT_PAGE_TOKENS; j += LANES)
        top = vf_max(top, vf_load(s + j));
    float m = vf_top(top);
    for (int j = 0; j < KT_PAGE_TOKENS; j += LANES) {
        vf p = vf_exp(vf_sub(vf_load(s + j), vf_set1(m)));
        p = vf_load_upto((vf_store(s + j, p), s), j, limit);    /* nothing beyond the limit */
        total = vf_add(total, p);
    }
    float old[LANES];
    vf_store(old, vf_exp(vf_set1(a->max[i] - m)));
    a->sum[i] = a->sum[i] * old[0] + vf_sum(total);
    a->max[i] = m;
    for (int64_t c = 0; c < a->dv; c += LANES) {
        vf out = vf_mul(vf_load_upto(acc, c, a->dv), vf_set1(old[0]));
        for (int32_t j = 0; j < limit; j++)
            out = vf_fma(vf_set1(s[j]), load_kv(a->v, j * a->v_stride, c, a->dv, is_f32), out);
        vf_store_upto(acc, c, a->dv, out);
    }
}

static void attend_page(const page_attention *a)
{
    for (int64_t i = 0; i < a->n_queries; i++)
        if (a->limit[i] > 0)
            a->kv_f32 ? attend_query(a, i, 1) : attend_query(a, i, 0);
}
