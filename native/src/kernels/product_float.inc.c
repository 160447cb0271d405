/* product_float.inc.c - products with bf16 and with f32 activations.
 *
 * Each output is one chain of operations over ascending columns, whatever the tile, so the token count
 * and the panel range do not change it. product_bf16: a pair of columns per operation; where the CPU
 * has no bf16 dot product, two fma in f32. The two differ by rounding: both lie within
 * (k + 2) * 2^-23 * sum |w * x| of the exact sum (the bf16 instruction also flushes subnormals).
 */

enum { FLOAT_TOKENS = 4, GEMV_PANELS = 4 };

INLINE void store_float(const product *p, int64_t panel, int64_t t, vf sum)
{
    int64_t row = 16 * panel;
    if (p->bias)
        sum = vf_add(sum, vf_load_upto(p->bias, row, p->n));
    vf_store_upto(p->y + row_of(p->y_rows, t) * p->y_stride, row, p->n, sum);
}

/* `panels` panels from `panel` on, `tokens` tokens from t on. */
INLINE void tile_bf16(const product *p, int64_t panel, int panels, int64_t t, int tokens)
{
    const uint16_t *x[FLOAT_TOKENS];
    vf acc[GEMV_PANELS][FLOAT_TOKENS];
    const uint8_t *w = p->w + (size_t)panel * p->panel_bytes;
    int64_t lines = round_up(p->k, 32) / 2;
    for (int i = 0; i < tokens; i++) {
        x[i] = p->xh + row_of(p->x_rows, t + i) * p->x_stride;
        for (int q = 0; q < panels; q++)
            acc[q][i] = vf_set1(0.0f);
    }
    for (int64_t line = 0; line < lines; line++)
        for (int q = 0; q < panels; q++) {
            const uint8_t *here = w + (size_t)q * p->panel_bytes + 64 * line;
            vi pair = vi_load(here);
            prefetch(here + 34 * 64);
            for (int i = 0; i < tokens; i++)
                acc[q][i] = vf_dot_bf16(acc[q][i], pair, vx_load(x[i] + 2 * line));
        }
    for (int q = 0; q < panels; q++)
        for (int i = 0; i < tokens; i++)
            store_float(p, panel + q, t + i, acc[q][i]);
}

static void product_bf16(const product *p)
{
    for (int64_t panel = p->first_panel; panel < p->last_panel;) {
        int panels = p->last_panel - panel >= GEMV_PANELS ? GEMV_PANELS : 1;
        for (int64_t t = 0; t < p->n_tokens;) {
            int tokens = p->n_tokens - t >= FLOAT_TOKENS ? FLOAT_TOKENS : 1;
            if (panels == 1)
                tokens == 1 ? tile_bf16(p, panel, 1, t, 1) : tile_bf16(p, panel, 1, t, FLOAT_TOKENS);
            else
                tokens == 1 ? tile_bf16(p, panel, GEMV_PANELS, t, 1)
                            : tile_bf16(p, panel, GEMV_PANELS, t, FLOAT_TOKENS);
            t += tokens;
        }
        panel += panels;
    }
}

/* What a panel decoder needs of a format. */
typedef struct decoder {
    layout l;
    int bits;
    int32_t scale;
    float values[16];       /* the codebook */
} decoder;

static decoder decoder_of(const kt_format *f, int64_t k)
{
    decoder d = {layout_of(f, k), f->bits, f->scale, {0}};
    for (int i = 0; i < 16; i++)
        d.values[i] = f->codebook[i];
    return d;
}

/* w[j] = decoded column c + j of the 16 rows, j in 0..g; c a multiple of g. */
INLINE void decode_columns(const decoder *d, const uint8_t *panel, int64_t c, vf *w)
{
    int64_t step = c / d->l.step, in = c % d->l.step;
    const uint8_t *at = panel + (size_t)step * d->l.step_bytes;
    if (d->bits == 32) {
        w[0] = vf_load((const float *)(at + 64 * in));
        return;
    }
    if (d->bits == 16) {
        vi pair = vi_load(at + 32 * in);
        w[0] = vf_bf16_even(pair);
        w[1] = vf_bf16_odd(pair);
        return;
    }
    vf scale = load_scales(d->scale, panel + d->l.scale_offset, c / d->l.group);
    vi four = vi_load(at + 16 * (d->bits == 4 ? in % 32 : in));
    for (int j = 0; j < 4; j++) {
        vf code = d->bits == 8 ? vf_of_vi(vi_sar(vi_shl(four, 24 - 8 * j), 24))
                               : vf_lookup(d->values, vi_and(vi_shr(four, 8 * j + (in < 32 ? 0 : 4)), 15));
        w[j] = vf_mul(code, scale);
    }
}

INLINE void tile_f32(const product *p, const decoder *d, int64_t panel, int64_t t, int tokens)
{
    const float *x[FLOAT_TOKENS];
    vf acc[FLOAT_TOKENS];
    const uint8_t *w = p->w + (size_t)panel * p->panel_bytes;
    for (int i = 0; i < tokens; i++) {
        x[i] = p->xf + row_of(p->x_rows, t + i) * p->x_stride;
        acc[i] = vf_set1(0.0f);
    }
    for (int64_t c = 0; c < p->k; c += d->l.g) {
        vf column[4];
        decode_columns(d, w, c, column);
        for (int j = 0; j < d->l.g && c + j < p->k; j++)
            for (int i = 0; i < tokens; i++)
                acc[i] = vf_fma(column[j], vf_set1(x[i][c + j]), acc[i]);
    }
    for (int i = 0; i < tokens; i++)
        store_float(p, panel, t + i, acc[i]);
}

static void product_f32(const product *p)
{
    decoder d = decoder_of(p->format, p->k);
    for (int64_t panel = p->first_panel; panel < p->last_panel; panel++)
        for (int64_t t = 0; t < p->n_tokens;) {
            int tokens = p->n_tokens - t >= FLOAT_TOKENS ? FLOAT_TOKENS : 1;
            tokens == 1 ? tile_f32(p, &d, panel, t, 1) : tile_f32(p, &d, panel, t, FLOAT_TOKENS);
            t += tokens;
        }
}
