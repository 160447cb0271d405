/* everything.h - a small program in which every operation occurs, for tests that are not about results:
 * one GQA layer with routed experts, one MLA layer with a dense swiglu, one of the gated delta rule, one of attention
 * over a window and chosen windows between two streams, embeddings and logits. */
#ifndef KT_EVERYTHING_H
#define KT_EVERYTHING_H

#include "check.h"

enum { EV_HIDDEN = 64, EV_VOCAB = 40, EV_PAGES = 20, EV_EXPERTS = 6, EV_WIDTH = 48, EV_LORA = 32, EV_WINDOWS = 16,
       EV_STATES = 12 };

typedef struct everything {
    kt_program *program;
    kt_view logits, best, peaks, sums;
    int32_t routing;
    test_weight qkv, o, router, gate_up, down, q, latent, uk_in, uk_out, uv, head;
    uint16_t *table;
    float gain[EV_HIDDEN], inv_freq[8];
    int32_t pages[EV_PAGES];
    void *cache;
    size_t page_bytes;
    float conv[2 * EV_HIDDEN], log_rate[2];
    float *states;              /* [EV_STATES]; ev_step reads one of the first two and has the other written, in turn */
    size_t state_bytes;
    int32_t turn;
    kt_run run;                 /* of ev_step */
} everything;

static inline kt_view part(kt_view v, int32_t column, int32_t width)
{
    return (kt_view){v.buffer, v.column + column, width};
}

static inline void ev_weights(everything *e, kt_pool *pool)
{
    const kt_format *i4 = &test_formats[INT4_G32].format, *i8 = &test_formats[INT8].format;
    const kt_format *b = &test_formats[BF16].format;
    e->qkv = make_weight(pool, i8, 128, EV_HIDDEN, 1, 1);
    e->o = make_weight(pool, i8, EV_HIDDEN, 64, 1, 2);
    e->router = make_weight(pool, b, EV_EXPERTS, EV_HIDDEN, 1, 3);
    e->gate_up = make_weight(pool, i4, 2 * EV_WIDTH, EV_HIDDEN, EV_EXPERTS, 4);
    e->down = make_weight(pool, i4, EV_HIDDEN, EV_WIDTH, EV_EXPERTS, 5);
    e->q = make_weight(pool, i8, 4 * 32, EV_HIDDEN, 1, 6);
    e->latent = make_weight(pool, i8, EV_LORA + 16, EV_HIDDEN, 1, 7);
    e->uk_in = make_weight(pool, b, EV_LORA, 16, 4, 8);
    e->uk_out = make_transposed(pool, &e->uk_in);
    e->uv = make_weight(pool, b, 16, EV_LORA, 4, 10);
    e->head = make_weight(pool, i8, EV_VOCAB, EV_HIDDEN, 1, 11);
    e->table = need(EV_VOCAB * EV_HIDDEN * sizeof *e->table);
    uint64_t state = 12;
    for (int i = 0; i < EV_VOCAB * EV_HIDDEN; i++)
        e->table[i] = to_bf16(random_float(&state));
    for (int i = 0; i < EV_HIDDEN; i++)
        e->gain[i] = 1 + 0.1f * random_float(&state);
    for (int i = 0; i < 8; i++)
        e->inv_freq[i] = powf(10000, -(float)i / 8);
}

