/* step.c - running a recorded program or a part of it: check the step, then let the whole team walk the list of
 * phases.
 *
 * All that can be wrong with a step is found before the team starts, so no phase checks anything. One
 * pool task per step; nothing is allocated.
 */
#include "program.h"
#include "thread.h"

#include <float.h>

/* ---- checks ------------------------------------------------------------------------------------- */

static int check_counts(kt_program *p, const kt_step *s)
{
    const kt_program_options *o = &p->options;
    if (s->n_tokens < 1 || s->n_tokens > o->max_tokens)
        return program_fail(p, KT_ERR_RANGE, "n_tokens is %lld, outside 1..%lld", (long long)s->n_tokens,
                            (long long)o->max_tokens);
    if (s->start < 0 || s->start > INT32_MAX - s->n_tokens)
        return program_fail(p, KT_ERR_RANGE, "start is %lld, outside 0..%lld", (long long)s->start,
                            (long long)(INT32_MAX - s->n_tokens));
    if (s->first_output < 0 || s->first_output > s->n_tokens || s->n_tokens - s->first_output > o->max_outputs)
        return program_fail(p, KT_ERR_RANGE, "first_output is %lld of %lld tokens; at most %lld outputs are possible",
                            (long long)s->first_output, (long long)s->n_tokens, (long long)o->max_outputs);
    if (s->defer < 0)
        return program_fail(p, KT_ERR_RANGE, "defer is %d; 0 or more is possible", s->defer);
    if (!(s->temperature >= 0 && s->temperature <= FLT_MAX))
        return program_fail(p, KT_ERR_RANGE, "temperature is %g; 0 or more is possible", (double)s->temperature);
    return KT_OK;
}

static int check_ids(kt_program *p, const kt_step *s)
{
    if (p->vocab == INT64_MAX)
        return KT_OK;
    if (!s->ids)
        return program_fail(p, KT_ERR_RANGE, "no ids given");
    for (int64_t t = 0; t < s->n_tokens; t++) {
        if (s->ids[t] < 0 || s->ids[t] >= p->vocab)
            return program_fail(p, KT_ERR_RANGE, "ids[%lld] is %d, outside 0..%lld", (long long)t, s->ids[t],
                                (long long)(p->vocab - 1));
    }
    return KT_OK;
}

static int check_cache(kt_program *p, const kt_step *s)
{
    if (p->page_bytes == 0)
        return KT_OK;
    int64_t needed = (s->start + s->n_tokens + KT_PAGE_TOKENS - 1) / KT_PAGE_TOKENS;
    if (s->start + s->n_tokens > p->positions)
        return program_fail(p, KT_ERR_RANGE, "the step ends at position %lld; sequences have %lld at most",
                            (long long)(s->start + s->n_tokens), (long long)p->positions);
    if (!s->cache || !s->pages || s->n_pages < needed)
        return program_fail(p, KT_ERR_RANGE, "%lld pages given; positions up to %lld need %lld",
                            (long long)(s->cache && s->pages ? s->n_pages : 0),
                            (long long)(s->start + s->n_tokens), (long long)needed);
    if (s->page_bytes < p->page_bytes || s->page_bytes % 64 != 0)
        return program_fail(p, KT_ERR_RANGE, "page_bytes is %zu; a multiple of 64 from %zu on is needed",
                            s->page_bytes, p->page_bytes);
    for (int64_t i = 0; i < needed; i++) {
        if (s->pages[i] < 0 || s->pages[i] >= s->cache_pages)
            return program_fail(p, KT_ERR_RANGE, "pages[%lld] is %d, outside 0..%lld", (long long)i, s->pages[i],
                                (long long)(s->cache_pages - 1));
    }
    return KT_OK;
}

static int check_state(kt_program *p, const kt_step *s)
{
    if (p->state_bytes == 0)
        return KT_OK;
    if (!s->next_state || s->state_bytes < p->state_bytes)
        return program_fail(p, KT_ERR_RANGE, "a state of %zu bytes given; %zu are needed",
                            s->next_state ? s->state_bytes : 0, p->state_bytes);
    if (!s->state && s->start > 0)
        return program_fail(p, KT_ERR_RANGE, "no state given of what is before position %lld", (long long)s->start);
    uintptr_t from = (uintptr_t)s->state, to = (uintptr_t)s->next_state;
    if (s->state && from < to + s->state_bytes && to < from + s->state_bytes)
        return program_fail(p, KT_ERR_RANGE, "the states before and after the step overlap");
    return KT_OK;
}

