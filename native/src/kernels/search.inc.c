/* search.inc.c - the search for scales of 4 and 6 bits, as specified in formats.h, without anything that
 * changes a result.
 *
 * Sixteen groups at once, those of a panel's rows at the same columns: lane r is row r, so a candidate costs no
 * sum over lanes, no branch and a sixteenth of a division. Column j of the groups is x[j]. Groups of whole rows
 * are walked in pieces of PIECE columns, all candidates in each, so that a piece is turned once.
 */

enum { BINS = 32 };

/* What lies nearest to v: values between the same two of `mid` have the same. v falls into one of BINS bins, and in
 * bin i first[i] middles are behind it; where no two are in one bin, one comparison decides. */
typedef struct codebook {
    float value[16], mid[16];       /* mid[15]: infinite. Of bits 6: the 8 least and the 8 greatest values */
    int32_t first[BINS];
    float scale, offset;            /* bin = rint(v * scale + offset), in 0..BINS - 1 */
    int has_bins;
    int is_linear;                  /* one value follows another by 1: nearest by rounding */
} codebook;

static void fill_bins(codebook *b)
{
    int bin[15];
    b->has_bins = !b->is_linear && b->mid[0] < b->mid[14];
    b->scale = b->has_bins ? (BINS - 2) / (b->mid[14] - b->mid[0]) : 0.0f;
    b->offset = 0.5f - b->mid[0] * b->scale;
    for (int i = 0; i < 15; i++) {
        bin[i] = (int)fminf(fmaxf(rintf(fmaf(b->mid[i], b->scale, b->offset)), 0.0f), BINS - 1);
        b->has_bins &= i == 0 || bin[i] > bin[i - 1];
    }
    for (int i = 0; i < BINS; i++) {
        b->first[i] = 0;
        for (int j = 0; j < 15; j++)
            b->first[i] += bin[j] < i;
    }
}

static codebook codebook_of(const kt_format *f)
{
    codebook b = {.is_linear = 1};
    for (int i = 0; i < 16; i++) {
        b.value[i] = f->bits == 6 ? (float)(LEAST_6 + i + (i < 8 ? 0 : 48)) : f->codebook[i];
        b.is_linear &= f->bits == 6 || b.value[i] == b.value[0] + (float)i;
    }
    for (int i = 0; i < 15; i++)
        b.mid[i] = (b.value[i] + b.value[i + 1]) / 2.0f;
    b.mid[15] = INFINITY;
    fill_bins(&b);
    return b;
}

/* How many middles are < v. */
INLINE vi nearest_index(const codebook *b, vf v)
{
    if (!b->has_bins)
        return vf_nearest(v, b->mid);
    vf bin = vf_rint(vf_fma(v, vf_set1(b->scale), vf_set1(b->offset)));
    vi first = vi_lookup32(b->first, vi_of_vf(vf_min(vf_max(bin, vf_set1(0.0f)), vf_set1(BINS - 1))));
    return vi_add_above(first, v, vf_lookup(b->mid, first));
}

/* The codebook's value nearest to v, ties to the lower. */
INLINE vf nearest_value(const codebook *b, int is_linear, vf v)
{
    if (!is_linear)
        return vf_lookup(b->value, nearest_index(b, v));
    vf c = vf_fix_tie(vf_rint(v), v);
    return vf_min(vf_max(c, vf_set1(b->value[0])), vf_set1(b->value[15]));
}

INLINE float round_scale(int32_t type, float s)
{
    return type == KT_SCALE_BF16 ? float_of_bf16(bf16_of_float(s)) : s;
}

/* The sizes that e4m3 scales of each lane's row can have. */
typedef struct size_range {
    float least[LANES], most[LANES];
} size_range;

/* scale_e4m3 of each lane. */
INLINE vf vf_round_e4m3(vf s, const size_range *range)
{
    vf none = vf_set1(0.0f), size = vf_abs(s);
    vi u = vi_bits(size), sign = vi_and(vi_bits(s), INT32_MIN);
    u = vi_add(vi_add(u, vi_set1(0x7ffff)), vi_and(vi_shr(u, 20), 1));
    vf rounded = vf_max(vf_bits(vi_and(u, (int32_t)0xfff00000u)), vf_load(range->least));
    rounded = vf_less(none, size, vf_min(rounded, vf_load(range->most)), none);
    return vf_bits(vi_add(vi_bits(rounded), sign));
}

