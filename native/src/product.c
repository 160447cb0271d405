/* product.c - the two operands of a product as the kernels expect them: activations converted
 * to int8 or bfloat16, and weights checked and divided into runs of panels.
 *
 * A view is converted once and kept in a *slot* until somebody writes to the view; so the experts, the
 * shared expert and every projection of one normed row read the same bytes. The slots of one kind are
 * few and are given away oldest first.
 */
#include "kernels/formats.h"
#include "program.h"

#include <string.h>

#define MAX_INT8_SUM 131072     /* products of 127 and 127 that an int32 sum and its bias of 128 hold */
#define SLOTS 4     /* conversions of one kind and domain kept at once: more than a layer has inputs */

/* ---- converted rows ----------------------------------------------------------------------------- */

int64_t act_stride(int32_t kind, int64_t k)
{
    int64_t unit = kind >= ACT_INT8 ? 128 : 64;     /* act8's rule; whole lines of bf16 */
    return (k + unit - 1) / unit * unit;
}

static int64_t act_scales(int32_t kind, int64_t stride)
{
    return kind == ACT_INT8_GROUPS || kind == ACT_WIDE_GROUPS ? stride / KT_ACT_GROUP : 1;
}

/* int8: q [rows][stride], sum [rows][stride/32], scale [rows][scales], wide: of twice as many rows; bf16:
 * [rows][stride]. */
size_t act_bytes(int32_t kind, int64_t rows, int64_t stride)
{
    size_t int8 = (size_t)stride + (size_t)stride / 8 + (size_t)act_scales(kind, stride) * sizeof(float);
    size_t row = kind >= ACT_INT8      ? (act_is_wide(kind) ? 2 : 1) * int8
                 : kind == ACT_BF16    ? (size_t)stride * 2
                 : kind != ACT_F32     ? (size_t)stride * sizeof(float)
                                       : 0;
    return size_mul((size_t)rows, row);
}

act act_at(int32_t kind, uint8_t *data, int64_t rows, int64_t stride)
{
    act a = {.kind = kind, .stride = stride};
    if (kind >= ACT_INT8) {
        rows *= act_is_wide(kind) ? 2 : 1;
        int32_t *sum = (int32_t *)(void *)(data + rows * stride);
        a.x8 = (act8){.q = (int8_t *)data, .sum = sum, .scale = (float *)(void *)(sum + rows * (stride / 32)),
                      .scales = act_scales(kind, stride), .stride = stride};
    } else {
        a.xh = (uint16_t *)(void *)data;
        a.xf = (float *)(void *)data;
    }
    return a;
}

act act_for(const matrices *m, uint8_t *data, int64_t rows, int64_t k)
{
    act a = act_at(m->kind, data, rows, act_stride(m->kind, k));
    a.rounds = m->rounds;
    return a;
}

/* out[0..k) = the only row of a, as f32. */
static void act_restore(const worker *w, const act *a, int64_t k, float *out)
{
    if (a->kind == ACT_BF16) {
        w->kernels->from_bf16(a->xh, k, out);
        return;
    }
    int64_t columns = a->stride / a->x8.scales;         /* of a scale */
    for (int64_t i = 0; i < k; i++)
        out[i] = (float)a->x8.q[i] * a->x8.scale[i / columns];
    for (int64_t i = 0; act_is_wide(a->kind) && i < k; i++)
        out[i] += (float)a->x8.q[a->stride + i] * a->x8.scale[a->x8.scales + i / columns];
}

/* Bytes of a row of k columns while it is rounded: as f32, for the rotation, and converted. */
static size_t rounding_bytes(const rounding *r, int64_t k)
{
    return size_add(act_bytes(ACT_ROUNDED, 1, act_stride(ACT_ROUNDED, k)), act_bytes(r->kind, 1, act_stride(r->kind, k)));
}

/* out[0..k) = x converted as r says, and back; with a rotation out[0..k rounded up to a block). */
static void act_round(const worker *w, const rounding *r, const float *x, int64_t k, float *out)
{
    uint8_t *behind = w->local + act_bytes(ACT_ROUNDED, 1, act_stride(ACT_ROUNDED, k));
    act a = act_at(r->kind, behind, 1, act_stride(r->kind, k));
    a.rotation = r->rotation;
    act_convert(w, &a, x, k, -1.0f, 0);
    int64_t columns = r->rotation ? (k + ROTATION_UNIT - 1) / ROTATION_UNIT * ROTATION_UNIT : k;
    act_restore(w, &a, columns, out);
    if (r->rotation)
        w->kernels->rotate(out, columns, r->rotation, out);
}

void act_convert(const worker *w, const act *a, const float *x, int64_t k, float amax, int64_t row)
{
    if (a->kind == ACT_ROUNDED) {
        act_round(w, &a->rounds, x, k, a->xf + row * a->stride);
        return;
    }
    if (a->rotation) {
        float *rotated = a->kind == ACT_ROTATED ? a->xf + row * a->stride : (float *)(void *)w->local;
        w->kernels->rotate(x, k, a->rotation, rotated);
        x = rotated;
        k = (k + ROTATION_UNIT - 1) / ROTATION_UNIT * ROTATION_UNIT;
    }
    if (a->kind == ACT_ROTATED)
        return;
    if (act_is_wide(a->kind))
        w->kernels->quantize_wide(x, k, &a->x8, 2 * row);
    else if (a->kind >= ACT_INT8)
        w->kernels->quantize(x, k, amax, &a->x8, row);
    else
        w->kernels->to_bf16(x, k, a->stride, a->xh + row * a->stride);
}

