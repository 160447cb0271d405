/* encode.inc.c - f32 rows to one packed panel. The algorithm and its order of operations are specified
 * in formats.h; here they are run 16 columns at a time, with nothing that changes a result.
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

/* ---- the search of 4-bit scales ----
 *
 * Sixteen groups at once, those of a panel's rows at the same columns: lane r is row r, so a candidate costs no
 * sum over lanes, no branch and a sixteenth of a division. Column j of the groups is x[j]. Groups of whole rows
 * are walked in pieces of PIECE columns, all candidates in each, so that a piece is turned once. */

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

/* ---- codes ---- */

/* The scale of an 8-bit group. */
static float amax_scale(const kt_format *f, const float *x, int64_t valid)
{
    int32_t type = f->scale;
    vf top = vf_set1(0.0f);
    for (int64_t c = 0; c < valid; c += LANES)
        top = vf_max(top, vf_abs(vf_load_upto(x, c, valid)));
    float amax = vf_top(top), s = amax / (f->codes == KT_CODE_E4M3 ? E4M3_MOST : 127.0f);
    if (amax < GROUP_TINY)
        return 0.0f;
    if (type == KT_SCALE_E8M0) {
        uint32_t u = bits_of_float(s);
        s = float_of_bits((u + 0x7fffffu) & 0x7f800000u);      /* up to a power of two */
    }
    return round_scale(type, s);
}

/* Codes of 16 columns from column c of row r on, 4 bytes (columns) per code line. */
INLINE void store_codes(int bits, uint8_t *panel, const layout *l, int64_t c, int r, vi codes)
{
    uint32_t word[4], there;
    uint8_t byte[LANES], *at = panel + (size_t)(c / 64) * l->step_bytes + 4 * r;
    int64_t in = c % 64;
    vi_store8(byte, codes);
    memcpy(word, byte, sizeof word);
    for (int q = 0; q < 4; q++) {
        uint8_t *to = at + 16 * ((bits == 4 ? in % 32 : in) + 4 * q);
        if (bits == 4 && in >= 32) {
            memcpy(&there, to, 4);
            word[q] = there | word[q] << 4;
        }
        memcpy(to, &word[q], 4);
    }
}

/* The codes nearest to v; *value what they mean. */
static vi nearest_e4m3(vf v, vf *value)
{
    float lane[LANES];
    int32_t code[LANES];
    vf_store(lane, v);
    for (int i = 0; i < LANES; i++) {
        uint8_t byte = e4m3_of_float(lane[i]);
        code[i] = (int8_t)byte;
        lane[i] = float_of_e4m3(byte);
    }
    *value = vf_load(lane);
    return vi_load(code);
}

/* Sums of squares of one row, lane by lane: errors and values; and what the columns' importance makes of them. */
typedef struct row_error {
    vf wrong, square, out_wrong, out_square, out_stored;
} row_error;

/* One group of one row with its scale: its codes, its error; `c` is its first column. */
static void encode_group(const kt_format *f, const layout *l, const codebook *b, const float *x,
                         const float *importance, int64_t valid, int64_t c, int r, float s, uint8_t *panel,
                         row_error *error)
{
    vf inv = vf_set1(s == 0.0f ? 0.0f : 1.0f / s);
    for (int64_t i = 0; i < l->group; i += LANES) {
        vf value = vf_load_upto(x, i, valid), v = vf_mul(value, inv), code;
        vi index;
        if (f->codes == KT_CODE_E4M3) {
            index = nearest_e4m3(v, &code);
        } else if (f->bits == 8) {
            code = vf_min(vf_max(vf_rint(v), vf_set1(-127.0f)), vf_set1(127.0f));
            index = vi_of_vf(code);
        } else if (b->is_linear) {
            code = nearest_value(b, 1, v);
            index = vi_of_vf(vf_sub(code, vf_set1(b->value[0])));
        } else {
            index = vf_nearest(v, b->mid);
            code = vf_lookup(b->value, index);
        }
        store_codes(f->bits, panel, l, c + i, r, index);
        if (i >= valid)
            continue;
        vf stored = vf_mul(code, vf_set1(s));
        if (i + LANES > valid) {            /* padding columns have no error */
            float tail[LANES];
            vf_store(tail, stored);
            stored = vf_load_n(tail, (int)(valid - i));
        }
        vf e = vf_sub(value, stored), weight = importance ? vf_load_upto(importance, i, valid) : vf_set1(1.0f);
        error->wrong = vf_add(error->wrong, vf_mul(e, e));
        error->square = vf_add(error->square, vf_mul(value, value));
        error->out_wrong = vf_add(error->out_wrong, vf_mul(vf_mul(e, e), weight));
        error->out_square = vf_add(error->out_square, vf_mul(vf_mul(value, value), weight));
        error->out_stored = vf_add(error->out_stored, vf_mul(vf_mul(stored, stored), weight));
    }
}

