/* product_int8.inc.c - products of 4-, 6- and 8-bit weights with int8 activations: the choice
 * between three methods, stream_int8.inc.c for few tokens, and for many tile_int8.inc.c or
 * block_int8.inc.c.
 *
 * A step is 64 columns of a panel. In 4 bits its 8 lines hold columns 0..31 in the low and 32..63 in the
 * high nibbles, and in 6 bits two more of each in the lines behind; in 8 bits its lines 0..7 and 8..15 do. So a step gives two int32 sums per row, `lo` and
 * `hi`, which belong to one part, or in groups of 32 to two.
 */

enum {
    TOKEN_BLOCK = 240,      /* tokens whose starts lie in the scratch: their x fits L2 beside a panel pair */
};

static code_kind code_kind_of(const kt_format *f)
{
    if (f->bits != 4)
        return f->bits == 8 ? CODES_INT8 : CODES_LINEAR6;
    for (int i = 0; i < 16; i++)
        if (f->codebook[i] != f->codebook[0] + i)
            return CODES_BOOK4;
    return DOT_LINEAR4 ? CODES_LINEAR4 : CODES_BOOK4;
}

/* What dot products are short of when weights are made unsigned (see vi_dot), per unit of sum x. */
static int32_t dot_bias(const kt_format *f)
{
    switch (code_kind_of(f)) {
    case CODES_INT8:
        return DOT_BIAS_INT8;
    case CODES_LINEAR4:
        return f->codebook[0];
    case CODES_LINEAR6:
        return LEAST_6;
    default:
        return DOT_BIAS_BOOK4(f->codebook);
    }
}

/* A thread's memory for one product. */
typedef struct int8_scratch {
    int32_t *start;         /* [TOKEN_BLOCK][parts]: where the int32 sums of a token begin; in blocks [parts][BLOCK_ROOM] */
    float *scales;          /* [GEMM_PANELS][groups][16] */
    int32_t *later;         /* [GEMV_TOKENS][parts of 32][16]: a stream's sums that wait for their scales */
    uint8_t *blocks;        /* where is_blocked: block_bytes() */
} int8_scratch;

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

#include "stream_int8.inc.c"
#include "tile_int8.inc.c"
#include "block_int8.inc.c"

static size_t int8_scratch_bytes(const kt_format *f, int64_t k)
{
    layout l = layout_of(f, k);
    size_t parts = (size_t)(l.k_padded / (f->group == 32 ? 32 : KT_ACT_GROUP));
    return parts * BLOCK_ROOM * 4 + (size_t)l.groups * GEMM_PANELS * 64 + (size_t)l.k_padded * GEMV_TOKENS * 2 + 192 +
           (is_blocked(f) ? block_bytes(&l) : 0);
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
    s.blocks = at + (size_t)l->groups * BLOCK_ROOM * 4;
    return s;
}

/* The most tokens that are streamed; codes that take more operations to unpack than linear ones of 4 bits: 2. */
static int64_t stream_most(const product *p)
{
    code_kind kind = code_kind_of(p->format);
    int64_t most = kind == CODES_INT8 ? p->tuning.stream_int8 : kind == CODES_LINEAR4 ? p->tuning.stream_int4 : 2;
    int64_t room = kind == CODES_INT8 ? STREAM_MOST_INT8 : STREAM_MOST_INT4;
    return most < room ? most : room;
}

static void product_int8(const product *p)
{
    layout l = layout_of(p->format, p->k);
    int8_scratch s = int8_scratch_at(&l, p->scratch);
    if (p->n_tokens <= stream_most(p)) {
        fill_starts(p, &l, 0, p->n_tokens, s.start);
        stream_block(p, &l, &s);
        return;
    }
    int blocked = takes_blocks(p, &l);
    for (int64_t t = 0; t < p->n_tokens; t += TOKEN_BLOCK) {
        int64_t n = p->n_tokens - t < TOKEN_BLOCK ? p->n_tokens - t : TOKEN_BLOCK;
        blocked ? block_block(p, &l, &s, t, n) : tile_block(p, &l, &s, t, n);
    }
}
