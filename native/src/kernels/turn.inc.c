/* turn.inc.c - panels of a matrix, decoded, as panels of its transpose, and the backward pass
 * of the experts' activation.
 *
 * In a packed panel lanes are rows, which the product with the transpose adds up. What comes out is what a forward product
 * reads, in bf16 or f32 (kt_weights.h), and forward products multiply with it.
 *
 * To bf16, from integers: codes are turned as bytes, 16 columns of 16 rows at a time, and become numbers in their new
 * places, times the scales of their rows; they are rounded to the nearest, ties away from zero. From bf16: words are turned
 * likewise. From anything else, and to f32: columns are decoded, a vector of rows each, and turned as a square of 16 by 16
 * words, a word being a pair of rows in bf16, or in f32 one row.
 */

enum { TURN_AHEAD = 4 };       /* panels: of each only a part is read, which the CPU does not foresee */

/* What will be read of a panel. */
INLINE void fetch_columns(const turn *t, const decoder *d, int64_t panel)
{
    const uint8_t *at = t->w + (size_t)panel * t->panel_bytes + (size_t)(t->column / d->l.step) * d->l.step_bytes;
    if (panel < t->panels)
        for (int64_t i = 0; i < t->columns * d->bits * 2; i += 64)
            prefetch(at + i);
}

/* Four lines of codes of columns [16 q, 16 q + 16) of a step. */
INLINE void code_lines(const uint8_t *at, int q, vb table, int bits, vb *codes)
{
    for (int i = 0; i < 4; i++) {
        int line = bits == 8 ? 4 * q + i : 4 * (q % 2) + i;
        vb raw = vb_load(at + 64 * line);
        if (bits == 8)
            codes[i] = raw;
        else
            codes[i] = q < 2 ? signed_low(bits, raw, table, at, line) : signed_high(bits, raw, table, at, line);
    }
}

/* A panel's columns [c, c + 16) as 8 lines of pairs of rows; scales [16] of its rows, times 2^-24. */
INLINE void turn_codes(const vb *codes, const float *scales, uint8_t *out)
{
    vi pairs[8], half = vi_set1(0x8000);
    vb_turn(codes, pairs);
    for (int p = 0; p < 8; p++) {
        vf even = vf_mul(vf_of_vi(vi_shl(pairs[p], 16)), vf_set1(scales[2 * p]));
        vf odd = vf_mul(vf_of_vi(vi_and(pairs[p], (int32_t)0xffff0000u)), vf_set1(scales[2 * p + 1]));
        vi low = vi_shr(vi_add(vi_bits(even), half), 16), high = vi_and(vi_add(vi_bits(odd), half), (int32_t)0xffff0000u);
        vi_store(out + 64 * p, vi_add(low, high));
    }
}

/* A panel of integers, its lines behind one another from `out` on, in each panel of what is made. */
INLINE void turn_integers(const turn *t, const decoder *d, const uint8_t *panel, int bits, uint8_t *out, size_t out_bytes)
{
    float scales[16] ALIGNED;
    vb table = vb_signed(t->format->codebook);
    int64_t group = t->column / d->l.group, blocks = t->columns / 16;
    for (int q = 0; q < blocks; q++) {      /* columns of one step, so of one group, or of two of 32 */
        vb codes[4];
        if (q == 0 || (q == 2 && d->l.group == 32))
            vf_store(scales, vf_mul(load_scales(d->scale, panel + d->l.scale_offset, group + q / 2), vf_set1(0x1p-24f)));
        code_lines(panel + (size_t)(t->column / 64) * d->l.step_bytes, q, table, bits, codes);
        turn_codes(codes, scales, out + (size_t)q * out_bytes);
    }
}

