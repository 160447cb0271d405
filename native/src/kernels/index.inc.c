/* index.inc.c - scores of a token's index heads for the keys of a page, which decide the
 * positions that it attends to. The products are those of attention, in its layouts
 * (attend_bf16.inc.c, attend_f32.inc.c). */

/* Take the scores s of `heads` heads from `first` on: add them up by weight, or write them. */
INLINE void index_take(const page_index *a, int64_t first, int heads, float (*s)[KT_PAGE_TOKENS])
{
    for (int i = 0; i < heads; i++)
        for (int64_t c = 0; c < a->n_keys; c += LANES) {
            vf x = vf_load(s[i] + c);
            float *to = a->out + (a->weight ? 0 : (first + i) * KT_PAGE_TOKENS) + c;
            if (a->weight)
                x = vf_fma(vf_set1(a->weight[first + i]), vf_max(x, vf_set1(0.0f)), vf_load(to));
            vf_store(to, x);
        }
}

static void index_f32(const page_index *a)
{
    page_attention p = {.dk = a->dim, .k = a->k, .k_stride = a->k_stride};
    float s[EXACT_QUERIES][KT_PAGE_TOKENS] ALIGNED = {{0}};
    const float *q[EXACT_QUERIES];
    if (a->weight)
        memset(a->out, 0, KT_PAGE_TOKENS * sizeof *a->out);
    for (int64_t h = 0, n; h < a->n_heads; h += n) {
        n = a->n_heads - h >= EXACT_QUERIES ? EXACT_QUERIES : 1;
        for (int64_t i = 0; i < n; i++)
            q[i] = (const float *)a->q + (h + i) * a->q_stride;
        for (int64_t j = 0; j < a->n_keys; j += KEYS)
            n > 1 ? exact_scores(&p, q, EXACT_QUERIES, j, a->n_keys, s) : exact_scores(&p, q, 1, j, a->n_keys, s);
        index_take(a, h, (int)n, s);
    }
}

/* Scores of heads [0, heads) from q on, of as many panels as hold keys: the page may end there. */
INLINE void index_scores(const page_index *a, const uint16_t *q, int heads, float (*s)[KT_PAGE_TOKENS])
{
    page_attention p = {.dk = a->dim, .q_stride = a->q_stride};
    const uint16_t *k = a->k;
    int64_t panel = (a->dim + 1) / 2 * 2 * LANES, panels = (a->n_keys + LANES - 1) / LANES;
    int some = heads < SCORE_QUERIES ? heads : SCORE_QUERIES;
    for (int i = 0; i < heads; i += some) {
        int64_t h = 0;
        for (; h + SCORE_PANELS <= panels; h += SCORE_PANELS)
            score_tile(&p, q + i * a->q_stride, some, k + h * panel, SCORE_PANELS, NULL, 0, s[i] + LANES * h);
        for (; h < panels; h++)
            score_tile(&p, q + i * a->q_stride, some, k + h * panel, 1, NULL, 0, s[i] + LANES * h);
    }
}

static void index_bf16(const page_index *a)
{
    float s[CHUNK][KT_PAGE_TOKENS] ALIGNED;
    if (a->weight)
        memset(a->out, 0, KT_PAGE_TOKENS * sizeof *a->out);
    for (int64_t h = 0, n; h < a->n_heads; h += n) {
        const uint16_t *q = (const uint16_t *)a->q + h * a->q_stride;
        n = a->n_heads - h >= CHUNK ? CHUNK : 1;
        n > 1 ? index_scores(a, q, CHUNK, s) : index_scores(a, q, 1, s);
        index_take(a, h, (int)n, s);
    }
}
