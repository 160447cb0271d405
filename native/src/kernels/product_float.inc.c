/* product_float.inc.c - products with bf16 and with f32 activations.
 *
 * Each output is one chain of operations over ascending columns, whatever the tile, so the token count
 * and the panel range do not change it. product_bf16: a pair of columns per operation; where the CPU
 * has no bf16 dot product, two fma in f32 in the same order. The two give the same bits unless something is
 * subnormal, which the instruction flushes. Within (k + 2) * 2^-23 * sum |w * x| of the exact sum. Tiles have
 * another chain within that bound: amx_products.inc.c.
 */

enum { FLOAT_TOKENS = 4 };

/* `tokens` tokens from t on (the last one again in the place of missing ones) times `panels` panels. A
 * single panel streams from memory and prefetches what follows it; several lie in L2 by then, and fetch
 * the next ones, `ahead_lines` per 16 pairs of columns. */
INLINE void tile_bf16(const product *p, int64_t panel, int panels, int64_t t, int tokens, int64_t ahead_lines,
                      const uint8_t **ahead)
{
    const uint16_t *x[BF16_TOKENS];
    vf acc[BF16_TOKENS][BF16_PANELS];
    const uint8_t *w = p->w + (size_t)panel * p->panel_bytes;
    int64_t lines = round_up(p->k, 32) / 2, last = p->n_tokens - 1 - t;
    for (int i = 0; i < tokens; i++) {
        x[i] = p->xh + row_of(p->x_rows, t + (i < last ? i : last)) * p->x_stride;
        for (int q = 0; q < panels; q++)
            acc[i][q] = vf_set1(0.0f);
    }
    for (int64_t line = 0; line < lines;) {
        for (int64_t i = 0; i < ahead_lines; i++, *ahead += 64)
            prefetch_l2(*ahead);
        for (int64_t end = line + 16; line < end; line++) {
            vi pair[BF16_PANELS];
            for (int q = 0; q < panels; q++)
                pair[q] = vi_load(w + (size_t)q * p->panel_bytes + 64 * line);
            if (panels == 1)
                fetch_line(p->tuning.loads, w + 64 * line + p->tuning.ahead);
            for (int i = 0; i < tokens; i++) {
                vx two = vx_load(x[i] + 2 * line);
                for (int q = 0; q < panels; q++)
                    acc[i][q] = vf_dot_bf16(acc[i][q], pair[q], two);
            }
        }
    }
    for (int i = 0; i < tokens && i <= last; i++)
        for (int q = 0; q < panels; q++)
            store_values(p, panel + q, t + i, acc[i][q]);
}

/* Up to BF16_STREAM tokens: one pass over one panel after the other. */
static void stream_bf16(const product *p, int64_t panel)
{
    if (p->n_tokens == 1)
        tile_bf16(p, panel, 1, 0, 1, 0, NULL);
    else if (p->n_tokens <= BF16_STREAM / 4)
        tile_bf16(p, panel, 1, 0, BF16_STREAM / 4, 0, NULL);
    else if (p->n_tokens <= BF16_STREAM / 2)
        tile_bf16(p, panel, 1, 0, BF16_STREAM / 2, 0, NULL);
    else
        tile_bf16(p, panel, 1, 0, BF16_STREAM, 0, NULL);
}

/* More tokens: tiles over BF16_PANELS panels, which the tiles of the panels before have fetched. */
static void tiles_bf16(const product *p, int64_t panel, int panels)
{
    const uint8_t *ahead = panels_after(p, panel + panels);
    int64_t steps = (p->n_tokens + BF16_TOKENS - 1) / BF16_TOKENS * (round_up(p->k, 32) / 32);
    int64_t lines = ahead ? (int64_t)(p->panel_bytes / 64) * panels : 0;
    lines = (lines + steps - 1) / steps;
    for (int64_t t = 0; t < p->n_tokens; t += BF16_TOKENS) {
        int half = p->n_tokens - t <= BF16_TOKENS / 2;
        if (panels == 1)
            half ? tile_bf16(p, panel, 1, t, BF16_TOKENS / 2, lines, &ahead)
                 : tile_bf16(p, panel, 1, t, BF16_TOKENS, lines, &ahead);
        else
            half ? tile_bf16(p, panel, BF16_PANELS, t, BF16_TOKENS / 2, lines, &ahead)
                 : tile_bf16(p, panel, BF16_PANELS, t, BF16_TOKENS, lines, &ahead);
    }
}

static void product_bf16(const product *p)
{
    for (int64_t panel = p->first_panel; panel < p->last_panel;) {
        int panels = p->last_panel - panel >= BF16_PANELS && p->n_tokens > BF16_STREAM ? BF16_PANELS : 1;
        if (p->n_tokens <= BF16_STREAM && panel + 1 == p->last_panel)
            fetch_next(p);
        p->n_tokens > BF16_STREAM ? tiles_bf16(p, panel, panels) : stream_bf16(p, panel);
        panel += panels;
    }
}

/* What a panel decoder needs of a format. */
typedef struct decoder {
    layout l;
    int bits;
    int32_t scale, codes;
    float values[16];       /* the codebook */
} decoder;

static decoder decoder_of(const kt_format *f, int64_t k)
{
    decoder d = {layout_of(f, k), f->bits, f->scale, f->codes, {0}};
    for (int i = 0; i < 16; i++)
        d.values[i] = f->codebook[i];
    return d;
}

/* Byte j of each lane, E4M3: its sign, and its exponent and mantissa in their place (float_of_e4m3). */
INLINE vf vf_e4m3(vi four, int j)
{
    vi in_place = vi_and(vi_sar(vi_shl(four, 24 - 8 * j), 4), (int32_t)0x87f00000u);
    return vf_mul(vf_bf16_odd(in_place), vf_set1(0x1p120f));
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
    vi four = vi_load(at + 16 * (d->bits < 8 ? in % 32 : in));
    for (int j = 0; j < 4; j++) {
        vf code;
        vi index = vi_and(vi_shr(four, 8 * j + (in < 32 ? 0 : 4)), 15);
        if (d->codes == KT_CODE_E4M3) {
            code = vf_e4m3(four, j);
        } else if (d->bits == 8) {
            code = vf_of_vi(vi_sar(vi_shl(four, 24 - 8 * j), 24));
        } else if (d->bits == 6) {
            vi two = vi_and(vi_shr(vi_load(at + 512 + 64 * (in % 32 / 8)), 8 * j + two_bits(in / 4)), 3);
            code = vf_of_vi(vi_add(vi_add(index, vi_shl(two, 4)), vi_set1(LEAST_6)));
        } else {
            code = vf_lookup(d->values, index);
        }
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
        store_values(p, panel, t + i, acc[i]);
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