/* The same of a panel of bf16. */
INLINE void turn_words(const turn *t, const decoder *d, const uint8_t *panel, uint8_t *out, size_t out_bytes)
{
    const uint8_t *at = panel + (size_t)(t->column / 32) * d->l.step_bytes;
    for (int64_t q = 0; q < t->columns / 16; q++) {
        vb words[8];
        vi pairs[8];
        for (int i = 0; i < 8; i++)
            words[i] = vb_load(at + 64 * (8 * q + i));
        vb_turn_words(words, pairs);
        for (int p = 0; p < 8; p++)
            vi_store(out + (size_t)q * out_bytes + 64 * p, pairs[p]);
    }
}

static void turn_whole(const turn *t, const decoder *d, size_t out_bytes)
{
    uint8_t *out = t->out + 512 * t->before;
    for (int64_t panel = 0; panel < t->panels; panel++) {
        const uint8_t *w = t->w + (size_t)panel * t->panel_bytes;
        fetch_columns(t, d, panel + TURN_AHEAD);
        if (d->bits == 16)
            turn_words(t, d, w, out + 512 * panel, out_bytes);
        else if (d->bits == 4)
            turn_integers(t, d, w, 4, out + 512 * panel, out_bytes);
        else if (d->bits == 6)
            turn_integers(t, d, w, 6, out + 512 * panel, out_bytes);
        else
            turn_integers(t, d, w, 8, out + 512 * panel, out_bytes);
    }
    for (int64_t q = 0; q < t->columns / 16; q++) {     /* halves of a step without a panel */
        if (t->before)
            memset(t->out + (size_t)q * out_bytes, 0, 512);
        if ((t->before + t->panels) % 2)
            memset(t->out + (size_t)(q + 1) * out_bytes - 512, 0, 512);
    }
}

/* The square of columns [c, c + 16) of a panel, as f32: column i in at[16 i]. */
INLINE void decode_square(const decoder *d, const uint8_t *panel, int64_t c, float *at)
{
    for (int64_t i = 0; i < 16; i += d->l.g) {
        vf column[4];
        decode_columns(d, panel, c + i, column);
        for (int j = 0; j < d->l.g; j++)
            vf_store(at + 16 * (i + j), column[j]);
    }
}

/* The same of bf16, rounded; column i in at[32 i]. */
INLINE void decode_pairs(const decoder *d, const uint8_t *panel, int64_t c, uint16_t *at)
{
    for (int64_t i = 0; i < 16; i += d->l.g) {
        vf column[4];
        decode_columns(d, panel, c + i, column);
        for (int j = 0; j < d->l.g; j++)
            vf_store_bf16_normal(at + 32 * (i + j), column[j]);
    }
}

/* Half of a step of 32 rows: a panel, or zeros where there is none. */
INLINE void half_step(const turn *t, const decoder *d, int64_t panel, int64_t c, uint16_t *at)
{
    if (panel >= 0 && panel < t->panels)
        decode_pairs(d, t->w + (size_t)panel * t->panel_bytes, c, at);
    else
        for (int i = 0; i < 16; i++)
            memset(at + 32 * i, 0, 32);
}

INLINE void turn_pair(const turn *t, const decoder *d, int64_t panel, uint8_t *out, size_t out_bytes)
{
    fetch_columns(t, d, panel + TURN_AHEAD);
    fetch_columns(t, d, panel + TURN_AHEAD + 1);
    const uint8_t *rows[16];
    uint16_t pairs[16 * 32] ALIGNED;
    for (int i = 0; i < 16; i++)
        rows[i] = (const uint8_t *)(pairs + 32 * i);
    for (int64_t q = 0; q < t->columns / 16; q++) {
        half_step(t, d, panel, t->column + 16 * q, pairs);
        half_step(t, d, panel + 1, t->column + 16 * q, pairs + 16);
        transpose16(rows, out + (size_t)q * out_bytes);
    }
}

INLINE void turn_one(const turn *t, const decoder *d, int64_t panel, uint8_t *out, size_t out_bytes)
{
    const uint8_t *w = t->w + (size_t)panel * t->panel_bytes, *rows[16];
    float square[16 * 16] ALIGNED;
    for (int i = 0; i < 16; i++)
        rows[i] = (const uint8_t *)(square + 16 * i);
    for (int64_t q = 0; q < t->columns / 16; q++) {
        decode_square(d, w, t->column + 16 * q, square);
        transpose16(rows, out + (size_t)q * out_bytes);
    }
}

