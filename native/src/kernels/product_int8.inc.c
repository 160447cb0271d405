/* product_int8.inc.c - products of 4- and 8-bit weights with int8 activations: what the two shapes of
 * work share, the streaming shape (few tokens), and the choice between them.
 *
 * A step is 64 columns of a panel. In 4 bits its 8 lines hold columns 0..31 in the low and 32..63 in the
 * high nibbles; in 8 bits its lines 0..7 and 8..15 do. So a step gives two int32 sums per row, `lo` and
 * `hi`, which belong to one group (64, 128, whole row) or to two (32).
 *
 * Integer sums are exact, so how they are cut never matters; the float operations per output are the
 * contract of kernels.h: acc = fma((float)sum, weight scale, acc) for ascending groups, then * x scale,
 * then + bias.
 */

enum {
    /* bytes ahead of the loads. int4 from memory, part of the read loop (Zen 5, two threads, k = 2048):
     * 48 lines 0.65, 64 0.72, 80 0.80, 96 0.82, 112 0.79; int8 is best at 48 to 80 (0.97), 0.93 at 96 */
    PREFETCH = 96 * 64,
    TOKEN_BLOCK = 240,      /* tokens whose starts lie in the scratch: their x fits L2 beside a panel pair */
};

/* How codes become the bytes of a dot product; constants in every loop below. */
typedef enum code_kind { CODES_INT8, CODES_LINEAR4, CODES_BOOK4 } code_kind;

static code_kind code_kind_of(const kt_format *f)
{
    if (f->bits == 8)
        return CODES_INT8;
    for (int i = 0; i < 16; i++)
        if (f->codebook[i] != f->codebook[0] + i)
            return CODES_BOOK4;
    return DOT_LINEAR4 ? CODES_LINEAR4 : CODES_BOOK4;
}

/* What dot products are short of when weights are made unsigned (see vi_dot), per unit of sum x. */
static int32_t dot_bias(const kt_format *f)
{
    return f->bits == 8 ? DOT_BIAS_INT8 : DOT_BIAS_INT4(f->codebook);
}

/* Columns that share an int32 sum start, and a scale. */
typedef struct int8_scratch {
    int32_t *start;         /* [TOKEN_BLOCK][groups]: where the int32 sums of a token begin */
    float *scales;          /* [GEMM_PANELS][groups][16] */
    uint8_t *lines;         /* [GEMM_PANELS][k' / 4][64]: 4-bit panels, ready for vi_dot */
} int8_scratch;

static size_t int8_scratch_bytes(const kt_format *f, int64_t k)
{
    layout l = layout_of(f, k);
    return (size_t)l.groups * (TOKEN_BLOCK * 4 + GEMM_PANELS * 64) + (size_t)l.k_padded * GEMM_PANELS * 16 + 192;
}

static int8_scratch int8_scratch_at(const layout *l, void *base)
{
    uint8_t *at = base;
    int8_scratch s;
    s.lines = at;
    at += (size_t)l->k_padded * GEMM_PANELS * 16;
    s.scales = (float *)(void *)at;
    at += (size_t)l->groups * GEMM_PANELS * 64;
    s.start = (int32_t *)(void *)at;
    return s;
}

