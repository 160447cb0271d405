/* test_stream.c - an offload: thousands of steps by calls and by flags, with random delays and depths, give what the
 * parts give one by one; errors, hangs and misuse end with a sentence and never keep the stream waiting; freeing
 * in the middle of a step. The stream is a thread of the test that does in order what a device would. */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <time.h>

enum { LAYERS = 4, HIDDEN = 32, WIDTH = 16, EXPERTS = 8, TOP_K = 4, TOKENS = 3, VARIANTS = 5, LONG_MS = 20000 };
enum { NO_LAYER = -1, ALL_TOKENS = (1 << TOKENS) - 1 };

/* Inputs and routings of neighbouring layers are two in turn: the stream writes one while the other is read. */
typedef struct model {
    kt_pool *pool;
    kt_program *program;
    test_weight gate_up, down;
    kt_view x[2], out, after[2];
    int32_t given[2], immediate[LAYERS], deferred[LAYERS];    /* routings; parts */
    float want[2][VARIANTS][LAYERS][TOKENS][HIDDEN];    /* by depth / 2 */
} model;

/* What a router on the device gives: experts and weights of a layer. */
static void write_layer(model *m, int32_t variant, int32_t layer, int32_t stray)
{
    uint64_t state = (uint64_t)(variant * LAYERS + layer);
    const float *gate;
    int32_t *ids = (int32_t *)kt_program_routing(m->program, m->given[layer % 2], &gate);
    fill_rows(m->program, m->x[layer % 2], TOKENS, state);
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        ids[i] = (int32_t)(random_bits(&state) % 2) + 2 * (i % TOP_K);
        ((float *)gate)[i] = random_float(&state);
    }
    if (stray == layer)
        ids[1] = EXPERTS;
}

static void make_program_of(model *m)
{
    kt_program *p = m->program = make_program(m->pool, TOKENS, 1, 0);
    for (int i = 0; i < 2; i++) {
        m->x[i] = make_view(p, HIDDEN, KT_ROWS_TOKENS);
        m->after[i] = make_view(p, HIDDEN, KT_ROWS_TOKENS);
        m->given[i] = kt_program_given(p, EXPERTS, TOP_K);
    }
    m->out = make_view(p, HIDDEN, KT_ROWS_TOKENS);
    for (int i = 0; i < LAYERS; i++) {
        m->immediate[i] = kt_program_part(p);
        OK(kt_program_input(p, m->x[i % 2]), kt_program_error(p));
        int32_t now = kt_program_split(p, &(kt_split){.routing = m->given[i % 2], .defers = i + 1 < LAYERS});
        OK(now, kt_program_error(p));
        OK(kt_program_experts(p, m->out, m->x[i % 2],
                              &(kt_experts){.routing = now, .gate_up = &m->gate_up.w, .down = &m->down.w}),
           kt_program_error(p));
        if (i > 0)
            OK(kt_program_carry(p, m->out, m->after[(i + 1) % 2]), kt_program_error(p));
        m->deferred[i] = i + 1 < LAYERS ? kt_program_part(p) : -1;
        if (i + 1 < LAYERS)
            OK(kt_program_experts(p, m->after[i % 2], m->x[i % 2],
                                  &(kt_experts){.routing = now + 1, .gate_up = &m->gate_up.w, .down = &m->down.w}),
               kt_program_error(p));
    }
    OK(kt_program_finish(p, NULL), kt_program_error(p));
}

static void run_one(model *m, int32_t part, int32_t defer)
{
    kt_step s = {RUN(.n_tokens = TOKENS, .first_output = TOKENS, .defer = defer)};
    OK(kt_program_run_part(m->program, &s, part), kt_program_error(m->program));
}

