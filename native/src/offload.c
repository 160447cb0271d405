/* offload.c - CPU experts for a stream of another device, from the caller's point of view:
 * create and free, and the beginning and end of each step. What goes on in between is stream.c. */
#define _GNU_SOURCE
#include "stream.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_LAYERS 65536
#define REST_SLEEP_NS 50000     /* between two looks whether the thread rests: usually it does at the first */

/* ---- steps -------------------------------------------------------------------------------------- */

/* Nothing has come that is not done. */
static int is_through(const kt_offload *o)
{
    int left = atomic_load(&o->active) && !o->flags && atomic_load(&o->taken) != atomic_load(&o->arrived);
    return !left && !atomic_load(&o->busy);
}

/* Returns when all that has come is done, or after an error (there will be one if it hangs). */
static void finish_step(kt_offload *o)
{
    for (;;) {
        uint32_t seen = atomic_load(&o->done.rung);
        if (offload_failed(o) || is_through(o))
            return;
        bell_wait(&o->done, seen, o->spin_ns);
    }
}

/* The thread rests, now or within timeout_ms: 1. */
static int rests(const kt_offload *o)
{
    for (int64_t until = now_ns() + o->timeout_ns; atomic_load(&o->busy); thread_sleep(REST_SLEEP_NS)) {
        if (now_ns() > until)
            return 0;
    }
    return 1;
}

int kt_offload_result(kt_offload *o)
{
    finish_step(o);
    atomic_store(&o->active, 0);
    rests(o);
    return atomic_load(&o->code);
}

static void reset(kt_offload *o)
{
    for (int32_t i = 0; i < o->layers; i++) {
        atomic_store(&o->state[i], OPEN);
        atomic_store(&o->queue[i], -1);
        for (int32_t j = i; o->flags && j < 2 * o->layers; j += o->layers)
            atomic_store(&o->flags[j], 0);
    }
    atomic_store(&o->arrived, 0);
    atomic_store(&o->taken, 0);
    atomic_store(&o->n_spans, 0);
    atomic_store(&o->code, KT_OK);
    o->error[0] = 0;
}

/* One run for neighbours of one depth; KT_ERR_RANGE if a depth is none. */
static int make_runs(kt_offload *o, int64_t n_tokens, const int32_t *defer)
{
    int64_t n = 0;
    o->defers = 0;
    for (int64_t t = 0; t < n_tokens; t++) {
        int32_t depth = defer ? defer[t] : 0;
        if (depth < 0)
            return offload_fail(o, KT_ERR_RANGE, "defer of token %lld is %d; 0 or more is possible", (long long)t,
                                depth);
        if (n == 0 || o->runs[n - 1].defer != depth)
            o->runs[n++] = (kt_run){.defer = depth, .adapter = o->adapter};
        o->runs[n - 1].first_output = ++o->runs[n - 1].n_tokens;
        o->defers |= depth > 0;
    }
    o->step = (kt_step){.runs = o->runs, .n_runs = n};
    return KT_OK;
}

int kt_offload_begin(kt_offload *o, int64_t n_tokens, const int32_t *defer)
{
    int64_t most = o->program->options.max_tokens;
    finish_step(o);
    atomic_store(&o->active, 0);
    if (!rests(o))
        return offload_fail(o, KT_ERR_TIMEOUT, "the last step still runs");
    pthread_mutex_lock(&o->lock);
    reset(o);
    pthread_mutex_unlock(&o->lock);
    if (n_tokens < 1 || n_tokens > most)
        return offload_fail(o, KT_ERR_RANGE, "n_tokens is %lld, outside 1..%lld", (long long)n_tokens, (long long)most);
    int failed = make_runs(o, n_tokens, defer);
    if (failed)
        return failed;
    atomic_store_explicit(&o->event_ns, now_ns(), memory_order_relaxed);
    atomic_store(&o->active, 1);
    bell_ring(&o->work);
    return KT_OK;
}

int kt_offload_adapter(kt_offload *o, int32_t adapter)
{
    if (adapter < 0 || adapter > o->program->adapters)
        return offload_fail(o, KT_ERR_RANGE, "adapter is %d, outside 0..%d", adapter, o->program->adapters);
    o->adapter = adapter;
    return KT_OK;
}

int32_t kt_offload_spans(const kt_offload *o, kt_span *out, int32_t capacity)
{
    int32_t n = atomic_load_explicit(&o->n_spans, memory_order_acquire);
    for (int32_t i = 0; i < n && i < capacity; i++)
        out[i] = o->spans[i];
    return n;
}

void *kt_offload_ticket(kt_offload *o, int32_t layer)
{
    return layer >= 0 && layer < o->layers ? &o->tickets[layer] : NULL;
}