static void turn_columns(const turn *t)
{
    decoder d = decoder_of(t->format, t->k);
    int64_t n = (t->before + t->panels) * 16;
    size_t out_bytes = t->in_f32 ? (size_t)n * 64 : (size_t)round_up(n, 32) * 32;
    if (t->in_f32)
        for (int64_t panel = 0; panel < t->panels; panel++)
            turn_one(t, &d, panel, t->out + 1024 * panel, out_bytes);
    else if (d.bits <= 16 && d.codes == KT_CODE_INTEGER)
        turn_whole(t, &d, out_bytes);
    else
        for (int64_t panel = 0; panel < t->before + t->panels; panel += 2)
            turn_pair(t, &d, panel - t->before, t->out + 512 * panel, out_bytes);
}

/* ---- the activation ------------------------------------------------------------------------------ */

/* 1 in lanes where a <= b, else 0: what a clamp lets through, as torch's does at the limit. */
INLINE vf not_above(vf a, vf b)
{
    return vf_less(b, a, vf_set1(0.0f), vf_set1(1.0f));
}

static float squared_relu_backward(const glu_backward *g)
{
    vf sum = vf_set1(0.0f), weight = vf_set1(g->weight);
    for (int64_t c = 0; c < g->width; c += LANES) {
        vf positive = vf_max(vf_set1(0.0f), vf_load_upto(g->gate_up, c, g->width)), dh = vf_load_upto(g->h, c, g->width);
        vf h = vf_mul(positive, positive);
        sum = vf_fma(dh, h, sum);
        vf_store(g->out + c, vf_mul(vf_mul(weight, dh), vf_add(positive, positive)));
        vf_store_upto(g->h, c, g->width, h);
    }
    return vf_sum(sum);
}

/* With s = gate / (1 + e^-a), a = alpha (gate + cubic gate^3): h = s (up + shift). */
static float glu_backward_of(const glu_backward *g)
{
    const kt_glu *glu = g->glu;
    if (glu->ungated)
        return squared_relu_backward(g);
    vf most = vf_set1(glu->limit), least = vf_set1(-glu->limit), top = vf_set1(glu->gate_limit), one = vf_set1(1.0f);
    vf steep = vf_set1(-glu->alpha), bend = vf_set1(-glu->alpha * glu->cubic), shift = vf_set1(glu->shift);
    vf sum = vf_set1(0.0f), weight = vf_set1(g->weight);
    for (int64_t c = 0; c < g->width; c += LANES) {
        vf z = vf_load(g->gate_up + 2 * c), gate = vf_min(top, z);
        vf y = vf_load(g->gate_up + 2 * c + LANES), up = vf_max(least, vf_min(most, y)), by = vf_add(up, shift);
        vf dh = vf_load_upto(g->h, c, g->width), da = vf_mul(weight, dh), square = vf_mul(gate, gate);
        vf share = vf_div(one, vf_add(one, vf_exp(vf_mul(vf_fma(bend, square, steep), gate))));
        vf s = vf_mul(gate, share), h = vf_mul(s, by);
        /* -a' = steep + 3 bend gate^2;  s' = share + s (1 - share) a' */
        vf slope = vf_fma(vf_mul(vf_set1(-3.0f), bend), square, vf_sub(vf_set1(0.0f), steep));
        vf ds = vf_fma(vf_mul(s, vf_sub(one, share)), slope, share);
        vf open = vf_mul(not_above(y, most), not_above(least, y));
        sum = vf_fma(dh, h, sum);
        vf_store(g->out + 2 * c, vf_mul(vf_mul(vf_mul(da, by), ds), not_above(z, top)));
        vf_store(g->out + 2 * c + LANES, vf_mul(vf_mul(da, s), open));
        vf_store_upto(g->h, c, g->width, h);
    }
    return vf_sum(sum);
}
