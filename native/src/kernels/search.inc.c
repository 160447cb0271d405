/* search.inc.c - the search of 4-bit scales, as specified in formats.h, with nothing that changes a result.
 *
 * Sixteen groups at once, those of a panel's rows at the same columns: lane r is row r, so a candidate costs no
 * sum over lanes, no branch and a sixteenth of a division. Column j of the groups is x[j]. Groups of whole rows
 * are walked in pieces of PIECE columns, all candidates in each, so that a piece is turned once.
 */

typedef struct codebook {
    float value[16], mid[16];       /* mid[15] is not used */
    int is_linear;                  /* value[i] = value[0] + i: nearest by rounding */
} codebook;

static codebook codebook_of(const kt_format *f)
{
    codebook b = {.is_linear = 1};
    for (int i = 0; i < 16; i++) {
        b.value[i] = f->codebook[i];
        b.is_linear &= b.value[i] == b.value[0] + (float)i;
    }
    for (int i = 0; i < 15; i++)
        b.mid[i] = (b.value[i] + b.value[i + 1]) / 2.0f;
    return b;
}

/* The codebook's value nearest to v, ties to the lower. */
INLINE vf nearest_value(const codebook *b, int is_linear, vf v)
{
    if (!is_linear)
        return vf_lookup(b->value, vf_nearest(v, b->mid));
    vf c = vf_fix_tie(vf_rint(v), v);
    return vf_min(vf_max(c, vf_set1(b->value[0])), vf_set1(b->value[15]));
}

INLINE float round_scale(int32_t type, float s)
{
    return type == KT_SCALE_BF16 ? float_of_bf16(bf16_of_float(s)) : s;
}

/* to[r] = m[r] / divisor, rounded to the type of the scales. */
INLINE void divide_scales(int32_t type, const float *m, float divisor, float *to)
{
    uint16_t half[LANES];
    vf s = vf_div(vf_load(m), vf_set1(divisor));
    if (type == KT_SCALE_BF16) {
        vf_store_bf16(half, s);
        s = vf_from_bf16(half);
    }
    vf_store(to, s);
}

enum {
    PIECE = 128,
    CANDIDATES = 2 * (SEARCH_LAST - SEARCH_FIRST + 1),
};

/* Where the groups lie: row r's column c at x + r * k + c, `valid` columns of `rows` rows; the rest is 0. */
typedef struct row_groups {
    const float *x, *importance;    /* importance: of the first column, or NULL */
    int64_t k, size, valid;
    int rows;
} row_groups;

/* Columns [first, first + n) of the groups, and their importance. */
static void turn_piece(const row_groups *g, int64_t first, int64_t n, float (*x)[LANES], float *importance)
{
    float edge[LANES][LANES];
    const uint8_t *row[LANES];
    for (int64_t c = 0; c < n; c += LANES) {
        for (int r = 0; r < LANES; r++) {
            int64_t left = r < g->rows ? g->valid - first - c : 0;
            const float *from = left > 0 ? g->x + r * g->k + first + c : NULL;
            for (int j = 0; left < LANES && j < LANES; j++)
                edge[r][j] = j < left ? from[j] : 0.0f;
            row[r] = (const uint8_t *)(left < LANES ? edge[r] : from);
        }
        transpose16(row, (uint8_t *)x[c]);
        for (int j = 0; g->importance && j < LANES; j++)
            importance[c + j] = first + c + j < g->valid ? g->importance[first + c + j] : 0.0f;
    }
}

/* q[c] += squared errors of columns c, c + 16, ... of a piece at one candidate scale. */
INLINE void add_errors(const codebook *b, int is_linear, const float (*x)[LANES], const float *importance, int64_t n,
                       const float *scale, vf *q)
{
    vf s = vf_load(scale), inv = vf_div(vf_set1(1.0f), s);
    for (int c = 0; c < LANES; c++)
        for (int64_t j = c; j < n; j += LANES) {
            vf value = vf_load(x[j]);
            vf e = vf_sub(value, vf_mul(nearest_value(b, is_linear, vf_mul(value, inv)), s));
            vf square = vf_mul(e, e);
            q[c] = vf_add(q[c], importance ? vf_mul(square, vf_set1(importance[j])) : square);
        }
}

/* The same with the common sizes as constants, so that the inner loop is unrolled. */
static void add_piece(const codebook *b, const float (*x)[LANES], const float *importance, int64_t n,
                      const float *scale, vf *q)
{
    if (!b->is_linear)
        add_errors(b, 0, x, importance, n, scale, q);
    else if (importance)
        add_errors(b, 1, x, importance, n, scale, q);
    else if (n == 32)
        add_errors(b, 1, x, NULL, 32, scale, q);
    else if (n == 64)
        add_errors(b, 1, x, NULL, 64, scale, q);
    else
        add_errors(b, 1, x, NULL, n, scale, q);
}

