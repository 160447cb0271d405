/* product_int8.inc.c - products of 4- and 8-bit weights with int8 activations: what the two shapes of
 * work share, and the choice between them: stream_int8.inc.c for few tokens, tile_int8.inc.c for many.
 *
 * A step is 64 columns of a panel. In 4 bits its 8 lines hold columns 0..31 in the low and 32..63 in the
 * high nibbles; in 8 bits its lines 0..7 and 8..15 do. So a step gives two int32 sums per row, `lo` and
 * `hi`, which belong to one part, or in groups of 32 to two.
 *
 * Integer sums are exact, so how they are cut never matters; the float operations per output are the
 * contract of kernels.h: those of ascending parts, then + bias.
 */

enum {
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
    code_kind kind = code_kind_of(f);
    return kind == CODES_INT8 ? DOT_BIAS_INT8 : kind == CODES_LINEAR4 ? f->codebook[0] : DOT_BIAS_BOOK4(f->codebook);
}

/* The parts of a product's columns; a constant in every loop below. */
typedef enum part_kind { PARTS_32, PARTS_64, PARTS_OF_ROW, WHOLE_ROW } part_kind;

static part_kind part_kind_of(const product *p)
{
    if (p->format->group)
        return p->format->group == 32 ? PARTS_32 : PARTS_64;
    return p->x8->scales > 1 ? PARTS_OF_ROW : WHOLE_ROW;
}

INLINE int64_t part_columns(const product *p, const layout *l)
{
    part_kind kind = part_kind_of(p);
    return kind == WHOLE_ROW ? l->k_padded : kind == PARTS_32 ? 32 : KT_ACT_GROUP;
}

/* Which of the scales of a row of weights is that of a part. */
INLINE int64_t group_of_part(const kt_format *f, int64_t part)
{
    return f->group == 0 ? 0 : f->group == 128 ? part / 2 : part;
}

/* The scale of x for a part of columns [column, …) of a row whose scales these are. */
INLINE float x_scale_at(part_kind kind, const float *scales, int64_t column)
{
    return scales[kind == WHOLE_ROW ? 0 : column / KT_ACT_GROUP];
}

/* acc after the part whose int32 sum this is. */
INLINE vf add_part(vf acc, vi sum, vf x_scale, vf weight_scale)
{
    return vf_fma(vf_mul(vf_of_vi(sum), weight_scale), x_scale, acc);
}

/* The same of PARTS_OF_ROW, which the weights' scale multiplies in the end. */
INLINE vf add_part_of_row(vf acc, vi sum, vf x_scale)
{
    return vf_fma(vf_of_vi(sum), x_scale, acc);
}

/* A thread's memory for one product. */
typedef struct int8_scratch {
    int32_t *start;         /* [TOKEN_BLOCK][parts]: where the int32 sums of a token begin */
    float *scales;          /* [GEMM_PANELS][groups][16] */
    int32_t *later;         /* [GEMV_TOKENS][parts of 32][16]: a stream's sums that wait for their scales */
} int8_scratch;

static size_t int8_scratch_bytes(const kt_format *f, int64_t k)
{
    layout l = layout_of(f, k);
    size_t parts = (size_t)(l.k_padded / (f->group == 32 ? 32 : KT_ACT_GROUP));
    return parts * TOKEN_BLOCK * 4 + (size_t)l.groups * GEMM_PANELS * 64 + (size_t)l.k_padded * GEMV_TOKENS * 2 + 192;
}

static int8_scratch int8_scratch_at(const layout *l, void *base)
{
    uint8_t *at = base;
    int8_scratch s;
    s.later = (int32_t *)(void *)at;
    at += (size_t)l->k_padded * GEMV_TOKENS * 2;
    s.scales = (float *)(void *)at;
    at += (size_t)l->groups * GEMM_PANELS * 64;
    s.start = (int32_t *)(void *)at;
    return s;
}

