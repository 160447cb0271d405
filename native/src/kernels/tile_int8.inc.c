/* tile_int8.inc.c - the tiled shape of product_int8, for many tokens. A set of GEMM_PANELS panels is
 * made ready for dot products once, for the whole of k, in the thread's scratch (64 kB for a pair at
 * k = 2048: L2); tiles of GEMM_TOKENS tokens then run over it with int32 and f32 sums in registers.
 * From here on nothing depends on the format: lines, f32 scales per group, starts per token and group.
 * While the tiles compute, the codes of the next panels are prefetched, a few lines per group.
 */

/* Lines and scales of panels [panel, panel + n), n <= GEMM_PANELS. */
INLINE void unpack_kind(const product *p, const layout *l, const int8_scratch *s, code_kind kind, int64_t panel,
                        int n)
{
    vb table = vb_table(p->format->codebook);
    for (int q = 0; q < n; q++) {
        const uint8_t *w = p->w + (size_t)(panel + q) * p->panel_bytes;
        uint8_t *out = s->lines + 64 * q;
        for (int64_t step = 0; step < l->k_padded / 64; step++, out += 16 * n * 64) {
            const uint8_t *from = w + (size_t)step * l->step_bytes;
            for (int line = 0; line < 8; line++) {
                vb raw = vb_load(from + 64 * line);
                prefetch(from + 64 * line + PREFETCH);
                vb high = kind == CODES_INT8 ? vb_int8(vb_load(from + 64 * line + 512))
                                             : line_high(kind, raw, table);
                vb_store(out + line * n * 64, line_low(kind, raw, table));
                vb_store(out + (line + 8) * n * 64, high);
            }
        }
        for (int64_t g = 0; g < l->groups; g++)
            vf_store(s->scales + (g * n + q) * LANES, load_scales(p->format->scale, w + l->scale_offset, g));
    }
}

static void unpack(const product *p, const layout *l, const int8_scratch *s, int64_t panel, int n)
{
    code_kind kind = code_kind_of(p->format);
    if (kind == CODES_INT8)
        unpack_kind(p, l, s, CODES_INT8, panel, n);
    else if (kind == CODES_LINEAR4)
        unpack_kind(p, l, s, CODES_LINEAR4, panel, n);
    else
        unpack_kind(p, l, s, CODES_BOOK4, panel, n);
}

/* Where the next codes are, and how many lines of them to prefetch per group of a tile. */
typedef struct ahead {
    const uint8_t *at;
    int lines;
} ahead;

/* Tokens t .. t + tokens of the block's `start`, panels from `panel` on. */
INLINE void tile(const product *p, const layout *l, const int8_scratch *s, int64_t panel, int panels, int64_t t,
                 int tokens, const int32_t *start, ahead *next)
{
    const int8_t *x[GEMM_TOKENS];
    const uint8_t *lines = s->lines;
    const float *scales = s->scales;
    vf acc[GEMM_TOKENS][GEMM_PANELS];
    for (int i = 0; i < tokens; i++) {
        x[i] = p->x8->q + row_of(p->x_rows, t + i) * p->x8->stride;
        for (int q = 0; q < panels; q++)
            acc[i][q] = vf_set1(0.0f);
    }
    for (int64_t g = 0; g < l->groups; g++) {
        vi sum[GEMM_TOKENS][GEMM_PANELS];
        for (int i = 0; i < tokens; i++)
            for (int q = 0; q < panels; q++)
                sum[i][q] = load_start(start + i * l->groups + g);
        for (int i = 0; i < next->lines; i++, next->at += 64)
            prefetch_l2(next->at);
#pragma GCC unroll 4
        for (int64_t c = g * l->group; c < (g + 1) * l->group; c += 4, lines += 64 * panels) {
            vb w[GEMM_PANELS];
            for (int q = 0; q < panels; q++)
                w[q] = vb_load(lines + 64 * q);
            for (int i = 0; i < tokens; i++) {
                vx four = vx_load(x[i] + c);
                for (int q = 0; q < panels; q++)
                    sum[i][q] = vi_dot(sum[i][q], w[q], four);
            }
        }
        for (int q = 0; q < panels; q++, scales += LANES)
            for (int i = 0; i < tokens; i++)
                acc[i][q] = vf_fma(vf_of_vi(sum[i][q]), vf_load(scales), acc[i][q]);
    }
    for (int i = 0; i < tokens; i++)
        for (int q = 0; q < panels; q++)
            store_int8(p, panel + q, t + i, acc[i][q]);
}

/* All tokens of the block for one set of panels. */
INLINE void tile_panels(const product *p, const layout *l, const int8_scratch *s, int64_t panel, int panels,
                        int64_t t, int64_t n)
{
    int64_t tiles = (n + GEMM_TOKENS - 1) / GEMM_TOKENS;
    int64_t lines = (int64_t)(p->panel_bytes / 64) * panels;
    ahead next = {p->w + (size_t)(panel + panels) * p->panel_bytes, 0};
    if (panel + panels < p->last_panel)
        next.lines = (int)((lines + tiles * l->groups - 1) / (tiles * l->groups));
    unpack(p, l, s, panel, panels);
    for (int64_t i = 0; i < n;) {
        const int32_t *start = s->start + i * l->groups;
        int64_t left = n - i;
        if (left >= GEMM_TOKENS) {
            tile(p, l, s, panel, panels, t + i, GEMM_TOKENS, start, &next);
            i += GEMM_TOKENS;
        } else if (left >= 2) {
            tile(p, l, s, panel, panels, t + i, 2, start, &next);
            i += 2;
        } else {
            tile(p, l, s, panel, panels, t + i, 1, start, &next);
            i += 1;
        }
    }
}

static void tile_block(const product *p, const layout *l, const int8_scratch *s, int64_t t, int64_t n)
{
    int64_t panel = p->first_panel;
    fill_starts(p, l, t, n, s->start);
    for (; panel + GEMM_PANELS <= p->last_panel; panel += GEMM_PANELS)
        tile_panels(p, l, s, panel, GEMM_PANELS, t, n);
    for (; panel < p->last_panel; panel++)
        tile_panels(p, l, s, panel, 1, t, n);
}
