/* place.c - moves bytes to their place: parallel reads of a file, copies, and packed matrices
 * divided between nodes.
 *
 * Every byte of a file is read once, by whichever thread is free; what it read goes to the memory of the node
 * whose slice it is. Where the system does not bind memory, a page lies where it is touched first: so the team
 * of each node touches its slices before anybody fills them.
 */
#define _GNU_SOURCE
#include "kernels/formats.h"
#include "pool.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define READ_RUN ((size_t)4 << 20)      /* bytes of one pread: long enough to stream, short enough to share */
#define CUT_RUN ((size_t)512 << 10)     /* bytes read to be cut into slices: they stay in the second cache */
#define COPY_RUN ((size_t)1 << 20)      /* bytes of one memcpy: as a read, but nothing waits for a disk */
#define PAGE ((size_t)4096)

typedef struct reading {
    kt_pool *pool;
    int fd;
    uint64_t offset;
    size_t size;
    uint8_t *dst;
    _Atomic int failed;         /* errno of the first failure; -1: the file ended */
    _Atomic uint64_t where;     /* file offset of that failure */
} reading;

/* dst[0..size) = the file's bytes from `offset`. 0, or the failure is noted in r. */
static int read_run(reading *r, uint64_t offset, size_t size, uint8_t *dst)
{
    size_t at = 0;
    int failed = 0, none = 0;
    while (at < size && !failed) {
        ssize_t n = pread(r->fd, dst + at, size - at, (off_t)(offset + at));
        if (n > 0)
            at += (size_t)n;
        else if (n == 0)
            failed = -1;
        else if (errno != EINTR)
            failed = errno;
    }
    if (failed && atomic_compare_exchange_strong(&r->failed, &none, failed))
        atomic_store(&r->where, offset + at);
    return failed;
}

static void read_task(void *arg, int thread, int threads)
{
    reading *r = arg;
    int64_t runs = (int64_t)((r->size + READ_RUN - 1) / READ_RUN);
    (void)threads;
    for (int64_t i; (i = pool_take(r->pool, thread, 1)) < runs && atomic_load(&r->failed) == 0;) {
        size_t first = (size_t)i * READ_RUN;
        read_run(r, r->offset + first, r->size - first < READ_RUN ? r->size - first : READ_RUN, r->dst + first);
    }
}

/* What became of a reading. */
static int outcome(reading *r)
{
    int failed = atomic_load(&r->failed);
    if (failed == 0)
        return KT_OK;
    pool_set_error(r->pool, "reading %zu bytes from offset %llu: %s at offset %llu", r->size,
                   (unsigned long long)r->offset, failed < 0 ? "the file ends" : strerror(failed),
                   (unsigned long long)atomic_load(&r->where));
    return KT_ERR_IO;
}

static int check_range(kt_pool *pool, uint64_t offset, size_t size)
{
    if (offset <= INT64_MAX && size <= INT64_MAX - offset)
        return KT_OK;
    pool_set_error(pool, "reading %zu bytes from offset %llu: no file is that long", size, (unsigned long long)offset);
    return KT_ERR_RANGE;
}

int kt_read(kt_pool *pool, int32_t fd, uint64_t offset, size_t size, void *dst)
{
    if (check_range(pool, offset, size) != KT_OK)
        return KT_ERR_RANGE;
    reading r = {.pool = pool, .fd = fd, .offset = offset, .size = size, .dst = dst};
    pool_run(pool, read_task, &r);
    return outcome(&r);
}

/* ---- copies ------------------------------------------------------------------------------------- */

typedef struct copying {
    kt_pool *pool;
    const kt_copy_piece *pieces;
    int64_t n;
} copying;

static int64_t copy_runs(const kt_copy_piece *piece)
{
    return (int64_t)((piece->size + COPY_RUN - 1) / COPY_RUN);
}

/* Runs are counted over all pieces, which a thread walks along as its runs ascend. */
static void copy_task(void *arg, int thread, int threads)
{
    const copying *c = arg;
    int64_t piece = 0, before = 0;      /* runs of the pieces before it */
    (void)threads;
    for (;;) {
        int64_t i = pool_take(c->pool, thread, 1);
        while (piece < c->n && i - before >= copy_runs(&c->pieces[piece]))
            before += copy_runs(&c->pieces[piece++]);
        if (piece == c->n)
            return;
        const kt_copy_piece *p = &c->pieces[piece];
        size_t first = (size_t)(i - before) * COPY_RUN, left = p->size - first;
        memcpy((uint8_t *)p->dst + first, (const uint8_t *)p->src + first, left < COPY_RUN ? left : COPY_RUN);
    }
}

