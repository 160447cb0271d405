/* tile_int8.inc.c - the tiled method of product_int8, for many tokens, GEMM_PANELS panels at a
 * time. Tiles of at most GEMM_TOKENS tokens run over them with int32 and f32 sums in registers:
 * lines, f32 scales per group, starts per token and part. Lines are multiplied where they lie;
 * those of 4 and 6 bits are unpacked in registers by each tile. A whole panel once for all tiles, in
 * the scratch, is slower (block_int8.inc.c does it for blocks of columns): int4, 32 and 256 tokens, parts of the peak, 0.75 and 0.80 instead of 0.81 and 0.81
 * on Zen 4, 0.42 and 0.44 instead of 0.50 and 0.48 on Emerald Rapids. While the tiles compute,
 * the next panels are prefetched, a few lines per step. */

/* Panels of one pass. */
typedef struct tile_panels {
    const uint8_t *lines[GEMM_PANELS];
    const float *scales[GEMM_PANELS];
    const uint8_t *ahead;               /* next line to prefetch */
    int64_t ahead_lines;                /* per step */
} tile_panels;

/* Make panel `panel` number q of the pass. */
static void prepare(const product *p, const layout *l, const int8_scratch *s, int64_t panel, int q, tile_panels *out)
{
    const uint8_t *w = p->w + (size_t)panel * p->panel_bytes;
    float *scales = s->scales + q * l->groups * LANES;
    for (int64_t g = 0; g < l->groups; g++)
        vf_store(scales + g * LANES, load_scales(p->format->scale, w + l->scale_offset, g));
    out->lines[q] = w;
    out->scales[q] = scales;
}

/* sum += the products of four columns of x, from `column` on, with the lines that hold them. */
INLINE void tile_line(int is_short, int panels, const int8_t *const *x, int tokens, int64_t column, const vb *line,
                      vi (*sum)[GEMM_PANELS])
{
    for (int i = 0; i < tokens; i++) {
        vx four = vx_load(x[i] + column);
        for (int q = 0; q < panels; q++)
            sum[i][q] = is_short ? short_dot(sum[i][q], line[q], four) : vi_dot(sum[i][q], line[q], four);
    }
}

/* sum += the 32 columns from `column` on, the low or the high ones of a step; not of 8 bits. */
INLINE void tile_codes(const tile_panels *w, code_kind kind, int is_short, vb table, int panels,
                       const int8_t *const *x, int tokens, int64_t column, int is_high, vi (*sum)[GEMM_PANELS])
{
    for (int at = 0; at < 8; at++) {
        vb line[GEMM_PANELS];
        for (int q = 0; q < panels; q++) {
            const uint8_t *step = w->lines[q] + (kind == CODES_LINEAR6 ? 12 : 8) * (column - 32 * is_high);
            vb raw = vb_load(step + 64 * at);
            vb two = line_two(kind, step, at);
            line[q] = is_high ? line_high(kind, raw, table, two, at) : line_low(kind, raw, table, two, at);
        }
        tile_line(is_short, panels, x, tokens, column + 4 * at, line, sum);
    }
}

/* sum += columns [column, stop), or as many of them as a short sum holds; returns where it stopped. */
INLINE int64_t tile_columns(const tile_panels *w, code_kind kind, vb table, int panels, const int8_t *const *x,
                            int tokens, int64_t column, int64_t stop, vi (*sum)[GEMM_PANELS])
{
    int is_short = SHORT_SUMS && kind == CODES_LINEAR4;
    vi part[GEMM_TOKENS][GEMM_PANELS];
    for (int i = 0; i < tokens; i++)
        for (int q = 0; q < panels; q++)
            part[i][q] = is_short ? vi_set1(0) : sum[i][q];
    int64_t end = is_short ? column + 4 * SHORT_SUMS : stop;
    for (; kind != CODES_INT8 && column < end; column += 32)
        if (column % 64)
            tile_codes(w, kind, is_short, table, panels, x, tokens, column, 1, part);
        else
            tile_codes(w, kind, is_short, table, panels, x, tokens, column, 0, part);
    for (; column < end; column += 4) {
        vb line[GEMM_PANELS];
        for (int q = 0; q < panels; q++)
            line[q] = vb_int8(vb_load(w->lines[q] + 16 * column));
        tile_line(is_short, panels, x, tokens, column, line, part);
    }
    for (int i = 0; i < tokens; i++)
        for (int q = 0; q < panels; q++)
            sum[i][q] = is_short ? vi_add(sum[i][q], short_total(part[i][q])) : part[i][q];
    return column;
}