act act_rows(const act *a, int64_t row)
{
    act b = *a;
    if (a->kind >= ACT_INT8) {
        row *= act_is_wide(a->kind) ? 2 : 1;
        b.x8.q += row * a->stride;
        b.x8.sum += row * (a->stride / 32);
        b.x8.scale += row * a->x8.scales;
    } else {
        b.xh += row * a->stride;
        b.xf += row * a->stride;
    }
    return b;
}

void act_bind(const act *a, product *p)
{
    p->x8 = &a->x8;
    p->xh = a->xh;
    p->xf = a->xf;
    p->x_stride = a->stride;
}

void source_bind(const worker *w, const source *s, act *a, product *p)
{
    if (s->slot < 0) {
        p->xf = view_row(w, s->view, 0);
        p->x_stride = view_stride(w, s->view);
        return;
    }
    const slot *at = &w->program->slots.at[s->slot];
    const kt_program_options *o = &w->program->options;
    *a = act_at(s->kind, at->data, at->domain == KT_ROWS_TOKENS ? o->max_tokens : o->max_outputs, s->stride);
    a->rotation = s->rotation;
    a->rounds = s->rounds;
    act_bind(a, p);
}

/* ---- sources: recording ------------------------------------------------------------------------- */

typedef struct conversion {
    source source;
    int32_t domain;
} conversion;

static void convert_run(const void *arg, worker *w)
{
    const conversion *c = arg;
    const source *s = &c->source;
    act a;
    product unused;
    source_bind(w, s, &a, &unused);
    int64_t row, last;
    for (own_rows(w, c->domain, &row, &last); row < last; row++)
        act_convert(w, &a, view_row(w, s->view, row), s->view.width, -1.0f, row);
}

/* The slot that holds v already, else the one to fill: a free one, or the one used longest ago. */
static int32_t find_slot(kt_program *p, kt_view v, const source *wanted)
{
    int32_t domain = program_domain(p, v), n = 0, oldest = -1;
    for (int32_t i = 0; i < p->slots.n; i++) {
        slot *s = &p->slots.at[i];
        if (s->kind != wanted->kind || s->domain != domain || s->rotation != wanted->rotation ||
            s->rounds.kind != wanted->rounds.kind || s->rounds.rotation != wanted->rounds.rotation)
            continue;
        if (s->valid && memcmp(&s->view, &v, sizeof v) == 0)
            return i;
        n++;
        if (oldest < 0 || s->used < p->slots.at[oldest].used)
            oldest = i;
    }
    if (n == SLOTS)
        return oldest;
    if (!ROOM(p, p->slots))
        return -1;
    p->slots.at[p->slots.n] = (slot){.kind = wanted->kind, .domain = domain, .rotation = wanted->rotation,
                                     .rounds = wanted->rounds, .resource = program_resource(p)};
    return p->slots.n++;
}

source program_source(kt_program *p, kt_view v, const matrices *m)
{
    int32_t kind = m->kind == ACT_F32 && m->rotation ? ACT_ROTATED : m->kind;
    source s = {.kind = kind, .slot = -1, .rotation = m->rotation, .rounds = m->rounds, .view = v,
                .stride = act_stride(kind, v.width)};
    if (kind == ACT_F32)
        return s;
    s.slot = find_slot(p, v, &s);
    conversion *c = s.slot < 0 ? NULL : program_new(p, sizeof *c);
    if (!c)
        return s;           /* the program is marked failed and will not run */
    slot *at = &p->slots.at[s.slot];
    int32_t fresh = !at->valid || memcmp(&at->view, &v, sizeof v) != 0;
    at->used = p->phases.n;
    if (!fresh)
        return s;
    at->view = v;
    at->stride = s.stride > at->stride ? s.stride : at->stride;
    *c = (conversion){.source = s, .domain = at->domain};
    program_phase(p, convert_run, c);
    program_touch_view(p, v, OWN_ROWS);
    program_touch(p, p->slots.at[s.slot].resource, 0, 1, OWN_ROWS | WRITES);
    p->slots.at[s.slot].valid = 1;
    p->slots.at[s.slot].part = p->parts.n;
    return s;
}

/* ---- weights ------------------------------------------------------------------------------------ */

/* What products of weights in a format read, unless the program is exact: ACT_*. */
static int32_t read_kind(const kt_format *f, int32_t reads)
{
    int fine = f->rotation && (f->bits == 8 || f->group) && reads != KT_READ_FORMAT;
    if (reads == KT_READ_F32 || f->bits == 32 || f->codes == KT_CODE_E4M3)
        return ACT_F32;
    if (f->bits == 16)
        return ACT_BF16;
    int32_t int8 = reads == KT_READ_WIDE && !fine ? ACT_WIDE : ACT_INT8;
    return int8 + (f->group || fine ? ACT_INT8_GROUPS - ACT_INT8 : 0);
}

