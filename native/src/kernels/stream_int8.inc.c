/* stream_int8.inc.c - the streaming shape of product_int8, for few tokens, where reading the weights is the
 * work. A panel is read in the order in which it lies, codes first, scales last; of up to
 * STREAM_ONCE tokens the int32 sums of the groups wait in the thread's scratch until the scales come.
 *
 * Why in order: on Zen 4, plain loads of 16 kB of codes that leave out the 1 kB of scales behind them reach
 * 15 GB/s per core where loads of all 17 kB reach 28, whatever is prefetched: the hardware prefetchers lose
 * the stream at every jump. Halves of an 8-bit step read side by side cost as much (21 against 34 GB/s).
 */

enum {
    STREAM_ONCE = 4,        /* most tokens whose sums wait for the scales: of more, they would fill the first cache */
    CHAINS_INT8 = 2,        /* sums per half of a step, since one chain is bound by its latency; */
    CHAINED = 2,            /* with more tokens than this there are chains enough */
};
static_assert(GEMV_TOKENS * 64 / 32 <= GEMM_PANELS * 16, "sums of all groups fit where tiles keep their lines");

/* Tokens [first, last] times one panel. */
typedef struct stream_pass {
    int64_t panel, first, last;
    const uint8_t *ahead;   /* what to fetch while the first step is computed */
    int64_t stride;         /* bytes of that for each line read: 64, or 32 where two passes share the work */
} stream_pass;

/* How many steps go into one sum: a constant, so that the common groups need no inner loop. */
typedef enum group_kind { GROUP_32, GROUP_64, GROUP_LONG } group_kind;

/* Sums of one step: lo[i] += columns 0..31 of token i, hi[i] += columns 32..63. Meanwhile what lies
 * `ahead` is fetched, `stride` bytes for each line. */
INLINE void dot_step(code_kind kind, int tokens, const uint8_t *step, const uint8_t *ahead, int64_t stride, vb table,
                     const int8_t *const *x, int64_t column, vi (*lo)[CHAINS_INT8], vi (*hi)[CHAINS_INT8])
{
    int chains = tokens <= CHAINED ? CHAINS_INT8 : 1;
#pragma GCC unroll 8
    for (int line = 0; line < 8; line++) {
        vb raw = vb_load(step + 64 * line), low = line_low(kind, raw, table);
        prefetch(ahead + line * stride);
        for (int i = 0; i < tokens; i++)
            lo[i][line % chains] = vi_dot_at(lo[i][line % chains], low, x[i] + column + 4 * line);
        if (kind == CODES_INT8)
            continue;
        vb high = line_high(kind, raw, table);
        for (int i = 0; i < tokens; i++)
            hi[i][line % chains] = vi_dot_at(hi[i][line % chains], high, x[i] + column + 32 + 4 * line);
    }
#pragma GCC unroll 8
    for (int line = 8; kind == CODES_INT8 && line < 16; line++) {
        vb raw = vb_int8(vb_load(step + 64 * line));
        prefetch(ahead + line * stride);
        for (int i = 0; i < tokens; i++)
            hi[i][line % chains] = vi_dot_at(hi[i][line % chains], raw, x[i] + column + 4 * line);
    }
}

INLINE vi total_of(const vi *chain, int tokens)
{
    vi total = chain[0];
    for (int c = 1; tokens <= CHAINED && c < CHAINS_INT8; c++)
        total = vi_add(total, chain[c]);
    return total;
}

/* What a pass keeps of its tokens. */
typedef struct stream_tokens {
    const int8_t *x[GEMV_TOKENS];
    const int32_t *start[GEMV_TOKENS];
    vf acc[GEMV_TOKENS];
    const uint8_t *scales;
    int32_t *later;         /* [groups][tokens][16]: sums that wait for their scales; NULL: none do */
} stream_tokens;

INLINE void scale_group(const product *p, stream_tokens *t, int tokens, int64_t group, const vi *sum)
{
    vf scale = load_scales(p->format->scale, t->scales, group);
    for (int i = 0; i < tokens; i++)
        t->acc[i] = vf_fma(vf_of_vi(vi_add(sum[i], load_start(t->start[i] + group))), scale, t->acc[i]);
}

INLINE void take_group(const product *p, stream_tokens *t, int tokens, int64_t group, const vi *sum)
{
    if (!t->later) {
        scale_group(p, t, tokens, group, sum);
        return;
    }
    for (int i = 0; i < tokens; i++)
        vi_store(t->later + LANES * (group * tokens + i), sum[i]);
}

/* The codes of one panel at w. */
INLINE void sum_groups(const product *p, const layout *l, code_kind kind, group_kind group, const uint8_t *w,
                       const stream_pass *pass, stream_tokens *t, int tokens)
{
    int64_t steps = l->k_padded / 64, per_group = group == GROUP_LONG ? (l->group < 64 ? 1 : l->group / 64) : 1;
    int64_t stride = tokens > STREAM_ONCE ? pass->stride : 64;
    int is_split = group == GROUP_LONG ? l->group == 32 : group == GROUP_32;
    vb table = vb_table(p->format->codebook);
    for (int64_t s = 0, g = 0; s < steps; g++) {
        vi lo[GEMV_TOKENS][CHAINS_INT8], hi[GEMV_TOKENS][CHAINS_INT8], low[GEMV_TOKENS], high[GEMV_TOKENS];
        for (int i = 0; i < tokens; i++)
            for (int c = 0; c < CHAINS_INT8; c++)
                lo[i][c] = hi[i][c] = vi_set1(0);
        for (int64_t end = s + per_group; s < end; s++)
            dot_step(kind, tokens, w + (size_t)s * l->step_bytes, pass->ahead + (size_t)s * l->step_bytes / 64 * stride,
                     stride, table, t->x, 64 * s, lo, hi);
        for (int i = 0; i < tokens; i++) {
            high[i] = total_of(hi[i], tokens);
            low[i] = is_split ? total_of(lo[i], tokens) : vi_add(total_of(lo[i], tokens), high[i]);
        }
        take_group(p, t, tokens, g, low);
        if (is_split)
            take_group(p, t, tokens, ++g, high);
    }
}

