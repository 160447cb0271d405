/* product_int8.inc.c - products of 4- and 8-bit weights with int8 activations.
 *
 * A step is 64 columns of a panel. Its lines 0..half are columns 0..31, the others columns 32..63; in
 * 4 bits one line holds both in its nibbles. So a step gives two int32 sums per row, `lo` and `hi`,
 * which are one group (64, 128, whole row) or two (32).
 *
 * Integer sums are exact, so how they are cut never matters; the float operations per output are the
 * contract of kernels.h: acc = fma((float)sum, weight scale, acc) for ascending groups, then * x scale,
 * then + bias.
 */

enum { GEMV_PANELS = 4 };

/* Scales of 16 rows: scale number index * 16 and on. */
INLINE vf load_scales(int32_t type, const uint8_t *scales, int64_t index)
{
    float s[LANES];
    if (type == KT_SCALE_BF16)
        return vf_from_bf16((const uint16_t *)(scales + 32 * index));
    if (type == KT_SCALE_F32)
        return vf_load((const float *)(scales + 64 * index));
    for (int r = 0; r < LANES; r++)
        s[r] = scale_load(type, scales, 16 * index + r);
    return vf_load(s);
}

INLINE int64_t row_of(const int32_t *rows, int64_t t)
{
    return rows ? rows[t] : t;
}

/* y[t][16 * panel + r] = sum * x scale (+ bias) for the rows that exist. */
INLINE void store_int8(const product *p, int64_t panel, int64_t t, vf sum)
{
    int64_t row = 16 * panel;
    sum = vf_mul(sum, vf_set1(p->x8->scale[row_of(p->x_rows, t)]));
    if (p->bias)
        sum = vf_add(sum, vf_load_upto(p->bias, row, p->n));
    vf_store_upto(p->y + row_of(p->y_rows, t) * p->y_stride, row, p->n, sum);
}

/* Sums of one step for `panels` panels: lo += columns 0..31, hi += columns 32..63. */
INLINE void dot_step(int bits, int panels, const uint8_t *const *w, size_t at, vb table, const int8_t *x,
                     vi *lo, vi *hi)
{
    for (int line = 0; line < 8; line++)
        for (int q = 0; q < panels; q++) {
            const uint8_t *here = w[q] + at + 64 * line;
            vb raw = vb_load(here);
            prefetch(here + 34 * 64);
            lo[q] = vi_dot(lo[q], bits == 4 ? vb_low(raw, table) : vb_int8(raw), x + 4 * line);
            if (bits == 4) {
                hi[q] = vi_dot(hi[q], vb_high(raw, table), x + 32 + 4 * line);
            } else {
                prefetch(here + 42 * 64);
                hi[q] = vi_dot(hi[q], vb_int8(vb_load(here + 512)), x + 32 + 4 * line);
            }
        }
}

/* One token, `panels` panels from `panel` on: a stream over each of them. */
INLINE void gemv(const product *p, const layout *l, int bits, int64_t panel, int panels, int64_t t)
{
    const kt_format *f = p->format;
    int64_t x_row = row_of(p->x_rows, t), steps = l->k_padded / 64, per_group = l->group / 64;
    const int8_t *x = p->x8->q + x_row * p->x8->stride;
    const int32_t *sum = p->x8->sum + x_row * (p->x8->stride / 32);
    int32_t bias = bits == 8 ? DOT_BIAS_INT8 : DOT_BIAS_INT4(f->codebook);
    vb table = vb_table(f->codebook);
    const uint8_t *w[GEMV_PANELS];
    vf acc[GEMV_PANELS];
    for (int q = 0; q < panels; q++) {
        w[q] = p->w + (size_t)(panel + q) * p->panel_bytes;
        acc[q] = vf_set1(0.0f);
    }
    for (int64_t s = 0, g = 0; s < steps;) {
        vi lo[GEMV_PANELS], hi[GEMV_PANELS];
        int64_t end = per_group ? s + per_group : s + 1;
        int32_t sum_lo = 0, sum_hi = 0;
        for (int64_t i = s; i < end; i++) {
            sum_lo += sum[2 * i];
            sum_hi += sum[2 * i + 1];
        }
        for (int q = 0; q < panels; q++) {
            lo[q] = vi_set1(bias * sum_lo);
            hi[q] = vi_set1(bias * sum_hi);
        }
        for (; s < end; s++)
            dot_step(bits, panels, w, (size_t)s * l->step_bytes, table, x + 64 * s, lo, hi);
        for (int q = 0; q < panels; q++) {
            const uint8_t *scales = w[q] + l->scale_offset;
            if (per_group) {
                acc[q] = vf_fma(vf_of_vi(vi_add(lo[q], hi[q])), load_scales(f->scale, scales, g), acc[q]);
            } else {
                acc[q] = vf_fma(vf_of_vi(lo[q]), load_scales(f->scale, scales, g), acc[q]);
                acc[q] = vf_fma(vf_of_vi(hi[q]), load_scales(f->scale, scales, g + 1), acc[q]);
            }
        }
        g += per_group ? 1 : 2;
    }
    for (int q = 0; q < panels; q++)
        store_int8(p, panel + q, t, acc[q]);
}

static void gemv_4(const product *p, const layout *l, int64_t panel, int panels, int64_t t)
{
    if (panels == GEMV_PANELS)
        gemv(p, l, 4, panel, GEMV_PANELS, t);
    else
        gemv(p, l, 4, panel, 1, t);
}

static void gemv_8(const product *p, const layout *l, int64_t panel, int panels, int64_t t)
{
    if (panels == GEMV_PANELS)
        gemv(p, l, 8, panel, GEMV_PANELS, t);
    else
        gemv(p, l, 8, panel, 1, t);
}

static void product_int8(const product *p)
{
    layout l = layout_of(p->format, p->k);
    for (int64_t panel = p->first_panel; panel < p->last_panel;) {
        int panels = p->last_panel - panel >= GEMV_PANELS ? GEMV_PANELS : 1;
        for (int64_t t = 0; t < p->n_tokens; t++)
            (p->format->bits == 4 ? gemv_4 : gemv_8)(p, &l, panel, panels, t);
        panel += panels;
    }
}
