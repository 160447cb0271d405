/* pack.c - whole matrices to and from the packed layout: decode a checkpoint's tensor, encode panels,
 * unpack, random weights. Each panel is independent, so the team shares them out by a counter and the
 * bytes do not depend on it. The encoder itself is a kernel; its specification is in kernels/formats.h.
 */
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "blocks.h"
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

/* ---- decode ------------------------------------------------------------------------------------ */

typedef struct decode_task {
    kt_pool *pool;
    int32_t dtype;
    const block_format *blocks;     /* GGUF's blocks; NULL: others */
    const kt_codes *codes;          /* codes with scales; NULL: others */
    const uint8_t *src;
    int64_t n, k;
    float *dst;
    atomic_int_fast64_t bad;        /* least index of a NaN or Inf, n * k if there is none */
} decode_task;

static void decode_plain(const decode_task *t, const kt_kernels *kernels, int64_t row)
{
    float *dst = t->dst + row * t->k;
    const uint16_t *half = (const uint16_t *)t->src + row * t->k;
    if (t->dtype == KT_F32)
        memcpy(dst, (const float *)t->src + row * t->k, (size_t)t->k * sizeof *dst);
    else if (t->dtype == KT_BF16)
        kernels->from_bf16(half, t->k, dst);
    else
        for (int64_t c = 0; c < t->k; c++)
            dst[c] = float_of_f16(half[c]);
}

static void decode_blocks(const decode_task *t, int64_t row)
{
    const block_format *b = t->blocks;
    const int64_t count = t->k / b->elements;
    for (int64_t i = 0; i < count; i++)
        b->decode(t->src + (row * count + i) * b->bytes, t->dst + row * t->k + i * b->elements);
}

static void decode_codes(const decode_task *t, int64_t row)
{
    const kt_codes *d = t->codes;
    const float *table = d->table;
    int64_t block = d->block_columns, blocks = (t->k + block - 1) / block, at = (d->row + row) / d->block_rows * blocks;
    const uint8_t *code = t->src + row * (d->bits == 8 ? t->k : (t->k + 1) / 2);
    float *dst = t->dst + row * t->k;
    for (int64_t b = 0, c = 0; b < blocks; b++) {
        float scale = d->scale[at + b], zero = d->zero ? d->zero[at + b] : 0.0f;
        int64_t end = c + block < t->k ? c + block : t->k;
        if (d->bits == 8)
            for (; c < end; c++)
                dst[c] = (table[code[c]] - zero) * scale;
        else
            for (; c < end; c++)
                dst[c] = (table[code[c / 2] >> 4 * (c & 1) & 15] - zero) * scale;
    }
}

/* Index of the first NaN or Inf of x[0..k), k if all are finite. */
static int64_t first_bad(const float *x, int64_t k)
{
    uint32_t any = 0;
    for (int64_t c = 0; c < k; c++)
        any |= ((bits_of_float(x[c]) & 0x7f800000u) + 0x00800000u) & 0x80000000u;
    if (!any)
        return k;
    for (int64_t c = 0; c < k; c++)
        if (!isfinite(x[c]))
            return c;
    return k;
}

static void decode_rows(void *arg, int thread, int threads)
{
    decode_task *t = arg;
    const kt_kernels *kernels = pool_kernels(t->pool);
    (void)threads;
    for (int64_t row; (row = pool_take(t->pool, thread, 16)) < t->n;)
        for (int64_t end = row + 16 < t->n ? row + 16 : t->n; row < end; row++) {
            if (t->codes)
                decode_codes(t, row);
            else if (t->blocks)
                decode_blocks(t, row);
            else
                decode_plain(t, kernels, row);
            int64_t c = first_bad(t->dst + row * t->k, t->k);
            int_fast64_t bad = atomic_load(&t->bad), at = row * t->k + c;
            while (c < t->k && at < bad && !atomic_compare_exchange_weak(&t->bad, &bad, at))
                continue;
        }
}

static int decode_all(decode_task *t)
{
    pool_run(t->pool, decode_rows, t);
    int64_t bad = atomic_load(&t->bad);
    if (bad == t->n * t->k)
        return KT_OK;
    pool_set_error(t->pool, "value at row %" PRId64 ", column %" PRId64 " is %s", bad / t->k, bad % t->k,
                   isnan(t->dst[bad]) ? "NaN" : "infinite");
    return KT_ERR_VALUE;
}

int kt_decode(kt_pool *pool, int32_t dtype, const void *src, int64_t n, int64_t k, float *dst)
{
    const block_format *blocks = block_format_of(dtype);
    if (n <= 0 || k <= 0 || (blocks ? k % blocks->elements != 0 : dtype < KT_F32 || dtype > KT_F16)) {
        pool_set_error(pool, "cannot decode a [%" PRId64 ", %" PRId64 "] tensor of dtype %d", n, k, (int)dtype);
        return KT_ERR_SHAPE;
    }
    decode_task t = {pool, dtype, blocks, NULL, src, n, k, dst, n * k};
    return decode_all(&t);
}