/* to[r] = m[r] / divisor, rounded to the type of the scales. */
INLINE void divide_scales(int32_t type, const size_range *range, const float *m, float divisor, float *to)
{
    uint16_t half[LANES];
    vf s = vf_div(vf_load(m), vf_set1(divisor));
    if (type == KT_SCALE_BF16) {
        vf_store_bf16(half, s);
        s = vf_from_bf16(half);
    }
    vf_store(to, type == KT_SCALE_E4M3 ? vf_round_e4m3(s, range) : s);
}

enum {
    PIECE = 128,
    CANDIDATES = 2 * (SEARCH_LAST - SEARCH_FIRST + 1),
};

/* Where the groups lie: columns [first, first + valid) of the rows x; the rest is 0, and rows that are NULL. */
typedef struct row_groups {
    const float *const *x, *importance;     /* importance: of column `first`, or NULL */
    const size_range *range;                /* of scales e4m3 */
    int64_t first, size, valid;
} row_groups;

/* Columns [first, first + n) of the groups, and their importance. */
static void turn_piece(const row_groups *g, int64_t first, int64_t n, float (*x)[LANES], float *importance)
{
    float edge[LANES][LANES];
    const uint8_t *row[LANES];
    for (int64_t c = 0; c < n; c += LANES) {
        for (int r = 0; r < LANES; r++) {
            int64_t left = g->x[r] ? g->valid - first - c : 0;
            const float *from = left > 0 ? g->x[r] + g->first + first + c : NULL;
            for (int j = 0; left < LANES && j < LANES; j++)
                edge[r][j] = j < left ? from[j] : 0.0f;
            row[r] = (const uint8_t *)(left < LANES ? edge[r] : from);
        }
        transpose16(row, (uint8_t *)x[c]);
        for (int j = 0; g->importance && j < LANES; j++)
            importance[c + j] = first + c + j < g->valid ? g->importance[first + c + j] : 0.0f;
    }
}

/* The codebook's value that the search takes for v: where that is by rounding, of two as near the even one. */
INLINE vf value_near(const codebook *b, int is_linear, vf v)
{
    if (!is_linear)
        return vf_lookup(b->value, nearest_index(b, v));
    return vf_min(vf_max(vf_rint(v), vf_set1(b->value[0])), vf_set1(b->value[15]));
}

/* Columns of the groups that were turned, of which the first n are some, and their importance or NULL. */
typedef struct piece {
    const float (*x)[LANES], *importance;
    int64_t n;
} piece;

/* A scale that is tried, and 1 / scale. */
typedef struct trial {
    vf scale, inv;
} trial;

/* sum + squared errors of columns c, c + 16, ... */
INLINE vf add_errors(const codebook *b, int is_linear, const piece *p, const trial *t, int64_t c, vf sum)
{
    for (int64_t j = c; j < p->n; j += LANES) {
        vf x = vf_load(p->x[j]);
        vf e = vf_sub(x, vf_mul(value_near(b, is_linear, vf_mul(x, t->inv)), t->scale)), square = vf_mul(e, e);
        sum = vf_add(sum, p->importance ? vf_mul(square, vf_set1(p->importance[j])) : square);
    }
    return sum;
}

#if SEARCH_UNROLLED
/* The total, from the leaves of its tree on, so that few sums are open at any time. */
INLINE vf errors_8(const codebook *b, int is_linear, const piece *p, const trial *t, int64_t c)
{
    return vf_add(add_errors(b, is_linear, p, t, c, vf_set1(0.0f)),
                  add_errors(b, is_linear, p, t, c + 8, vf_set1(0.0f)));
}

INLINE vf errors_4(const codebook *b, int is_linear, const piece *p, const trial *t, int64_t c)
{
    return vf_add(errors_8(b, is_linear, p, t, c), errors_8(b, is_linear, p, t, c + 4));
}

INLINE vf errors_2(const codebook *b, int is_linear, const piece *p, const trial *t, int64_t c)
{
    return vf_add(errors_4(b, is_linear, p, t, c), errors_4(b, is_linear, p, t, c + 2));
}

INLINE vf errors_1(const codebook *b, int is_linear, const piece *p, const trial *t)
{
    return vf_add(errors_2(b, is_linear, p, t, 0), errors_2(b, is_linear, p, t, 1));
}

