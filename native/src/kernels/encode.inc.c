/* encode.inc.c - encodes f32 rows as one packed panel. The algorithm and its order of
 * operations are specified in formats.h; here they are run 16 columns at a time, with nothing
 * that changes a result. */

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
        int64_t line = bits == 8 ? in / 4 + q : in % 32 / 4 + q;
        uint32_t lower = bits == 8 ? word[q] : word[q] & 0x0f0f0f0fu, upper = word[q] >> 4 & 0x03030303u;
        memcpy(&there, at + 64 * line, 4);
        lower = bits != 8 && in >= 32 ? there | lower << 4 : lower;
        memcpy(at + 64 * line, &lower, 4);
        if (bits != 6)
            continue;
        int shift = two_bits(in / 4 + q);
        memcpy(&there, at + 512 + 64 * (line / 2), 4);
        upper = shift ? there | upper << shift : upper;
        memcpy(at + 512 + 64 * (line / 2), &upper, 4);
    }
}

/* The codes nearest to v, as e4m3_of_float finds them; *value what they mean, as float_of_e4m3 does. */
INLINE vi nearest_e4m3(vf v, vf *value)
{
    vf size = vf_min(vf_abs(v), vf_set1(E4M3_MOST));
    vi u = vi_bits(size), sign = vi_and(vi_bits(v), INT32_MIN), odd = vi_and(vi_shr(u, 20), 1);
    vi normal = vi_shr(vi_add(vi_add(u, vi_set1(0x7ffff)), odd), 20);
    vf code = vf_less(size, vf_set1(0x1p-6f), vf_rint(vf_mul(size, vf_set1(0x1p9f))),
                      vf_of_vi(vi_add(normal, vi_set1(-(120 << 3)))));
    vi byte = vi_of_vf(code);
    vf found = vf_mul(vf_bits(vi_shl(byte, 20)), vf_set1(0x1p120f));
    *value = vf_bits(vi_add(vi_bits(found), sign));
    return vi_add(byte, vi_sar(sign, 24));
}

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
            index = nearest_index(b, v);
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
        add_row_error(error, value, stored, importance ? vf_load_upto(importance, i, valid) : vf_set1(1.0f));
    }
}

/* bits 16 and 32: the values themselves, a step of columns at once. */
static void encode_plain(int bits, const layout *l, const panel_rows *rows, uint8_t *panel, row_error *errors)
{
    uint8_t line[LANES][64] ALIGNED;
    const uint8_t *row[LANES];
    for (int r = 0; r < LANES; r++)
        row[r] = line[r];
    for (int64_t c = 0; c < l->k_padded; c += l->step, panel += l->step_bytes) {
        for (int r = 0; r < LANES; r++)
            for (int64_t i = 0; i < l->step; i += LANES) {
                vf value = vf_load_upto(rows->x[r], c + i, rows->x[r] ? rows->k : 0), stored = value;
                uint8_t *to = line[r] + i * bits / 8;
                if (bits == 16) {
                    vf_store_bf16((uint16_t *)to, value);
                    stored = vf_from_bf16((const uint16_t *)to);
                } else {
                    vf_store((float *)to, value);
                }
                vf weight = rows->importance ? vf_load_upto(rows->importance, c + i, rows->k) : vf_set1(1.0f);
                add_row_error(&errors[r], value, stored, weight);
            }
        transpose16(row, panel);
    }
}

/* The scale that a group was given, 0 if there is none that can be used. */
static float usable_scale(const float *given)
{
    float size = given ? fabsf(*given) : 0.0f;
    return size >= GROUP_TINY && size <= 1.0f / GROUP_TINY ? *given : 0.0f;
}

/* What the e4m3 scales of each row have in common: stored, and the sizes it leaves. */
static void choose_range(const codebook *b, const panel_rows *rows, uint8_t *stored, size_range *range)
{
    float most = fminf(fabsf(b->value[0]), fabsf(b->value[15])) * SCALE_E4M3_ROOM;
    for (int r = 0; r < LANES; r++) {
        vf top = vf_set1(0.0f);
        for (int64_t c = 0; rows->x[r] && c < rows->k; c += LANES)
            top = vf_max(top, vf_abs(vf_load_upto(rows->x[r], c, rows->k)));
        stored[r] = row_e4m3(vf_top(top) / most);
        range->least[r] = least_e4m3(stored[r]);
        range->most[r] = most_e4m3(stored[r]);
    }
}

static void encode_panel(const kt_format *f, const panel_rows *rows, uint8_t *dst, kt_pack_error *error)
{
    layout l = layout_of(f, rows->k);
    codebook b = {0};
    size_range range;
    float block_scale[ROTATION_UNIT / SMALLEST_GROUP][LANES];
    row_error sums[LANES + 1];      /* of each row; last those of blocks, a row in each lane */
    for (int r = 0; r <= LANES; r++)
        sums[r].wrong = sums[r].square = sums[r].out_wrong = sums[r].out_square = sums[r].out_stored = vf_set1(0.0f);
    memset(dst + l.scale_offset, 0, l.panel_bytes - l.scale_offset);
    if (f->bits < 8)
        b = codebook_of(f);
    if (f->scale == KT_SCALE_E4M3)
        choose_range(&b, rows, dst + l.scale_offset, &range);
    if (f->bits >= 16)
        encode_plain(f->bits, &l, rows, dst, sums);
    for (int64_t g = 0; f->bits < 16 && g < l.groups; g++) {
        int64_t c = g * l.group, left = rows->k - c, valid = left < 0 ? 0 : left < l.group ? left : l.group;
        const float *weight = rows->importance && valid ? rows->importance + c : NULL;
        row_groups groups = {rows->x, weight, &range, c, l.group, valid};
        float found[LANES] = {0}, given[LANES];
        int missing = 0;
        for (int r = 0; r < LANES; r++) {
            int has = rows->scales && valid && rows->x[r];
            given[r] = usable_scale(has ? rows->scales + r * l.groups + g : NULL);
            missing |= given[r] == 0.0f && rows->x[r];
        }
        if (f->bits < 8 && missing)
            search_scales(&b, f->scale, &groups, found);
        for (int r = 0; r < LANES; r++) {
            int64_t columns = rows->x[r] ? valid : 0;
            const float *from = columns ? rows->x[r] + c : NULL;
            float s = given[r];
            if (s == 0.0f && f->bits == 8)
                s = amax_scale(f, from, columns);
            else if (s == 0.0f)
                s = found[r];
            if (rows->feedback)
                block_scale[c % ROTATION_UNIT / l.group][r] = s;
            else
                encode_group(f, &l, &b, from, weight, columns, c, r, s, dst, &sums[r]);
            scale_store(f->scale, s, dst + l.scale_offset, 16 * g + r);
        }
        int64_t end = c + l.group;
        if (rows->feedback && end % ROTATION_UNIT == 0)
            encode_block(f, &l, &b, rows, end - ROTATION_UNIT, block_scale, dst, &sums[LANES]);
    }
    for (int r = 0; r <= LANES; r++) {
        error->sum_sq_error += (double)vf_sum(sums[r].wrong);
        error->sum_sq += (double)vf_sum(sums[r].square);
        error->out_error += (double)vf_sum(sums[r].out_wrong);
        error->out_sq += (double)vf_sum(sums[r].out_square);
        error->out_stored += (double)vf_sum(sums[r].out_stored);
    }
}
