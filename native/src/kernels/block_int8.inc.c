/* block_int8.inc.c - the method of product_int8 for many tokens where codes take many operations to
 * unpack, groups are of 32 and scales E4M3: BLOCK_COLUMNS columns of GEMM_PANELS panels are unpacked once, into the
 * first cache, and multiplied with all tokens before the next ones are. The f32 sums wait in the scratch
 * meanwhile; int32 and f32 sums of a tile are in registers.
 *
 * The product of an int32 sum and such a scale is exact (20 bits and 4), so one operation does what
 * conversion and multiplication do: the sum begins at SUM_MAGIC, of which the bits of int32 are
 * those of the float SUM_ZERO + sum, and (SUM_ZERO + sum) * scale - SUM_ZERO * scale is rounded once.
 */

enum {
    BLOCK_COLUMNS = 512,            /* 8 kB of a panel, unpacked */
    BLOCK_ROOM = TOKEN_BLOCK + 16,  /* tokens, and a tile that hangs over */
    SUM_MAGIC = 0x4b400000,
    /* R of rows with which SUM_ZERO * scale is finite, and no product with a scale of x, 2^-107 or more, so small
     * that it becomes a zero: its sign would be that of the sum, or here + */
    LEAST_R = 86,
    MOST_R = 200,
};
#define SUM_ZERO 0x1.8p23f          /* |sum| < 2^22: 32 columns, 128 * 127 each, are less than 2^19 */
static_assert(TOKEN_BLOCK % GEMM_TOKENS == 0, "a tile that hangs over is the last one of all tokens");

/* One block of one pass. */
typedef struct block_panels {
    uint8_t *lines;                 /* [panels][BLOCK_COLUMNS / 4][64] */
    const float *scales;            /* [panels][groups][16] */
    float *acc;                     /* [tokens][panels][16] */
    int32_t *start;                 /* [groups][BLOCK_ROOM] */
    float *x_scales;                /* [groups / 2][BLOCK_ROOM] */
    int is_last;
    int64_t panel, groups, column, parts;  /* groups of a row; of the block */
    const uint8_t *ahead;
    int64_t ahead_lines;            /* per part */
} block_panels;

static int is_blocked(const kt_format *f)
{
    code_kind kind = code_kind_of(f);
    return f->group == 32 && f->scale == KT_SCALE_E4M3 &&
           ((BLOCKS_BOOK4 && kind == CODES_BOOK4) || (BLOCKS_LINEAR4 && kind == CODES_LINEAR4) ||
            (BLOCKS_LINEAR6 && kind == CODES_LINEAR6));
}

/* Bytes of the scratch: lines, sums, scales of x. */
static size_t block_bytes(const layout *l)
{
    return GEMM_PANELS * (BLOCK_COLUMNS * 16 + BLOCK_ROOM * LANES * sizeof(float)) +
           (size_t)((l->k_padded + KT_ACT_GROUP - 1) / KT_ACT_GROUP * BLOCK_ROOM) * sizeof(float);
}

static block_panels blocks_of(const layout *l, const int8_scratch *s)
{
    block_panels b = {.groups = l->groups, .lines = s->blocks, .start = s->start, .scales = s->scales};
    b.acc = (float *)(void *)(b.lines + GEMM_PANELS * BLOCK_COLUMNS * 16);
    b.x_scales = b.acc + GEMM_PANELS * BLOCK_ROOM * LANES;
    return b;
}

/* There are enough tokens for blocks to be faster than tiles, and the sums of all panels may begin at SUM_MAGIC. */
static int takes_blocks(const product *p, const layout *l)
{
    if (!is_blocked(p->format) || (code_kind_of(p->format) == CODES_BOOK4 && !p->tuning.blocks_book4))
        return 0;
    if (p->n_tokens <= (p->format->bits == 6 ? 1 : 2) * GEMM_TOKENS)
        return 0;
    int is_plain = 1;
    for (int64_t panel = p->first_panel; panel < p->last_panel; panel++) {
        const uint8_t *r = p->w + (size_t)panel * p->panel_bytes + l->scale_offset;
        for (int i = 0; i < KT_PANEL_ROWS; i++)
            is_plain &= r[i] >= LEAST_R && r[i] <= MOST_R;
    }
    return is_plain;
}

/* out = columns [column, column + columns) of a panel, a line for every four. */
INLINE void unpack_columns(code_kind kind, const uint8_t *codes, size_t step_bytes, int64_t columns, vb table,
                           uint8_t *out)
{
    for (int64_t c = 0; c < columns; c += 64, codes += step_bytes, out += 1024)
        for (int line = 0; line < 8; line++) {
            vb raw = vb_load(codes + 64 * line);
            vb_store(out + 64 * line, line_low(kind, raw, table, line_two(kind, codes, line), line));
            vb_store(out + 512 + 64 * line, line_high(kind, raw, table, line_two(kind, codes, line), line));
        }
}