/* Of groups that are one piece; the common sizes as constants, so that the loops are unrolled. */
static vf whole_error(const codebook *b, const piece *p, const trial *t)
{
    piece usual = {p->x, NULL, 32};
    if (p->importance || p->n > 64)
        return b->is_linear ? errors_1(b, 1, p, t) : errors_1(b, 0, p, t);
    if (p->n == 64) {
        usual.n = 64;
        return b->is_linear ? errors_1(b, 1, &usual, t) : errors_1(b, 0, &usual, t);
    }
    return b->is_linear ? errors_1(b, 1, &usual, t) : errors_1(b, 0, &usual, t);
}
#endif

/* Of groups of several pieces, up to this one; the sums are kept in q. */
static vf piece_error(const codebook *b, const piece *p, const trial *t, int is_first, vf *q)
{
    vf sums[LANES];
    for (int c = 0; c < LANES; c++) {
        vf sum = is_first ? vf_set1(0.0f) : q[c];
        sums[c] = q[c] = b->is_linear ? add_errors(b, 1, p, t, c, sum) : add_errors(b, 0, p, t, c, sum);
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int c = 0; c < half; c++)
            sums[c] = vf_add(sums[c], sums[c + half]);
    return sums[0];
}

/* Magnitudes of the errors of a piece at one candidate scale: the greatest so far in *worst. Stops where no lane is
 * exact any more. */
INLINE void raise_worst(const codebook *b, int is_linear, const piece *p, const float *scale, vf *worst)
{
    vf s = vf_load(scale), inv = vf_div(vf_set1(1.0f), s), least = vf_set1(0x1p-149f);
    for (int64_t j = 0; j < p->n && vf_any_above(least, *worst); j++) {
        vf x = vf_load(p->x[j]), v = vf_mul(nearest_value(b, is_linear, vf_mul(x, inv)), s);
        *worst = vf_max(vf_abs(vf_sub(x, v)), *worst);
    }
}

/* What the search knows of its sixteen groups. */
typedef struct search {
    float m[LANES];                         /* the value of the largest magnitude; 0: the group is a zero */
    float exact[16][LANES], scale[CANDIDATES][LANES];
    int n;                                  /* candidates; a scale of 0: none */
} search;

/* Raises the greatest values and magnitudes of negative ones by those of a piece. */
INLINE void raise_ends(const piece *p, vf *high, vf *low)
{
    for (int64_t j = 0; j < p->n; j++) {
        vf v = vf_load(p->x[j]);
        *high = vf_max(*high, v);
        *low = vf_max(*low, vf_sub(vf_set1(0.0f), v));
    }
}

/* The e4m3 scales with which the largest value lies near `end`. */
static void list_sizes(const size_range *range, search *f, float end)
{
    vf most = vf_load(range->most), none = vf_set1(0.0f);
    divide_scales(KT_SCALE_E4M3, range, f->m, end * (SEARCH_LAST / 32.0f), f->scale[f->n]);
    vf first = vf_load(f->scale[f->n]), size = vf_abs(first);
    vi sign = vi_and(vi_bits(first), INT32_MIN);
    for (int i = 0; i < SCALE_E4M3_SIZES; i++, f->n++) {
        vf next = vf_min(vf_bits(vi_add(vi_bits(size), vi_set1(i << 20))), most);
        next = vf_less(none, size, next, none);
        vf_store(f->scale[f->n], vf_bits(vi_add(vi_bits(next), sign)));
    }
}

