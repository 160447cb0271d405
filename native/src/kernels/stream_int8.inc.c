/* stream_int8.inc.c - the streaming method of product_int8, for few tokens, where the time is
 * spent on reading the weights. A panel is read in the order in which it lies, codes first,
 * scales last; the int32 sums of the parts wait in the thread's scratch until the scales come.
 *
 * Why in order: on Zen 4, plain loads of 16 kB of codes that leave out the 1 kB of scales behind them reach
 * 15 GB/s per core where loads of all 17 kB reach 28, whatever is prefetched: the hardware prefetchers lose
 * the stream at every jump. Halves of an 8-bit step read side by side cost as much (21 against 34 GB/s).
 */

enum {
    CHAINS_INT8 = 2,        /* sums per half of a step, since one chain is bound by its latency; */
    CHAINED = 2,            /* with more tokens than this there are chains enough */
};

/* The first lines of one step of 4 or 6 bits, loaded in the order in which they lie, before one is used; what lies
 * `ahead`, if not NULL, is fetched. */
INLINE void load_lines(int lines, const uint8_t *step, const uint8_t *ahead, vb *raw)
{
#pragma GCC unroll 12
    for (int i = 0; i < lines; i++) {
        raw[i] = vb_load_now(step + 64 * i);
        if (ahead)
            prefetch(ahead + 64 * i);
    }
}

/* Line `line` (of 8) of such a step, loaded where it is used; of 6 bits, where the first 8 are there, at each even one that
 * with the upper bits of two. What lies ahead is fetched in its order all the same. One token of int6 on Zen 4: 0.75 of
 * the read loop; with each line where it is used 0.61, and 0.50 with all 12 and what they fetch at once. */
INLINE void load_line(code_kind kind, load_kind loads, const uint8_t *step, const uint8_t *ahead, vb *raw, int line)
{
    int at = kind == CODES_LINEAR6 ? 3 * line / 2 : line, two = 8 + line / 2;
    if (kind != CODES_LINEAR6)
        raw[line] = vb_load(step + 64 * line);
    else if (line % 2 == 0)
        raw[two] = vb_load_now(step + 64 * two);
    fetch_line(loads, ahead + 64 * at);
    if (kind == CODES_LINEAR6 && line % 2)
        fetch_line(loads, ahead + 64 * (at + 1));
}

/* sum += the products of line `line` with x. In short form they wait in `part` for those of the lines before and behind. */
INLINE void dot_line(int shorts, int line, vb codes, const int8_t *x, vi *part, vi *sum)
{
    if (!shorts) {
        *sum = vi_dot_at(*sum, codes, x);
        return;
    }
    *part = short_dot(line % shorts ? *part : vi_set1(0), codes, vx_load(x));
    if (line % shorts == shorts - 1)
        *sum = vi_add(*sum, short_total(*part));
}

/* Sums of one step: lo[i] += columns 0..31 of token i, hi[i] += columns 32..63. Meanwhile what lies
 * `ahead` is fetched, a line for each line. */
INLINE void dot_step(code_kind kind, load_kind loads, int tokens, const uint8_t *step, const uint8_t *ahead, vb table,
                     const int8_t *const *x, int64_t column, vi (*lo)[CHAINS_INT8], vi (*hi)[CHAINS_INT8])
{
    int shorts = short_lines(kind), chains = tokens <= CHAINED && !shorts ? CHAINS_INT8 : 1;
    vi part[2][GEMV_TOKENS];
    vb raw[12];
    if (kind != CODES_INT8 && loads == LOADS_IN_ORDER)
        load_lines(kind == CODES_LINEAR6 ? 12 : 8, step, ahead, raw);
    else if (kind == CODES_LINEAR6)
        load_lines(8, step, NULL, raw);
#pragma GCC unroll 8
    for (int line = 0; kind != CODES_INT8 && line < 8; line++) {
        if (loads != LOADS_IN_ORDER)
            load_line(kind, loads, step, ahead, raw, line);
        vb two = kind == CODES_LINEAR6 ? raw[8 + line / 2] : raw[line];
        vb low = line_low(kind, raw[line], table, two, line), high = line_high(kind, raw[line], table, two, line);
        for (int i = 0; i < tokens; i++) {
            const int8_t *at = x[i] + column + 4 * line;
            dot_line(shorts, line, low, at, &part[0][i], &lo[i][line % chains]);
            dot_line(shorts, line, high, at + 32, &part[1][i], &hi[i][line % chains]);
        }
    }
#pragma GCC unroll 16
    for (int line = 0; kind == CODES_INT8 && line < 16; line++) {
        vi (*sum)[CHAINS_INT8] = line < 8 ? lo : hi;
        vb codes = vb_int8(vb_load(step + 64 * line));
        fetch_line(loads, ahead + 64 * line);
        for (int i = 0; i < tokens; i++)
            sum[i][line % chains] = vi_dot_at(sum[i][line % chains], codes, x[i] + column + 4 * line);
    }
}

