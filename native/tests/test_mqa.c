/* test_mqa.c - attention over a window and pooled rows against plain loops in double, with the cache in f32 and in
 * bf16, with and without windows that are chosen, however a sequence is cut into steps; the same bits for every team;
 * and a state that is read is not written. */
#include "check.h"

enum { HEADS = 5, DIM = 22, TOKENS = 330, WINDOW = 9, INDEX_HEADS = 3, INDEX_DIM = 10, BEST = 7, PAGES = 6 };
enum { WIDTH = HEADS * DIM, STATE_AT = 128, ROWS_AT = 64, INDEX_AT = 8192, PAGE = 16384 };

typedef struct shape {
    int32_t every, chosen, exact, sinks;
} shape;

static const shape shapes[] = {{0, 0, 1, 1}, {4, 0, 1, 1}, {4, 1, 1, 1}, {64, 0, 1, 0}, {128, 0, 1, 1}, {4, 1, 0, 1}, {0, 0, 0, 0}};

typedef struct run {
    shape s;
    kt_program *p;
    kt_view q, kv, pooled, out, index_q, key, weight;
    int32_t choice;
    float sinks[HEADS];
} run;

static void record(run *r, kt_pool *pool, const shape *s, int64_t most)
{
    *r = (run){.s = *s, .p = make_program(pool, most, 0, s->exact)};
    kt_program *p = r->p;
    r->q = make_view(p, WIDTH, KT_ROWS_TOKENS);
    r->out = make_view(p, WIDTH, KT_ROWS_TOKENS);
    r->kv = make_view(p, DIM, KT_ROWS_TOKENS);
    r->pooled = make_view(p, DIM, KT_ROWS_TOKENS);
    r->index_q = make_view(p, INDEX_HEADS * INDEX_DIM, KT_ROWS_TOKENS);
    r->key = make_view(p, INDEX_DIM, KT_ROWS_TOKENS);
    r->weight = make_view(p, INDEX_HEADS, KT_ROWS_TOKENS);
    fill(r->sinks, HEADS, 9);
    if (s->chosen) {
        kt_choose c = {.heads = INDEX_HEADS, .dim = INDEX_DIM, .top_k = BEST, .block = 1, .scale = 0.3f,
                       .layer_offset = INDEX_AT, .every = s->every};
        r->choice = kt_program_choose(p, r->index_q, r->key, r->weight, &c);
        OK(r->choice, kt_program_error(p));
    }
    kt_mqa a = {.heads = HEADS, .dim = DIM, .scale = 0.4f, .window = WINDOW, .sinks = s->sinks ? r->sinks : NULL,
                .state_offset = STATE_AT, .every = s->every, .choice = r->choice,
                .context = TOKENS, .layer_offset = ROWS_AT};
    kt_view pooled = s->every ? r->pooled : (kt_view){0};
    OK(kt_program_mqa(p, r->out, r->q, r->kv, pooled, &a), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
}

/* What token t brings: its queries, its key, and the row of the window that it completes. */
static void input(const run *r, int64_t row, int64_t t)
{
    const kt_view views[] = {r->q, r->kv, r->pooled, r->index_q, r->key, r->weight};
    for (uint64_t i = 0; i < 6; i++)
        fill(row_of(r->p, views[i], row), (size_t)views[i].width, 100000 * i + (uint64_t)t);
}

static void key_of(const run *r, uint64_t kind, int64_t t, double *key)
{
    float x[DIM];
    fill(x, DIM, 100000 * kind + (uint64_t)t);
    for (int c = 0; c < DIM; c++)
        key[c] = (double)(r->s.exact ? x[c] : from_bf16(to_bf16(x[c])));
}

/* Token t, with so many pooled rows: those at `places`, or the first ones. */
static void expect(const run *r, int64_t t, const int32_t *places, int64_t pooled, double *out)
{
    static double keys[WINDOW + TOKENS][DIM], score[WINDOW + TOKENS];
    float q[WIDTH];
    int64_t n = 0;
    fill(q, WIDTH, (uint64_t)t);
    for (int64_t at = t < WINDOW ? 0 : t + 1 - WINDOW; at <= t; at++)
        key_of(r, 1, at, keys[n++]);
    for (int64_t i = 0; i < pooled; i++)
        key_of(r, 2, ((places ? places[i] : i) + 1) * r->s.every - 1, keys[n++]);
    for (int h = 0; h < HEADS; h++) {
        double max = r->s.sinks ? (double)r->sinks[h] : -INFINITY, sum = 0;
        for (int64_t i = 0; i < n; i++) {
            score[i] = 0;
            for (int c = 0; c < DIM; c++) {
                float x = q[h * DIM + c];
                score[i] += (double)(r->s.exact ? x : from_bf16(to_bf16(x))) * keys[i][c];
            }
            max = fmax(max, score[i] *= (double)0.4f);
        }
        sum = r->s.sinks ? exp((double)r->sinks[h] - max) : 0;
        memset(out + h * DIM, 0, DIM * sizeof *out);
        for (int64_t i = 0; i < n; i++) {
            double e = exp(score[i] - max);
            sum += e;
            for (int c = 0; c < DIM; c++)
                out[h * DIM + c] += e * keys[i][c];
        }
        for (int c = 0; c < DIM; c++)
            out[h * DIM + c] /= sum;
    }
}

static void compare(const run *r, int64_t start, int64_t n, int64_t row)
{
    const int32_t *count = NULL, *all = kt_program_choice(r->p, r->choice, &count), *places = NULL;
    int64_t t = start + row, pooled = r->s.every ? (t + 1) / r->s.every : 0;
    double want[WIDTH];
    if (r->s.chosen && start + n > BEST * r->s.every) {
        places = all + row * BEST;
        pooled = count[row];
    }
    expect(r, t, places, pooled, want);
    double off = distance(row_of(r->p, r->out, row), want, WIDTH);
    CHECK(off < (r->s.exact ? 2e-6 : 1e-2), "every %d, chosen %d: token %lld in a step of %lld is off by %g",
          r->s.every, r->s.chosen, (long long)t, (long long)n, off);
}

/* All tokens in steps of so many; the results to out. */
static void feed(run *r, int64_t most, float out[TOKENS][WIDTH])
{
    enum { STATE = STATE_AT / 4 + WINDOW * DIM + 2 };
    static float states[2][(STATE + 15) / 16 * 16], before[(STATE + 15) / 16 * 16];
    uint8_t *data = need(PAGES * PAGE);
    int32_t pages[PAGES];
    memset(data, 0xff, PAGES * PAGE);   /* NaN */
    memset(states, 0xff, sizeof states);
    for (int i = 0; i < PAGES; i++)
        pages[i] = PAGES - 1 - i;
    for (int64_t start = 0, n, which = 0; start < TOKENS; start += n, which = 1 - which) {
        n = most < TOKENS - start ? most : TOKENS - start;
        for (int64_t t = 0; t < n; t++)
            input(r, t, start + t);
        memcpy(before, states[which], sizeof before);
        kt_step s = {RUN(.n_tokens = n, .start = start, .first_output = n, .pages = pages, .n_pages = PAGES,
                         .state = start ? (int32_t)which : -1, .next_state = (int32_t)(1 - which)),
                     .cache = data, .cache_pages = PAGES, .page_bytes = PAGE, .states = states[0], .n_states = 2,
                     .state_bytes = sizeof states[0]};
        OK(kt_program_run(r->p, &s), kt_program_error(r->p));
        CHECK(memcmp(before, states[which], sizeof before) == 0, "the state that was is written");
        for (int64_t t = 0; t < n; t++)
            memcpy(out[start + t], row_of(r->p, r->out, t), sizeof out[0]);
        for (int64_t t = 0; t < n; t += most > 30 ? 13 : 1)
            compare(r, start, n, t);
    }
    free(data);
}

static void check_shape(kt_pool *const pools[2], const shape *s)
{
    static float one[TOKENS][WIDTH], more[TOKENS][WIDTH];
    const int64_t sizes[] = {TOKENS, 70, 1};
    for (int i = 0; i < 3; i++)
        for (int team = 0; team < 2; team++) {
            run r;
            record(&r, pools[team], s, sizes[i]);
            feed(&r, sizes[i], team ? more : one);
            CHECK(!team || memcmp(one, more, sizeof one) == 0, "every %d: teams differ in steps of %lld", s->every,
                  (long long)sizes[i]);
            kt_program_free(r.p);
        }
}

static void check_refusals(kt_pool *pool)
{
    kt_program *p = make_program(pool, 4, 0, 0);
    kt_view q = make_view(p, WIDTH, KT_ROWS_TOKENS), out = make_view(p, WIDTH, KT_ROWS_TOKENS);
    kt_view kv = make_view(p, DIM, KT_ROWS_TOKENS), none = {0};
    const kt_mqa good = {.heads = HEADS, .dim = DIM, .scale = 1, .window = 4, .every = 4, .context = 32};
    kt_mqa a = good;
    a.heads = 4;
    REFUSED(kt_program_mqa(p, out, q, kv, kv, &a), KT_ERR_SHAPE, kt_program_error(p), "4 heads");
    a = good;
    a.window = 0;
    REFUSED(kt_program_mqa(p, out, q, kv, kv, &a), KT_ERR_RANGE, kt_program_error(p), "window of 0");
    a = good;
    a.every = 5;
    REFUSED(kt_program_mqa(p, out, q, kv, kv, &a), KT_ERR_SHAPE, kt_program_error(p), "windows of 5");
    a = good;
    a.context = 3;
    REFUSED(kt_program_mqa(p, out, q, kv, kv, &a), KT_ERR_SHAPE, kt_program_error(p), "up to 0");
    a.context = 4 * ((1LL << 24) + 1);
    REFUSED(kt_program_mqa(p, out, q, kv, kv, &a), KT_ERR_SHAPE, kt_program_error(p), "1..16777216 are possible");
    a = good;
    a.choice = 1;
    REFUSED(kt_program_mqa(p, out, q, kv, kv, &a), KT_ERR_RANGE, kt_program_error(p), "choice 1 of 0");
    a = good;
    a.every = 0;
    REFUSED(kt_program_mqa(p, out, q, kv, kv, &a), KT_ERR_RANGE, kt_program_error(p), "windows of 0");
    a.scale = 0;
    REFUSED(kt_program_mqa(p, out, q, kv, none, &a), KT_ERR_RANGE, kt_program_error(p), "scale of 0");
    kt_program_free(p);
}

int main(void)
{
    kt_pool *pools[2] = {make_pool(NULL, 1), make_pool(NULL, 3)};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_shape(pools, &shapes[i]);
    check_refusals(pools[0]);
    for (int i = 0; i < 2; i++)
        kt_pool_free(pools[i]);
    return report("test_mqa");
}
