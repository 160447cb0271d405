/* tile_int8.inc.c - the tiled shape of product_int8, for many tokens. 4-bit panels, GEMM_PANELS at a
 * time, are made ready for dot products once, for the whole of k, in the thread's scratch (64 kB for a
 * pair at k = 2048: L2); 8-bit panels are read where they lie. Tiles of GEMM_TOKENS tokens then run over
 * them with int32 and f32 sums in registers: lines, f32 scales per group, starts per token and group.
 * While the tiles compute, the codes of the next panels are prefetched, a few lines per step.
 */

/* Panels of one pass, ready to multiply. */
typedef struct tile_panels {
    const uint8_t *lines[GEMM_PANELS];
    const float *scales[GEMM_PANELS];
    const uint8_t *ahead;               /* next line to prefetch */
    int64_t ahead_lines;                /* per step */
} tile_panels;

INLINE void unpack_lines(const layout *l, code_kind kind, vb table, const uint8_t *w, uint8_t *out)
{
    for (int64_t step = 0; step < l->k_padded / 64; step++, w += 512, out += 1024)
        for (int line = 0; line < 8; line++) {
            vb raw = vb_load(w + 64 * line);
            prefetch(w + 64 * line + PREFETCH);
            vb_store(out + 64 * line, line_low(kind, raw, table));
            vb_store(out + 64 * line + 512, line_high(kind, raw, table));
        }
}

/* Make panel `panel` number q of the pass. */
static void prepare(const product *p, const layout *l, const int8_scratch *s, code_kind kind, int64_t panel, int q,
                    tile_panels *out)
{
    const uint8_t *w = p->w + (size_t)panel * p->panel_bytes;
    uint8_t *lines = s->lines + q * l->k_padded * 16;
    float *scales = s->scales + q * l->groups * LANES;
    vb table = vb_table(p->format->codebook);
    if (kind == CODES_LINEAR4)
        unpack_lines(l, CODES_LINEAR4, table, w, lines);
    else if (kind == CODES_BOOK4)
        unpack_lines(l, CODES_BOOK4, table, w, lines);
    for (int64_t g = 0; g < l->groups; g++)
        vf_store(scales + g * LANES, load_scales(p->format->scale, w + l->scale_offset, g));
    out->lines[q] = kind == CODES_INT8 ? w : lines;
    out->scales[q] = scales;
}

/* sum += columns [column, stop), or as many of them as a short sum holds; returns where it stopped. */
INLINE int64_t tile_columns(const tile_panels *w, code_kind kind, int panels, const int8_t *const *x, int tokens,
                            int64_t column, int64_t stop, vi (*sum)[GEMM_PANELS])
{
    int is_short = SHORT_SUMS && kind == CODES_LINEAR4;
    vi part[GEMM_TOKENS][GEMM_PANELS];
    for (int i = 0; i < tokens; i++)
        for (int q = 0; q < panels; q++)
            part[i][q] = is_short ? vi_set1(0) : sum[i][q];
    for (int64_t end = is_short ? column + 4 * SHORT_SUMS : stop; column < end; column += 4) {
        vb line[GEMM_PANELS];
        for (int q = 0; q < panels; q++) {
            line[q] = vb_load(w->lines[q] + 16 * column);
            if (kind == CODES_INT8)
                line[q] = vb_int8(line[q]);
        }
        for (int i = 0; i < tokens; i++) {
            vx four = vx_load(x[i] + column);
            for (int q = 0; q < panels; q++)
                part[i][q] = is_short ? short_dot(part[i][q], line[q], four) : vi_dot(part[i][q], line[q], four);
        }
    }
    for (int i = 0; i < tokens; i++)
        for (int q = 0; q < panels; q++)
            sum[i][q] = is_short ? vi_add(sum[i][q], short_total(part[i][q])) : part[i][q];
    return column;
}