INLINE vi total_of(const vi *chain, int tokens)
{
    vi total = chain[0];
    for (int c = 1; tokens <= CHAINED && c < CHAINS_INT8; c++)
        total = vi_add(total, chain[c]);
    return total;
}

/* What a panel keeps of its tokens. */
typedef struct stream_tokens {
    const int8_t *x[GEMV_TOKENS];
    const float *x_scale[GEMV_TOKENS];
    const int32_t *start[GEMV_TOKENS];
    vf acc[GEMV_TOKENS];    /* of PARTS_OF_ROW, which wait for nothing */
    const uint8_t *scales;
    int32_t *later;         /* [parts][tokens][16]: sums that wait for their scales */
} stream_tokens;

INLINE void take_part(part_kind kind, stream_tokens *t, int tokens, int64_t part, const vi *sum)
{
    for (int i = 0; i < tokens; i++)
        if (kind == PARTS_OF_ROW)
            t->acc[i] = add_part_of_row(t->acc[i], sum[i], vf_set1(t->x_scale[i][part]));
        else
            vi_store(t->later + LANES * (part * tokens + i), sum[i]);
}

/* The codes of one panel at w. */
INLINE void sum_parts(const product *p, const layout *l, code_kind kind, load_kind loads, part_kind parts,
                      const uint8_t *w, stream_tokens *t, int tokens)
{
    int64_t steps = l->k_padded / 64, per_part = parts == WHOLE_ROW ? steps : 1;
    vb table = vb_table(p->format->codebook);
    for (int64_t s = 0, part = 0; s < steps; part++) {
        vi lo[GEMV_TOKENS][CHAINS_INT8], hi[GEMV_TOKENS][CHAINS_INT8], low[GEMV_TOKENS], high[GEMV_TOKENS];
        for (int i = 0; i < tokens; i++)
            for (int c = 0; c < CHAINS_INT8; c++)
                lo[i][c] = hi[i][c] = vi_set1(0);
        for (int i = 0; i < tokens; i++) {
            lo[i][0] = load_start(t->start[i] + part);
            if (parts == PARTS_32)
                hi[i][0] = load_start(t->start[i] + part + 1);
        }
        for (int64_t end = s + per_part; s < end; s++) {
            const uint8_t *step = w + (size_t)s * l->step_bytes;
            dot_step(kind, loads, tokens, step, step + p->tuning.ahead, table, t->x, 64 * s, lo, hi);
        }
        for (int i = 0; i < tokens; i++) {
            high[i] = total_of(hi[i], tokens);
            low[i] = parts == PARTS_32 ? total_of(lo[i], tokens) : vi_add(total_of(lo[i], tokens), high[i]);
        }
        take_part(parts, t, tokens, part, low);
        if (parts == PARTS_32)
            take_part(parts, t, tokens, ++part, high);
    }
}

/* Outputs of what waited. Meanwhile what comes after the scales is fetched, a line for each line of them. */
INLINE void scale_later(const product *p, const layout *l, part_kind kind, int is_e4m3, int64_t panel,
                        const stream_tokens *t, int tokens)
{
    vf acc[GEMV_TOKENS];
    vi rows = is_e4m3 ? load_rows_e4m3(t->scales) : vi_set1(0);
    for (int i = 0; i < tokens; i++)
        acc[i] = kind == PARTS_OF_ROW ? vf_mul(t->acc[i], load_scales(p->format->scale, t->scales, 0)) : vf_set1(0.0f);
    int64_t width = part_columns(p, l), row = 16 * (int64_t)scale_bytes(p->format->scale);
    if (kind == PARTS_OF_ROW)
        fetch_line(p->tuning.loads, t->scales + p->tuning.ahead);
    for (int64_t part = 0; kind != PARTS_OF_ROW && part < l->k_padded / width; part++) {
        int64_t group = is_e4m3 ? part : group_of_part(p->format, part), at = group * row;
        if (at % 64 == 0)
            fetch_line(p->tuning.loads, t->scales + at + p->tuning.ahead);
        vf scale = is_e4m3 ? load_e4m3(t->scales, group, rows) : load_scales(p->format->scale, t->scales, group);
        for (int i = 0; i < tokens; i++) {
            vi sum = vi_load(t->later + LANES * (part * tokens + i));
            acc[i] = add_part(acc[i], sum, vf_set1(x_scale_at(kind, t->x_scale[i], part * width)), scale);
        }
    }
    for (int i = 0; i < tokens && i < p->n_tokens; i++)
        store_values(p, panel, i, acc[i]);
}

