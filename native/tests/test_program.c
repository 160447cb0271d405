/* test_program.c - recording and running: what is refused and with which numbers, output rows, the
 * profile, and the barriers: random programs give the same bits with one thread and with several (and
 * ThreadSanitizer watches). */
#include "everything.h"

/* ---- refusals ----------------------------------------------------------------------------------- */

static void check_create(kt_pool *pool)
{
    char error[256] = "";
    kt_program_options o = {.max_tokens = 0, .max_outputs = 0};
    CHECK(!kt_program_create(pool, &o, error, sizeof error) && strstr(error, "max_tokens 0"), "%s", error);
    o = (kt_program_options){.max_tokens = 4, .max_outputs = 5};
    CHECK(!kt_program_create(pool, &o, error, sizeof error) && strstr(error, "max_outputs 5"), "%s", error);
    o = (kt_program_options){.max_tokens = INT64_MAX, .max_outputs = 1};
    CHECK(!kt_program_create(pool, &o, error, sizeof error), "all tokens there are");
    kt_program_free(NULL);
}

static void check_recording(kt_pool *pool)
{
    kt_program *p = make_program(pool, 8, 2, 0);
    const char *(*why)(const kt_program *) = kt_program_error;
    REFUSED(kt_program_buffer(p, 0, KT_ROWS_TOKENS), KT_ERR_SHAPE, why(p), "0 columns");
    REFUSED(kt_program_buffer(p, INT64_MAX, KT_ROWS_TOKENS), KT_ERR_SHAPE, why(p), "9223372036854775807");
    REFUSED(kt_program_buffer(p, 8, 2), KT_ERR_RANGE, why(p), "domain 2");
    kt_view a = make_view(p, 64, KT_ROWS_TOKENS), b = make_view(p, 64, KT_ROWS_TOKENS);
    kt_view outputs = make_view(p, 64, KT_ROWS_OUTPUTS);
    REFUSED(kt_program_add(p, a, b, (kt_view){7, 0, 64}), KT_ERR_RANGE, why(p), "buffer 7 of 3");
    REFUSED(kt_program_add(p, a, b, (kt_view){-1, 0, 64}), KT_ERR_RANGE, why(p), "buffer -1");
    REFUSED(kt_program_add(p, a, b, (kt_view){1, 1, 64}), KT_ERR_SHAPE, why(p), "columns 1..65");
    REFUSED(kt_program_add(p, a, b, (kt_view){1, INT32_MAX, INT32_MAX}), KT_ERR_SHAPE, why(p), "which has 64");
    REFUSED(kt_program_add(p, a, b, (kt_view){1, -1, 64}), KT_ERR_SHAPE, why(p), "columns -1");
    REFUSED(kt_program_add(p, a, b, part(b, 0, 32)), KT_ERR_SHAPE, why(p), "64 columns and 32");
    REFUSED(kt_program_add(p, a, b, outputs), KT_ERR_SHAPE, why(p), "domain 1");
    REFUSED(kt_program_add(p, part(a, 8, 32), part(a, 0, 32), part(b, 0, 32)), KT_ERR_SHAPE, why(p), "overlap");
    REFUSED(kt_program_select(p, a, a), KT_ERR_SHAPE, why(p), "domain 0");
    REFUSED(kt_program_norm(p, a, b,
                            &(kt_norm){.gain = (float[48]){1}, .head_width = 48}), KT_ERR_SHAPE, why(p), "runs of 48");
    REFUSED(kt_program_embed(p, a, &(kt_embed){.vocab = 5}), KT_ERR_SHAPE, why(p), "table");
    REFUSED(kt_program_gate(p, a, b, part(b, 0, 5), &(kt_gate){0}), KT_ERR_SHAPE, why(p), "64 columns by 5");
    REFUSED(kt_program_gate(p, a, b, part(a, 3, 1), &(kt_gate){0}), KT_ERR_SHAPE, why(p), "overlap");
    REFUSED(kt_program_gate(p, a, b, part(outputs, 0, 1), &(kt_gate){0}), KT_ERR_SHAPE, why(p), "domain 1");
    REFUSED(kt_program_swiglu(p, part(a, 0, 20), part(b, 0, 40),
                              &(kt_swiglu){0}), KT_ERR_SHAPE, why(p), "20 columns from 40");
    REFUSED(kt_program_scale(p, a, part(b, 0, 32), &(kt_scale){.by = 2}), KT_ERR_SHAPE, why(p), "32 columns to 64");
    REFUSED(kt_program_scale(p, a, b, &(kt_scale){.by = INFINITY}), KT_ERR_RANGE, why(p), "by inf");
    REFUSED(kt_program_temper(p, a, part(b, 0, 32), &(kt_temper){.every = 1}), KT_ERR_SHAPE, why(p), "32 columns to 64");
    REFUSED(kt_program_temper(p, a, b, &(kt_temper){.every = 0}), KT_ERR_RANGE, why(p), "every 0 positions");
    REFUSED(kt_program_temper(p, outputs, outputs, &(kt_temper){.every = 1}), KT_ERR_SHAPE, why(p), "domain 1");
    REFUSED(kt_program_greatest(p, a, b), KT_ERR_SHAPE, why(p), "64 columns to 64");
    kt_rope rope = {.dim = 7, .inv_freq = (float[8]){1}, .scale = 1, .head_width = 16, .first = 4};
    REFUSED(kt_program_rope(p, a, &rope), KT_ERR_SHAPE, why(p), "dim is 7");
    rope.dim = 16;
    REFUSED(kt_program_rope(p, a, &rope), KT_ERR_SHAPE, why(p), "columns 4..20");
    REFUSED(kt_program_rope(p, outputs, &rope), KT_ERR_SHAPE, why(p), "domain 1");
    rope.shift = INT64_MAX;
    REFUSED(kt_program_rope(p, a, &rope), KT_ERR_RANGE, why(p), "shifted by 9223372036854775807");
    kt_norm some = {.gain = (float[32]){1}, .columns = 32};
    REFUSED(kt_program_norm(p, a, b, &some), KT_ERR_SHAPE, why(p), "the first 32 in place");
    some.columns = 65;
    REFUSED(kt_program_norm(p, a, a, &some), KT_ERR_SHAPE, why(p), "the first 65 in place");
    kt_step s = {RUN(.n_tokens = 1)};
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "not finished");
    CHECK(kt_program_data(p, a.buffer, NULL) == NULL, "data before finish");
    OK(kt_program_finish(p, NULL), why(p));
    REFUSED(kt_program_add(p, a, a, b), KT_ERR_SHAPE, why(p), "finished");
    REFUSED(kt_program_finish(p, NULL), KT_ERR_SHAPE, why(p), "finished");
    CHECK(kt_program_data(p, 3, NULL) == NULL && kt_program_data(p, -1, NULL) == NULL, "data of no buffer");
    kt_program_free(p);
}