static model *make_model(int32_t threads)
{
    model *m = need(sizeof *m);
    m->pool = make_pool(own_row(), threads);
    m->gate_up = make_weight(m->pool, &test_formats[INT8].format, 2 * WIDTH, HIDDEN, EXPERTS, 1);
    m->down = make_weight(m->pool, &test_formats[INT8].format, HIDDEN, WIDTH, EXPERTS, 2);
    make_program_of(m);
    for (int32_t i = 0; i < 2 * VARIANTS * LAYERS; i++) {
        int32_t layer = i % LAYERS, variant = i / LAYERS % VARIANTS, deferring = i / LAYERS / VARIANTS;
        write_layer(m, variant, layer, NO_LAYER);
        run_one(m, m->immediate[layer], 2 * deferring);
        for (int t = 0; t < TOKENS; t++)
            memcpy(m->want[deferring][variant][layer][t], row_of(m->program, m->out, t), HIDDEN * sizeof(float));
        if (m->deferred[layer] >= 0)
            run_one(m, m->deferred[layer], 2 * deferring);
    }
    return m;
}

static void free_model(model *m)
{
    kt_program_free(m->program);
    free_weight(&m->gate_up);
    free_weight(&m->down);
    kt_pool_free(m->pool);
    free(m);
}

/* ---- the stream --------------------------------------------------------------------------------- */

typedef struct stream {
    model *m;
    kt_offload *o;
    _Atomic int32_t *flags;     /* NULL: by calls */
    sem_t go, ended;
    int32_t variant, stray, checked;    /* of the next step; variant < 0: the stream ends */
    int32_t defer[TOKENS];
    uint64_t state;
    pthread_t thread;
} stream;

static void delay(stream *s)
{
    uint64_t kind = random_bits(&s->state) % 16;
    if (kind == 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(random_bits(&s->state) % 200000)}, NULL);
    else if (kind < 4)
        sched_yield();
}

static void hand_over(stream *s, int32_t layer)
{
    if (s->flags)
        atomic_store(&s->flags[layer], 1);
    else
        kt_offload_submit(kt_offload_ticket(s->o, layer));
    delay(s);
    if (!s->flags)
        kt_offload_wait(kt_offload_ticket(s->o, layer));
    while (s->flags && !atomic_exchange(&s->flags[LAYERS + layer], 0))
        sched_yield();
}

static void *stream_thread(void *arg)
{
    stream *s = arg;
    for (sem_wait(&s->go); s->variant >= 0; sem_wait(&s->go)) {
        for (int32_t i = 0; i < LAYERS; i++) {
            delay(s);
            write_layer(s->m, s->variant, i, s->stray);
            hand_over(s, i);
            for (int t = 0; t < TOKENS && s->checked; t++)
                CHECK(!memcmp(row_of(s->m->program, s->m->out, t), s->m->want[s->defer[t] / 2][s->variant][i][t],
                              HIDDEN * sizeof(float)), "variant %d, layer %d, token %d of depth %d is wrong", s->variant,
                      i, t, s->defer[t]);
        }
        sem_post(&s->ended);
    }
    return NULL;
}

static kt_offload *make_offload(model *m, int32_t timeout_ms, _Atomic int32_t *flags)
{
    char error[256] = "";
    kt_offload_options o = {.layers = LAYERS, .immediate = m->immediate, .deferred = m->deferred,
                            .timeout_ms = timeout_ms, .spin_us = 20, .flags = (int32_t *)(void *)flags};
    kt_offload *offload = kt_offload_create(m->program, &o, error, sizeof error);
    CHECK(offload != NULL, "%s", error);
    return offload;
}

static stream *make_stream(model *m, int32_t timeout_ms, _Atomic int32_t *flags)
{
    stream *s = need(sizeof *s);
    s->m = m;
    s->flags = flags;
    s->o = make_offload(m, timeout_ms, flags);
    s->state = 3;
    sem_init(&s->go, 0, 0);
    sem_init(&s->ended, 0, 0);
    pthread_create(&s->thread, NULL, stream_thread, s);
    return s;
}

static void end_stream(stream *s)
{
    s->variant = -1;
    sem_post(&s->go);
    pthread_join(s->thread, NULL);
    sem_destroy(&s->go);
    sem_destroy(&s->ended);
    kt_offload_free(s->o);
    free(s);
}

/* which: the tokens that defer, a bit each. */
static int step(stream *s, int32_t variant, int32_t which, int32_t stray)
{
    s->variant = variant;
    for (int t = 0; t < TOKENS; t++)
        s->defer[t] = which >> t & 1 ? 2 : 0;
    s->stray = stray;
    s->checked = stray == NO_LAYER;
    OK(kt_offload_begin(s->o, TOKENS, which ? s->defer : NULL), kt_offload_error(s->o));
    sem_post(&s->go);
    sem_wait(&s->ended);
    return kt_offload_result(s->o);
}

