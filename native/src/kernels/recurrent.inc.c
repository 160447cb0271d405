/* recurrent.inc.c - kernels of layers with a fixed-size state: a causal convolution of few
 * rows, the gated delta rule, and the state space model of Mamba-2.
 *
 * Columns of the state do not meet: each is the same sequence of float operations, over the keys in ascending
 * order, however columns are grouped and however the tokens are cut into steps.
 */

static void conv(const float *const *rows, const float *weight, const float *bias, int64_t width, int64_t n, float *out)
{
    for (int64_t c = 0; c < n; c += LANES) {
        vf sum = vf_load_upto(bias, c, n);
        for (int64_t i = 0; i < width; i++)
            sum = vf_fma(vf_load_upto(rows[i], c, n), vf_load_upto(weight + i * n, c, n), sum);
        vf below = vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_set1(0.0f), sum)));
        vf_store_upto(out, c, n, vf_div(sum, below));
    }
}

/* scratch = g k and g q of token t, for all keys; returns q . k. */
INLINE float delta_prepare(const delta_block *d, int64_t t)
{
    const float *q = d->q + t * d->q_stride, *k = d->k + t * d->k_stride, *g = d->decay + t * d->decay_stride;
    vf both = vf_set1(0.0f);
    for (int64_t c = 0; c < d->dk; c += LANES) {
        vf qs = vf_load_upto(q, c, d->dk), ks = vf_load_upto(k, c, d->dk);
        vf gs = d->decay_step ? vf_load_upto(g, c, d->dk) : vf_set1(g[0]);
        both = vf_fma(qs, ks, both);
        vf_store_upto(d->scratch, c, d->dk, vf_mul(gs, ks));
        vf_store_upto(d->scratch + d->dk, c, d->dk, vf_mul(gs, qs));
    }
    return vf_sum(both);
}

/* Columns of the state of before a token: where the keys' rows begin, and their stride (0: all are the same zeros). */
typedef struct delta_before {
    const float *rows;
    int64_t stride;
} delta_before;

/* told = S^T g k and mixed = S^T g q of the token that was prepared. */
INLINE void delta_read(const delta_block *d, delta_before from, int vectors, vf *told, vf *mixed)
{
    for (int i = 0; i < vectors; i++)
        told[i] = mixed[i] = vf_set1(0.0f);
    for (int64_t j = 0; j < d->dk; j++)
        for (int i = 0; i < vectors; i++) {
            vf s = vf_load(from.rows + j * from.stride + LANES * i);
            told[i] = vf_fma(s, vf_set1(d->scratch[j]), told[i]);
            mixed[i] = vf_fma(s, vf_set1(d->scratch[d->dk + j]), mixed[i]);
        }
}

/* The state after token t, given k and its correction; in the same pass it is read for the next token, which was
 * prepared, unless there is none. */
INLINE void delta_write(const delta_block *d, int64_t t, delta_before from, int64_t c, int vectors, const vf *delta,
                        vf *told, vf *mixed)
{
    const float *k = d->k + t * d->k_stride, *g = d->decay + t * d->decay_stride;
    int more = t + 1 < d->n_tokens;
    for (int i = 0; i < vectors; i++)
        told[i] = mixed[i] = vf_set1(0.0f);
    for (int64_t j = 0; j < d->dk; j++)
        for (int i = 0; i < vectors; i++) {
            vf s = vf_mul(vf_load(from.rows + j * from.stride + LANES * i), vf_set1(g[j * d->decay_step]));
            s = vf_fma(vf_set1(k[j]), delta[i], s);
            vf_store(d->next + j * d->width + c + LANES * i, s);
            if (more) {
                told[i] = vf_fma(s, vf_set1(d->scratch[j]), told[i]);
                mixed[i] = vf_fma(s, vf_set1(d->scratch[d->dk + j]), mixed[i]);
            }
        }
}

/* out = g S^T q + (q . k) delta, which is S^T q of the state after the token. */
INLINE void delta_columns(const delta_block *d, int64_t c, int vectors)
{
    static const float zeros[LANES * DELTA_VECTORS];
    delta_before from = {d->state ? d->state + c : zeros, d->state ? d->width : 0};
    vf told[DELTA_VECTORS], mixed[DELTA_VECTORS], delta[DELTA_VECTORS];
    float overlap = delta_prepare(d, 0);
    delta_read(d, from, vectors, told, mixed);
    for (int64_t t = 0; t < d->n_tokens; t++) {
        for (int i = 0; i < vectors; i++) {
            int64_t at = c + LANES * i;
            vf v = vf_load_upto(d->v + t * d->v_stride, at, d->columns);
            delta[i] = vf_mul(vf_sub(v, told[i]), vf_set1(d->beta[t * d->beta_stride]));
            vf_store_upto(d->out + t * d->out_stride, at, d->columns, vf_fma(delta[i], vf_set1(overlap), mixed[i]));
        }
        if (t + 1 < d->n_tokens)
            overlap = delta_prepare(d, t + 1);
        delta_write(d, t, from, c, vectors, delta, told, mixed);
        from = (delta_before){d->next + c, d->width};
    }
}

static void delta_rule(const delta_block *d)
{
    int64_t c = 0;
    for (; c + LANES * DELTA_VECTORS <= d->width; c += LANES * DELTA_VECTORS)
        delta_columns(d, c, DELTA_VECTORS);
    for (; c < d->width; c += LANES)
        delta_columns(d, c, 1);
}

/* One pass over the state for each token: it is read, written, and read out. expf is the C library's, hence the same in
 * every row. */
INLINE void scan_columns(const scan_block *s, int64_t c, int vectors)
{
    static const float zeros[LANES * DELTA_VECTORS];
    const float *from = s->state ? s->state + c : zeros;
    int64_t stride = s->state ? s->width : 0;
    vf enters[DELTA_VECTORS], sum[DELTA_VECTORS];
    for (int64_t t = 0; t < s->n_tokens; t++, from = s->next + c, stride = s->width) {
        const float *b = s->b + t * s->b_stride, *read = s->c + t * s->c_stride;
        float dt = s->dt[t * s->dt_stride];
        vf kept = vf_set1(expf(-s->rate * dt));
        for (int i = 0; i < vectors; i++) {
            vf x = vf_load_upto(s->x + t * s->x_stride, c + LANES * i, s->columns);
            enters[i] = vf_mul(x, vf_set1(dt));
            sum[i] = vf_mul(x, vf_set1(s->skip));
        }
        for (int64_t j = 0; j < s->state_dim; j++)
            for (int i = 0; i < vectors; i++) {
                vf state = vf_mul(vf_load(from + j * stride + LANES * i), kept);
                state = vf_fma(vf_set1(b[j]), enters[i], state);
                vf_store(s->next + j * s->width + c + LANES * i, state);
                sum[i] = vf_fma(state, vf_set1(read[j]), sum[i]);
            }
        for (int i = 0; i < vectors; i++)
            vf_store_upto(s->out + t * s->out_stride, c + LANES * i, s->columns, sum[i]);
    }
}

static void scan(const scan_block *s)
{
    int64_t c = 0;
    for (; c + LANES * DELTA_VECTORS <= s->width; c += LANES * DELTA_VECTORS)
        scan_columns(s, c, DELTA_VECTORS);
    for (; c < s->width; c += LANES)
        scan_columns(s, c, 1);
}