static void check_weights(kt_pool *pool)
{
    kt_program *p = make_program(pool, 8, 2, 0);
    const char *(*why)(const kt_program *) = kt_program_error;
    kt_view a = make_view(p, 64, KT_ROWS_TOKENS), b = make_view(p, 48, KT_ROWS_TOKENS);
    kt_view scores = make_view(p, 4, KT_ROWS_TOKENS);
    test_weight t = make_weight(pool, &test_formats[INT8].format, 48, 64, 1, 1);
    kt_weight w = t.w;
    REFUSED(kt_program_linear(p, a, b, &(kt_linear){.weight = &w}), KT_ERR_SHAPE, why(p), "[48, 64], but [64, 48]");
    w.count = 2;
    REFUSED(kt_program_linear(p, b, a, &(kt_linear){.weight = &w}), KT_ERR_SHAPE, why(p), "2 matrices");
    w = t.w;
    w.format.bits = 5;
    REFUSED(kt_program_linear(p, b, a, &(kt_linear){.weight = &w}), KT_ERR_SHAPE, why(p), "5 bits");
    w = t.w;
    w.data = NULL;
    REFUSED(kt_program_linear(p, b, a, &(kt_linear){.weight = &w}), KT_ERR_SHAPE, why(p), "no data");
    REFUSED(kt_program_linear(p, part(a, 0, 48), a, &(kt_linear){.weight = &t.w}), KT_ERR_SHAPE, why(p),
            "overlap");
    kt_route r = {.experts = 4, .top_k = 2, .scale = 1};
    int32_t routing = kt_program_route(p, scores, &r);
    kt_weight many = t.w;
    many.count = INT64_MAX / 2;
    kt_experts all = {.routing = routing, .gate_up = &many, .down = &many}, none = all;
    none.routing++;
    REFUSED(kt_program_experts(p, a, a, &all), KT_ERR_SHAPE, why(p), "experts gate_up");
    REFUSED(kt_program_experts(p, a, a, &none), KT_ERR_RANGE, why(p), "routing 1 of 1");
    REFUSED(kt_program_experts(p, a, b, &all), KT_ERR_SHAPE, why(p), "48 columns to 64");
    kt_gqa g = {3, 2, 16, 1, 0, 0, NULL, 0};
    REFUSED(kt_program_gqa(p, b, part(a, 0, 48), part(a, 0, 32), part(a, 32, 32), &g), KT_ERR_SHAPE, why(p), "3 heads");
    g = (kt_gqa){.heads = 3, .kv_heads = 1, .head_dim = 16, .scale = 1, .v = 8};
    REFUSED(kt_program_gqa(p, b, part(a, 0, 48), part(a, 0, 16), part(a, 16, 16), &g), KT_ERR_SHAPE, why(p),
            "values of 8");
    g.v = -1;
    REFUSED(kt_program_gqa(p, b, part(a, 0, 48), part(a, 0, 16), part(a, 16, 16), &g), KT_ERR_SHAPE, why(p),
            "values of -1");
    g = (kt_gqa){3, 1, 16, 1, 32, 0, NULL};
    REFUSED(kt_program_gqa(p, b, part(a, 0, 48), part(a, 0, 16), part(a, 16, 16), &g), KT_ERR_SHAPE, why(p),
            "layer_offset 32");
    g = (kt_gqa){3, 1, 16, 0, 0, 0, NULL};
    REFUSED(kt_program_gqa(p, b, part(a, 0, 48), part(a, 0, 16), part(a, 16, 16), &g), KT_ERR_RANGE, why(p),
            "scale of 0");
    g = (kt_gqa){3, 1, 16, 1, 0, -1, NULL};
    REFUSED(kt_program_gqa(p, b, part(a, 0, 48), part(a, 0, 16), part(a, 16, 16), &g), KT_ERR_RANGE, why(p),
            "window of -1");
    REFUSED(kt_program_scale(p, a, a, &(kt_scale){.by = 2, .limit = -1}), KT_ERR_RANGE, why(p), "limit -1");
    kt_glu glu = {1, -7, 0};
    all.glu = &glu;
    REFUSED(kt_program_experts(p, a, a, &all), KT_ERR_RANGE, why(p), "limit -7");
    glu = (kt_glu){1, 7, 0, -1, 0};
    REFUSED(kt_program_swiglu(p, part(b, 0, 32), a, &(kt_swiglu){.glu = &glu}), KT_ERR_RANGE, why(p), "-1 of gate");
    glu = (kt_glu){.alpha = NAN, .limit = 7};
    REFUSED(kt_program_swiglu(p, part(b, 0, 32), a, &(kt_swiglu){.glu = &glu}), KT_ERR_RANGE, why(p), "alpha nan");
    glu = (kt_glu){.alpha = 1, .cubic = -1};
    REFUSED(kt_program_swiglu(p, part(b, 0, 32), a, &(kt_swiglu){.glu = &glu}), KT_ERR_RANGE, why(p), "cubic -1");
    kt_mla m = {.heads = 2, .nope = 16, .rope = 8, .v = 24, .lora = 40, .scale = 1,
                .uk_in = t.w, .uk_out = t.w, .uv = t.w};
    REFUSED(kt_program_mla(p, b, part(a, 0, 48), part(a, 0, 48), &m), KT_ERR_SHAPE, why(p), "mla uk_in");
    m.lora = 41;
    REFUSED(kt_program_mla(p, b, part(a, 0, 48), part(a, 0, 48), &m), KT_ERR_SHAPE, why(p), "lora 41");
    free_weight(&t);
    kt_program_free(p);
}

