/* test_choose.c - chosen positions against plain loops: scores and choices; latent attention over what was
 * chosen, positions or windows; and the laws that threads, rows and how a prompt is cut change no choice, that of equals
 * the lower place is chosen, and that a short context is plain latent attention, bit by bit. */
#include "chosen.h"

enum { HEADS = 3, NOPE = 24, ROPE = 8, V = 20, LORA = 40, LATENT = LORA + ROPE, INDEX_HEADS = 11, TOP = 70 };
enum { LATENT_AT = 192, EVERY = 8, BEST = 8, PLACES = BEST * EVERY + EVERY - 1 };

/* ---- a program of choose and mla ---------------------------------------------------------------- */

typedef struct model {
    int32_t exact, top_k;       /* top_k 0: no choice */
    int32_t equal;              /* all keys are the same */
    int32_t every;              /* positions of a window that is chosen */
    size_t index_at, page_bytes;
    test_weight uk_in, uk_out, uv;
} model;

typedef struct run {
    kt_program *program;
    kt_view q, latent, out, index_q, key, weight;
    int32_t choice;
} run;

static model make_model(kt_pool *pool, int32_t exact, int32_t top_k)
{
    const kt_format *f = &test_formats[BF16].format;
    model m = {.exact = exact, .top_k = top_k, .every = 1, .index_at = LATENT_AT + LATENT * 64 * (exact ? 4u : 2u)};
    m.page_bytes = m.index_at + DIM * 64 * (exact ? 4u : 2u);
    m.uk_in = make_weight(pool, f, LORA, NOPE, HEADS, 11);
    m.uk_out = make_transposed(pool, &m.uk_in);
    m.uv = make_weight(pool, f, V, LORA, HEADS, 13);
    return m;
}

static void free_model(model *m)
{
    free_weight(&m->uk_in);
    free_weight(&m->uk_out);
    free_weight(&m->uv);
}