/* ---- what goes well ----------------------------------------------------------------------------- */

/* Both parts of each layer in turn, one after the other; only the first `layers`. */
static void check_spans(const stream *s, int32_t layers)
{
    kt_span spans[2 * LAYERS];
    int32_t defers = 0;
    for (int t = 0; t < TOKENS; t++)
        defers |= s->defer[t];
    int32_t n = kt_offload_spans(s->o, spans, 2 * LAYERS), at = 0;
    for (int32_t i = 0; i < layers; i++) {
        for (int32_t later = 0; later <= (defers && i + 1 < layers); later++, at++) {
            const kt_span *p = &spans[at];
            CHECK(at < n && p->layer == i && p->deferred == later, "span %d of %d: not layer %d, deferred %d", at, n, i,
                  later);
            CHECK(p->start_ns <= p->end_ns && (at == 0 || p[-1].end_ns <= p->start_ns), "span %d overlaps", at);
        }
    }
    CHECK(n == at, "%d spans, not %d", n, at);
}

static void check_steps(model *m, _Atomic int32_t *flags, int steps)
{
    stream *s = make_stream(m, LONG_MS, flags);
    uint64_t state = 17;
    for (int i = 0; i < steps; i++) {
        int32_t variant = (int32_t)(random_bits(&state) % VARIANTS), which = (int32_t)(random_bits(&state) % (ALL_TOKENS + 1));
        OK(step(s, variant, i % 2 ? which : 0, NO_LAYER), kt_offload_error(s->o));
        if (i % 16 == 0)
            check_spans(s, LAYERS);
    }
    end_stream(s);
}