/* Sizes that are each allowed and together more than there is. */
static void check_too_large(kt_pool *pool)
{
    kt_program *p = make_program(pool, 1 << 24, 1, 0);
    for (int i = 0; i < 20; i++)
        OK(kt_program_buffer(p, 1 << 28, KT_ROWS_TOKENS), kt_program_error(p));
    REFUSED(kt_program_finish(p, NULL), KT_ERR_MEMORY, kt_program_error(p), "arena");
    kt_program_free(p);
}

static void check_steps(kt_pool *pool)
{
    everything *e = ev_make(pool, 0);
    kt_program *p = e->program;
    const char *(*why)(const kt_program *) = kt_program_error;
    int32_t ids[90] = {0};
    kt_step good = ev_step(e, ids, 5, 60, 2), s = good;
    kt_run run = e->run;
    s.runs = good.runs = &run;
    OK(kt_program_run(p, &s), why(p));
    run.n_tokens = 0;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "run 0: n_tokens is 0");
    run = e->run;
    run.n_tokens = 81;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "outside 1..80");
    run = e->run;
    run.start = -1;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "start is -1");
    run.start = INT64_MAX;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "start is 9223372036854775807");
    run.start = EV_PAGES * 64 - 4;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "20 pages given; positions up to 1281 need 21");
    run = e->run;
    run.first_output = 1;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "at most 80 tokens and 3 outputs");
    run.first_output = 6;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "first_output is 6");
    run = e->run;
    s.page_bytes -= 64;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "page_bytes");
    s = good;
    s.page_bytes += 4;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "multiple of 64");
    s = good;
    s.cache = NULL;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "0 pages given");
    s = good;
    s.cache_pages = EV_PAGES - 1;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "pages[0] is 19, outside 0..18");
    s = good;
    s.ids = NULL;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "no ids");
    ids[3] = EV_VOCAB;
    REFUSED(kt_program_run(p, &good), KT_ERR_RANGE, why(p), "ids[3] is 40, outside 0..39");
    ids[3] = -1;
    REFUSED(kt_program_run(p, &good), KT_ERR_RANGE, why(p), "ids[3] is -1");
    ev_free(e);
}