/* Scales of 16 rows: number 16 * index and on. */
INLINE vf load_scales(int32_t type, const uint8_t *scales, int64_t index)
{
    if (type == KT_SCALE_BF16)
        return vf_from_bf16((const uint16_t *)(const void *)(scales + 32 * index));
    if (type == KT_SCALE_F32)
        return vf_load((const float *)(const void *)(scales + 64 * index));
    return type == KT_SCALE_E8M0 ? vf_from_e8m0(scales + 16 * index) : vf_set1(1.0f);
}

INLINE int64_t row_of(const int32_t *rows, int64_t t)
{
    return rows ? rows[t] : t;
}

/* The panels from `panel` on, or after the last one what comes next; NULL: nothing known. */
INLINE const uint8_t *panels_after(const product *p, int64_t panel)
{
    return panel < p->last_panel ? p->w + (size_t)panel * p->panel_bytes : p->next;
}

/* The beginning of what comes next: from there on the stream fetches ahead itself. */
INLINE void fetch_next(const product *p)
{
    for (int64_t i = 0; p->next && i < p->ahead; i += 64)
        prefetch_l2(p->next + i);
}

INLINE float *y_at(const product *p, int64_t panel, int64_t t)
{
    return p->y + row_of(p->y_rows, t) * p->y_stride + 16 * panel;
}

/* Row t of the product, rows 16 * panel and on, is v, plus bias; kept or added as kernels.h says. */
INLINE void store_values(const product *p, int64_t panel, int64_t t, vf v)
{
    int64_t row = 16 * panel;
    float *y = p->y + row_of(p->y_rows, t) * p->y_stride;
    if (p->bias)
        v = vf_add(v, vf_load_upto(p->bias, row, p->n));
    if (p->y_gate)
        v = vf_fma(vf_set1(p->y_gate[t]), v, vf_load_upto(y, row, p->n));
    vf_store_upto(y, row, p->n, v);
}

/* The scales of row t of x. */
INLINE const float *x_scales(const product *p, int64_t t)
{
    return p->x8->scale + row_of(p->x_rows, t) * p->x8->scales;
}

/* start[i][part] = bias * sum of x over the part, for tokens [t, t + n). */
static void fill_starts(const product *p, const layout *l, int64_t t, int64_t n, int32_t *start)
{
    int32_t bias = dot_bias(p->format);
    int64_t sums = part_columns(p, l) / 32, parts = l->k_padded / part_columns(p, l);
    for (int64_t i = 0; i < n; i++) {
        const int32_t *sum = p->x8->sum + row_of(p->x_rows, t + i) * (p->x8->stride / 32);
        for (int64_t part = 0; part < parts; part++) {
            int32_t total = 0;
            for (int64_t j = 0; j < sums; j++)
                total += *sum++;
            *start++ = bias * total;
        }
    }
}

INLINE vi load_start(const int32_t *start)
{
    return vi_set1(*start);
}

INLINE vb line_low(code_kind kind, vb raw, vb table)
{
    return kind == CODES_INT8 ? vb_int8(raw) : kind == CODES_LINEAR4 ? vb_low_bits(raw) : vb_low(raw, table);
}

INLINE vb line_high(code_kind kind, vb raw, vb table)
{
    return kind == CODES_LINEAR4 ? vb_high_bits(raw) : vb_high(raw, table);
}

#include "stream_int8.inc.c"
#include "tile_int8.inc.c"

static void product_int8(const product *p)
{
    layout l = layout_of(p->format, p->k);
    int8_scratch s = int8_scratch_at(&l, p->scratch);
    if (p->n_tokens <= (p->format->bits == 4 ? STREAM_MOST_INT4 : STREAM_MOST_INT8)) {
        fill_starts(p, &l, 0, p->n_tokens, s.start);
        stream_block(p, &l, &s);
        return;
    }
    for (int64_t t = 0; t < p->n_tokens; t += TOKEN_BLOCK)
        tile_block(p, &l, &s, t, p->n_tokens - t < TOKEN_BLOCK ? p->n_tokens - t : TOKEN_BLOCK);
}
