/* product.inc.c - shared by all products: parts and scales of integer formats, and how values
 * are stored.
 *
 * Integer sums are exact, so how they are cut never matters; the float operations per output are the
 * contract of kernels.h: those of ascending parts, then + bias.
 */

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

/* What the e4m3 scales of 16 rows have in common: R in the place of a float's exponent. */
INLINE vi load_rows_e4m3(const uint8_t *scales)
{
    return vi_shl(vi_load8(scales), 23);
}

/* Scales of 16 rows, number 16 * index and on, of rows with that in common. */
INLINE vf load_e4m3(const uint8_t *scales, int64_t index, vi rows)
{
    vi size = vi_shl(vi_load_int8(scales + KT_PANEL_ROWS + 16 * index), 20);
    return vf_bits(vi_add(vi_and(size, (int32_t)0x87f00000u), rows));
}

/* Scales of 16 rows: number 16 * index and on. */
INLINE vf load_scales(int32_t type, const uint8_t *scales, int64_t index)
{
    if (type == KT_SCALE_BF16)
        return vf_from_bf16((const uint16_t *)(const void *)(scales + 32 * index));
    if (type == KT_SCALE_F32)
        return vf_load((const float *)(const void *)(scales + 64 * index));
    if (type == KT_SCALE_E8M0)
        return vf_bits(vi_shl(vi_load8(scales + 16 * index), 23));
    if (type == KT_SCALE_E4M3)
        return load_e4m3(scales, index, load_rows_e4m3(scales));
    return vf_set1(1.0f);
}

INLINE int64_t row_of(const int32_t *rows, int64_t t)
{
    return rows ? rows[t] : t;
}

/* What LOADS_FAR fetches into L2 lies so many bytes behind what it fetches into L1. */
enum { FAR = 64 * 64 };

/* Fetch a line that a stream needs soon, and one that it needs later. */
INLINE void fetch_line(load_kind loads, const uint8_t *line)
{
    if (loads == LOADS_FAR)
        prefetch_l2(line + FAR);
    prefetch(line);
}

/* Fetch a line that a tile needs when it comes to the next panels. */
INLINE void prefetch_next(const product *p, const void *line)
{
    if (p->tuning.near)
        prefetch(line);
    else
        prefetch_l2(line);
}

/* The panels from `panel` on, or after the last one what comes next; NULL: nothing known. */
INLINE const uint8_t *panels_after(const product *p, int64_t panel)
{
    return panel < p->last_panel ? p->w + (size_t)panel * p->panel_bytes : p->next;
}

/* The beginning of what comes next: from there on the stream fetches ahead itself. */
INLINE void fetch_next(const product *p)
{
    int64_t end = p->tuning.ahead + (p->tuning.loads == LOADS_FAR ? FAR : 0);
    for (int64_t i = 0; p->next && i < end; i += 64)
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