/* The rounding that w asks for, in *m. */
static int find_rounding(kt_program *p, const char *name, const kt_weight *w, int32_t reads, matrices *m)
{
    if (!w->input)
        return KT_OK;
    if (kt_packed_bytes(w->input, w->n, w->k) == 0)
        return program_fail(p, KT_ERR_SHAPE, "%s: input of %d bits, group %d, scale type %d is not a valid format", name,
                            w->input->bits, w->input->group, w->input->scale);
    if (m->kind != ACT_F32 || m->rotation)
        return program_fail(p, KT_ERR_SHAPE, "%s: only input that is read as f32 and not rotated can be rounded", name);
    m->rounds.kind = read_kind(w->input, reads);
    if (m->rounds.kind == ACT_F32)
        return KT_OK;
    m->kind = ACT_ROUNDED;
    m->rounds.rotation = rotation_block(w->input, w->k);
    return KT_OK;
}

int program_matrices(kt_program *p, const char *name, const kt_weight *w, const int64_t n_k_count[3],
                     int32_t reads, matrices *m)
{
    if (w->n != n_k_count[0] || w->k != n_k_count[1] || w->count != n_k_count[2] || w->count < 1)
        return program_fail(p, KT_ERR_SHAPE, "%s: %lld matrices [%lld, %lld], but [%lld, %lld] x %lld are needed",
                            name, (long long)w->count, (long long)w->n, (long long)w->k, (long long)n_k_count[0],
                            (long long)n_k_count[1], (long long)n_k_count[2]);
    size_t bytes = w->n <= MAX_COLUMNS && w->k <= MAX_COLUMNS ? kt_packed_bytes(&w->format, w->n, w->k) : 0;
    if (bytes == 0 || size_mul(bytes, (size_t)w->count) == SIZE_MAX)
        return program_fail(p, KT_ERR_SHAPE, "%s: %lld x [%lld, %lld] with %d bits, group %d, scale type %d is not a "
                            "valid weight", name, (long long)w->count, (long long)w->n, (long long)w->k,
                            w->format.bits, w->format.group, w->format.scale);
    if (!w->data)
        return program_fail(p, KT_ERR_SHAPE, "%s: no data", name);
    if (w->format.bits <= 8 && w->format.codes == KT_CODE_INTEGER && w->format.group == 0 && w->k > MAX_INT8_SUM)
        return program_fail(p, KT_ERR_SHAPE, "%s: %lld columns under one scale, the most is %d", name, (long long)w->k,
                            MAX_INT8_SUM);
    *m = (matrices){.weight = *w, .kind = p->options.exact ? ACT_F32 : read_kind(&w->format, reads),
                    .panels = (w->n + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS,
                    .panel_bytes = kt_packed_bytes(&w->format, KT_PANEL_ROWS, w->k), .bytes = bytes,
                    .rotation = rotation_block(&w->format, w->k)};
    int failed = find_rounding(p, name, w, reads, m);
    if (failed)
        return failed;
    size_t scratch = p->kernels->product_scratch_bytes(&w->format, w->k);
    size_t rotated = m->rotation ? (size_t)rotated_columns(&w->format, w->k) * sizeof(float) : 0;
    size_t rounded = m->kind == ACT_ROUNDED ? rounding_bytes(&m->rounds, w->k) : 0;
    scratch = scratch > rotated ? scratch : rotated;
    scratch = scratch > rounded ? scratch : rounded;
    if (scratch > p->product_bytes)
        p->product_bytes = (scratch + 63) / 64 * 64;
    return KT_OK;
}

void matrices_bind(const worker *w, const matrices *m, int64_t index, int64_t first_panel, int64_t last_panel,
                   product *p)
{
    int64_t rows = m->weight.n - first_panel * KT_PANEL_ROWS;
    int64_t wanted = (last_panel - first_panel) * KT_PANEL_ROWS;
    p->format = &m->weight.format;
    p->n = rows < wanted ? rows : wanted;
    p->k = rotated_columns(&m->weight.format, m->weight.k);
    p->w = panel_at(m, index, first_panel);
    p->panel_bytes = m->panel_bytes;
    p->first_panel = 0;
    p->last_panel = last_panel - first_panel;
    p->scratch = w->local;
    p->next = NULL;
    p->tuning = pool_tuning(w->pool);
    int32_t bits = m->weight.format.bits;
    p->tile_min = pool_tile_min(w->pool, bits < 8 ? KT_TILE_INT4 : bits == 8 ? KT_TILE_INT8 : KT_TILE_BF16);
    if (bits == 16 && w->program->options.by_row)
        p->tile_min = 1;        /* tiles add bf16 in another order than vectors do */
}

void product_run(const worker *w, int32_t kind, const product *p)
{
    if (kind >= ACT_INT8)
        w->kernels->product_int8(p);
    else if (kind == ACT_BF16)
        w->kernels->product_bf16(p);
    else
        w->kernels->product_f32(p);
}
