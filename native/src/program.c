/* program.c - recording: buffers, and phases with their barriers. The end of it is finish.c, running is step.c; what
 * the operations compute stands in the files named after them.
 */
#include "program.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Buffers whose rows are a multiple of this many floats get one more line per row: rows that lie a
 * multiple of 4 kB apart compete for the same sets of the first cache. */
#define ALIASING_FLOATS 1024

/* ---- errors and sizes --------------------------------------------------------------------------- */

int program_fail(kt_program *p, int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(p->error, sizeof p->error, format, arguments);
    va_end(arguments);
    return code;
}

size_t size_mul(size_t a, size_t b)
{
    size_t product;
    return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

size_t size_add(size_t a, size_t b)
{
    size_t sum;
    return __builtin_add_overflow(a, b, &sum) ? SIZE_MAX : sum;
}

int program_room(kt_program *p, void *at, int32_t n, int32_t *capacity, size_t item)
{
    if (n < *capacity)
        return 1;
    void *items;
    memcpy(&items, at, sizeof items);
    int32_t wanted = *capacity ? 2 * *capacity : 16;
    items = wanted > 0 ? realloc(items, (size_t)wanted * item) : NULL;
    if (!items) {
        p->failed = 1;
        program_fail(p, KT_ERR_MEMORY, "no memory left to record operation %d", p->operations);
        return 0;
    }
    memcpy(at, &items, sizeof items);
    *capacity = wanted;
    return 1;
}

/* ---- create and free ---------------------------------------------------------------------------- */

kt_program *kt_program_create(kt_pool *pool, const kt_program_options *options, char *error, size_t error_size)
{
    if (options->max_tokens < 1 || options->max_tokens > MAX_ROWS || options->max_outputs < 0 ||
        options->max_outputs > options->max_tokens) {
        snprintf(error, error_size, "max_tokens %lld is outside 1..%lld or max_outputs %lld outside 0..max_tokens",
                 (long long)options->max_tokens, (long long)MAX_ROWS, (long long)options->max_outputs);
        return NULL;
    }
    if (options->cache < KT_CACHE_BF16 || options->cache > KT_CACHE_FP8) {
        snprintf(error, error_size, "cache %d is not one of KT_CACHE_*", options->cache);
        return NULL;
    }
    kt_program *p = calloc(1, sizeof *p);
    if (!p) {
        snprintf(error, error_size, "no memory for a program");
        return NULL;
    }
    p->pool = pool;
    p->kernels = pool_kernels(pool);
    p->options = *options;
    p->vocab = p->positions = INT64_MAX;
    p->inner[0] = p->inner[1] = -1;
    p->resources = 4;       /* 0: scratch, 1: the cache, 2: the nodes' scratch, 3: the window pages */
    p->n_nodes = kt_pool_nodes(pool);
    p->nodes = program_new(p, (size_t)p->n_nodes * sizeof *p->nodes);
    if (!p->nodes) {
        snprintf(error, error_size, "no memory for a program");
        kt_program_free(p);
        return NULL;
    }
    return p;
}

void program_release(kt_program *p)
{
    for (int32_t i = 0; p->nodes && i < p->n_nodes; i++) {
        kt_arena_free(p->nodes[i].arena);
        p->nodes[i].arena = NULL;
    }
    kt_arena_free(p->arena);
    p->arena = NULL;
    free(p->profile);
    p->profile = NULL;
}

void kt_program_free(kt_program *p)
{
    if (!p)
        return;
    program_release(p);
    for (int32_t i = 0; i < p->owned.n; i++)
        free(p->owned.at[i]);
    free(p->owned.at);
    free(p->buffers.at);
    free(p->slots.at);
    free(p->tables.at);
    free(p->routings.at);
    free(p->selections.at);
    free(p->adaptables.at);
    free(p->gains.at);
    free(p->phases.at);
    free(p->parts.at);
    free(p->recent.at);
    free(p);
}

const char *kt_program_error(const kt_program *p)
{
    return p->error;
}

int program_open(kt_program *p)
{
    if (p->failed)
        return program_fail(p, KT_ERR_MEMORY, "no memory left to record operation %d", p->operations);
    if (p->finished)
        return program_fail(p, KT_ERR_SHAPE, "the program is finished; nothing can be recorded any more");
    return KT_OK;
}

void *program_new(kt_program *p, size_t size)
{
    void *memory = ROOM(p, p->owned) ? calloc(1, size) : NULL;
    if (!memory) {
        p->failed = 1;
        program_fail(p, KT_ERR_MEMORY, "no memory left to record operation %d", p->operations);
        return NULL;
    }
    p->owned.at[p->owned.n++] = memory;
    return memory;
}

float *program_constant(kt_program *p, int64_t n, double value)
{
    float *made = program_new(p, (size_t)n * sizeof *made);
    for (int64_t i = 0; made && i < n; i++)
        made[i] = (float)value;
    return made;
}

int program_reserve_state(kt_program *p, const char *name, size_t offset, size_t size)
{
    if (offset % 64 != 0 || offset > INT64_MAX / 2)
        return program_fail(p, KT_ERR_SHAPE, "%s: state_offset %zu is not a multiple of 64", name, offset);
    p->state_bytes = p->state_bytes > offset + size ? p->state_bytes : offset + size;
    return KT_OK;
}

int32_t program_resource(kt_program *p)
{
    return p->resources++;
}

/* ---- buffers and views -------------------------------------------------------------------------- */

int32_t kt_program_buffer(kt_program *p, int64_t width, int32_t domain)
{
    int failed = program_open(p);
    if (failed)
        return failed;
    if (width < 1 || width > MAX_COLUMNS)
        return program_fail(p, KT_ERR_SHAPE, "a buffer of %lld columns: 1..%lld are possible", (long long)width,
                            (long long)MAX_COLUMNS);
    if (domain != KT_ROWS_TOKENS && domain != KT_ROWS_OUTPUTS)
        return program_fail(p, KT_ERR_RANGE, "a buffer of domain %d: there are %d (tokens) and %d (outputs)",
                            domain, KT_ROWS_TOKENS, KT_ROWS_OUTPUTS);
    if (!ROOM(p, p->buffers))
        return program_open(p);
    int64_t stride = (width + 15) / 16 * 16;
    if (stride % ALIASING_FLOATS == 0)
        stride += 16;
    p->buffers.at[p->buffers.n] = (buffer){.width = width, .stride = stride, .domain = domain,
                                           .resource = program_resource(p)};
    return p->buffers.n++;
}

float *kt_program_data(kt_program *p, int32_t number, int64_t *stride)
{
    if (!p->finished || number < 0 || number >= p->buffers.n)
        return NULL;
    if (stride)
        *stride = p->buffers.at[number].stride;
    return p->buffers.at[number].data;
}

int program_check_view(kt_program *p, const char *name, kt_view v, int32_t domain)
{
    if (v.buffer < 0 || v.buffer >= p->buffers.n)
        return program_fail(p, KT_ERR_RANGE, "%s: buffer %d of %d", name, v.buffer, p->buffers.n);
    const buffer *b = &p->buffers.at[v.buffer];
    if (v.column < 0 || v.width < 1 || (int64_t)v.column + v.width > b->width)
        return program_fail(p, KT_ERR_SHAPE, "%s: columns %d..%lld of buffer %d, which has %lld", name, v.column,
                            (long long)v.column + v.width, v.buffer, (long long)b->width);
    if (domain >= 0 && b->domain != domain)
        return program_fail(p, KT_ERR_SHAPE, "%s: buffer %d has rows of domain %d, not %d", name, v.buffer,
                            b->domain, domain);
    return KT_OK;
}

int32_t program_domain(const kt_program *p, kt_view v)
{
    return p->buffers.at[v.buffer].domain;
}

int64_t program_rows(const kt_program *p, int32_t domain)
{
    return domain == KT_ROWS_TOKENS ? p->options.max_tokens : p->options.max_outputs;
}

int program_check_overlap(kt_program *p, const char *name, kt_view a, kt_view b, int32_t equal_allowed)
{
    int apart = a.buffer != b.buffer || (int64_t)a.column + a.width <= b.column ||
                (int64_t)b.column + b.width <= a.column;
    int equal = a.column == b.column && a.width == b.width;
    if (apart || (equal && equal_allowed))
        return KT_OK;
    return program_fail(p, KT_ERR_SHAPE, "%s: columns %d..%d and %d..%d of buffer %d overlap", name, a.column,
                        a.column + a.width, b.column, b.column + b.width, a.buffer);
}

/* ---- phases and barriers ------------------------------------------------------------------------ */

void program_operation(kt_program *p)
{
    p->operations++;
}

void program_phase(kt_program *p, phase_run *run, const void *arg)
{
    if (!ROOM(p, p->phases))
        return;
    p->phase_first = p->recent.n;
    /* Between two barriers each phase takes its work from another counter of the pool; one is left for
     * a phase that starts a second loop after barriers of its own. */
    int32_t full = p->loops == POOL_LOOPS - 1;
    if (full) {
        p->recent.n = p->phase_first = 0;
        p->loops = 0;
    }
    p->loops++;
    p->phases.at[p->phases.n++] = (phase){.run = run, .arg = arg, .operation = p->operations - 1, .barrier = full,
                                          .late = p->late, .kernels = p->kernels};
}

int kt_program_row(kt_program *p, const char *isa)
{
    int failed = program_open(p);
    if (failed)
        return failed;
    char why[256] = "";
    const kt_kernels *row = isa ? cpu_choose_row(isa, why, sizeof why) : pool_kernels(p->pool);
    if (!row)
        return program_fail(p, KT_ERR_RANGE, "%s", why);
    p->kernels = row;
    return KT_OK;
}

static int conflict(const access *a, const access *b)
{
    int apart = a->resource != b->resource || a->last <= b->first || b->last <= a->first;
    int reading = !((a->how | b->how) & WRITES);
    int own = !((a->how | b->how) & ANY_ROWS);
    return !apart && !reading && !own;
}

void program_touch(kt_program *p, int32_t resource, int64_t first, int64_t last, int32_t how)
{
    access now = {.resource = resource, .how = how, .first = first, .last = last};
    int32_t meets = 0;
    for (int32_t i = 0; i < p->phase_first && !meets; i++)
        meets = conflict(&p->recent.at[i], &now);
    if (meets) {
        p->phases.at[p->phases.n - 1].barrier = 1;
        p->recent.n -= p->phase_first;
        memmove(p->recent.at, p->recent.at + p->phase_first, (size_t)p->recent.n * sizeof(access));
        p->phase_first = 0;
        p->loops = 1;
    }
    if (ROOM(p, p->recent))
        p->recent.at[p->recent.n++] = now;
}

void program_forget(kt_program *p, kt_view v)
{
    int64_t last = (int64_t)v.column + v.width;
    for (int32_t i = 0; i < p->slots.n; i++) {
        slot *s = &p->slots.at[i];
        if (s->view.buffer == v.buffer && s->view.column < last && v.column < (int64_t)s->view.column + s->view.width)
            s->valid = 0;
    }
}

void program_touch_view(kt_program *p, kt_view v, int32_t how)
{
    int64_t last = (int64_t)v.column + v.width;
    program_touch(p, p->buffers.at[v.buffer].resource, v.column, last, how);
    if (how & WRITES)
        program_forget(p, v);
}

void program_touch_source(kt_program *p, const source *s)
{
    if (s->slot < 0)
        program_touch_view(p, s->view, ANY_ROWS);
    else
        program_touch(p, p->slots.at[s->slot].resource, 0, 1, ANY_ROWS);
}

void program_touch_scratch(kt_program *p, int32_t how)
{
    program_touch(p, 0, 0, 1, how);
}

void program_touch_node_scratch(kt_program *p, int32_t how)
{
    program_touch(p, 2, 0, 1, how);
}

void program_touch_cache(kt_program *p, size_t offset, size_t size, int32_t how)
{
    program_touch(p, 1, (int64_t)offset, (int64_t)(offset + size), how);
}

void program_touch_windows(kt_program *p, size_t offset, size_t size, int32_t how)
{
    program_touch(p, 3, (int64_t)offset, (int64_t)(offset + size), how);
}

void program_reserve(kt_program *p, size_t scratch, size_t local)
{
    if (scratch > p->scratch_bytes)
        p->scratch_bytes = scratch;
    if (local > p->local_bytes)
        p->local_bytes = local;
}

void program_reserve_node(kt_program *p, size_t scratch)
{
    if (scratch > p->node_bytes)
        p->node_bytes = scratch;
}