INLINE vf tree_total(vf *q)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int c = 0; c < half; c++)
            q[c] = vf_add(q[c], q[c + half]);
    return q[0];
}

/* Magnitudes of the errors of a piece at one candidate scale: the greatest so far in *worst. Stops where no lane is
 * exact any more. */
INLINE void raise_worst(const codebook *b, int is_linear, const float (*x)[LANES], int64_t n, const float *scale,
                        vf *worst)
{
    vf s = vf_load(scale), inv = vf_div(vf_set1(1.0f), s), least = vf_set1(0x1p-149f);
    for (int64_t j = 0; j < n && vf_any_above(least, *worst); j++) {
        vf value = vf_load(x[j]);
        *worst = vf_max(vf_abs(vf_sub(value, vf_mul(nearest_value(b, is_linear, vf_mul(value, inv)), s))),
                        *worst);
    }
}

/* What the search knows of its sixteen groups. */
typedef struct search {
    float m[LANES];                         /* the value of the largest magnitude; 0: the group is a zero */
    float exact[16][LANES], scale[CANDIDATES][LANES];
    int n;                                  /* candidates; a scale of 0: none */
} search;

static void find_largest(const row_groups *g, float *m)
{
    for (int r = 0; r < LANES; r++) {
        vf high = vf_set1(0.0f), low = vf_set1(0.0f);
        for (int64_t c = 0; r < g->rows && c < g->valid; c += LANES) {
            vf v = vf_load_upto(g->x + r * g->k, c, g->valid);
            high = vf_max(high, v);
            low = vf_max(low, vf_sub(vf_set1(0.0f), v));
        }
        float hi = vf_top(high), lo = vf_top(low);
        m[r] = hi >= lo ? hi : -lo;
        m[r] = fabsf(m[r]) < GROUP_TINY ? 0.0f : m[r];
    }
}

/* Steps 3 and 4 of the specification: which scales are tried. */
static void list_candidates(const codebook *b, int32_t type, search *f)
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
            divide_scales(type, f->m, b->value[i], f->exact[i]);
    for (int j = SEARCH_FIRST; j <= SEARCH_LAST; j++)
        for (int at = 0; at < 16; at += 15)
            if (b->value[at] != 0.0f)
                divide_scales(type, f->m, b->value[at] * ((float)j / 32.0f), f->scale[f->n++]);
}

/* The scales of sixteen 4-bit groups, 0 where one encodes as zero. Steps 1 to 4 of the specification. */
static void search_scales(const codebook *b, int32_t type, const row_groups *g, float *chosen)
{
    search f;
    vf worst[16], q[CANDIDATES][LANES];
    float x[PIECE][LANES] ALIGNED, importance[PIECE], best[LANES];
    find_largest(g, f.m);
    list_candidates(b, type, &f);
    for (int i = 0; i < 16; i++) {
        for (int r = 0; r < LANES; r++)
            best[r] = f.exact[i][r] == 0.0f ? INFINITY : 0.0f;
        worst[i] = vf_load(best);
    }
    int whole = g->size <= PIECE;           /* then the sums of one candidate need not wait */
    for (int r = 0; r < LANES; r++) {
        chosen[r] = 0.0f;
        best[r] = INFINITY;
    }
    for (int64_t c = 0; c < g->size; c += PIECE) {
        int64_t n = g->size - c < PIECE ? g->size - c : PIECE;
        turn_piece(g, c, n, x, importance);
        for (int i = 0; i < 16; i++)
            if (b->is_linear)
                raise_worst(b, 1, (const float (*)[LANES])x, n, f.exact[i], &worst[i]);
            else
                raise_worst(b, 0, (const float (*)[LANES])x, n, f.exact[i], &worst[i]);
        for (int i = 0; i < f.n; i++) {
            vf *sum = q[whole ? 0 : i];
            for (int l = 0; c == 0 && l < LANES; l++)
                sum[l] = vf_set1(0.0f);
            add_piece(b, (const float (*)[LANES])x, g->importance ? importance : NULL, n, f.scale[i], sum);
            if (c + n < g->size)
                continue;
            float error[LANES];
            vf_store(error, tree_total(sum));
            for (int r = 0; r < LANES; r++) {
                int better = f.scale[i][r] != 0.0f && error[r] < best[r];
                best[r] = better ? error[r] : best[r];
                chosen[r] = better ? f.scale[i][r] : chosen[r];
            }
        }
    }
    for (int i = 15; i >= 0; i--) {         /* the first exact one stands last */
        float off[LANES];
        vf_store(off, worst[i]);
        for (int r = 0; r < LANES; r++)
            chosen[r] = off[r] == 0.0f ? f.exact[i][r] : chosen[r];
    }
}