int kt_copy(kt_pool *pool, const kt_copy_piece *pieces, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (pieces[i].size > 0 && (!pieces[i].dst || !pieces[i].src)) {
            pool_set_error(pool, "copying piece %lld of %lld: no memory is named", (long long)i, (long long)n);
            return KT_ERR_RANGE;
        }
    }
    copying c = {.pool = pool, .pieces = pieces, .n = n};
    pool_run(pool, copy_task, &c);
    return KT_OK;
}

/* ---- slices ------------------------------------------------------------------------------------- */

typedef struct cutting {
    reading r;
    const kt_weight *w;
    const kt_slice *slices;     /* [nodes] */
    int32_t axis, nodes;
    layout whole;
    int64_t panels, run;        /* panels of a matrix, and of one task */
    uint8_t *bounce;            /* [threads][run] panels, to cut columns; NULL where rows are cut */
} cutting;

/* The shape of a slice as a matrix of its own; *n and *k 0 if it is empty. */
static void slice_shape(const cutting *c, int node, int64_t *n, int64_t *k)
{
    const kt_slice *s = &c->slices[node];
    int64_t width = s->last - s->first;
    *n = width == 0 ? 0 : c->axis == KT_CUT_ROWS ? width : c->w->n;
    *k = width == 0 ? 0 : c->axis == KT_CUT_ROWS ? c->w->k : width;
}

static size_t slice_bytes(const cutting *c, int node)
{
    int64_t n, k;
    slice_shape(c, node, &n, &k);
    return n ? kt_packed_bytes(&c->w->format, n, k) : 0;
}

/* One byte of every page that holds a part of the team's slice; all of them are written again. */
static void touch(const cutting *c, int thread)
{
    int node = pool_place_of(c->r.pool, thread).node;
    volatile uint8_t *data = c->slices[node].data;
    size_t size = slice_bytes(c, node) * (size_t)c->w->count;
    for (size_t i; (i = (size_t)pool_take_own(c->r.pool, thread, 1) * READ_RUN) < size;) {
        data[i] = 0;
        for (size_t at = i + PAGE - (uintptr_t)(data + i) % PAGE; at < i + READ_RUN && at < size; at += PAGE)
            data[at] = 0;
    }
}

/* Panel i of matrix e, whose bytes are at `from`, cut by columns. */
static void cut_panel(const cutting *c, int64_t e, int64_t i, const uint8_t *from)
{
    const kt_format *f = &c->w->format;
    size_t row = KT_PANEL_ROWS * scale_bytes(f->scale), head = scale_head(f->scale);
    for (int32_t node = 0; node < c->nodes; node++) {
        const kt_slice *s = &c->slices[node];
        if (s->first == s->last)
            continue;
        layout l = layout_of(f, s->last - s->first);
        uint8_t *to = (uint8_t *)s->data + (size_t)(e * c->panels + i) * l.panel_bytes;
        int64_t group = f->group ? s->first / f->group : 0;
        size_t codes = l.scale_offset, scales = head + (size_t)l.groups * row;
        const uint8_t *heads = from + c->whole.scale_offset;
        memcpy(to, from + (size_t)(s->first / l.step) * l.step_bytes, codes);
        memcpy(to + codes, heads, head);
        memcpy(to + codes + head, heads + head + (size_t)group * row, scales - head);
        memset(to + codes + scales, 0, l.panel_bytes - codes - scales);
    }
}

/* Panels [first, last) of all matrices, in the order of the file. */
static int columns_run(cutting *c, int64_t first, int64_t last, uint8_t *bounce)
{
    size_t bytes = c->whole.panel_bytes, size = (size_t)(last - first) * bytes, at = (size_t)first * bytes;
    const uint8_t *from = bounce;
    if (c->r.fd < 0)
        from = (const uint8_t *)c->w->data + at;
    else if (read_run(&c->r, c->r.offset + at, size, bounce))
        return 0;
    for (int64_t p = first; p < last; p++)
        cut_panel(c, p / c->panels, p % c->panels, from + (size_t)(p - first) * bytes);
    return 1;
}