/* Steps 3 and 4 of the specification: which scales are tried. */
static void list_candidates(const codebook *b, int32_t type, const size_range *range, search *f)
{
    float end = fmaxf(fabsf(b->value[0]), fabsf(b->value[15]));
    int span = end >= 1.0f ? (int)(bits_of_float(end) >> 23 & 255) - 127 : 0;
    f->n = 0;
    memset(f->exact, 0, sizeof f->exact);
    for (int i = 0; type == KT_SCALE_E8M0 && i <= span; i++, f->n++)
        for (int r = 0; r < LANES; r++) {
            int e = (int)(bits_of_float(f->m[r]) >> 23 & 255) - 127 - i;
            int usable = f->m[r] != 0.0f && e >= -126 && e <= 127;
            f->scale[f->n][r] = usable ? float_of_bits((uint32_t)(e + 127) << 23) : 0.0f;
        }
    if (type == KT_SCALE_E8M0)
        return;
    for (int i = 0; i < 16; i++)
        if (b->value[i] != 0.0f)
            divide_scales(type, range, f->m, b->value[i], f->exact[i]);
    for (int at = 0; type == KT_SCALE_E4M3 && at < 16; at += 15)
        if (b->value[at] != 0.0f)
            list_sizes(range, f, b->value[at]);
    for (int j = SEARCH_FIRST; type != KT_SCALE_E4M3 && j <= SEARCH_LAST; j++)
        for (int at = 0; at < 16; at += 15)
            if (b->value[at] != 0.0f)
                divide_scales(type, range, f->m, b->value[at] * ((float)j / 32.0f), f->scale[f->n++]);
}

/* What the exact candidates leave over: worst[i], infinite where there is no such candidate. */
static void find_worst(const codebook *b, const search *f, const piece *p, vf *worst)
{
    for (int i = 0; i < 16; i++)
        if (b->is_linear)
            raise_worst(b, 1, p, f->exact[i], &worst[i]);
        else
            raise_worst(b, 0, p, f->exact[i], &worst[i]);
}

/* The scales of sixteen groups, 0 where one encodes as zero. Steps 1 to 4 of the specification. */
static void search_scales(const codebook *b, int32_t type, const row_groups *g, float *chosen)
{
    search f;
    vf worst[16], q[CANDIDATES][LANES], none = vf_set1(0.0f), endless = vf_set1(INFINITY);
    vf high = none, low = none, best = endless, scale = none;
    float turned[PIECE][LANES] ALIGNED, importance[PIECE];
    piece p = {(const float (*)[LANES])turned, g->importance ? importance : NULL, 0};
    for (int64_t c = 0; c < g->size; c += PIECE) {
        p.n = g->size - c < PIECE ? g->size - c : PIECE;
        turn_piece(g, c, p.n, turned, importance);
        raise_ends(&p, &high, &low);
    }
    vf largest = vf_less(high, low, vf_sub(none, low), high);
    vf_store(f.m, vf_less(vf_abs(largest), vf_set1(GROUP_TINY), none, largest));
    list_candidates(b, type, g->range, &f);
    for (int i = 0; i < 16; i++)
        worst[i] = vf_less(none, vf_abs(vf_load(f.exact[i])), none, endless);
    for (int64_t c = 0; c < g->size; c += PIECE) {
        p.n = g->size - c < PIECE ? g->size - c : PIECE;
        if (g->size > PIECE)
            turn_piece(g, c, p.n, turned, importance);
        find_worst(b, &f, &p, worst);
        for (int i = 0; i < f.n; i++) {
            vf s = vf_load(f.scale[i]);
            trial t = {s, vf_div(vf_set1(1.0f), s)};
#if SEARCH_UNROLLED
            vf error = g->size <= PIECE ? whole_error(b, &p, &t) : piece_error(b, &p, &t, c == 0, q[i]);
#else
            vf error = piece_error(b, &p, &t, c == 0, q[i]);
#endif
            error = vf_less(none, vf_abs(s), error, endless);
            if (c + p.n == g->size) {
                scale = vf_less(error, best, s, scale);
                best = vf_less(error, best, error, best);
            }
        }
    }
    for (int i = 15; i >= 0; i--)           /* the first exact one stands last */
        scale = vf_less(none, worst[i], scale, vf_load(f.exact[i]));
    vf_store(chosen, scale);
}

/* Sums of squares of one row, lane by lane: errors and values; and what the columns' importance makes of them. */
typedef struct row_error {
    vf wrong, square, out_wrong, out_square, out_stored;
} row_error;

/* Sixteen columns more. */
INLINE void add_row_error(row_error *error, vf value, vf stored, vf weight)
{
    vf e = vf_sub(value, stored), wrong = vf_mul(e, e), square = vf_mul(value, value);
    error->wrong = vf_add(error->wrong, wrong);
    error->square = vf_add(error->square, square);
    error->out_wrong = vf_add(error->out_wrong, vf_mul(wrong, weight));
    error->out_square = vf_add(error->out_square, vf_mul(square, weight));
    error->out_stored = vf_add(error->out_stored, vf_mul(vf_mul(stored, stored), weight));
}