static inline void ev_gqa_layer(everything *e, kt_view x, kt_view normed, const kt_rope *rope)
{
    kt_program *p = e->program;
    kt_view qkv = make_view(p, 128, KT_ROWS_TOKENS), out = make_view(p, 64, KT_ROWS_TOKENS);
    kt_view y = make_view(p, EV_HIDDEN, KT_ROWS_TOKENS), scores = make_view(p, EV_EXPERTS, KT_ROWS_TOKENS);
    kt_view q = part(qkv, 0, 64), k = part(qkv, 64, 32), v = part(qkv, 96, 32);
    kt_gqa shape = {4, 2, 16, 0.25f, 0, 70, e->gain, 0};      /* a window, and sinks */
    kt_route router = {.experts = EV_EXPERTS, .top_k = 3, .normalize = 1, .scale = 1};
    OK(kt_program_norm(p, normed, x,
                       &(kt_norm){.gain = e->gain, .eps = 1e-6f, .head_width = EV_HIDDEN}), kt_program_error(p));
    OK(kt_program_linear(p, qkv, normed, &(kt_linear){.weight = &e->qkv.w}), kt_program_error(p));
    OK(kt_program_norm(p, q, q, &(kt_norm){.gain = e->gain, .eps = 1e-6f, .head_width = 16}), kt_program_error(p));
    OK(kt_program_rope(p, q, rope), kt_program_error(p));
    OK(kt_program_rope(p, k, rope), kt_program_error(p));
    OK(kt_program_gqa(p, out, q, k, v, &shape), kt_program_error(p));
    OK(kt_program_linear(p, y, out, &(kt_linear){.weight = &e->o.w}), kt_program_error(p));
    OK(kt_program_add(p, x, x, y), kt_program_error(p));
    OK(kt_program_norm(p, normed, x,
                       &(kt_norm){.gain = e->gain, .eps = 1e-6f, .head_width = EV_HIDDEN}), kt_program_error(p));
    OK(kt_program_linear(p, scores, normed,
                         &(kt_linear){.weight = &e->router.w, .reads = KT_READ_F32}), kt_program_error(p));
    e->routing = kt_program_route(p, scores, &router);
    OK(e->routing, kt_program_error(p));
    OK(kt_program_experts(p, y, normed,
                          &(kt_experts){.routing = e->routing, .gate_up = &e->gate_up.w, .down = &e->down.w}),
       kt_program_error(p));
    OK(kt_program_add(p, x, x, y), kt_program_error(p));
}

static inline void ev_mla_layer(everything *e, kt_view x, kt_view normed, const kt_rope *rope, size_t offset)
{
    kt_program *p = e->program;
    kt_rope of_latent = *rope, of_heads = *rope;
    of_latent.interleaved = of_heads.interleaved = 1;
    of_heads.head_width = 32;
    of_heads.first = 16;
    kt_view q = make_view(p, 128, KT_ROWS_TOKENS), latent = make_view(p, EV_LORA + 16, KT_ROWS_TOKENS);
    kt_view out = make_view(p, 64, KT_ROWS_TOKENS), y = make_view(p, EV_HIDDEN, KT_ROWS_TOKENS);
    kt_mla shape = {4, 16, 16, 16, EV_LORA, 0.2f, offset, e->uk_in.w, e->uk_out.w, e->uv.w, 0};
    OK(kt_program_norm(p, normed, x,
                       &(kt_norm){.gain = e->gain, .eps = 1e-6f, .head_width = EV_HIDDEN}), kt_program_error(p));
    OK(kt_program_linear(p, q, normed, &(kt_linear){.weight = &e->q.w}), kt_program_error(p));
    OK(kt_program_linear(p, latent, normed, &(kt_linear){.weight = &e->latent.w}), kt_program_error(p));
    OK(kt_program_rope(p, q, &of_heads), kt_program_error(p));
    OK(kt_program_rope(p, part(latent, EV_LORA, 16), &of_latent), kt_program_error(p));
    OK(kt_program_mla(p, out, q, latent, &shape), kt_program_error(p));
    OK(kt_program_swiglu(p, part(y, 0, 32), out, &(kt_swiglu){0}), kt_program_error(p));
    OK(kt_program_gate(p, part(y, 0, 32), part(y, 0, 32), part(latent, 3, 1), &(kt_gate){0}), kt_program_error(p));
    OK(kt_program_add(p, part(x, 0, 32), part(x, 0, 32), part(y, 0, 32)), kt_program_error(p));
}