/* ---- results ------------------------------------------------------------------------------------ */

/* Logits of a text, as outputs of one step or of many, and the profile's shape. */
static void check_outputs(kt_pool *pool)
{
    enum { N = 40 };
    everything *e = ev_make(pool, 1);
    int32_t ids[N];
    float last[3][EV_VOCAB];
    for (int i = 0; i < N; i++)
        ids[i] = 7 * i % EV_VOCAB;
    kt_step s = ev_step(e, ids, N, 0, 3);
    OK(kt_program_run(e->program, &s), kt_program_error(e->program));
    for (int i = 0; i < 3; i++)
        memcpy(last[i], row_of(e->program, e->logits, i), sizeof last[i]);
    for (int t = 0; t < N; t++) {
        s = ev_step(e, ids + t, 1, t, t >= N - 3);
        OK(kt_program_run(e->program, &s), kt_program_error(e->program));
        double want[EV_VOCAB];
        for (int i = 0; i < EV_VOCAB && t >= N - 3; i++)
            want[i] = (double)last[t - N + 3][i];
        if (t >= N - 3)
            CHECK(distance(row_of(e->program, e->logits, 0), want, EV_VOCAB) < 1e-5, "token %d alone is off by %g", t,
                  distance(row_of(e->program, e->logits, 0), want, EV_VOCAB));
    }
    int64_t ns[100], sum = 0;
    int32_t n = kt_program_profile(e->program, ns, 100);
    for (int i = 0; i < n && i < 100; i++)
        sum += ns[i];
    CHECK(n == 45 && sum > 0, "%d operations, %lld ns", n, (long long)sum);
    ev_free(e);
}

static void check_everything(void)
{
    enum { N = 80 };
    int32_t ids[N];
    float want[2][3 * EV_VOCAB];
    for (int i = 0; i < N; i++)
        ids[i] = 11 * i % EV_VOCAB;
    for (int32_t threads = 1; threads <= 4; threads++) {
        kt_pool *pool = make_pool(NULL, threads);
        everything *e = ev_make(pool, 0);
        for (int64_t start = 0; start < 1200; start += N) {
            kt_step s = ev_step(e, ids, N, start, 3);
            OK(kt_program_run(e->program, &s), kt_program_error(e->program));
        }
        for (int i = 0; i < 2; i++) {
            float got[3 * EV_VOCAB];
            for (int r = 0; r < 3; r++)
                memcpy(got + r * EV_VOCAB, row_of(e->program, e->logits, r), EV_VOCAB * sizeof(float));
            if (threads == 1)
                memcpy(want[i], got, sizeof got);
            CHECK(memcmp(want[i], got, sizeof got) == 0, "%d threads give other logits", threads);
            kt_step s = ev_step(e, ids, 3, 1200, 3);
            OK(kt_program_run(e->program, &s), kt_program_error(e->program));
        }
        ev_free(e);
        kt_pool_free(pool);
    }
}

/* ---- random programs ---------------------------------------------------------------------------- */

enum { BUFFERS = 5, COLUMNS = 96, OPERATIONS = 60, TOKENS = 11 };

typedef struct shared {
    test_weight w[3], gate_up, down, router;    /* [48, 48] in three formats */
    float gain[48];
} shared;

/* One of the two halves of a random buffer; not the one that `other` is. */
static kt_view pick(uint64_t *state, const kt_view *views, kt_view other)
{
    for (;;) {
        kt_view v = part(views[random_bits(state) % BUFFERS], random_bits(state) % 2 ? 48 : 0, 48);
        if (v.buffer != other.buffer || v.column != other.column)
            return v;
    }
}

