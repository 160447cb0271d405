/* pack.c - converts whole matrices to and from the packed layout. Each panel is independent, so
 * the team shares them out by a counter and the bytes do not depend on it; who encodes a panel
 * decodes its rows first. The encoder itself is a kernel; its specification is in
 * kernels/formats.h. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "feedback.h"
#include "kernels/formats.h"
#include "numbers.h"

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
    const kt_gathered *src;
    const float *scales;            /* NULL or [n][groups] */
    const float *importance;        /* NULL or [k]; with a rotation the means of its blocks, [columns] */
    const float *counts;            /* [k]: importance before it became means; NULL: there is no feedback */
    float *feedback;                /* [columns / 64][64][64], see feedback.h */
    uint8_t *dst;
    layout l;
    int64_t panels, block, columns; /* block: of the rotation, 0: none; columns: of a row as it is encoded */
    float *rows;                    /* [threads][16][stride]: rows that do not lie in memory as they are encoded */
    int64_t stride;
    kt_pack_error *error;           /* [panels]: added up in order, so that the sum is always the same */
} pack_task;

/* Row i as it is encoded, in `buffer` or where it lies; NULL: zeros. */
static const float *pack_row(const pack_task *t, const kt_kernels *kernels, int64_t i, float *buffer)
{
    const kt_gathered *m = t->src;
    const float *row = i < m->n ? gathered_row(kernels, m, i, buffer) : NULL;
    if (!row)
        return NULL;
    if (m->divisors)
        kernels->divide(row, m->divisors, m->k, buffer);
    row = m->divisors ? buffer : row;
    if (t->block)
        kernels->rotate(row, m->k, t->block, buffer);
    return t->block ? buffer : row;
}

static void pack_panels(void *arg, int thread, int threads)
{
    pack_task *t = arg;
    const kt_kernels *kernels = pool_kernels(t->pool);
    float *buffer = t->rows + (int64_t)thread * KT_PANEL_ROWS * t->stride;
    (void)threads;
    for (int64_t i; (i = pool_take(t->pool, thread, 1)) < t->panels;) {
        const float *x[KT_PANEL_ROWS];
        int64_t first = i * KT_PANEL_ROWS;
        for (int r = 0; r < KT_PANEL_ROWS; r++)
            x[r] = pack_row(t, kernels, first + r, buffer + r * t->stride);
        panel_rows rows = {t->columns, x, t->scales ? t->scales + first * t->l.groups : NULL, t->importance,
                           t->feedback, t->counts, t->src->k};
        kernels->encode_panel(t->format, &rows, t->dst + (size_t)i * t->l.panel_bytes, &t->error[i]);
    }
}