/* The same where rows are cut: neighbours of one matrix and node are neighbours there, too. */
static int rows_run(cutting *c, int64_t first, int64_t last)
{
    size_t bytes = c->whole.panel_bytes;
    for (int64_t p = first, next; p < last; p = next) {
        int64_t e = p / c->panels, row = p % c->panels * KT_PANEL_ROWS;
        int32_t node = 0;
        while (c->slices[node].last <= row)
            node++;
        const kt_slice *s = &c->slices[node];
        int64_t end = e * c->panels + (s->last + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS;
        next = end < last ? end : last;
        uint8_t *to = (uint8_t *)s->data + (size_t)e * slice_bytes(c, node) +
                      (size_t)((row - s->first) / KT_PANEL_ROWS) * bytes;
        size_t at = (size_t)p * bytes, size = (size_t)(next - p) * bytes;
        if (c->r.fd < 0)
            memcpy(to, (const uint8_t *)c->w->data + at, size);
        else if (read_run(&c->r, c->r.offset + at, size, to))
            return 0;
    }
    return 1;
}

static void cut_task(void *arg, int thread, int threads)
{
    cutting *c = arg;
    int64_t all = c->panels * c->w->count;
    uint8_t *bounce = c->bounce ? c->bounce + (size_t)thread * (size_t)c->run * c->whole.panel_bytes : NULL;
    int good = 1;
    (void)threads;
    if (c->nodes > 1)
        touch(c, thread);
    pool_barrier(c->r.pool, thread);
    for (int64_t p; good && (p = pool_take(c->r.pool, thread, c->run)) < all && atomic_load(&c->r.failed) == 0;) {
        int64_t last = p + c->run < all ? p + c->run : all;
        good = c->axis == KT_CUT_ROWS ? rows_run(c, p, last) : columns_run(c, p, last, bounce);
    }
}

/* Slices follow one another from 0 to the end, on boundaries that the format can be cut at. */
static int check_slices(kt_pool *pool, const cutting *c)
{
    int64_t at = 0, end = c->axis == KT_CUT_ROWS ? c->w->n : c->w->k;
    int64_t unit = c->axis == KT_CUT_ROWS ? KT_PANEL_ROWS : kt_cut_columns(&c->w->format);
    for (int32_t i = 0; i < c->nodes; i++) {
        const kt_slice *s = &c->slices[i];
        if (s->first != at || s->last < at || s->last > end || (s->last < end && s->last % unit) ||
            (s->last > at && !s->data)) {
            pool_set_error(pool, "slice %d of %d is %lld..%lld of %lld, cut every %lld: it must begin at %lld", i,
                           c->nodes, (long long)s->first, (long long)s->last, (long long)end, (long long)unit,
                           (long long)at);
            return KT_ERR_SHAPE;
        }
        at = s->last;
    }
    if (at == end)
        return KT_OK;
    pool_set_error(pool, "the slices end at %lld of %lld", (long long)at, (long long)end);
    return KT_ERR_SHAPE;
}

int64_t kt_cut_columns(const kt_format *format)
{
    if (!format_is_valid(format))
        return 0;
    layout l = layout_of(format, 1);
    int64_t unit = format->group > l.step ? format->group : l.step;
    return format->rotation > unit ? format->rotation : unit;
}

int kt_place(kt_pool *pool, int32_t fd, uint64_t offset, const kt_weight *w, int32_t axis, const kt_slice *slices)
{
    size_t bytes = kt_packed_bytes(&w->format, w->n, w->k), size;
    if (!bytes || w->count < 1 || __builtin_mul_overflow(bytes, (size_t)w->count, &size) ||
        (axis != KT_CUT_ROWS && axis != KT_CUT_COLUMNS)) {
        pool_set_error(pool, "cannot place %lld matrices [%lld, %lld] along axis %d", (long long)w->count,
                       (long long)w->n, (long long)w->k, axis);
        return KT_ERR_SHAPE;
    }
    if (axis == KT_CUT_COLUMNS && rotation_block(&w->format, w->k) != w->format.rotation) {
        pool_set_error(pool, "columns rotated in blocks of %lld are cut of a format that says so, not %d",
                       (long long)rotation_block(&w->format, w->k), (int)w->format.rotation);
        return KT_ERR_SHAPE;
    }
    cutting c = {.r = {.pool = pool, .fd = fd, .offset = offset, .size = size}, .w = w, .slices = slices,
                 .axis = axis, .nodes = kt_pool_nodes(pool), .whole = layout_of(&w->format, w->k)};
    int failed = fd < 0 ? KT_OK : check_range(pool, offset, size);
    if (fd < 0 && !w->data) {
        pool_set_error(pool, "no file to place %zu bytes from, and no data", size);
        failed = KT_ERR_SHAPE;
    }
    if (!failed)
        failed = check_slices(pool, &c);
    if (failed)
        return failed;
    size_t most = axis == KT_CUT_ROWS ? READ_RUN : CUT_RUN;
    c.panels = round_up(w->n, KT_PANEL_ROWS) / KT_PANEL_ROWS;
    c.run = most > c.whole.panel_bytes ? (int64_t)(most / c.whole.panel_bytes) : 1;
    if (axis == KT_CUT_COLUMNS && fd >= 0) {
        c.bounce = malloc((size_t)kt_pool_threads(pool) * (size_t)c.run * c.whole.panel_bytes);
        if (!c.bounce) {
            pool_set_error(pool, "no memory to cut %zu bytes into slices", size);
            return KT_ERR_MEMORY;
        }
    }
    pool_run(pool, cut_task, &c);
    free(c.bounce);
    return outcome(&c.r);
}