/* 2 heads of 16 keys and 16 columns; what decays and how much is learned are two columns each of x. */
static inline void ev_delta_layer(everything *e, kt_view x)
{
    kt_program *p = e->program;
    kt_view mixed = make_view(p, EV_HIDDEN, KT_ROWS_TOKENS), gates = make_view(p, EV_HIDDEN, KT_ROWS_TOKENS);
    kt_view out = make_view(p, 32, KT_ROWS_TOKENS);
    kt_conv conv = {2, e->conv, 0, NULL, 0};
    kt_delta rule = {2, 1, 16, 16, e->log_rate, e->log_rate, EV_HIDDEN * sizeof(float), 0};
    kt_scan scan = {2, 1, 16, 16, e->log_rate, e->log_rate, e->log_rate, 0, INFINITY,
                    (EV_HIDDEN + 2 * 16 * 16) * sizeof(float)};
    kt_lightning lightning = {1, 16, (float[1]){0.1f}, (EV_HIDDEN + 4 * 16 * 16) * sizeof(float)};
    e->state_bytes = EV_HIDDEN * sizeof(float) + 5 * 16 * 16 * sizeof(float);
    OK(kt_program_conv(p, mixed, x, &conv), kt_program_error(p));
    OK(kt_program_norm(p, gates, x,
                       &(kt_norm){.gain = e->gain, .eps = 1e-6f, .head_width = EV_HIDDEN}), kt_program_error(p));
    OK(kt_program_delta(p, out, part(mixed, 0, 16), part(mixed, 16, 16), part(mixed, 32, 32), part(gates, 0, 2),
                        part(gates, 2, 2), &rule), kt_program_error(p));
    OK(kt_program_scan(p, part(gates, 16, 32), part(mixed, 32, 32), part(mixed, 16, 16), part(mixed, 0, 16),
                       part(gates, 4, 2), &scan), kt_program_error(p));
    OK(kt_program_add(p, out, out, part(gates, 16, 32)), kt_program_error(p));
    OK(kt_program_lightning(p, part(gates, 16, 16), part(mixed, 0, 16), part(mixed, 16, 16), part(mixed, 32, 16),
                            &lightning), kt_program_error(p));
    OK(kt_program_add(p, part(out, 0, 16), part(out, 0, 16), part(gates, 16, 16)), kt_program_error(p));
    OK(kt_program_add(p, part(x, 16, 32), part(x, 16, 32), out), kt_program_error(p));
}

/* Two streams; windows of 4 positions, the best 5 of them beside the last 9 positions. All views are columns of one,
 * as a product's would be: queries [64], key [16], what is pooled [16] and its scores [16], index weights [2]. */
static inline void ev_mqa_layer(everything *e, kt_view x, size_t offset, size_t index_offset)
{
    enum { EVERY = 4, WINDOW = 9, DIM = 16, RING = (WINDOW * DIM + 15) / 16 * 16 * sizeof(float) };
    kt_program *p = e->program;
    kt_view streams = make_view(p, 2 * EV_HIDDEN, KT_ROWS_TOKENS), next = make_view(p, 2 * EV_HIDDEN, KT_ROWS_TOKENS);
    kt_view by = make_view(p, 8, KT_ROWS_TOKENS), entered = make_view(p, EV_HIDDEN, KT_ROWS_TOKENS);
    kt_view all = make_view(p, 128, KT_ROWS_TOKENS), pooled = make_view(p, DIM, KT_ROWS_TOKENS);
    kt_view out = make_view(p, EV_HIDDEN, KT_ROWS_TOKENS);
    kt_mix mix = {.streams = 2, .iterations = 3, .eps = 1e-6f, .scale = e->gain, .base = e->gain};
    kt_pooling pooling = {.every = EVERY, .bias = e->conv, .state_offset = e->state_bytes};
    kt_choose choose = {.heads = 2, .dim = DIM, .top_k = 5, .block = 1, .scale = 0.2f, .every = EVERY,
                        .layer_offset = index_offset};
    kt_mqa shape = {.heads = 4, .dim = DIM, .scale = 0.25f, .window = WINDOW, .sinks = e->gain, .every = EVERY,
                    .state_offset = e->state_bytes + 3 * DIM * sizeof(float), .context = EV_PAGES * EV_WINDOWS * EVERY,
                    .layer_offset = offset};
    e->state_bytes += 3 * DIM * sizeof(float) + RING;
    OK(kt_program_spread(p, streams, x), kt_program_error(p));
    OK(kt_program_norm(p, by, part(x, 0, 8), &(kt_norm){.eps = 1e-6f, .head_width = 8}), kt_program_error(p));
    OK(kt_program_mix(p, by, &mix), kt_program_error(p));
    OK(kt_program_collapse(p, entered, streams, part(by, 0, 2)), kt_program_error(p));
    OK(kt_program_linear(p, all, entered, &(kt_linear){.weight = &e->qkv.w}), kt_program_error(p));
    OK(kt_program_pooling(p, pooled, part(all, 80, DIM), part(all, 96, DIM), &pooling), kt_program_error(p));
    shape.choice = kt_program_choose(p, part(all, 0, 2 * DIM), pooled, part(all, 112, 2), &choose);
    OK(shape.choice, kt_program_error(p));
    OK(kt_program_mqa(p, out, part(all, 0, 64), part(all, 64, DIM), pooled, &shape), kt_program_error(p));
    OK(kt_program_expand(p, next, streams, out, part(by, 2, 6)), kt_program_error(p));
    OK(kt_program_collapse(p, x, next, part(by, 0, 2)), kt_program_error(p));
}