/* `tokens` tokens from t on (the last one again in the place of missing ones) times `panels` panels. */
INLINE void tile(const product *p, const layout *l, tile_panels *w, code_kind kind, int64_t panel, int panels,
                 int64_t t, int tokens, const int32_t *start)
{
    const int8_t *x[GEMM_TOKENS];
    const int32_t *from[GEMM_TOKENS];
    vf acc[GEMM_TOKENS][GEMM_PANELS];
    int64_t last = p->n_tokens - 1 - t, column = 0, chunk = l->group < 64 ? l->group : 64;
    for (int i = 0; i < tokens; i++) {
        x[i] = p->x8->q + row_of(p->x_rows, t + (i < last ? i : last)) * p->x8->stride;
        from[i] = start + (i < last ? i : last) * l->groups;
        for (int q = 0; q < panels; q++) {
            acc[i][q] = vf_set1(0.0f);
            if (p->y_gate)      /* rows far apart, to which the last expert added: they come while the tile computes */
                prefetch(y_at(p, panel + q, t + (i < last ? i : last)));
        }
    }
    for (int64_t g = 0; g < l->groups; g++) {
        vi sum[GEMM_TOKENS][GEMM_PANELS];
        for (int i = 0; i < tokens; i++)
            for (int q = 0; q < panels; q++)
                sum[i][q] = load_start(from[i] + g);
        for (int64_t end = column + l->group; column < end;) {
            for (int64_t i = 0; i < w->ahead_lines; i++, w->ahead += 64)
                prefetch_l2(w->ahead);
            for (int64_t stop = column + chunk; column < stop;)
                column = tile_columns(w, kind, panels, x, tokens, column, stop, sum);
        }
        for (int q = 0; q < panels; q++)
            for (int i = 0; i < tokens; i++)
                acc[i][q] = vf_fma(vf_of_vi(sum[i][q]), vf_load(w->scales[q] + g * LANES), acc[i][q]);
    }
    for (int i = 0; i < tokens && i <= last; i++)
        for (int q = 0; q < panels; q++)
            store_int8(p, panel + q, t + i, acc[i][q]);
}

/* Tokens [t, t + n) times one set of panels. */
INLINE void tile_tokens(const product *p, const layout *l, const int8_scratch *s, tile_panels *w, code_kind kind,
                        int64_t panel, int panels, int64_t t, int64_t n)
{
    for (int64_t i = 0; i < n; i += GEMM_TOKENS) {
        const int32_t *start = s->start + i * l->groups;
        if (n - i > GEMM_TOKENS / 2)
            tile(p, l, w, kind, panel, panels, t + i, GEMM_TOKENS, start);
        else
            tile(p, l, w, kind, panel, panels, t + i, GEMM_TOKENS / 2, start);
    }
}

INLINE void tile_kind(const product *p, const layout *l, const int8_scratch *s, tile_panels *w, code_kind kind,
                      int64_t panel, int panels, int64_t t, int64_t n)
{
    if (panels == GEMM_PANELS)
        tile_tokens(p, l, s, w, kind, panel, GEMM_PANELS, t, n);
    else
        tile_tokens(p, l, s, w, kind, panel, 1, t, n);
}

static void tile_pass(const product *p, const layout *l, const int8_scratch *s, int64_t panel, int panels, int64_t t,
                      int64_t n)
{
    code_kind kind = code_kind_of(p->format);
    int64_t steps = (n + GEMM_TOKENS - 1) / GEMM_TOKENS * (l->k_padded / (l->group < 64 ? 32 : 64));
    int64_t lines = (int64_t)(p->panel_bytes / 64) * panels;
    tile_panels w = {.ahead = panels_after(p, panel + panels)};
    if (w.ahead)
        w.ahead_lines = (lines + steps - 1) / steps;
    for (int q = 0; q < panels; q++)
        prepare(p, l, s, kind, panel + q, q, &w);
    if (kind == CODES_INT8)
        tile_kind(p, l, s, &w, CODES_INT8, panel, panels, t, n);
    else if (SHORT_SUMS && kind == CODES_LINEAR4)
        tile_kind(p, l, s, &w, CODES_LINEAR4, panel, panels, t, n);
    else                            /* lines are ready for vi_dot, whatever the codebook was */
        tile_kind(p, l, s, &w, CODES_BOOK4, panel, panels, t, n);
}

static void tile_block(const product *p, const layout *l, const int8_scratch *s, int64_t t, int64_t n)
{
    int64_t panel = p->first_panel;
    fill_starts(p, l, t, n, s->start);
    for (; panel + GEMM_PANELS <= p->last_panel; panel += GEMM_PANELS)
        tile_pass(p, l, s, panel, GEMM_PANELS, t, n);
    for (; panel < p->last_panel; panel++)
        tile_pass(p, l, s, panel, 1, t, n);
}