const char *kt_offload_error(const kt_offload *o)
{
    return o->error;
}

/* ---- create and free ---------------------------------------------------------------------------- */

static int check(const kt_program *p, const kt_offload_options *o, char *error, size_t size)
{
    if (!p->finished || p->vocab != INT64_MAX || p->page_bytes || p->window_bytes) {
        snprintf(error, size, "the program %s", p->finished ? "has embeddings or attention" : "is not finished");
        return 0;
    }
    if (o->layers < 1 || o->layers > MAX_LAYERS || o->timeout_ms < 1 || o->spin_us < 0) {
        snprintf(error, size, "layers %d is outside 1..%d, timeout_ms %d below 1 or spin_us %d below 0", o->layers,
                 MAX_LAYERS, o->timeout_ms, o->spin_us);
        return 0;
    }
    for (int32_t i = 0; i < o->layers; i++) {
        if (o->immediate[i] < 0 || o->immediate[i] > p->parts.n || o->deferred[i] < -1 || o->deferred[i] > p->parts.n) {
            snprintf(error, size, "layer %d runs parts %d and %d of %d", i, o->immediate[i], o->deferred[i],
                     p->parts.n + 1);
            return 0;
        }
    }
    return 1;
}

/* Memory for all layers, and for the runs of a step; 0 if there is none. */
static int make_layers(kt_offload *o, int64_t max_tokens, const kt_offload_options *options)
{
    size_t n = (size_t)options->layers;
    o->immediate = calloc(n, sizeof *o->immediate);
    o->deferred = calloc(n, sizeof *o->deferred);
    o->runs = calloc((size_t)max_tokens, sizeof *o->runs);
    o->tickets = calloc(n, sizeof *o->tickets);
    o->state = calloc(n, sizeof *o->state);
    o->queue = calloc(n, sizeof *o->queue);
    o->spans = calloc(2 * n, sizeof *o->spans);
    if (!o->immediate || !o->deferred || !o->runs || !o->tickets || !o->state || !o->queue || !o->spans)
        return 0;
    o->layers = options->layers;
    memcpy(o->immediate, options->immediate, n * sizeof *o->immediate);
    memcpy(o->deferred, options->deferred, n * sizeof *o->deferred);
    for (int32_t i = 0; i < o->layers; i++)
        o->tickets[i] = (ticket){o, i};
    return 1;
}

static int start_threads(kt_offload *o)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&o->stopped, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&o->lock, NULL);
    int failed = thread_start(&o->thread, NULL, offload_work, o);
    o->started += !failed;
    if (!failed)
        failed = thread_start(&o->watchdog, NULL, offload_watch, o);
    o->started += !failed;
    return failed;
}

kt_offload *kt_offload_create(kt_program *program, const kt_offload_options *options, char *error, size_t error_size)
{
    if (!check(program, options, error, error_size))
        return NULL;
    kt_offload *o = aligned_alloc(LINE, sizeof *o);
    if (o)
        memset(o, 0, sizeof *o);
    if (!o || !make_layers(o, program->options.max_tokens, options)) {
        snprintf(error, error_size, "no memory for the offload of %d layers", options->layers);
        kt_offload_free(o);
        return NULL;
    }
    o->program = program;
    o->timeout_ns = (int64_t)options->timeout_ms * 1000000;
    o->spin_ns = (int64_t)options->spin_us * 1000;
    pool_spin_for(program->pool, o->spin_ns);
    o->flags = (_Atomic int32_t *)(void *)options->flags;
    reset(o);
    int failed = start_threads(o);
    if (failed) {
        snprintf(error, error_size, "cannot start a thread: %s", strerror(failed));
        kt_offload_free(o);
        return NULL;
    }
    return o;
}

static void stop_threads(kt_offload *o)
{
    atomic_store(&o->active, 0);
    pthread_mutex_lock(&o->lock);
    atomic_store(&o->stop, 1);
    pthread_cond_signal(&o->stopped);
    pthread_mutex_unlock(&o->lock);
    offload_fail(o, KT_ERR_RANGE, "the offload is freed");
    bell_ring(&o->work);
    if (o->started > 1)
        pthread_join(o->watchdog, NULL);
    if (o->started > 0)
        pthread_join(o->thread, NULL);
    while (atomic_load(&o->inside) > 0)
        thread_sleep(REST_SLEEP_NS);
    pthread_mutex_destroy(&o->lock);
    pthread_cond_destroy(&o->stopped);
}

void kt_offload_free(kt_offload *o)
{
    if (!o)
        return;
    if (o->program)
        stop_threads(o);
    free(o->immediate);
    free(o->deferred);
    free(o->runs);
    free(o->tickets);
    free(o->state);
    free(o->queue);
    free(o->spans);
    free(o);
}