/* acc = the sums of the columns before; none: 0. Rows of y that are added to lie far apart: they come meanwhile. */
INLINE void take_sums(const product *p, const block_panels *b, int panels, int64_t t, int64_t from, int tokens,
                      vf (*acc)[GEMM_PANELS])
{
    for (int i = 0; i < tokens; i++)
        for (int q = 0; q < panels; q++) {
            acc[i][q] = b->column ? vf_load(b->acc + ((from + i) * panels + q) * LANES) : vf_set1(0.0f);
            if (b->is_last && t + from + i < p->n_tokens)
                prefetch(y_at(p, b->panel + q, t + from + i));
        }
}

/* Keep them, or where all columns are summed up store the values of the tokens that there are. */
INLINE void keep_sums(const product *p, const block_panels *b, int panels, int64_t t, int64_t from, int tokens,
                      vf (*acc)[GEMM_PANELS])
{
    for (int i = 0; i < tokens; i++)
        for (int q = 0; q < panels; q++)
            if (!b->is_last)
                vf_store(b->acc + ((from + i) * panels + q) * LANES, acc[i][q]);
            else if (t + from + i < p->n_tokens)
                store_values(p, b->panel + q, t + from + i, acc[i][q]);
}

/* sum += the products of one part, whose lines those are. */
INLINE void block_part(code_kind kind, int panels, const uint8_t *lines, const int8_t *const *x, int tokens, int64_t column,
                       vi (*sum)[GEMM_PANELS])
{
    int is_short = short_lines(kind) > 0, most = is_short ? short_lines(kind) : 8;
    vi part[GEMM_TOKENS][GEMM_PANELS];
#pragma GCC unroll 8
    for (int line = 0; line < 8; line++) {
        vb w[GEMM_PANELS];
        for (int i = 0; i < tokens && line % most == 0; i++)
            for (int q = 0; q < panels; q++)
                part[i][q] = is_short ? vi_set1(0) : sum[i][q];
        for (int q = 0; q < panels; q++)
            w[q] = vb_load(lines + q * BLOCK_COLUMNS * 16 + 64 * line);
        tile_line(is_short, panels, x, tokens, column + 4 * line, w, part);
        for (int i = 0; i < tokens && line % most == most - 1; i++)
            for (int q = 0; q < panels; q++)
                sum[i][q] = is_short ? vi_add(sum[i][q], short_total(part[i][q])) : part[i][q];
    }
}

/* `tokens` tokens from number `from` of the block on, the last one again in the place of missing ones. */
INLINE void block_tile(const product *p, block_panels *b, code_kind kind, int panels, int64_t t, int64_t from,
                       int tokens)
{
    const int8_t *x[GEMM_TOKENS];
    int64_t last = p->n_tokens - 1 - t - from, part = b->column / 32, end = part + b->parts;
    const int32_t *start = b->start + part * BLOCK_ROOM + from;
    const float *x_scale = b->x_scales + part / 2 * BLOCK_ROOM + from, *scales = b->scales + part * LANES;
    const uint8_t *lines = b->lines;
    vf acc[GEMM_TOKENS][GEMM_PANELS];
    for (int i = 0; i < tokens; i++)
        x[i] = p->x8->q + row_of(p->x_rows, t + from + (i < last ? i : last)) * p->x8->stride;
    take_sums(p, b, panels, t, from, tokens, acc);
    for (; part < end; part++, lines += 512, start += BLOCK_ROOM, scales += LANES) {
        vi sum[GEMM_TOKENS][GEMM_PANELS];
        for (int64_t i = 0; i < b->ahead_lines; i++, b->ahead += 64)
            prefetch_next(p, b->ahead);
        for (int i = 0; i < tokens; i++)
            for (int q = 0; q < panels; q++)
                sum[i][q] = load_start(start + i);
        block_part(kind, panels, lines, x, tokens, 32 * part, sum);
        for (int q = 0; q < panels; q++) {
            vf scale = vf_load(scales + q * b->groups * LANES), zero = vf_mul(scale, vf_set1(-SUM_ZERO));
            for (int i = 0; i < tokens; i++) {
                vf by = vf_set1(x_scale[i]);
                acc[i][q] = vf_fma(vf_fma(vf_bits(sum[i][q]), scale, zero), by, acc[i][q]);
            }
        }
        x_scale += part % 2 * BLOCK_ROOM;
    }
    keep_sums(p, b, panels, t, from, tokens, acc);
}