static run record(kt_pool *pool, const model *m, int64_t tokens)
{
    run r = {.program = make_program(pool, tokens, 1, m->exact)};
    kt_program *p = r.program;
    r.q = make_view(p, HEADS * (NOPE + ROPE), KT_ROWS_TOKENS);
    r.latent = make_view(p, LATENT, KT_ROWS_TOKENS);
    r.out = make_view(p, HEADS * V, KT_ROWS_TOKENS);
    r.index_q = make_view(p, INDEX_HEADS * DIM, KT_ROWS_TOKENS);
    r.key = make_view(p, DIM, KT_ROWS_TOKENS);
    r.weight = make_view(p, INDEX_HEADS, KT_ROWS_TOKENS);
    if (m->top_k) {
        kt_choose c = {INDEX_HEADS, DIM, m->top_k, 1, 0, 0.3f, m->index_at, m->every};
        r.choice = kt_program_choose(p, r.index_q, r.key, r.weight, &c);
        OK(r.choice, kt_program_error(p));
    }
    kt_mla a = {HEADS, NOPE, ROPE, V, LORA, 0.2f, LATENT_AT, m->uk_in.w, m->uk_out.w, m->uv.w, r.choice};
    OK(kt_program_mla(p, r.out, r.q, r.latent, &a), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    return r;
}

/* What token t brings; the same in every run. */
static void input(const run *r, const model *m, int64_t row, int64_t t)
{
    const kt_view views[] = {r->q, r->latent, r->index_q, r->key, r->weight};
    for (uint64_t i = 0; i < 5; i++) {
        uint64_t seed = 100000 * i + (uint64_t)(m->equal && i == 3 ? 0 : t);
        fill(row_of(r->program, views[i], row), (size_t)views[i].width, seed);
    }
}

/* Everything a run gave, by token. */
typedef struct result {
    float out[TOKENS][HEADS * V];
    int32_t count[TOKENS], places[TOKENS][PLACES];
} result;

/* Positions of the places chosen, and those behind the last window that is complete with the token. */
static void take_places(result *to, const model *m, int64_t t, const int32_t *places, int32_t count)
{
    int32_t n = 0;
    for (; n < count * m->every; n++)
        to->places[t][n] = places[n / m->every] * m->every + n % m->every;
    for (int64_t p = (t + 1) / m->every * m->every; p <= t; p++)
        to->places[t][n++] = (int32_t)p;
    to->count[t] = n;
}

static void step(run *r, const model *m, cache *c, int64_t start, int64_t n, result *to)
{
    const int32_t *count = NULL, *places = kt_program_choice(r->program, r->choice, &count);
    for (int64_t t = 0; t < n; t++)
        input(r, m, t, start + t);
    kt_step s = {RUN(.n_tokens = n, .start = start, .first_output = n, .pages = c->pages,
                     .n_pages = (TOKENS + 63) / 64),
                 .cache = c->data, .cache_pages = (TOKENS + 63) / 64, .page_bytes = m->page_bytes};
    OK(kt_program_run(r->program, &s), kt_program_error(r->program));
    for (int64_t t = 0; t < n; t++) {
        memcpy(to->out[start + t], row_of(r->program, r->out, t), sizeof to->out[0]);
        to->count[start + t] = (int32_t)(start + t + 1);
        for (int32_t i = 0; i < PLACES; i++)
            to->places[start + t][i] = i;
        if (m->top_k && start + n > m->top_k * m->every)
            take_places(to, m, start + t, places + t * m->top_k, count[t]);
    }
}

static result *run_all(kt_pool *pool, const model *m, int64_t piece)
{
    result *to = need(sizeof *to);
    run r = record(pool, m, piece);
    cache c = make_cache(m->page_bytes);
    for (int64_t t = 0; t < TOKENS; t += piece)
        step(&r, m, &c, t, piece < TOKENS - t ? piece : TOKENS - t, to);
    free(c.data);
    kt_program_free(r.program);
    return to;
}

/* ---- the reference ------------------------------------------------------------------------------ */

typedef struct inputs {
    float q[TOKENS][HEADS * (NOPE + ROPE)], latent[TOKENS][LATENT];
    float index_q[TOKENS][INDEX_HEADS * DIM], key[TOKENS][DIM], weight[TOKENS][INDEX_HEADS];
} inputs;

static inputs *make_inputs(kt_pool *pool, const model *m)
{
    inputs *x = need(sizeof *x);
    run r = record(pool, m, 1);
    for (int64_t t = 0; t < TOKENS; t++) {
        input(&r, m, 0, t);
        memcpy(x->q[t], row_of(r.program, r.q, 0), sizeof x->q[t]);
        memcpy(x->latent[t], row_of(r.program, r.latent, 0), sizeof x->latent[t]);
        memcpy(x->index_q[t], row_of(r.program, r.index_q, 0), sizeof x->index_q[t]);
        memcpy(x->key[t], row_of(r.program, r.key, 0), sizeof x->key[t]);
        memcpy(x->weight[t], row_of(r.program, r.weight, 0), sizeof x->weight[t]);
    }
    kt_program_free(r.program);
    return x;
}

REFERENCE static double score(const model *m, const inputs *x, int64_t t, int64_t j)
{
    double sum = 0;
    for (int h = 0; h < INDEX_HEADS; h++) {
        double dot = 0;
        for (int i = 0; i < DIM; i++)
            dot += kept(m->exact, x->index_q[t][h * DIM + i]) * kept(m->exact, x->key[j][i]);
        sum += (double)x->weight[t][h] * 0.3 * fmax(dot, 0);
    }
    return sum;
}

/* Nothing that was refused is better than what was chosen, beyond rounding. */
static void check_choice(const model *m, const inputs *x, const result *r, int64_t t)
{
    double worst = INFINITY;
    int32_t n = r->count[t], wanted = (int32_t)(t + 1 < m->top_k ? t + 1 : m->top_k), at = 0;
    CHECK(n == wanted, "token %lld: %d chosen, not %d", (long long)t, n, wanted);
    for (int32_t i = 0; i < n; i++) {
        CHECK(r->places[t][i] <= t && (i == 0 || r->places[t][i] > r->places[t][i - 1]), "token %lld: place %d",
              (long long)t, r->places[t][i]);
        worst = fmin(worst, score(m, x, t, r->places[t][i]));
    }
    for (int64_t j = 0; j <= t; j++) {
        if (at < n && r->places[t][at] == j)
            at++;
        else
            CHECK(score(m, x, t, j) <= worst + 1e-5, "token %lld: place %lld is better by %g", (long long)t,
                  (long long)j, score(m, x, t, j) - worst);
    }
}

REFERENCE static void expect(const model *m, const inputs *x, const result *r, int64_t t, double *out)
{
    int32_t n = r->count[t];
    for (int h = 0; h < HEADS; h++) {
        double q[LATENT], nope[NOPE], weight[TOKENS], mixed[LORA] = {0}, max = -INFINITY, sum = 0;
        for (int i = 0; i < NOPE; i++)
            nope[i] = (double)x->q[t][h * (NOPE + ROPE) + i];
        multiply(m->uk_in.values + h * LORA * NOPE, LORA, NOPE, nope, q);
        for (int i = 0; i < ROPE; i++)
            q[LORA + i] = (double)x->q[t][h * (NOPE + ROPE) + NOPE + i];
        for (int32_t j = 0; j < n; j++) {
            weight[j] = 0;
            for (int i = 0; i < LATENT; i++)
                weight[j] += 0.2 * q[i] * kept(m->exact, x->latent[r->places[t][j]][i]);
            max = fmax(max, weight[j]);
        }
        for (int32_t j = 0; j < n; j++)
            sum += weight[j] = exp(weight[j] - max);
        for (int32_t j = 0; j < n; j++)
            for (int i = 0; i < LORA; i++)
                mixed[i] += weight[j] / sum * kept(m->exact, x->latent[r->places[t][j]][i]);
        multiply(m->uv.values + h * V * LORA, V, LORA, mixed, out + h * V);
    }
}

/* ---- the laws ----------------------------------------------------------------------------------- */

static void check_model(const char *isa, int32_t exact)
{
    kt_pool *pool = make_pool(isa, 3);
    model m = make_model(pool, exact, TOP), plain = make_model(pool, exact, 0);
    inputs *x = make_inputs(pool, &m);
    const int64_t pieces[] = {TOKENS, 37, 2, 1};
    result *first = NULL, *without = run_all(pool, &plain, 1);
    for (int i = 0; i < 4; i++) {
        result *r = run_all(pool, &m, pieces[i]);
        for (int64_t t = TOKENS - 1; t > 0; t -= 13) {
            double want[HEADS * V];
            check_choice(&m, x, r, t);
            if (t < r->count[t] && t > TOP)     /* what a long step sees whole is not in `places` */
                continue;
            expect(&m, x, r, t, want);
            double off = t >= TOP ? distance(r->out[t], want, HEADS * V) : 0;
            CHECK(off <= (exact ? 1e-5 : 0.03), "%s, %s, pieces of %lld: token %lld is off by %g", isa,
                  exact ? "exact" : "fast", (long long)pieces[i], (long long)t, off);
        }
        for (int64_t t = TOP; t < TOKENS && first; t++)
            CHECK(memcmp(first->places[t], r->places[t], sizeof r->places[t]) == 0,
                  "%s: pieces of %lld choose other places for token %lld", isa, (long long)pieces[i], (long long)t);
        if (pieces[i] == 1)
            CHECK(memcmp(r->out, without->out, TOP * sizeof r->out[0]) == 0,
                  "%s: where all is chosen, it is not plain latent attention", isa);
        if (first)
            free(r);
        else
            first = r;
    }
    free(first);
    free(without);
    free(x);
    free_model(&m);
    free_model(&plain);
    kt_pool_free(pool);
}

/* Of windows of 8 positions 8 are chosen, and up to 7 positions stand behind them: more than a page of rows. In
 * pieces of any size the same bits, for every number of threads. */
static void check_latents_over_windows(int32_t exact)
{
    const int64_t pieces[] = {TOKENS, 37, 1, TOKENS};
    result *first = NULL;
    for (int i = 0; i < 4; i++) {
        kt_pool_options o = {.n_threads = i + 1, .tile_min[KT_TILE_BF16] = INT32_MAX};
        kt_pool *pool = make_pool_of(&o);
        model m = make_model(pool, exact, BEST);
        m.every = EVERY;
        inputs *x = make_inputs(pool, &m);
        result *r = run_all(pool, &m, pieces[i]);
        for (int64_t t = TOKENS - 1; t >= EVERY * BEST; t -= i ? 29 : 7) {
            double want[HEADS * V];
            expect(&m, x, r, t, want);
            double off = distance(r->out[t], want, HEADS * V);
            CHECK(r->count[t] == EVERY * BEST + (t + 1) % EVERY && off <= (exact ? 1e-5 : 0.03),
                  "token %lld, over %d positions, is off by %g", (long long)t, r->count[t], off);
            CHECK(!first || (memcmp(first->places[t], r->places[t], sizeof r->places[t]) == 0 &&
                             memcmp(first->out[t], r->out[t], sizeof r->out[t]) == 0),
                  "windows, pieces of %lld, %d threads: other places or bits of token %lld", (long long)pieces[i], i + 1,
                  (long long)t);
        }
        if (first)
            free(r);
        else
            first = r;
        free(x);
        free_model(&m);
        kt_pool_free(pool);
    }
    free(first);
}

/* The same bits for every row and number of threads. */
static void check_same(const char *const *rows, int n, int64_t piece)
{
    result *first = NULL;
    for (int i = 0; i < n + 3; i++) {
        kt_pool_options o = {.isa = rows[i < n ? i : 0], .n_threads = i < n ? 2 : 2 * (i - n) + 1,
                             .tile_min[KT_TILE_BF16] = INT32_MAX};
        kt_pool *pool = make_pool_of(&o);
        model m = make_model(pool, 0, TOP);
        result *r = run_all(pool, &m, piece);
        CHECK(!first || memcmp(first, r, sizeof *r) == 0, "%s, %d threads, pieces of %lld: other bits", o.isa,
              o.n_threads, (long long)piece);
        free_model(&m);
        kt_pool_free(pool);
        if (first)
            free(r);
        else
            first = r;
    }
    free(first);
}

static void check_ties(const char *isa)
{
    kt_pool *pool = make_pool(isa, 2);
    model m = make_model(pool, 0, TOP);
    m.equal = 1;
    result *r = run_all(pool, &m, 100);
    for (int32_t i = 0; i < TOP; i++)
        CHECK(r->places[TOKENS - 1][i] == i, "of equals place %d is chosen as number %d", r->places[TOKENS - 1][i], i);
    free(r);
    free_model(&m);
    kt_pool_free(pool);
}

static void check_refusals(const char *isa)
{
    kt_pool *pool = make_pool(isa, 1);
    kt_program *p = make_program(pool, 4, 1, 0);
    kt_view q = make_view(p, 4 * DIM, KT_ROWS_TOKENS), key = make_view(p, DIM, KT_ROWS_TOKENS);
    kt_view weight = make_view(p, 4, KT_ROWS_TOKENS), none = {0, 0, 0};
    const struct { kt_view weight; kt_choose s; const char *said; } bad[] = {
        {weight, {4, DIM + 1, 8, 1, 0, 1, 0}, "even number"}, {weight, {3, DIM, 8, 1, 0, 1, 0}, "q has"},
        {weight, {4, DIM, 0, 1, 0, 1, 0}, "0 places"}, {weight, {4, DIM, 1 << 20, 1, 0, 1, 0}, "places"},
        {weight, {4, DIM, 8, 64, 0, 1, 0}, "blocks of 64"}, {none, {4, DIM, 8, 1, 0, 1, 0}, "blocks of 1 "},
        {none, {4, DIM, 8, 96, 0, 1, 0}, "blocks of 96"}, {weight, {4, DIM, 8, 1, 0, 1, 32}, "multiple of 64"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int32_t code = kt_program_choose(p, q, key, bad[i].weight, &bad[i].s);
        CHECK(code < 0 && strstr(kt_program_error(p), bad[i].said), "%s", kt_program_error(p));
    }
    kt_program_free(p);
    kt_pool_free(pool);
}

/* ---- windows of positions ------------------------------------------------------------------------ */

/* What token t's window w is worth; its key is that of its last position. */
static double window_score(const float *q, const float *weight, int64_t window)
{
    float key[DIM];
    double score = 0;
    fill(key, DIM, 300000 + (uint64_t)(4 * window + 3));
    for (int h = 0; h < INDEX_HEADS; h++) {
        double dot = 0;
        for (int c = 0; c < DIM; c++)
            dot += (double)q[h * DIM + c] * (double)key[c];
        score += (double)weight[h] * fmax(0, dot);
    }
    return score;
}

static void check_windows(kt_pool *pool, int64_t most)
{
    enum { SOME = 5, PAGE = DIM * 16 * 4 };
    model m = {.exact = 1};
    run r = {.program = make_program(pool, TOKENS, 1, 1)};
    kt_program *p = r.program;
    r.index_q = make_view(p, INDEX_HEADS * DIM, KT_ROWS_TOKENS);
    r.key = make_view(p, DIM, KT_ROWS_TOKENS);
    r.weight = make_view(p, INDEX_HEADS, KT_ROWS_TOKENS);
    r.q = r.latent = r.weight;
    kt_choose shape = {INDEX_HEADS, DIM, SOME, 1, 0, 0.3f, 0, 4};
    r.choice = kt_program_choose(p, r.index_q, r.key, r.weight, &shape);
    OK(r.choice, kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    m.page_bytes = PAGE;
    cache c = make_cache(m.page_bytes);
    for (int64_t start = 0, n; start < TOKENS; start += n) {
        n = most < TOKENS - start ? most : TOKENS - start;
        for (int64_t t = 0; t < n; t++)
            input(&r, &m, t, start + t);
        kt_step s = {RUN(.n_tokens = n, .start = start, .first_output = n, .pages = c.pages,
                         .n_pages = (TOKENS + 63) / 64),
                     .cache = c.data, .cache_pages = (TOKENS + 63) / 64, .page_bytes = PAGE};
        OK(kt_program_run(p, &s), kt_program_error(p));
        const int32_t *count, *places = kt_program_choice(p, r.choice, &count);
        for (int64_t t = 0; t < n && start + n > 4 * SOME; t++) {
            int64_t seen = (start + t + 1) / 4, want = seen < SOME ? seen : SOME;
            CHECK(count[t] == want, "token %lld: %d windows, not %lld", (long long)(start + t), count[t], (long long)want);
            double worst = INFINITY;
            for (int64_t k = 0; k < want; k++)
                worst = fmin(worst, window_score(row_of(p, r.index_q, t), row_of(p, r.weight, t), places[t * SOME + k]));
            int64_t better = 0;
            for (int64_t w = 0; w < seen; w++)
                better += window_score(row_of(p, r.index_q, t), row_of(p, r.weight, t), w) > worst + 1e-4;
            CHECK(better < SOME, "token %lld: %lld windows are better", (long long)(start + t), (long long)better);
        }
    }
    free(c.data);
    kt_program_free(p);
}

int main(void)
{
    const char *rows[8];
    int n = usable_rows(rows);
    check_model(own_row(), 0);
    check_model(own_row(), 1);
    check_model("portable", 1);
    check_latents_over_windows(0);
    check_latents_over_windows(1);
    check_same(rows, n, TOKENS);
    check_same(rows, n, 3);
    check_ties(own_row());
    check_refusals(own_row());
    kt_pool *two = make_pool(NULL, 2);
    check_windows(two, TOKENS);
    check_windows(two, 1);
    check_windows(two, 37);
    kt_pool_free(two);
    return report("test_choose");
}
