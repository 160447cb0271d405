/* pack.c - whole matrices to and from the packed layout. Each panel is independent, so the team shares them out by
 * a counter and the bytes do not depend on it. The encoder itself is a kernel; its specification is in
 * kernels/formats.h.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/formats.h"
#include "pool.h"

#define LEAST_IMPORTANCE 0x1p-20f

size_t kt_packed_bytes(const kt_format *format, int64_t n, int64_t k)
{
    size_t bytes;
    if (!format_is_valid(format) || n <= 0 || k <= 0 || n > INT32_MAX || k > INT32_MAX)
        return 0;
    layout l = layout_of(format, k);
    if (__builtin_mul_overflow((size_t)(round_up(n, KT_PANEL_ROWS) / KT_PANEL_ROWS), l.panel_bytes, &bytes))
        return 0;
    return bytes;
}

typedef struct pack_task {
    kt_pool *pool;
    const kt_format *format;
    int64_t n, k, panels;
    const float *src, *scales;      /* scales: NULL or [n][groups] */
    const float *importance;        /* NULL or [k]; with a rotation the means of its blocks, [k rounded up to 64] */
    uint8_t *dst;
    size_t stride;                  /* bytes from one panel to the next */
    int64_t block, columns;         /* of the rotation, 0: none; columns of a rotated row */
    float *rotated;                 /* [threads][16][columns] */
    kt_pack_error *error;           /* [panels]: added up in order, so that the sum is always the same */
} pack_task;

/* The 16 rows of panel i, rotated, as a matrix of their own. */
static void pack_rotated(const pack_task *t, const kt_kernels *kernels, int64_t i, float *rows, uint8_t *dst)
{
    int64_t first = i * KT_PANEL_ROWS, n = t->n - first < KT_PANEL_ROWS ? t->n - first : KT_PANEL_ROWS;
    for (int64_t r = 0; r < n; r++)
        kernels->rotate(t->src + (first + r) * t->k, t->k, t->block, rows + r * t->columns);
    kernels->encode_panel(t->format, n, t->columns, rows, NULL, t->importance, 0, dst, &t->error[i]);
}

static void pack_panels(void *arg, int thread, int threads)
{
    pack_task *t = arg;
    const kt_kernels *kernels = pool_kernels(t->pool);
    (void)threads;
    for (int64_t i; (i = pool_take(t->pool, thread, 1)) < t->panels;) {
        uint8_t *dst = t->dst + (size_t)i * t->stride;
        if (t->block)
            pack_rotated(t, kernels, i, t->rotated + (size_t)thread * KT_PANEL_ROWS * (size_t)t->columns, dst);
        else
            kernels->encode_panel(t->format, t->n, t->k, t->src, t->scales, t->importance, i * KT_PANEL_ROWS, dst,
                                  &t->error[i]);
    }
}

/* The mean importance of each rotated block in all its columns. */
static void spread_importance(const pack_task *t, const float *importance, float *means)
{
    for (int64_t first = 0; first < t->columns; first += t->block) {
        int64_t last = first + t->block < t->k ? first + t->block : t->k;
        float sum = 0.0f;
        for (int64_t c = first; c < last; c++)
            sum += importance[c];
        for (int64_t c = first; c < first + t->block; c++)
            means[c] = sum / (float)(last - first);
    }
}

static int importance_is_valid(const float *importance, int64_t k)
{
    for (int64_t c = 0; importance && c < k; c++)
        if (!(importance[c] >= LEAST_IMPORTANCE && importance[c] <= 1.0f / LEAST_IMPORTANCE))
            return 0;
    return 1;
}