/* Tokens [t, t + n) times one block, cut into tiles as equal as can be. */
INLINE void block_tiles(const product *p, block_panels *b, code_kind kind, int panels, int64_t t, int64_t n)
{
    int64_t tiles = (n + GEMM_TOKENS - 1) / GEMM_TOKENS;
    for (int64_t i = 0, left; i < n; i += left) {
        left = (n - i + tiles - 1) / tiles;
        tiles--;
        if (left == GEMM_TOKENS)
            block_tile(p, b, kind, panels, t, i, GEMM_TOKENS);
        else if (left == GEMM_TOKENS - 1)
            block_tile(p, b, kind, panels, t, i, GEMM_TOKENS - 1);
        else
            block_tile(p, b, kind, panels, t, i, GEMM_TOKENS - 2);
    }
}

/* Tokens [t, t + n) times `panels` panels. */
INLINE void block_pass(const product *p, const layout *l, const int8_scratch *s, code_kind kind, int64_t panel, int panels,
                       int64_t t, int64_t n)
{
    int64_t turns = (n + GEMM_TOKENS - 1) / GEMM_TOKENS * l->groups, lines = (int64_t)(p->panel_bytes / 64) * panels;
    const uint8_t *w = p->w + (size_t)panel * p->panel_bytes;
    vb table = vb_table(p->format->codebook);
    block_panels b = blocks_of(l, s);
    b.panel = panel;
    b.ahead = panels_after(p, panel + panels);
    if (b.ahead)
        b.ahead_lines = (lines + turns - 1) / turns;
    for (int q = 0; q < panels; q++)
        for (int64_t g = 0; g < l->groups; g++)
            vf_store(s->scales + (q * l->groups + g) * LANES,
                     load_scales(p->format->scale, w + q * p->panel_bytes + l->scale_offset, g));
    for (; b.column < l->k_padded; b.column += BLOCK_COLUMNS) {
        int64_t columns = l->k_padded - b.column < BLOCK_COLUMNS ? l->k_padded - b.column : BLOCK_COLUMNS;
        for (int q = 0; q < panels; q++)
            unpack_columns(kind, w + q * p->panel_bytes + (size_t)(b.column / 64) * l->step_bytes, l->step_bytes,
                           columns, table, b.lines + q * BLOCK_COLUMNS * 16);
        b.parts = columns / 32;
        b.is_last = b.column + columns == l->k_padded;
        block_tiles(p, &b, kind, panels, t, n);
    }
}

INLINE void block_kind(const product *p, const layout *l, const int8_scratch *s, code_kind kind, int64_t t, int64_t n)
{
    int64_t panel = p->first_panel;
    for (; panel + GEMM_PANELS <= p->last_panel; panel += GEMM_PANELS)
        block_pass(p, l, s, kind, panel, GEMM_PANELS, t, n);
    for (; panel < p->last_panel; panel++)
        block_pass(p, l, s, kind, panel, 1, t, n);
}

/* Starts and scales of tokens [t, t + n), those of one part beside each other and written one after the other: the lines
 * of one token lie so far apart that they drive each other out of the first cache. */
static void take_rows(const product *p, const layout *l, const int8_scratch *s, int64_t t, int64_t n)
{
    int32_t bias = dot_bias(p->format);
    block_panels b = blocks_of(l, s);
    const int32_t *sums[TOKEN_BLOCK];
    const float *scales[TOKEN_BLOCK];
    for (int64_t i = 0; i < n; i++) {
        sums[i] = p->x8->sum + row_of(p->x_rows, t + i) * (p->x8->stride / 32);
        scales[i] = x_scales(p, t + i);
    }
    for (int64_t g = 0; g < l->groups; g++) {
        for (int64_t i = 0; i < n; i++)
            b.start[g * BLOCK_ROOM + i] = SUM_MAGIC + bias * sums[i][g];
        for (int64_t i = 0; i < n && g % 2 == 0; i++)
            b.x_scales[g / 2 * BLOCK_ROOM + i] = scales[i][g / 2];
    }
}

static void block_block(const product *p, const layout *l, const int8_scratch *s, int64_t t, int64_t n)
{
    take_rows(p, l, s, t, n);
    code_kind kind = code_kind_of(p->format);
    if (BLOCKS_BOOK4 && kind == CODES_BOOK4)
        block_kind(p, l, s, CODES_BOOK4, t, n);
    else if (BLOCKS_LINEAR4 && kind == CODES_LINEAR4)
        block_kind(p, l, s, CODES_LINEAR4, t, n);
    else if (BLOCKS_LINEAR6)
        block_kind(p, l, s, CODES_LINEAR6, t, n);
}
