/* test_pooling.c - windows of positions that become rows, against plain loops in double; the same bits however a
 * sequence is cut into steps and for every team; and a state that is read is not written. */
#include "check.h"

enum { TOKENS = 23, MOST = 300, STATE = 6 * 150 + 28 };

typedef struct shape {
    int dim, every, overlap;
} shape;

static const shape shapes[] = {{70, 4, 1}, {150, 4, 0}, {5, 8, 1}, {64, 1, 1}, {33, 16, 0}, {1, 1, 0}};

typedef struct fixture {
    shape s;
    int width;
    kt_program *p;
    kt_view in, score, out;
    float bias[16 * MOST], x[TOKENS][MOST], z[TOKENS][MOST];
} fixture;

static void record(fixture *f, kt_pool *pool, const shape *s)
{
    f->s = *s;
    f->width = s->dim * (s->overlap ? 2 : 1);
    fill(f->bias, (size_t)(s->every * f->width), 1);
    for (int t = 0; t < TOKENS; t++) {
        fill(f->x[t], (size_t)f->width, 10 + (uint64_t)t);
        fill(f->z[t], (size_t)f->width, 50 + (uint64_t)t);
        for (int c = 0; c < f->width; c++)
            f->z[t][c] *= 30;       /* some weights vanish */
    }
    kt_program *p = f->p = make_program(pool, TOKENS, 0, 0);
    f->in = make_view(p, f->width, KT_ROWS_TOKENS);
    f->score = make_view(p, f->width, KT_ROWS_TOKENS);
    f->out = make_view(p, s->dim, KT_ROWS_TOKENS);
    kt_pooling pooling = {s->every, s->overlap, f->bias, 64};
    OK(kt_program_pooling(p, f->out, f->in, f->score, &pooling), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
}

/* One column of the row of the window that begins at `first`. */
static double expect(const fixture *f, int first, int c)
{
    double max = -INFINITY, sum = 0, acc = 0;
    int every = f->s.every, begin = f->s.overlap ? first - every : first;
    for (int pass = 0; pass < 2; pass++)
        for (int t = begin < 0 ? 0 : begin; t < first + every; t++) {
            int at = c + (f->s.overlap && t >= first ? f->s.dim : 0);
            float score = f->z[t][at] + f->bias[t % every * f->width + at];
            if (pass == 0)
                max = fmax(max, (double)score);
            else {
                double e = exp((double)score - max);
                sum += e;
                acc += e * (double)f->x[t][at];
            }
        }
    return acc / sum;
}

/* All tokens in steps of so many; rows to out. */
static void run(const fixture *f, int most, float out[TOKENS][MOST])
{
    static float states[2][STATE], before[STATE];
    memset(states, 0, sizeof states);
    for (int start = 0, which = 0, n; start < TOKENS; start += n, which = 1 - which) {
        n = most < TOKENS - start ? most : TOKENS - start;
        for (int t = 0; t < n; t++) {
            memcpy(row_of(f->p, f->in, t), f->x[start + t], (size_t)f->width * sizeof(float));
            memcpy(row_of(f->p, f->score, t), f->z[start + t], (size_t)f->width * sizeof(float));
        }
        memcpy(before, states[which], sizeof before);
        kt_step step = {RUN(.n_tokens = n, .start = start, .first_output = n, .state = start ? which : -1,
                            .next_state = 1 - which),
                        .states = states[0], .n_states = 2, .state_bytes = sizeof states[0]};
        OK(kt_program_run(f->p, &step), kt_program_error(f->p));
        CHECK(memcmp(before, states[which], sizeof before) == 0, "the state that was is written");
        for (int t = 0; t < n; t++)
            memcpy(out[start + t], row_of(f->p, f->out, t), (size_t)f->s.dim * sizeof(float));
    }
}

static void check_shape(kt_pool *const pools[3], const shape *s)
{
    static fixture f;
    static float whole[TOKENS][MOST], cut[TOKENS][MOST];
    for (int team = 0; team < 3; team++) {
        memset(&f, 0, sizeof f);
        record(&f, pools[team], s);
        for (int most = TOKENS; most > 0; most = most == TOKENS ? 7 : most / 2) {
            int is_first = team == 0 && most == TOKENS;
            run(&f, most, is_first ? whole : cut);
            for (int t = 0; t < TOKENS && !is_first; t++)
                CHECK(memcmp(whole[t], cut[t], (size_t)s->dim * sizeof(float)) == 0,
                      "%d every %d: row %d differs in steps of %d", s->dim, s->every, t, most);
        }
        kt_program_free(f.p);
    }
    for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < s->dim; c++) {
            double want = (t + 1) % s->every ? 0 : expect(&f, t + 1 - s->every, c);
            CHECK(fabs((double)whole[t][c] - want) <= 1e-5, "%d every %d, row %d, column %d: %g, not %g", s->dim,
                  s->every, t, c, (double)whole[t][c], want);
        }
}

static void check_refusals(kt_pool *pool)
{
    float bias[80] = {0};
    kt_program *p = make_program(pool, 4, 0, 0);
    kt_view in = make_view(p, 20, KT_ROWS_TOKENS), score = make_view(p, 20, KT_ROWS_TOKENS);
    kt_view out = make_view(p, 20, KT_ROWS_TOKENS);
    kt_pooling s = {.every = 4, .overlap = 1, .bias = bias};
    REFUSED(kt_program_pooling(p, out, in, score, &s), KT_ERR_SHAPE, kt_program_error(p), "to 20, 2 times");
    s = (kt_pooling){.every = 0, .bias = bias};
    REFUSED(kt_program_pooling(p, out, in, score, &s), KT_ERR_SHAPE, kt_program_error(p), "every 0");
    s = (kt_pooling){.every = 4};
    REFUSED(kt_program_pooling(p, out, in, score, &s), KT_ERR_SHAPE, kt_program_error(p), "without a bias");
    s = (kt_pooling){.every = 4, .bias = bias, .state_offset = 4};
    REFUSED(kt_program_pooling(p, out, in, score, &s), KT_ERR_SHAPE, kt_program_error(p), "multiple of 64");
    REFUSED(kt_program_pooling(p, in, in, score, &s), KT_ERR_SHAPE, kt_program_error(p), "overlap");
    kt_program_free(p);
}

int main(void)
{
    kt_pool *pools[3] = {make_pool(NULL, 1), make_pool(NULL, 2), make_pool(NULL, 3)};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check_shape(pools, &shapes[i]);
    check_refusals(pools[0]);
    for (int i = 0; i < 3; i++)
        kt_pool_free(pools[i]);
    return report("test_pooling");
}