/* Scales of 16 rows: number 16 * index and on. */
INLINE vf load_scales(int32_t type, const uint8_t *scales, int64_t index)
{
    float s[LANES];
    if (type == KT_SCALE_BF16)
        return vf_from_bf16((const uint16_t *)(const void *)(scales + 32 * index));
    if (type == KT_SCALE_F32)
        return vf_load((const float *)(const void *)(scales + 64 * index));
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

/* start[i][g] = bias * sum of x over group g, for tokens [t, t + n). */
static void fill_starts(const product *p, const layout *l, int64_t t, int64_t n, int32_t *start)
{
    int32_t bias = dot_bias(p->format);
    int64_t parts = l->group / 32;
    if (bias == 0)
        return;
    for (int64_t i = 0; i < n; i++) {
        const int32_t *sum = p->x8->sum + row_of(p->x_rows, t + i) * (p->x8->stride / 32);
        for (int64_t g = 0; g < l->groups; g++) {
            int32_t total = 0;
            for (int64_t j = 0; j < parts; j++)
                total += sum[g * parts + j];
            start[i * l->groups + g] = bias * total;
        }
    }
}

INLINE vi load_start(const int32_t *start)
{
    return DOT_BIAS_INT8 ? vi_set1(*start) : vi_set1(0);
}

INLINE vb line_low(code_kind kind, vb raw, vb table)
{
    return kind == CODES_INT8 ? vb_int8(raw) : kind == CODES_LINEAR4 ? vb_low_bits(raw) : vb_low(raw, table);
}

INLINE vb line_high(code_kind kind, vb raw, vb table)
{
    return kind == CODES_LINEAR4 ? vb_high_bits(raw) : vb_high(raw, table);
}

/* What to prefetch at `at` bytes into a panel's codes: codes further on, and after them the next panel's. */
INLINE const uint8_t *ahead_of(const product *p, const layout *l, const uint8_t *w, size_t at)
{
    at += PREFETCH;
    return w + (at < l->scale_offset ? at : at + p->panel_bytes - l->scale_offset);
}

/* Scales lie behind the codes, a second stream: fetched some groups ahead, then for the next panel. */
INLINE void prefetch_scales(const product *p, const layout *l, const uint8_t *scales, int64_t g)
{
    int64_t row = 16 * (int64_t)scale_bytes(p->format->scale), distance = l->groups < 16 ? l->groups : 16;
    int64_t at = (g + distance) * row, end = l->groups * row;
    if (g * row % 64 == 0)
        prefetch(scales + (at < end ? at : at - end + (int64_t)p->panel_bytes));
}

/* Sums of one step: lo[i] += columns 0..31 of token i, hi[i] += columns 32..63. */
INLINE void dot_step(code_kind kind, int tokens, const uint8_t *step, const uint8_t *ahead, vb table,
                     const int8_t *const *x, int64_t column, vi *lo, vi *hi)
{
#pragma GCC unroll 8
    for (int line = 0; line < 8; line++) {
        vb raw = vb_load(step + 64 * line), low, high;
        prefetch(ahead + 64 * line);
        low = line_low(kind, raw, table);
        if (kind == CODES_INT8) {
            prefetch(ahead + 64 * line + 512);
            high = vb_int8(vb_load(step + 64 * line + 512));
        } else {
            high = line_high(kind, raw, table);
        }
        for (int i = 0; i < tokens; i++) {
            lo[i] = vi_dot(lo[i], low, vx_load(x[i] + column + 4 * line));
            hi[i] = vi_dot(hi[i], high, vx_load(x[i] + column + 32 + 4 * line));
        }
    }
}

/* One panel, `tokens` tokens: one stream through memory. Measured against four panels at once (four
 * streams, activations shared), int4 from memory: one stream is half as fast again, since what is
 * prefetched beyond its end is what comes next. If the call has fewer tokens, the last one is computed
 * again in the place of the missing ones. */
INLINE void stream_panel(const product *p, const layout *l, code_kind kind, int is_group_32, int64_t panel,
                         int64_t first, int64_t last, int tokens, const int32_t *start)
{
    int64_t steps = l->k_padded / 64, per_group = is_group_32 ? 1 : l->group / 64;
    const uint8_t *w = p->w + (size_t)panel * p->panel_bytes, *scales = w + l->scale_offset;
    vb table = vb_table(p->format->codebook);
    const int8_t *x[GEMV_TOKENS];
    vf acc[GEMV_TOKENS];
    const int32_t *from[GEMV_TOKENS];
    for (int i = 0; i < tokens; i++) {
        int64_t t = first + i < last ? first + i : last;
        x[i] = p->x8->q + row_of(p->x_rows, t) * p->x8->stride;
        from[i] = start + t * l->groups;
        acc[i] = vf_set1(0.0f);
    }
    for (int64_t s = 0, g = 0; s < steps; g++) {
        vi lo[GEMV_TOKENS], hi[GEMV_TOKENS];
        vf scale = load_scales(p->format->scale, scales, g);
        prefetch_scales(p, l, scales, g);
        for (int i = 0; i < tokens; i++) {
            lo[i] = load_start(from[i] + g);
            hi[i] = is_group_32 ? load_start(from[i] + g + 1) : vi_set1(0);
        }
        for (int64_t end = s + per_group; s < end; s++)
            dot_step(kind, tokens, w + (size_t)s * l->step_bytes, ahead_of(p, l, w, (size_t)s * l->step_bytes),
                     table, x, 64 * s, lo, hi);
        for (int i = 0; i < tokens; i++)
            acc[i] = vf_fma(vf_of_vi(is_group_32 ? lo[i] : vi_add(lo[i], hi[i])), scale, acc[i]);
        if (is_group_32) {
            scale = load_scales(p->format->scale, scales, ++g);
            for (int i = 0; i < tokens; i++)
                acc[i] = vf_fma(vf_of_vi(hi[i]), scale, acc[i]);
        }
    }
    for (int i = 0; i < tokens; i++)
        store_int8(p, panel, first + i < last ? first + i : last, acc[i]);
}

/* Format and number of tokens become constants of the inner loops. Tokens [first, last]. */
INLINE void stream_tokens(const product *p, const layout *l, int64_t panel, int64_t first, int64_t last, int tokens,
                          const int32_t *start)
{
    code_kind kind = code_kind_of(p->format);
    int is_group_32 = l->group == 32;
    if (kind == CODES_INT8)
        is_group_32 ? stream_panel(p, l, CODES_INT8, 1, panel, first, last, tokens, start)
                    : stream_panel(p, l, CODES_INT8, 0, panel, first, last, tokens, start);
    else if (kind == CODES_LINEAR4)
        is_group_32 ? stream_panel(p, l, CODES_LINEAR4, 1, panel, first, last, tokens, start)
                    : stream_panel(p, l, CODES_LINEAR4, 0, panel, first, last, tokens, start);
    else
        is_group_32 ? stream_panel(p, l, CODES_BOOK4, 1, panel, first, last, tokens, start)
                    : stream_panel(p, l, CODES_BOOK4, 0, panel, first, last, tokens, start);
}

typedef void stream(const product *p, const layout *l, int64_t panel, int64_t first, int64_t last,
                    const int32_t *start);
#define STREAM(n)                                                                                       \
    static void stream_##n(const product *p, const layout *l, int64_t panel, int64_t first, int64_t last, \
                           const int32_t *start)                                                        \
    {                                                                                                   \
        stream_tokens(p, l, panel, first, last, n, start);                                              \
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

#include "tile_int8.inc.c"

/* All panels, each with all tokens before the next: several passes over a panel find it in the cache. */
static void stream_block(const product *p, const layout *l, const int32_t *start)
{
    int64_t passes = (p->n_tokens + GEMV_TOKENS - 1) / GEMV_TOKENS, each = (p->n_tokens + passes - 1) / passes;
    for (int64_t panel = p->first_panel; panel < p->last_panel; panel++)
        for (int64_t t = 0; t < p->n_tokens; t += each) {
            int64_t n = p->n_tokens - t < each ? p->n_tokens - t : each;
            streams[n](p, l, panel, t, t + n - 1, start);
        }
}

static void product_int8(const product *p)
{
    layout l = layout_of(p->format, p->k);
    int8_scratch s = int8_scratch_at(&l, p->scratch);
    if (p->n_tokens <= (p->format->bits == 4 ? STREAM_MOST_INT4 : STREAM_MOST_INT8)) {
        fill_starts(p, &l, 0, p->n_tokens, s.start);
        stream_block(p, &l, s.start);
        return;
    }
    for (int64_t t = 0; t < p->n_tokens; t += TOKEN_BLOCK)
        tile_block(p, &l, &s, t, p->n_tokens - t < TOKEN_BLOCK ? p->n_tokens - t : TOKEN_BLOCK);
}