/* bits 16 and 32: the values themselves. */
static void encode_plain(int bits, const layout *l, int64_t k, const float *x, const float *importance, int r,
                         uint8_t *panel, kt_pack_error *error)
{
    for (int64_t c = 0; c < l->k_padded; c++) {
        float value = c < k ? x[c] : 0.0f;
        uint16_t half = bf16_of_float(value);
        if (bits == 32)
            memcpy(panel + 64 * c + 4 * r, &value, 4);
        else
            memcpy(panel + 64 * (c / 2) + 4 * r + 2 * (c % 2), &half, 2);
        double stored = bits == 32 ? (double)value : (double)float_of_bf16(half), e = (double)value - stored;
        double weight = importance && c < k ? (double)importance[c] : 1.0;
        error->sum_sq_error += e * e;
        error->sum_sq += (double)value * (double)value;
        error->out_error += weight * e * e;
        error->out_sq += weight * (double)value * (double)value;
        error->out_stored += weight * stored * stored;
    }
}

/* The scale that a group was given, 0 if there is none that can be used. */
static float usable_scale(const float *given)
{
    float size = given ? fabsf(*given) : 0.0f;
    return size >= GROUP_TINY && size <= 1.0f / GROUP_TINY ? *given : 0.0f;
}

static void encode_panel(const kt_format *f, int64_t n, int64_t k, const float *src, const float *scales,
                         const float *importance, int64_t row, uint8_t *dst, kt_pack_error *error)
{
    layout l = layout_of(f, k);
    codebook b = codebook_of(f);
    int rows = n - row < LANES ? (int)(n - row) : LANES;
    const float *x = src + row * k;
    if (f->bits >= 16) {
        for (int r = 0; r < LANES; r++)
            encode_plain(f->bits, &l, r < rows ? k : 0, r < rows ? x + r * k : x, importance, r, dst, error);
        return;
    }
    row_error sums[LANES];
    for (int r = 0; r < LANES; r++)
        sums[r].wrong = sums[r].square = sums[r].out_wrong = sums[r].out_square = sums[r].out_stored = vf_set1(0.0f);
    memset(dst + l.scale_offset, 0, l.panel_bytes - l.scale_offset);
    for (int64_t g = 0; g < l.groups; g++) {
        int64_t c = g * l.group, valid = k < c ? 0 : k - c < l.group ? k - c : l.group;
        const float *at = valid ? x + c : x, *weight = importance && valid ? importance + c : NULL;
        row_groups groups = {at, weight, k, l.group, valid, rows};
        float found[LANES] = {0}, given[LANES];
        int missing = 0;
        for (int r = 0; r < LANES; r++) {
            int has = scales && valid && r < rows;
            given[r] = usable_scale(has ? scales + (row + r) * l.groups + g : NULL);
            missing |= given[r] == 0.0f && r < rows;
        }
        if (f->bits == 4 && missing)
            search_scales(&b, f->scale, &groups, found);
        for (int r = 0; r < LANES; r++) {
            int64_t columns = r < rows ? valid : 0;
            const float *from = columns ? at + r * k : x;
            float s = given[r];
            if (s == 0.0f && f->bits == 8)
                s = amax_scale(f, from, columns);
            else if (s == 0.0f)
                s = found[r];
            encode_group(f, &l, &b, from, weight, columns, c, r, s, dst, &sums[r]);
            scale_store(f->scale, s, dst + l.scale_offset, 16 * g + r);
        }
    }
    for (int r = 0; r < rows; r++) {
        error->sum_sq_error += (double)vf_sum(sums[r].wrong);
        error->sum_sq += (double)vf_sum(sums[r].square);
        error->out_error += (double)vf_sum(sums[r].out_wrong);
        error->out_sq += (double)vf_sum(sums[r].out_square);
        error->out_stored += (double)vf_sum(sums[r].out_stored);
    }
}