int kt_decode_codes(kt_pool *pool, const kt_codes *codes, const void *src, int64_t n, int64_t k, float *dst)
{
    if (n <= 0 || k <= 0 || (codes->bits != 8 && codes->bits != 4) || codes->block_rows <= 0 ||
        codes->block_columns <= 0 || codes->row < 0) {
        pool_set_error(pool, "cannot decode a [%" PRId64 ", %" PRId64 "] tensor of %d bits in blocks of %" PRId64
                       " x %" PRId64, n, k, (int)codes->bits, codes->block_rows, codes->block_columns);
        return KT_ERR_SHAPE;
    }
    decode_task t = {pool, 0, NULL, codes, src, n, k, dst, n * k};
    return decode_all(&t);
}

/* ---- pack and unpack --------------------------------------------------------------------------- */

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

/* ---- random weights ---------------------------------------------------------------------------- */

typedef struct random_task {
    kt_pool *pool;
    const kt_format *format;
    layout l;
    int64_t panels;
    uint8_t *data;
    uint64_t seed;
    float rms;              /* wanted */
} random_task;

/* splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Random sign and mantissa and one of two exponents, e or e + 1: the mean square is 7/3 * 5/2 * 4^e. */
static void random_floats(int bits, float rms, uint64_t *state, uint8_t *dst, size_t size)
{
    uint64_t e = (uint64_t)(127 + lrintf(log2f(rms / sqrtf(35.0f / 6.0f))));
    uint64_t base = bits == 16 ? (e << 7) * 0x0001000100010001u : (e << 23) * 0x0000000100000001u;
    uint64_t keep = bits == 16 ? 0x80ff80ff80ff80ffu : 0x80ffffff80ffffffu;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t value = base + (next_random(state) & keep);
        memcpy(dst + i, &value, 8);
    }
}

/* 8 bits: -128 is no code, the lowest bit is set in all (odd codes, mean square 5461). E4M3: 1 to 15/8 of
 * either sign (mean square 2.148). 4 bits: all indices are codes. */
static void random_codes(const kt_format *f, uint64_t *state, uint8_t *dst, size_t size)
{
    int e4m3 = f->codes == KT_CODE_E4M3;
    uint64_t keep = e4m3 ? 0x8787878787878787u : ~(uint64_t)0;
    uint64_t set = e4m3 ? 0x3838383838383838u : f->bits == 8 ? 0x0101010101010101u : 0;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t value = (next_random(state) & keep) | set;
        memcpy(dst + i, &value, 8);
    }
}

static float code_rms(const kt_format *f)
{
    float square = 0.0f;
    if (f->codes == KT_CODE_E4M3)
        return sqrtf(2.148f);
    for (int i = 0; i < 16; i++)
        square += (float)f->codebook[i] * (float)f->codebook[i] / 16.0f;
    return f->bits == 8 ? sqrtf(5461.0f) : sqrtf(square > 0.0f ? square : 1.0f);
}

/* Scales of one panel, each between 3/4 and 5/4 of what the wanted rms asks for, or the nearest power
 * of two. Of either sign where the type has one: the mean of linear 4-bit codes is -1/2, and with it all
 * outputs of a matrix would have much in common. */
static void random_scales(const random_task *t, uint64_t *state, uint8_t *panel)
{
    float middle = t->rms / code_rms(t->format);
    memset(panel + t->l.scale_offset, 0, t->l.panel_bytes - t->l.scale_offset);
    for (int64_t i = 0; i < t->l.groups * KT_PANEL_ROWS; i++) {
        uint64_t bits = next_random(state);
        float s = middle * (0.75f + 0.5f * (float)(bits >> 40) * 0x1p-24f) * (bits & 1 ? -1.0f : 1.0f);
        if (t->format->scale == KT_SCALE_E8M0)
            s = ldexpf(1.0f, (int)lrintf(log2f(middle)));
        else if (t->format->scale == KT_SCALE_BF16)
            s = float_of_bf16(bf16_of_float(s));
        scale_store(t->format->scale, s, panel + t->l.scale_offset, i);
    }
}

static void random_panels(void *arg, int thread, int threads)
{
    random_task *t = arg;
    (void)threads;
    for (int64_t i; (i = pool_take(t->pool, thread, 1)) < t->panels;) {
        uint64_t state = t->seed ^ (uint64_t)i * 0xd1342543de82ef95u;
        uint8_t *panel = t->data + (size_t)i * t->l.panel_bytes;
        if (t->format->bits >= 16) {
            random_floats(t->format->bits, t->rms, &state, panel, t->l.panel_bytes);
            continue;
        }
        random_codes(t->format, &state, panel, t->l.scale_offset);
        random_scales(t, &state, panel);
    }
}

int kt_fill_random(kt_pool *pool, const kt_weight *w, uint64_t seed)
{
    if (!kt_packed_bytes(&w->format, w->n, w->k) || w->count < 1) {
        pool_set_error(pool, "cannot fill %" PRId64 " matrices [%" PRId64 ", %" PRId64 "]", w->count, w->n, w->k);
        return KT_ERR_SHAPE;
    }
    int64_t panels = round_up(w->n, KT_PANEL_ROWS) / KT_PANEL_ROWS * w->count;
    random_task t = {pool,   &w->format, layout_of(&w->format, w->k), panels, (uint8_t *)(uintptr_t)w->data, seed,
                     1.0f / sqrtf((float)w->k)};
    pool_run(pool, random_panels, &t);
    return KT_OK;
}