/* The mean importance of each rotated block in all its columns. */
static void spread_importance(const pack_task *t, const float *importance, float *means)
{
    for (int64_t first = 0; first < t->columns; first += t->block) {
        int64_t last = first + t->block < t->src->k ? first + t->block : t->src->k;
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

static int pack_check(kt_pool *pool, const kt_format *format, const kt_gathered *src, const float *scales,
                      const float *importance)
{
    if (!kt_packed_bytes(format, src->n, src->k)) {
        pool_set_error(pool, "cannot pack a [%" PRId64 ", %" PRId64 "] matrix at %d bits, group %d", src->n, src->k,
                       (int)format->bits, (int)format->group);
        return KT_ERR_SHAPE;
    }
    if (scales && (format->bits > 8 || format->scale != KT_SCALE_F32 || format->rotation)) {
        pool_set_error(pool, "scales can be given for 4 and 8 bits and f32 scales, not for %d bits, scale type %d, rotation "
                       "%d", (int)format->bits, (int)format->scale, (int)format->rotation);
        return KT_ERR_SHAPE;
    }
    if (!importance_is_valid(importance, src->k)) {
        pool_set_error(pool, "the importance of a column is not within %g..%g", (double)LEAST_IMPORTANCE,
                       1.0 / (double)LEAST_IMPORTANCE);
        return KT_ERR_VALUE;
    }
    return gathered_check(pool, src);
}

/* The first row of the sources with a NaN or Inf, or -1. Where there is one, the sum of squares is none. */
static int64_t find_bad_row(const pack_task *t, const kt_pack_error *sums)
{
    if (isfinite(sums->sum_sq))
        return -1;
    for (int64_t i = 0; i < t->src->n; i++) {
        const float *row = gathered_row(pool_kernels(t->pool), t->src, i, t->rows);
        int64_t c = row ? first_bad(row, t->src->k) : t->src->k;
        if (c < t->src->k) {
            pool_set_error(t->pool, "value at row %" PRId64 ", column %" PRId64 " is %s", i, c,
                           isnan(row[c]) ? "NaN" : "infinite");
            return i;
        }
    }
    return -1;
}

static void add_errors(const pack_task *t, kt_pack_error *sums)
{
    for (int64_t i = 0; i < t->panels; i++) {
        sums->sum_sq_error += t->error[i].sum_sq_error;
        sums->sum_sq += t->error[i].sum_sq;
        sums->out_error += t->error[i].out_error;
        sums->out_sq += t->error[i].out_sq;
        sums->out_stored += t->error[i].out_stored;
    }
}

int kt_pack(kt_pool *pool, const kt_format *format, const kt_gathered *src, const float *scales,
            const float *importance, void *dst, kt_pack_error *error, int64_t *bad_row)
{
    int result = pack_check(pool, format, src, scales, importance);
    *bad_row = -1;
    if (result != KT_OK)
        return result;
    int64_t columns = rotated_columns(format, src->k), panels = round_up(src->n, KT_PANEL_ROWS) / KT_PANEL_ROWS;
    pack_task t = {.pool = pool, .format = format, .src = src, .scales = scales, .importance = importance, .dst = dst,
                   .l = layout_of(format, src->k), .panels = panels, .block = rotation_block(format, src->k),
                   .columns = columns, .stride = round_up(columns, 16) + 16};
    size_t rows = (size_t)kt_pool_threads(pool) * KT_PANEL_ROWS + 1;
    int feeds = importance && format_feeds_back(format);
    t.rows = malloc(rows * (size_t)t.stride * sizeof *t.rows);
    t.error = calloc((size_t)panels, sizeof *t.error);
    t.feedback = feeds ? malloc((size_t)columns * ROTATION_UNIT * sizeof *t.feedback) : NULL;
    if (t.rows && t.error && (t.feedback || !feeds)) {
        kt_pack_error sums = error ? *error : (kt_pack_error){0};
        float *means = t.rows + (rows - 1) * (size_t)t.stride;
        if (t.block && importance) {
            spread_importance(&t, importance, means);
            t.importance = means;
        }
        if (feeds) {
            t.counts = importance;
            feedback_fill(pool, importance, src->k, t.feedback);
        }
        pool_run(pool, pack_panels, &t);
        add_errors(&t, &sums);
        *bad_row = find_bad_row(&t, &sums);
        result = *bad_row < 0 ? KT_OK : KT_ERR_VALUE;
        if (error && result == KT_OK)
            *error = sums;
    } else {
        pool_set_error(pool, "no memory for %" PRId64 " panels of %" PRId64 " columns", panels, columns);
        result = KT_ERR_MEMORY;
    }
    free(t.feedback);
    free(t.error);
    free(t.rows);
    return result;
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
    int64_t line = in % 32 / 4, at = 4 * r + in % 4;
    int low = in < 32 ? step[64 * line + at] & 15 : step[64 * line + at] >> 4;
    if (f->bits == 4)
        return (float)f->codebook[low] * scale;
    int upper = step[512 + 64 * (line / 2) + at] >> two_bits(in / 4) & 3;
    return (float)(LEAST_6 + (upper << 4 | low)) * scale;
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