static int record_random(kt_program *p, const shared *s, uint64_t *state, const kt_view *views)
{
    kt_view none = {.buffer = -1}, out = pick(state, views, none), in = pick(state, views, out);
    kt_route r = {.experts = 6, .top_k = 2, .normalize = 1, .scale = 1};
    kt_gqa g = {3, 1, 16, 0.3f, 0, 9, NULL, 0};
    int32_t routing;
    switch (random_bits(state) % 9) {
    case 0:
        return kt_program_add(p, out, in, pick(state, views, none));
    case 1:
        return kt_program_norm(p, out, random_bits(state) % 2 ? out : in,
                               &(kt_norm){.gain = s->gain, .eps = 1e-3f, .head_width = 48});
    case 2:
        routing = kt_program_route(p, part(in, (int32_t)(random_bits(state) % 42), 6), &r);
        return routing < 0 ? routing : kt_program_experts(p, out, in,
                                                          &(kt_experts){.routing = routing, .gate_up = &s->gate_up.w, .down = &s->down.w});
    case 3:
        return kt_program_gqa(p, out, in, part(pick(state, views, none), 3, 16), part(in, 16, 16), &g);
    case 4:
        return kt_program_swiglu(p, part(out, 5, 16), part(in, 0, 32), &(kt_swiglu){0});
    case 5:
        return kt_program_gate(p, out, in, pick(state, views, out), &(kt_gate){0});
    default:
        return kt_program_linear(p, out, in,
                                 &(kt_linear){.weight = &s->w[random_bits(state) % 3].w, .reads = (int32_t)(random_bits(state) % 3)});
    }
}

static void run_random(kt_pool *pool, const shared *s, uint64_t seed, float *result)
{
    kt_program *p = make_program(pool, TOKENS, 1, 0);
    kt_view views[BUFFERS];
    for (int i = 0; i < BUFFERS; i++)
        views[i] = make_view(p, COLUMNS, KT_ROWS_TOKENS);
    uint64_t state = seed;
    for (int i = 0; i < OPERATIONS; i++)
        OK(record_random(p, s, &state, views), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    void *cache = need(64 * 32 * 2);
    for (int run = 0; run < 3; run++) {
        for (int i = 0; i < BUFFERS; i++)
            fill_rows(p, views[i], TOKENS, seed + (uint64_t)i);
        kt_step step = {RUN(.n_tokens = run == 1 ? 1 : TOKENS, .start = run, .first_output = run == 1 ? 1 : TOKENS,
                            .pages = (int32_t[1]){0}, .n_pages = 1),
                        .cache = cache, .cache_pages = 1, .page_bytes = 64 * 32 * 2};
        OK(kt_program_run(p, &step), kt_program_error(p));
        for (int i = 0; i < BUFFERS * TOKENS; i++, result += COLUMNS)
            memcpy(result, row_of(p, views[i / TOKENS], i % TOKENS), COLUMNS * sizeof(float));
    }
    free(cache);
    kt_program_free(p);
}

static void check_random(void)
{
    const int formats[] = {INT8, INT4_G64, BF16};
    size_t size = 3 * BUFFERS * TOKENS * COLUMNS * sizeof(float);
    float *alone = need(size), *together = need(size);
    kt_pool *one = make_pool(NULL, 1);
    shared s;
    for (int i = 0; i < 3; i++)
        s.w[i] = make_weight(one, &test_formats[formats[i]].format, 48, 48, 1, 20 + (uint64_t)i);
    s.gate_up = make_weight(one, &test_formats[INT4_G32].format, 64, 48, 6, 30);
    s.down = make_weight(one, &test_formats[INT4_G32].format, 48, 32, 6, 31);
    for (int i = 0; i < 48; i++)
        s.gain[i] = 1;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        kt_pool *many = make_pool(NULL, 2 + (int32_t)(seed % 3));
        run_random(one, &s, seed, alone);
        run_random(many, &s, seed, together);
        CHECK(memcmp(alone, together, size) == 0, "random program %d depends on the threads", (int)seed);
        kt_pool_free(many);
    }
    for (int i = 0; i < 3; i++)
        free_weight(&s.w[i]);
    free_weight(&s.gate_up);
    free_weight(&s.down);
    kt_pool_free(one);
    free(alone);
    free(together);
}

int main(void)
{
    kt_pool *pool = make_pool(NULL, 2);
    check_create(pool);
    check_recording(pool);
    check_weights(pool);
    check_too_large(pool);
    check_steps(pool);
    check_outputs(pool);
    kt_pool_free(pool);
    check_everything();
    check_random();
    return report("test_program");
}