/* ---- parts -------------------------------------------------------------------------------------- */

int kt_program_input(kt_program *p, kt_view x)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "input", x, -1);
    if (!failed)
        program_forget(p, x);
    return failed;
}

int32_t kt_program_part(kt_program *p)
{
    int failed = program_open(p);
    if (failed)
        return failed;
    if (!ROOM(p, p->parts))
        return KT_ERR_MEMORY;
    for (int32_t i = 0; i < p->slots.n; i++)
        p->slots.at[i].valid &= p->slots.at[i].part == p->parts.n;
    for (int32_t i = 0; i < p->tables.n; i++)
        p->tables.at[i].recorded = 0;
    /* Its first phase gets a barrier as if there were no counter left. */
    p->loops = POOL_LOOPS - 1;
    p->parts.at[p->parts.n++] = p->phases.n;
    return p->parts.n;
}

/* ---- run ---------------------------------------------------------------------------------------- */

typedef struct run {
    kt_program *program;
    const kt_step *step;
    int32_t first, last;        /* phases */
} run;

static void step_task(void *arg, int thread, int threads)
{
    const run *r = arg;
    kt_program *p = r->program;
    worker w = {.program = p, .pool = p->pool, .kernels = pool_kernels(p->pool), .step = r->step,
                .thread = thread, .threads = threads, .own = pool_place_of(p->pool, thread)};
    w.local = p->nodes[w.own.node].local + (size_t)w.own.thread * p->local_stride;
    int64_t last = thread == 0 ? now_ns() : 0;
    for (int32_t i = r->first; i < r->last; i++) {
        const phase *f = &p->phases.at[i];
        if (i > r->first && f->barrier)
            pool_barrier(p->pool, thread);
        else if (i > r->first)
            pool_next_loop(p->pool, thread);
        if (!f->late || r->step->defer > 0)
            f->run(f->arg, &w);
        if (thread == 0) {
            int64_t now = now_ns();
            p->profile[f->operation] += now - last;
            last = now;
        }
    }
}

static int run_phases(kt_program *p, const kt_step *step, int32_t first, int32_t last)
{
    if (!p->finished)
        return program_fail(p, KT_ERR_RANGE, "the program is not finished; it cannot run yet");
    int failed = check_counts(p, step);
    if (!failed)
        failed = check_ids(p, step);
    if (!failed)
        failed = check_cache(p, step);
    if (!failed)
        failed = check_state(p, step);
    if (failed)
        return failed;
    if (p->stray)
        atomic_store_explicit(&p->stray->found, 0, memory_order_relaxed);
    run r = {.program = p, .step = step, .first = first, .last = last};
    pool_run(p->pool, step_task, &r);
    const stray *s = p->stray;
    if (s && atomic_load_explicit(&s->found, memory_order_relaxed))
        return program_fail(p, KT_ERR_RANGE, "token %lld of routing %d goes to expert %d, outside -1..%d",
                            (long long)s->row, s->routing, s->id, p->routings.at[s->routing].experts - 1);
    return KT_OK;
}

int kt_program_run(kt_program *p, const kt_step *step)
{
    return run_phases(p, step, 0, p->phases.n);
}

int kt_program_run_part(kt_program *p, const kt_step *step, int32_t part)
{
    const int32_t *first = p->parts.at;
    if (part < 0 || part > p->parts.n)
        return program_fail(p, KT_ERR_RANGE, "part %d of %d", part, p->parts.n + 1);
    return run_phases(p, step, part > 0 ? first[part - 1] : 0, part < p->parts.n ? first[part] : p->phases.n);
}

int32_t kt_program_profile(const kt_program *p, int64_t *nanoseconds, int32_t capacity)
{
    for (int32_t i = 0; p->finished && i < p->operations && i < capacity; i++)
        nanoseconds[i] = p->profile[i];
    return p->operations;
}
