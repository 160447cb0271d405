/* step.c - running a recorded program or a part of it: check the step and derive its rows
 * (batch.c), then let the whole team execute the list of phases. One pool task per step;
 * nothing is allocated. */
#include "program.h"
#include "thread.h"

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

/* A row with tiles in the pool of another row: no thread has made them ready. */
static void run_phase(const phase *f, worker *w)
{
    int alone = f->kernels->enter && f->kernels != pool_kernels(w->pool);
    w->kernels = f->kernels;
    if (alone)
        f->kernels->enter();
    f->run(f->arg, w);
    if (alone)
        f->kernels->leave();
}

static void step_task(void *arg, int thread, int threads)
{
    const run *r = arg;
    kt_program *p = r->program;
    worker w = {.program = p, .pool = p->pool, .kernels = pool_kernels(p->pool), .step = r->step,
                .batch = &p->batch, .thread = thread, .threads = threads, .own = pool_place_of(p->pool, thread)};
    w.local = p->nodes[w.own.node].local + (size_t)w.own.thread * p->local_stride;
    int64_t last = thread == 0 ? now_ns() : 0;
    for (int32_t i = r->first; i < r->last; i++) {
        const phase *f = &p->phases.at[i];
        if (i > r->first && f->barrier)
            pool_barrier(p->pool, thread);
        else if (i > r->first)
            pool_next_loop(p->pool, thread);
        if (!f->late || p->batch.defer > 0)
            run_phase(f, &w);
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
    int failed = batch_check(p, step);
    if (failed)
        return failed;
    batch_derive(&p->batch, step);
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