/* One panel times `tokens` tokens; where there are fewer, the last one stands in the place of the missing ones and is
 * computed again. */
INLINE void stream_panel(const product *p, const layout *l, const int8_scratch *scratch, int64_t panel, code_kind kind,
                         part_kind parts, int tokens)
{
    const uint8_t *w = p->w + (size_t)panel * p->panel_bytes;
    stream_tokens t = {.scales = w + l->scale_offset, .later = scratch->later};
    for (int i = 0; i < tokens; i++) {
        int64_t token = i < p->n_tokens ? i : p->n_tokens - 1;
        t.x[i] = p->x8->q + row_of(p->x_rows, token) * p->x8->stride;
        t.x_scale[i] = x_scales(p, token);
        t.acc[i] = vf_set1(0.0f);
        t.start[i] = scratch->start + token * (l->k_padded / part_columns(p, l));
    }
    load_kind loads = p->tuning.loads;
    if (STREAM_LOADS >= LOADS_IN_ORDER && loads == LOADS_IN_ORDER && tokens <= CHAINED && kind != CODES_INT8)
        sum_parts(p, l, kind, LOADS_IN_ORDER, parts, w, &t, tokens);
    else if (STREAM_LOADS >= LOADS_FAR && loads == LOADS_FAR)
        sum_parts(p, l, kind, LOADS_FAR, parts, w, &t, tokens);
    else
        sum_parts(p, l, kind, LOADS_NEAR, parts, w, &t, tokens);
    if (parts == PARTS_32 && p->format->scale == KT_SCALE_E4M3)
        scale_later(p, l, parts, 1, panel, &t, tokens);
    else
        scale_later(p, l, parts, 0, panel, &t, tokens);
}

/* Format and number of tokens become constants of the inner loops. */
INLINE void stream_parts(const product *p, const layout *l, const int8_scratch *s, int64_t panel, code_kind kind,
                         int tokens)
{
    switch (part_kind_of(p)) {
    case PARTS_32:
        stream_panel(p, l, s, panel, kind, PARTS_32, tokens);
        break;
    case PARTS_64:
        stream_panel(p, l, s, panel, kind, PARTS_64, tokens);
        break;
    case PARTS_OF_ROW:
        stream_panel(p, l, s, panel, kind, PARTS_OF_ROW, tokens);
        break;
    case WHOLE_ROW:
        stream_panel(p, l, s, panel, kind, WHOLE_ROW, tokens);
    }
}

INLINE void stream_format(const product *p, const layout *l, const int8_scratch *s, int64_t panel, int tokens)
{
    code_kind kind = code_kind_of(p->format);
    if (kind == CODES_INT8 || tokens > STREAM_MOST_INT4)
        stream_parts(p, l, s, panel, CODES_INT8, tokens);
    else if (kind == CODES_LINEAR4)
        stream_parts(p, l, s, panel, CODES_LINEAR4, tokens);
    else if (kind == CODES_LINEAR6)
        stream_parts(p, l, s, panel, CODES_LINEAR6, tokens);
    else
        stream_parts(p, l, s, panel, CODES_BOOK4, tokens);
}

typedef void stream(const product *p, const layout *l, const int8_scratch *s, int64_t panel);
#define STREAM(n)                                                                                   \
    static void stream_##n(const product *p, const layout *l, const int8_scratch *s, int64_t panel) \
    {                                                                                               \
        stream_format(p, l, s, panel, n);                                                           \
    }
STREAM(1)
STREAM(2)
#if GEMV_TOKENS > 2
STREAM(4)
STREAM(6)
STREAM(8)
static stream *const streams[GEMV_TOKENS + 1] = {stream_1, stream_1, stream_2, stream_4, stream_4,
                                                 stream_6, stream_6, stream_8, stream_8};
#else
static stream *const streams[GEMV_TOKENS + 1] = {stream_1, stream_1, stream_2};
#endif

static void stream_block(const product *p, const layout *l, const int8_scratch *s)
{
    for (int64_t panel = p->first_panel; panel < p->last_panel; panel++) {
        if (panel + 1 == p->last_panel)
            fetch_next(p);
        streams[p->n_tokens](p, l, s, panel);
    }
}
