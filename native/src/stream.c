/* stream.c - the offload while a step runs: the thread that runs the parts, the two entry
 * points, and the watchdog.
 *
 * The *thread* is asleep between steps. In a step it takes the layers that have come, one by one: from a queue that
 * kt_offload_submit fills, or from flags that the device writes. A layer is *open* until it is signalled, which
 * happens once per step: by the thread after the immediate part, or by whoever finds an error, for all layers at once.
 *
 * The *watchdog* wakes four times per timeout and calls it an error when nothing has happened for that long
 * although something should have.
 */
#include "stream.h"

#include <stdarg.h>
#include <stdio.h>

#define POLL_SLEEP_NS 50000     /* between two looks at the flags when spinning is over; the kernel adds about as much */

static void event(kt_offload *o)
{
    atomic_store_explicit(&o->event_ns, now_ns(), memory_order_relaxed);
}

/* ---- signals and errors ------------------------------------------------------------------------- */

static void signal_layer(kt_offload *o, int32_t layer)
{
    if (atomic_exchange(&o->state[layer], SIGNALLED) != SIGNALLED && o->flags)
        atomic_store_explicit(&o->flags[o->layers + layer], 1, memory_order_release);
    bell_ring(&o->done);
}

/* Keep the step's first error and let everybody go on. With the lock. */
static void fail_locked(kt_offload *o, int32_t code, const char *sentence)
{
    if (!offload_failed(o)) {
        snprintf(o->error, sizeof o->error, "%s", sentence);
        atomic_store(&o->code, code);
    }
    for (int32_t i = 0; o->flags && i < o->layers; i++)
        signal_layer(o, i);
    bell_ring(&o->done);
}

int offload_fail(kt_offload *o, int32_t code, const char *format, ...)
{
    char sentence[OFFLOAD_ERROR];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&o->lock);
    fail_locked(o, code, sentence);
    pthread_mutex_unlock(&o->lock);
    return code;
}

/* ---- the thread --------------------------------------------------------------------------------- */

static void run_part(kt_offload *o, int32_t layer, int32_t deferred)
{
    kt_span s = {.layer = layer, .deferred = deferred, .start_ns = now_ns()};
    atomic_store_explicit(&o->event_ns, s.start_ns, memory_order_relaxed);
    int code = kt_program_run_part(o->program, &o->step, deferred ? o->deferred[layer] : o->immediate[layer]);
    s.end_ns = now_ns();
    atomic_store_explicit(&o->event_ns, s.end_ns, memory_order_relaxed);
    int32_t at = atomic_load_explicit(&o->n_spans, memory_order_relaxed);
    o->spans[at] = s;
    atomic_store_explicit(&o->n_spans, at + 1, memory_order_release);
    if (code != KT_OK)
        offload_fail(o, code, "layer %d: %s", layer, kt_program_error(o->program));
}

static void serve(kt_offload *o, int32_t layer)
{
    if (!offload_failed(o))
        run_part(o, layer, 0);
    signal_layer(o, layer);
    if (o->deferred[layer] >= 0 && o->defers && !offload_failed(o))
        run_part(o, layer, 1);
}

/* A layer that has come, or -1. take: it is the thread's now. */
static int32_t next_layer(kt_offload *o, int take)
{
    int32_t at = atomic_load(&o->taken);
    if (!o->flags) {
        int32_t layer = at < o->layers ? atomic_load(&o->queue[at]) : -1;
        if (layer >= 0 && take)
            atomic_store(&o->taken, at + 1);
        return layer;
    }
    for (int32_t i = 0; i < o->layers; i++) {
        if (atomic_load_explicit(&o->flags[i], memory_order_acquire) == 0 || atomic_load(&o->state[i]) != OPEN)
            continue;
        if (take && atomic_exchange(&o->flags[i], 0) == 0)
            continue;
        if (take)
            atomic_store(&o->taken, at + 1);
        return i;
    }
    return -1;
}

/* 1 if there was something to do. */
static int take_and_serve(kt_offload *o)
{
    if (!atomic_load(&o->active) || next_layer(o, 0) < 0)
        return 0;
    atomic_store(&o->busy, 1);
    int32_t layer = atomic_load(&o->active) ? next_layer(o, 1) : -1;
    if (layer >= 0)
        serve(o, layer);
    atomic_store(&o->busy, 0);
    bell_ring(&o->done);
    return layer >= 0;
}