/* max_tokens 80, max_outputs 3 */
static inline everything *ev_make(kt_pool *pool, int32_t exact)
{
    everything *e = need(sizeof *e);
    size_t first = 64 * 64 * (exact ? 4u : 2u);
    size_t second = first + 64 * (EV_LORA + 16) * (exact ? 4u : 2u), rows = EV_WINDOWS * 16 * (exact ? 4u : 2u);
    e->page_bytes = second + 2 * rows;
    e->cache = need(EV_PAGES * e->page_bytes);
    for (int32_t i = 0; i < EV_PAGES; i++)
        e->pages[i] = EV_PAGES - 1 - i;
    ev_weights(e, pool);
    for (int i = 0; i < 2 * EV_HIDDEN; i++)
        e->conv[i] = 0.5f;
    e->log_rate[0] = -2;
    kt_program *p = e->program = make_program(pool, 80, 3, exact);
    kt_view x = make_view(p, EV_HIDDEN, KT_ROWS_TOKENS), normed = make_view(p, EV_HIDDEN, KT_ROWS_TOKENS);
    kt_view last = make_view(p, EV_HIDDEN, KT_ROWS_OUTPUTS);
    e->logits = make_view(p, EV_VOCAB, KT_ROWS_OUTPUTS);
    kt_rope rope = {.dim = 16, .inv_freq = e->inv_freq, .scale = 1, .head_width = 16};
    OK(kt_program_embed(p, x, &(kt_embed){.table = e->table, .vocab = EV_VOCAB}), kt_program_error(p));
    ev_gqa_layer(e, x, normed, &rope);
    ev_mla_layer(e, x, normed, &rope, first);
    ev_delta_layer(e, x);
    ev_mqa_layer(e, x, second, second + rows);
    OK(kt_program_select(p, last, x), kt_program_error(p));
    OK(kt_program_norm(p, last, last,
                       &(kt_norm){.gain = e->gain, .eps = 1e-6f, .head_width = EV_HIDDEN}), kt_program_error(p));
    OK(kt_program_linear(p, e->logits, last, &(kt_linear){.weight = &e->head.w}), kt_program_error(p));
    e->best = make_view(p, 1, KT_ROWS_OUTPUTS);
    e->peaks = make_view(p, 1, KT_ROWS_OUTPUTS);
    e->sums = make_view(p, 1, KT_ROWS_OUTPUTS);
    OK(kt_program_summary(p, e->best, e->peaks, e->sums, e->logits), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    e->state_bytes = (e->state_bytes + 63) / 64 * 64;
    e->states = need(EV_STATES * e->state_bytes);
    return e;
}

static inline void ev_free(everything *e)
{
    test_weight *all[] = {&e->qkv, &e->o, &e->router, &e->gate_up, &e->down, &e->q, &e->latent, &e->uk_in,
                          &e->uk_out, &e->uv, &e->head};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free_weight(all[i]);
    kt_program_free(e->program);
    free(e->table);
    free(e->cache);
    free(e->states);
    free(e);
}

/* A step of these runs with everything else. */
static inline kt_step ev_batch(const everything *e, const kt_run *runs, int64_t n_runs, const int32_t *ids)
{
    return (kt_step){.runs = runs, .n_runs = n_runs, .ids = ids, .cache = e->cache, .cache_pages = EV_PAGES,
                     .page_bytes = e->page_bytes, .states = e->states, .n_states = EV_STATES,
                     .state_bytes = e->state_bytes};
}

/* A step of one run of n tokens at `start`, the last `outputs` of which give logits; ids must hold n. It continues the
 * step made before it. */
static inline kt_step ev_step(everything *e, const int32_t *ids, int64_t n, int64_t start, int64_t outputs)
{
    e->turn = !e->turn;
    e->run = (kt_run){.n_tokens = n, .start = start, .first_output = n - outputs, .pages = e->pages,
                      .n_pages = EV_PAGES, .temperature = 0.7f, .state = start ? !e->turn : -1,
                      .next_state = e->turn};
    return ev_batch(e, &e->run, 1, ids);
}

#endif