/* One pass with `tokens` tokens; where it has fewer, the last one stands in the place of the missing ones and is
 * computed again. */
INLINE void stream_panel(const product *p, const layout *l, const int8_scratch *scratch, const stream_pass *pass,
                         code_kind kind, group_kind group, int tokens)
{
    const uint8_t *w = p->w + (size_t)pass->panel * p->panel_bytes;
    int64_t row = 16 * (int64_t)scale_bytes(p->format->scale);
    stream_tokens t = {.scales = w + l->scale_offset};
    t.later = tokens <= STREAM_ONCE ? (int32_t *)(void *)scratch->lines : NULL;
    for (int i = 0; i < tokens; i++) {
        int64_t token = pass->first + i < pass->last ? pass->first + i : pass->last;
        t.x[i] = p->x8->q + row_of(p->x_rows, token) * p->x8->stride;
        t.start[i] = scratch->start + token * l->groups;
        t.acc[i] = vf_set1(0.0f);
    }
    sum_groups(p, l, kind, group, w, pass, &t, tokens);
    for (int64_t g = 0; g < l->groups; g++) {
        vi sum[GEMV_TOKENS];
        if (g * row % 64 == 0)
            prefetch(t.scales + g * row + (tokens <= STREAM_ONCE ? PREFETCH : (int64_t)p->panel_bytes));
        for (int i = 0; t.later && i < tokens; i++)
            sum[i] = vi_load(t.later + LANES * (g * tokens + i));
        if (t.later)
            scale_group(p, &t, tokens, g, sum);
    }
    for (int i = 0; i < tokens && pass->first + i <= pass->last; i++)
        store_int8(p, pass->panel, pass->first + i, t.acc[i]);
}

/* Format and number of tokens become constants of the inner loops. */
INLINE void stream_format(const product *p, const layout *l, const int8_scratch *s, const stream_pass *pass, int tokens)
{
    code_kind kind = code_kind_of(p->format);
    if (kind == CODES_INT8)
        stream_panel(p, l, s, pass, CODES_INT8, GROUP_LONG, tokens);
    else if (kind == CODES_LINEAR4 && l->group == 64)
        stream_panel(p, l, s, pass, CODES_LINEAR4, GROUP_64, tokens);
    else if (kind == CODES_LINEAR4 && l->group == 32)
        stream_panel(p, l, s, pass, CODES_LINEAR4, GROUP_32, tokens);
    else if (kind == CODES_LINEAR4)
        stream_panel(p, l, s, pass, CODES_LINEAR4, GROUP_LONG, tokens);
    else if (l->group == 64)
        stream_panel(p, l, s, pass, CODES_BOOK4, GROUP_64, tokens);
    else if (l->group == 32)
        stream_panel(p, l, s, pass, CODES_BOOK4, GROUP_32, tokens);
    else
        stream_panel(p, l, s, pass, CODES_BOOK4, GROUP_LONG, tokens);
}

typedef void stream(const product *p, const layout *l, const int8_scratch *s, const stream_pass *pass);
#define STREAM(n)                                                                                             \
    static void stream_##n(const product *p, const layout *l, const int8_scratch *s, const stream_pass *pass) \
    {                                                                                                         \
        stream_format(p, l, s, pass, n);                                                                      \
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

/* All panels, each with all tokens before the next. A single pass fetches what lies PREFETCH bytes on. With
 * several, the later ones find the panel in the cache, so the memory would stand still: each fetches its part of
 * the next panel (12 tokens, int4: 0.64 of the int8 peak with the first pass fetching all, 0.75 so). */
static void stream_block(const product *p, const layout *l, const int8_scratch *s)
{
    int64_t passes = (p->n_tokens + GEMV_TOKENS - 1) / GEMV_TOKENS, each = (p->n_tokens + passes - 1) / passes;
    stream_pass pass = {.stride = 64 / passes};
    for (pass.panel = p->first_panel; pass.panel < p->last_panel; pass.panel++) {
        if (pass.panel + 1 == p->last_panel)
            fetch_next(p);
        const uint8_t *w = p->w + (size_t)pass.panel * p->panel_bytes;
        for (int64_t i = 0; i < passes; i++) {
            pass.first = i * each;
            pass.last = (pass.first + each < p->n_tokens ? pass.first + each : p->n_tokens) - 1;
            pass.ahead = passes == 1 ? w + PREFETCH : w + p->panel_bytes + i * (int64_t)l->scale_offset / passes;
            streams[pass.last - pass.first + 1](p, l, s, &pass);
        }
    }
}