/* Nothing tells the thread that a flag has changed. */
static void wait_for_flag(const kt_offload *o)
{
    if (now_ns() - atomic_load_explicit(&o->event_ns, memory_order_relaxed) >= o->spin_ns)
        thread_sleep(POLL_SLEEP_NS);
    for (int i = 0; i < 4; i++)
        thread_relax();
}

void *offload_work(void *arg)
{
    kt_offload *o = arg;
    pool_settle(o->program->pool);
    for (;;) {
        uint32_t seen = atomic_load(&o->work.rung);
        if (atomic_load(&o->stop))
            return NULL;
        if (take_and_serve(o))
            continue;
        if (o->flags && atomic_load(&o->active) && !offload_failed(o) && atomic_load(&o->taken) < o->layers)
            wait_for_flag(o);
        else
            bell_wait(&o->work, seen, o->flags ? 0 : o->spin_ns);
    }
}

/* ---- the watchdog ------------------------------------------------------------------------------- */

/* Something should have happened and did not. With the lock. */
static int hangs(const kt_offload *o)
{
    int expected = atomic_load(&o->busy) || atomic_load(&o->waiting) > 0 ||
                   (o->flags && atomic_load(&o->taken) < o->layers);
    int64_t since = now_ns() - atomic_load_explicit(&o->event_ns, memory_order_relaxed);
    return atomic_load(&o->active) && !offload_failed(o) && expected && since >= o->timeout_ns;
}

void *offload_watch(void *arg)
{
    kt_offload *o = arg;
    int64_t round = o->timeout_ns / 4;
    pthread_mutex_lock(&o->lock);
    while (!atomic_load(&o->stop)) {
        int64_t until = now_ns() + round;
        struct timespec t = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
        pthread_cond_timedwait(&o->stopped, &o->lock, &t);
        if (!hangs(o))
            continue;
        char sentence[OFFLOAD_ERROR];
        snprintf(sentence, sizeof sentence, "nothing happened for %lld ms; %d of %d layers have come, the last %s",
                 (long long)(o->timeout_ns / 1000000), atomic_load(&o->taken), o->layers,
                 atomic_load(&o->busy) ? "still runs" : "is done");
        fail_locked(o, KT_ERR_TIMEOUT, sentence);
    }
    pthread_mutex_unlock(&o->lock);
    return NULL;
}

/* ---- the stream's side -------------------------------------------------------------------------- */

void kt_offload_submit(void *given)
{
    const ticket *t = given;
    kt_offload *o = t->offload;
    int32_t open = OPEN;
    atomic_fetch_add(&o->inside, 1);
    if (o->flags) {
        offload_fail(o, KT_ERR_RANGE, "layer %d was submitted by a call, but layers come by flags", t->layer);
    } else if (!atomic_load(&o->active)) {
        offload_fail(o, KT_ERR_RANGE, "layer %d was submitted outside of a step", t->layer);
    } else if (!atomic_compare_exchange_strong(&o->state[t->layer], &open, SUBMITTED)) {
        offload_fail(o, KT_ERR_RANGE, "layer %d was submitted twice in a step", t->layer);
    } else {
        int32_t at = atomic_fetch_add(&o->arrived, 1);
        if (at < o->layers)     /* always, unless it comes while a step begins */
            atomic_store(&o->queue[at], t->layer);
        bell_ring(&o->work);
    }
    atomic_fetch_sub(&o->inside, 1);
}

static int is_done(kt_offload *o, int32_t layer)
{
    return offload_failed(o) || atomic_load(&o->stop) || atomic_load(&o->state[layer]) == SIGNALLED;
}

void kt_offload_wait(void *given)
{
    const ticket *t = given;
    kt_offload *o = t->offload;
    atomic_fetch_add(&o->inside, 1);
    if (!is_done(o, t->layer) && !atomic_load(&o->active))
        offload_fail(o, KT_ERR_RANGE, "layer %d was waited for outside of a step", t->layer);
    if (!is_done(o, t->layer)) {
        event(o);
        atomic_fetch_add(&o->waiting, 1);
        for (uint32_t seen = atomic_load(&o->done.rung); !is_done(o, t->layer); seen = atomic_load(&o->done.rung))
            bell_wait(&o->done, seen, o->spin_ns);
        atomic_fetch_sub(&o->waiting, 1);
    }
    atomic_fetch_sub(&o->inside, 1);
}