/* `tokens` tokens from t on (the last one again in the place of missing ones) times `panels` panels. */
INLINE void tile(const product *p, const layout *l, tile_panels *w, code_kind kind, int64_t panel, int panels, int64_t t,
                 int tokens, const int32_t *start)
{
    const int8_t *x[GEMM_TOKENS];
    const int32_t *from[GEMM_TOKENS];
    vf acc[GEMM_TOKENS][GEMM_PANELS];
    const float *x_scale[GEMM_TOKENS];
    part_kind parts = part_kind_of(p);
    int64_t last = p->n_tokens - 1 - t, width = part_columns(p, l), n_parts = l->k_padded / width, column = 0;
    int64_t chunk = width < 64 ? width : 64;
    vb table = vb_table(p->format->codebook);
    for (int i = 0; i < tokens; i++) {
        x[i] = p->x8->q + row_of(p->x_rows, t + (i < last ? i : last)) * p->x8->stride;
        x_scale[i] = x_scales(p, t + (i < last ? i : last));
        from[i] = start + (i < last ? i : last) * n_parts;
        for (int q = 0; q < panels; q++) {
            acc[i][q] = vf_set1(0.0f);
            prefetch(y_at(p, panel + q, t + (i < last ? i : last)));   /* rows far apart: they come meanwhile */
        }
    }
    for (int64_t part = 0; part < n_parts; part++) {
        vi sum[GEMM_TOKENS][GEMM_PANELS];
        int64_t first = column, group = group_of_part(p->format, part);
        for (int i = 0; i < tokens; i++)
            for (int q = 0; q < panels; q++)
                sum[i][q] = load_start(from[i] + part);
        for (int64_t end = column + width; column < end;) {
            for (int64_t i = 0; i < w->ahead_lines; i++, w->ahead += 64)
                prefetch_next(p, w->ahead);
            for (int64_t stop = column + chunk; column < stop;)
                column = tile_columns(w, kind, table, panels, x, tokens, column, stop, sum);
        }
        for (int i = 0; i < tokens; i++) {
            vf by = vf_set1(x_scale_at(parts, x_scale[i], first));
            for (int q = 0; q < panels; q++)
                acc[i][q] = parts == PARTS_OF_ROW
                                ? add_part_of_row(acc[i][q], sum[i][q], by)
                                : add_part(acc[i][q], sum[i][q], by, vf_load(w->scales[q] + group * LANES));
        }
    }
    for (int i = 0; i < tokens && i <= last; i++)
        for (int q = 0; q < panels; q++)
            store_values(p, panel + q, t + i,
                         parts == PARTS_OF_ROW ? vf_mul(acc[i][q], vf_load(w->scales[q])) : acc[i][q]);
}

/* Tokens [t, t + n) times one set of panels, cut into tiles as equal as can be. */
INLINE void tile_tokens(const product *p, const layout *l, const int8_scratch *s, tile_panels *w, code_kind kind,
                        int64_t panel, int panels, int64_t t, int64_t n)
{
    int64_t parts = l->k_padded / part_columns(p, l), tiles = (n + GEMM_TOKENS - 1) / GEMM_TOKENS;
    for (int64_t i = 0, left; i < n; i += left) {
        const int32_t *start = s->start + i * parts;
        left = (n - i + tiles - 1) / tiles;
        tiles--;
        if (left == GEMM_TOKENS)
            tile(p, l, w, kind, panel, panels, t + i, GEMM_TOKENS, start);
        else if (left == GEMM_TOKENS - 1)
            tile(p, l, w, kind, panel, panels, t + i, GEMM_TOKENS - 1, start);
        else if (left == GEMM_TOKENS - 2)
            tile(p, l, w, kind, panel, panels, t + i, GEMM_TOKENS - 2, start);
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
        prepare(p, l, s, panel + q, q, &w);
    if (kind == CODES_INT8)
        tile_kind(p, l, s, &w, CODES_INT8, panel, panels, t, n);
    else if (kind == CODES_LINEAR4)
        tile_kind(p, l, s, &w, CODES_LINEAR4, panel, panels, t, n);
    else if (kind == CODES_LINEAR6)
        tile_kind(p, l, s, &w, CODES_LINEAR6, panel, panels, t, n);
    else
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