/* Between steps the thread uses no processor time, whichever way layers come. */
static void check_idle(model *m, _Atomic int32_t *flags)
{
    stream *s = make_stream(m, LONG_MS, flags);
    OK(step(s, 0, ALL_TOKENS, NO_LAYER), kt_offload_error(s->o));
    struct timespec before, after, pause = {.tv_nsec = 50000000};
    nanosleep(&pause, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    nanosleep(&pause, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    double used = (double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec);
    CHECK(used < 0.025, "an idle offload used %g s of 0.05 s", used);
    end_stream(s);
}

/* ---- what does not ------------------------------------------------------------------------------ */

static void check_error(model *m, _Atomic int32_t *flags)
{
    stream *s = make_stream(m, LONG_MS, flags);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        REFUSED(step(s, 1, ALL_TOKENS, layer), KT_ERR_RANGE, kt_offload_error(s->o), "expert 8, outside -1..7");
        char sentence[32];
        snprintf(sentence, sizeof sentence, "layer %d: ", layer);
        CHECK(strstr(kt_offload_error(s->o), sentence), "\"%s\" without \"%s\"", kt_offload_error(s->o), sentence);
        check_spans(s, layer + 1);
        REFUSED(kt_offload_result(s->o), KT_ERR_RANGE, kt_offload_error(s->o), "layer");
        OK(step(s, 2, ALL_TOKENS, NO_LAYER), kt_offload_error(s->o));
    }
    end_stream(s);
}

/* The stream waits for what nobody submitted, or submits nothing. */
static void check_silence(model *m, _Atomic int32_t *flags)
{
    kt_offload *o = make_offload(m, 20, flags);
    for (int i = 0; i < 2; i++) {
        OK(kt_offload_begin(o, 1, NULL), kt_offload_error(o));
        for (int32_t layer = 0; layer < LAYERS; layer++)
            kt_offload_wait(kt_offload_ticket(o, layer));
        for (int32_t layer = 0; layer < LAYERS && flags; layer++)
            while (!atomic_exchange(&flags[LAYERS + layer], 0))
                sched_yield();
        REFUSED(kt_offload_result(o), KT_ERR_TIMEOUT, kt_offload_error(o), "0 of 4 layers");
    }
    kt_offload_free(o);
}

/* The stream's side of a step with one layer: it hands the layer over and waits. */
static void submit_long_part(kt_offload *o, _Atomic int32_t *flags)
{
    if (flags)
        atomic_store(&flags[0], 1);
    else
        kt_offload_submit(kt_offload_ticket(o, 0));
    kt_offload_wait(kt_offload_ticket(o, 0));
}

/* The next step, as soon as the part of the last one is over. */
static void begin_again(kt_offload *o, int tokens)
{
    while (kt_offload_begin(o, tokens, NULL) != KT_OK)
        CHECK(strstr(kt_offload_error(o), "runs"), "%s", kt_offload_error(o));
}

/* A part that takes far longer than the timeout: whoever waits goes on, and no step begins before it is over. */
static void check_long_part(int by_flags, int freed)
{
    enum { WIDE = 512, MANY = 64 };
    char error[256] = "";
    _Atomic int32_t flags[2] = {0};
    kt_pool *pool = make_pool("portable", 1);
    kt_program *p = make_program(pool, MANY, 1, 1);
    test_weight w = make_weight(pool, &test_formats[F32].format, WIDE, WIDE, 1, 1);
    kt_view x = make_view(p, WIDE, KT_ROWS_TOKENS), y = make_view(p, WIDE, KT_ROWS_TOKENS);
    OK(kt_program_linear(p, y, x, &(kt_linear){.weight = &w.w, .reads = KT_READ_F32}), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    kt_offload_options options = {.layers = 1, .immediate = (int32_t[]){0}, .deferred = (int32_t[]){-1},
                                  .timeout_ms = 1, .flags = by_flags ? (int32_t *)(void *)flags : NULL};
    kt_offload *o = kt_offload_create(p, &options, error, sizeof error);
    CHECK(o != NULL, "%s", error);
    OK(kt_offload_begin(o, MANY, NULL), kt_offload_error(o));
    submit_long_part(o, by_flags ? flags : NULL);
    if (!freed) {
        /* On a busy machine the thread may not have looked at all for that long: then there is nothing to see yet. */
        for (int i = 0; i < 100 && strstr(kt_offload_error(o), "0 of 1"); i++) {
            begin_again(o, MANY);
            submit_long_part(o, by_flags ? flags : NULL);
        }
        REFUSED(kt_offload_result(o), KT_ERR_TIMEOUT, kt_offload_error(o), "still runs");
        begin_again(o, 1);
        CHECK(!by_flags || (flags[0] == 0 && flags[1] == 0), "flags were left over");
    }
    kt_offload_free(o);
    kt_program_free(p);
    free_weight(&w);
    kt_pool_free(pool);
}

typedef struct waiter {
    kt_offload *o;
    _Atomic int32_t *flags;
    sem_t waits;
} waiter;

static void *wait_for_nothing(void *arg)
{
    waiter *w = arg;
    sem_post(&w->waits);
    if (w->flags)
        while (!atomic_load(&w->flags[LAYERS + 1]))
            sched_yield();
    else
        kt_offload_wait(kt_offload_ticket(w->o, 1));
    return NULL;
}

/* The handle goes while the stream waits, with a layer on its way or none. */
static void check_freed(model *m, _Atomic int32_t *flags)
{
    for (int i = 0; i < 20; i++) {
        waiter w = {make_offload(m, LONG_MS, flags), flags, {{0}}};
        pthread_t thread;
        sem_init(&w.waits, 0, 0);
        write_layer(m, 0, 0, NO_LAYER);
        OK(kt_offload_begin(w.o, TOKENS, (int32_t[TOKENS]){2, 0, 2}), kt_offload_error(w.o));
        pthread_create(&thread, NULL, wait_for_nothing, &w);
        sem_wait(&w.waits);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);    /* so that it waits by now */
        if (i % 2 && flags)
            atomic_store(&flags[0], 1);
        else if (i % 2)
            kt_offload_submit(kt_offload_ticket(w.o, 0));
        kt_offload_free(w.o);
        pthread_join(thread, NULL);
        sem_destroy(&w.waits);
    }
}

static void check_misuse(model *m, _Atomic int32_t *flags)
{
    kt_offload *o = make_offload(m, LONG_MS, NULL);
    void *first = kt_offload_ticket(o, 0);
    CHECK(!kt_offload_ticket(o, -1) && !kt_offload_ticket(o, LAYERS), "a ticket of no layer");
    kt_offload_submit(first);
    kt_offload_wait(first);
    REFUSED(kt_offload_result(o), KT_ERR_RANGE, kt_offload_error(o), "submitted outside of a step");
    OK(kt_offload_begin(o, 1, NULL), kt_offload_error(o));
    kt_offload_submit(first);
    kt_offload_submit(first);
    kt_offload_wait(kt_offload_ticket(o, 3));
    REFUSED(kt_offload_result(o), KT_ERR_RANGE, kt_offload_error(o), "twice");
    REFUSED(kt_offload_begin(o, TOKENS + 1, NULL), KT_ERR_RANGE, kt_offload_error(o), "n_tokens is 4, outside 1..3");
    REFUSED(kt_offload_begin(o, 0, NULL), KT_ERR_RANGE, kt_offload_error(o), "n_tokens is 0");
    REFUSED(kt_offload_begin(o, 2, (int32_t[]){0, -1}), KT_ERR_RANGE, kt_offload_error(o), "defer of token 1 is -1");
    kt_offload_wait(first);
    OK(kt_offload_begin(o, 1, NULL), kt_offload_error(o));
    OK(kt_offload_result(o), kt_offload_error(o));
    CHECK(kt_offload_spans(o, NULL, 0) == 0, "spans of an empty step");
    kt_offload_wait(first);
    REFUSED(kt_offload_result(o), KT_ERR_RANGE, kt_offload_error(o), "waited for outside");
    kt_offload_free(o);
    o = make_offload(m, LONG_MS, flags);
    OK(kt_offload_begin(o, 1, NULL), kt_offload_error(o));
    kt_offload_submit(kt_offload_ticket(o, 0));
    REFUSED(kt_offload_result(o), KT_ERR_RANGE, kt_offload_error(o), "come by flags");
    kt_offload_free(o);
    kt_offload_free(NULL);
}

static void check_create(model *m)
{
    char error[256] = "";
    int32_t strange[] = {99}, none[] = {-2};
    kt_offload_options o = {.layers = 0, .immediate = m->immediate, .deferred = m->deferred, .timeout_ms = 1};
    CHECK(!kt_offload_create(m->program, &o, error, sizeof error) && strstr(error, "layers 0"), "%s", error);
    o = (kt_offload_options){.layers = 1, .immediate = m->immediate, .deferred = m->deferred};
    CHECK(!kt_offload_create(m->program, &o, error, sizeof error) && strstr(error, "timeout_ms 0"), "%s", error);
    o = (kt_offload_options){.layers = 1, .immediate = strange, .deferred = m->deferred, .timeout_ms = 1};
    CHECK(!kt_offload_create(m->program, &o, error, sizeof error) && strstr(error, "parts 99 and 2 of 8"), "%s", error);
    o = (kt_offload_options){.layers = 1, .immediate = m->immediate, .deferred = none, .timeout_ms = 1};
    CHECK(!kt_offload_create(m->program, &o, error, sizeof error) && strstr(error, "and -2"), "%s", error);
    kt_program *p = make_program(m->pool, 1, 1, 0);
    CHECK(!kt_offload_create(p, &o, error, sizeof error) && strstr(error, "not finished"), "%s", error);
    uint16_t table[16] = {0};
    OK(kt_program_embed(p, make_view(p, 16, KT_ROWS_TOKENS),
                        &(kt_embed){.table = table, .vocab = 1}), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    CHECK(!kt_offload_create(p, &o, error, sizeof error) && strstr(error, "has embeddings"), "%s", error);
    kt_program_free(p);
}

int main(void)
{
    static _Atomic int32_t flags[2 * LAYERS];
    model *m = make_model(2), *small = make_model(1);
    for (int by_flags = 0; by_flags < 2; by_flags++) {
        _Atomic int32_t *way = by_flags ? flags : NULL;
        check_steps(m, way, 200);
        check_steps(small, way, 800);      /* a team of one is much the faster */
        check_idle(m, way);
        check_error(m, way);
        check_silence(m, way);
        check_freed(m, way);
        check_long_part(by_flags, 0);
        check_long_part(by_flags, 1);
    }
    check_misuse(m, flags);
    check_create(m);
    free_model(m);
    free_model(small);
    return report("test_stream");
}