int kt_pack(kt_pool *pool, const kt_format *format, int64_t n, int64_t k, const float *src, const float *scales,
            const float *importance, int64_t panel_step, void *dst, kt_pack_error *error)
{
    if (!kt_packed_bytes(format, n, k) || panel_step < 1) {
        pool_set_error(pool, "cannot pack a [%" PRId64 ", %" PRId64 "] matrix at %d bits, group %d, step %" PRId64,
                       n, k, (int)format->bits, (int)format->group, panel_step);
        return KT_ERR_SHAPE;
    }
    if (scales && (format->bits > 8 || format->scale != KT_SCALE_F32 || format->rotation)) {
        pool_set_error(pool, "scales can be given for 4 and 8 bits and f32 scales, not for %d bits, scale type %d, rotation "
                       "%d", (int)format->bits, (int)format->scale, (int)format->rotation);
        return KT_ERR_SHAPE;
    }
    if (!importance_is_valid(importance, k)) {
        pool_set_error(pool, "the importance of a column is not within %g..%g", (double)LEAST_IMPORTANCE,
                       1.0 / (double)LEAST_IMPORTANCE);
        return KT_ERR_VALUE;
    }
    layout l = layout_of(format, k);
    int64_t panels = round_up(n, KT_PANEL_ROWS) / KT_PANEL_ROWS;
    pack_task t = {pool, format, n, k, panels, src, scales, importance, dst, (size_t)panel_step * l.panel_bytes,
                   rotation_block(format, k), rotated_columns(format, k), NULL, NULL};
    size_t row = (size_t)t.columns * sizeof(float), rows = (size_t)kt_pool_threads(pool) * KT_PANEL_ROWS + 1;
    float *means = NULL;
    t.error = calloc((size_t)panels, sizeof *t.error);
    if (t.block)
        t.rotated = means = calloc(rows, row);
    if (!t.error || (t.block && !means)) {
        pool_set_error(pool, "no memory for %" PRId64 " panels of %" PRId64 " columns", panels, k);
    } else {
        if (t.block) {
            t.rotated += t.columns;
            if (importance)
                spread_importance(&t, importance, means);
            t.importance = importance ? means : NULL;
        }
        pool_run(pool, pack_panels, &t);
    }
    for (int64_t i = 0; error && t.error && i < panels; i++) {
        error->sum_sq_error += t.error[i].sum_sq_error;
        error->sum_sq += t.error[i].sum_sq;
        error->out_error += t.error[i].out_error;
        error->out_sq += t.error[i].out_sq;
        error->out_stored += t.error[i].out_stored;
    }
    int failed = !t.error || (t.block && !means);
    free(t.error);
    free(means);
    return failed ? KT_ERR_MEMORY : KT_OK;
}

typedef struct unpack_task {
    kt_pool *pool;
    const kt_format *format;
    layout l;
    int64_t n, k, columns;          /* columns: of a row as it is stored */
    const uint8_t *src;
    float *dst;
    float *rows;                    /* [threads][columns] rotated ones; NULL: there is no rotation */
} unpack_task;

/* Row r, column c of a panel. */
static float unpack_value(const kt_format *f, const layout *l, const uint8_t *panel, int r, int64_t c)
{
    const uint8_t *step = panel + (size_t)(c / l->step) * l->step_bytes;
    int64_t in = c % l->step;
    if (f->bits == 32)
        return scale_load(KT_SCALE_F32, step, 16 * in + r);
    if (f->bits == 16)
        return scale_load(KT_SCALE_BF16, step, 32 * (in / 2) + 2 * r + in % 2);
    float scale = scale_load(f->scale, panel + l->scale_offset, 16 * (c / l->group) + r);
    if (f->bits == 8) {
        uint8_t code = step[64 * (in / 4) + 4 * r + in % 4];
        return (f->codes == KT_CODE_E4M3 ? float_of_e4m3(code) : (float)(int8_t)code) * scale;
    }
    uint8_t both = step[64 * (in % 32 / 4) + 4 * r + in % 4];
    return (float)f->codebook[in < 32 ? both & 15 : both >> 4] * scale;
}

static void unpack_panels(void *arg, int thread, int threads)
{
    unpack_task *t = arg;
    (void)threads;
    for (int64_t i; (i = pool_take(t->pool, thread, 1)) * KT_PANEL_ROWS < t->n;) {
        const uint8_t *panel = t->src + (size_t)i * t->l.panel_bytes;
        for (int r = 0; r < KT_PANEL_ROWS && i * KT_PANEL_ROWS + r < t->n; r++) {
            float *dst = t->dst + (i * KT_PANEL_ROWS + r) * t->k, *row = t->rows ? t->rows + thread * t->columns : dst;
            for (int64_t c = 0; c < t->columns; c++)
                row[c] = unpack_value(t->format, &t->l, panel, r, c);
            if (!t->rows)
                continue;
            pool_kernels(t->pool)->rotate(row, t->columns, rotation_block(t->format, t->k), row);
            memcpy(dst, row, (size_t)t->k * sizeof *dst);
        }
    }
}

int kt_unpack(kt_pool *pool, const kt_weight *w, int64_t index, float *dst)
{
    size_t bytes = kt_packed_bytes(&w->format, w->n, w->k);
    if (!bytes || index < 0 || index >= w->count) {
        pool_set_error(pool, "cannot unpack matrix %" PRId64 " of %" PRId64 " [%" PRId64 ", %" PRId64 "]", index,
                       w->count, w->n, w->k);
        return bytes ? KT_ERR_RANGE : KT_ERR_SHAPE;
    }
    unpack_task t = {pool, &w->format, layout_of(&w->format, w->k), w->n, w->k, rotated_columns(&w->format, w->k),
                     (const uint8_t *)w->data + (size_t)index * bytes, dst, NULL};
    if (w->format.rotation && !(t.rows = calloc((size_t)kt_pool_threads(pool), (size_t)t.columns * sizeof(float)))) {
        pool_set_error(pool, "no memory for rows of %" PRId64 " columns", t.columns);
        return KT_ERR_MEMORY;
    }
    pool_run(pool, unpack_panels, &t);
    free(t.rows);
    return KT_OK;
}
