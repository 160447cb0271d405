/* test_batch.c - steps of several runs: what is refused, which rows they make, and the law that a run's results have
 * the same bits alone and in any company, whole or in pieces. */
#include "everything.h"
#include "program.h"

#define why kt_program_error

/* ---- rows --------------------------------------------------------------------------------------- */

static void check_rows(void)
{
    enum { MOST = 16 };
    const kt_run runs[] = {{.n_tokens = 1, .start = 70, .first_output = 0, .defer = 2},
                           {.n_tokens = 4, .start = 0, .first_output = 2},
                           {.n_tokens = 3, .start = 9, .first_output = 3, .defer = 1}};
    const int32_t run[] = {0, 1, 1, 1, 1, 2, 2, 2}, position[] = {70, 0, 1, 2, 3, 9, 10, 11}, output[] = {0, 3, 4};
    const int64_t first[] = {0, 1, 5, 8};
    void *memory = need(batch_bytes(MOST));
    batch b = batch_at(memory, MOST);
    kt_step step = {.runs = runs, .n_runs = 3};
    for (int again = 0; again < 2; again++) {
        batch_derive(&b, &step);
        CHECK(b.runs == runs && b.n_runs == 3 && b.rows == 8 && b.outputs == 3 && b.defer == 2,
              "%lld rows, %lld outputs, defer %d", (long long)b.rows, (long long)b.outputs, b.defer);
        CHECK(!memcmp(b.first, first, sizeof first) && !memcmp(b.run, run, sizeof run), "other runs");
        CHECK(!memcmp(b.position, position, sizeof position), "other positions");
        CHECK(!memcmp(b.output, output, sizeof output), "other outputs");
    }
    free(memory);
}

/* ---- what is refused ---------------------------------------------------------------------------- */

static void check_refused(kt_pool *pool)
{
    everything *e = ev_make(pool, 0);
    kt_program *p = e->program;
    int32_t ids[90] = {0}, other[EV_PAGES];
    for (int i = 0; i < EV_PAGES; i++)
        other[i] = (e->pages[i] + 3) % EV_PAGES;
    const kt_run good[2] = {{.n_tokens = 5, .start = 60, .first_output = 4, .pages = e->pages, .n_pages = EV_PAGES,
                             .state = 0, .next_state = 1},
                            {.n_tokens = 2, .start = 0, .first_output = 0, .pages = other, .n_pages = EV_PAGES,
                             .state = -1, .next_state = 2}};
    kt_run runs[2] = {good[0], good[1]};
    kt_step s = ev_batch(e, runs, 2, ids);
    OK(kt_program_run(p, &s), why(p));
    s.n_runs = 0;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "a step of 0 runs");
    s.n_runs = 81;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "a step of 81 runs");
    s.n_runs = 2;
#define WRONG(field, value, sentence)                                               \
    runs[1].field = (value);                                                        \
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), sentence);                 \
    runs[1] = good[1]
    WRONG(n_tokens, 0, "run 1: n_tokens is 0");
    WRONG(n_tokens, 76, "run 1: 81 tokens");
    WRONG(first_output, 3, "run 1: first_output is 3 of 2");
    WRONG(start, -1, "run 1: start is -1");
    WRONG(defer, -1, "run 1: defer is -1");
    WRONG(temperature, NAN, "run 1: temperature is nan");
    WRONG(n_pages, 0, "run 1: 0 pages given; positions up to 2 need 1");
    WRONG(pages, e->pages + 1, "runs 0 and 1 both write page 18");
    WRONG(next_state, 0, "run 1 writes state 0, which run 0 reads");
    WRONG(next_state, 1, "run 1 writes state 1, which run 0 writes");
    WRONG(next_state, EV_STATES, "run 1: states -1 and 12 of 12");
    WRONG(state, -2, "run 1: states -2 and 2");
    runs[1].n_tokens = 4;
    WRONG(first_output, 0, "run 1: 9 tokens and 5 outputs");
    runs[1].chunk_tokens = 5;
    WRONG(chunk_start, 1, "run 1: positions 0..2 are not a piece of a chunk of 5 from 1 on");
    runs[1].n_tokens = 3;
    WRONG(chunk_tokens, 2, "run 1: positions 0..3 are not a piece of a chunk of 2 from 0 on");
    WRONG(chunk_tokens, -1, "run 1: positions");
    runs[1].n_tokens = 2;
    runs[0].chunk_start = runs[0].start;
    runs[0].chunk_tokens = 1;       /* drafted */
    OK(kt_program_run(p, &s), why(p));
    runs[0] = good[0];
#undef WRONG
    runs[1] = good[1];
    runs[0].state = 3;
    runs[1].start = 64;
    runs[1].state = 3;              /* forks read one state */
    OK(kt_program_run(p, &s), why(p));
    ev_free(e);
}

/* ---- the law ------------------------------------------------------------------------------------ */

enum { SEQUENCES = 3, OWN_PAGES = 6, LENGTH = 330, MOST_TOKENS = 80 };

typedef struct sequence {
    int32_t pages[OWN_PAGES], ids[LENGTH];
    int64_t at;                     /* what is computed */
    int64_t chunk, chunk_end;
    int32_t turn;
} sequence;

/* What there is of the token that ends a chunk. */
typedef struct last_row {
    float logits[EV_VOCAB], best, peak, sum;
} last_row;

static void start_all(sequence *all, int shuffled)
{
    uint64_t state = 5;
    for (int i = 0; i < SEQUENCES; i++) {
        sequence *q = &all[i];
        *q = (sequence){0};
        for (int j = 0; j < OWN_PAGES; j++)
            q->pages[j] = shuffled ? j * SEQUENCES + i : i * OWN_PAGES + j;
        for (int j = 0; j < LENGTH; j++)
            q->ids[j] = (int32_t)(random_bits(&state) % EV_VOCAB);
    }
}

/* The tokens of the chunk that begins at a position: mostly one, sometimes some or many. */
static int64_t chunk_at(int number, int64_t at)
{
    uint64_t state = (uint64_t)(1000 * number) + (uint64_t)at;
    uint64_t drawn = random_bits(&state);
    int64_t n = at == 0 ? 40 + (int64_t)(drawn % 40) : drawn % 4 ? 1 : 1 + (int64_t)(drawn / 4 % 79);
    return n < LENGTH - at ? n : LENGTH - at;
}

/* The next run of a sequence: up to `most` tokens of its chunk, or, drafted, of chunks of one token. */
static kt_run next_run(sequence *q, int number, int64_t most, int drafted)
{
    int is_drafted = 0;
    if (q->at == q->chunk_end) {
        q->chunk = q->at;
        q->chunk_end = q->at + chunk_at(number, q->at);
        is_drafted = drafted && q->chunk_end - q->chunk == 1;
        while (is_drafted && q->chunk_end - q->chunk < most && q->chunk_end < LENGTH &&
               chunk_at(number, q->chunk_end) == 1)
            q->chunk_end++;
    }
    int64_t left = q->chunk_end - q->at, n = left < most ? left : most;
    kt_run run = {.n_tokens = n, .start = q->at, .first_output = n == left ? n - 1 : n, .chunk_start = q->chunk,
                  .chunk_tokens = is_drafted ? 1 : q->chunk_end - q->chunk, .pages = q->pages, .n_pages = OWN_PAGES,
                  .expanded = q->chunk + 5, .expanded_end = is_drafted ? 0 : q->chunk_end,
                  .temperature = 0.5f * (float)number, .state = q->at ? 2 * number + q->turn : -1,
                  .next_state = 2 * number + !q->turn};
    q->turn = !q->turn;
    q->at += n;
    return run;
}

static void keep_row(const everything *e, int64_t row, const kt_run *run, last_row *to)
{
    memcpy(to->logits, row_of(e->program, e->logits, row), sizeof to->logits);
    to->best = *row_of(e->program, e->best, row);
    to->peak = *row_of(e->program, e->peaks, row);
    to->sum = run->temperature > 0 ? *row_of(e->program, e->sums, row) : 0;
}

/* Each chunk of each sequence in a step of its own. */
static void alone(everything *e, last_row (*rows)[LENGTH])
{
    static sequence all[SEQUENCES];
    start_all(all, 0);
    for (int i = 0; i < SEQUENCES; i++)
        while (all[i].at < LENGTH) {
            int64_t at = all[i].at;
            kt_run run = next_run(&all[i], i, MOST_TOKENS, 0);
            kt_step s = ev_batch(e, &run, 1, all[i].ids + at);
            OK(kt_program_run(e->program, &s), why(e->program));
            keep_row(e, 0, &run, &rows[i][all[i].at - 1]);
        }
}

static void together(everything *e, const last_row (*rows)[LENGTH], const char *what)
{
    static sequence all[SEQUENCES];
    uint64_t state = 9;
    start_all(all, 1);
    for (int64_t done = 0, step = 0; done < SEQUENCES * LENGTH; step++) {
        kt_run runs[SEQUENCES];
        int of[SEQUENCES], n = 0;
        int32_t ids[MOST_TOKENS];
        int64_t used = 0, row = 0;
        for (int k = 0; k < SEQUENCES; k++) {
            int i = (int)((step + k) % SEQUENCES);
            int64_t at = all[i].at, most = 1 + (int64_t)(random_bits(&state) % 60);
            most = most < MOST_TOKENS - used ? most : MOST_TOKENS - used;
            if (at == LENGTH || most < 1 || (n && random_bits(&state) % 4 == 0))
                continue;
            of[n] = i;
            runs[n] = next_run(&all[i], i, most, random_bits(&state) % 2 == 0);
            memcpy(ids + used, all[i].ids + at, (size_t)runs[n].n_tokens * sizeof *ids);
            used += runs[n++].n_tokens;
        }
        if (n == 0)
            continue;
        kt_step s = ev_batch(e, runs, n, ids);
        OK(kt_program_run(e->program, &s), why(e->program));
        for (int k = 0; k < n; k++) {
            if (runs[k].first_output == runs[k].n_tokens)
                continue;
            last_row got, want = rows[of[k]][all[of[k]].at - 1];
            keep_row(e, row++, &runs[k], &got);
            CHECK(!memcmp(&got, &want, sizeof got), "%s, step %lld: other bits of sequence %d at %lld", what,
                  (long long)step, of[k], (long long)all[of[k]].at - 1);
        }
        done += used;
    }
}

static void check_law(const char *isa, int32_t exact)
{
    static last_row rows[SEQUENCES][LENGTH];
    char what[64];
    for (int32_t threads = 1; threads <= 3; threads++) {
        kt_pool *pool = make_pool(isa, threads);
        everything *e = ev_make(pool, exact);
        if (threads == 1)
            alone(e, rows);
        memset(e->cache, 0xff, EV_PAGES * e->page_bytes);
        memset(e->states, 0xff, EV_STATES * e->state_bytes);
        snprintf(what, sizeof what, "%s, %d threads, exact %d", isa, threads, exact);
        together(e, (const last_row(*)[LENGTH])rows, what);
        ev_free(e);
        kt_pool_free(pool);
    }
}

/* ---- latent attention by itself: its bf16 matrices may use tiles ---------------------------------- */

enum { HEADS = 2, NOPE = 64, ROPE = 16, LORA = 128, VALUES = 48, WIDTH = LORA + ROPE };

typedef struct latent {
    kt_program *p;
    kt_view q, latent, out;
    test_weight uk_in, uk_out, uv;
    uint8_t *cache;
} latent;

static latent make_latent(kt_pool *pool)
{
    const kt_format *b = &test_formats[BF16].format;
    latent l = {.p = make_program(pool, MOST_TOKENS, 0, 0), .uk_in = make_weight(pool, b, LORA, NOPE, HEADS, 1),
                .uv = make_weight(pool, b, VALUES, LORA, HEADS, 2), .cache = need(EV_PAGES * 64 * WIDTH * 2)};
    l.uk_out = make_transposed(pool, &l.uk_in);
    l.q = make_view(l.p, HEADS * (NOPE + ROPE), KT_ROWS_TOKENS);
    l.latent = make_view(l.p, WIDTH, KT_ROWS_TOKENS);
    l.out = make_view(l.p, HEADS * VALUES, KT_ROWS_TOKENS);
    kt_mla shape = {.heads = HEADS, .nope = NOPE, .rope = ROPE, .v = VALUES, .lora = LORA, .scale = 0.1f,
                    .uk_in = l.uk_in.w, .uk_out = l.uk_out.w, .uv = l.uv.w};
    OK(kt_program_mla(l.p, l.out, l.q, l.latent, &shape), why(l.p));
    OK(kt_program_finish(l.p, NULL), why(l.p));
    return l;
}

/* One step; the rows' results in the order of rows. */
static void run_latent(latent *l, const kt_run *runs, const int *of, int n)
{
    int64_t row = 0;
    for (int k = 0; k < n; k++)
        for (int64_t t = 0; t < runs[k].n_tokens; t++, row++) {
            uint64_t seed = (uint64_t)(of[k] * LENGTH + runs[k].start + t + 1);
            fill(row_of(l->p, l->q, row), HEADS * (NOPE + ROPE), 2 * seed);
            fill(row_of(l->p, l->latent, row), WIDTH, 2 * seed + 1);
        }
    kt_step s = {.runs = runs, .n_runs = n, .cache = l->cache, .cache_pages = EV_PAGES, .page_bytes = 64 * WIDTH * 2};
    OK(kt_program_run(l->p, &s), why(l->p));
}

static void check_latent(const char *isa, int32_t threads)
{
    static float want[SEQUENCES][LENGTH][HEADS * VALUES];
    static sequence all[SEQUENCES];
    uint64_t state = 3;
    kt_pool *pool = make_pool(isa, threads);
    latent l = make_latent(pool);
    start_all(all, 0);
    for (int i = 0; i < SEQUENCES; i++)
        while (all[i].at < LENGTH) {
            int64_t at = all[i].at;
            kt_run run = next_run(&all[i], i, MOST_TOKENS, 0);
            run.first_output = run.n_tokens;
            run_latent(&l, &run, &i, 1);
            for (int64_t t = 0; t < run.n_tokens; t++)
                memcpy(want[i][at + t], row_of(l.p, l.out, t), sizeof want[i][0]);
        }
    start_all(all, 1);
    for (int64_t done = 0; done < SEQUENCES * LENGTH;) {
        kt_run runs[SEQUENCES];
        int of[SEQUENCES], n = 0;
        int64_t row = 0;
        for (int i = 0; i < SEQUENCES; i++) {
            if (all[i].at == LENGTH)
                continue;
            of[n] = i;
            runs[n] = next_run(&all[i], i, 1 + (int64_t)(random_bits(&state) % 26), random_bits(&state) % 2 == 0);
            runs[n].first_output = runs[n].n_tokens;
            done += runs[n++].n_tokens;
        }
        run_latent(&l, runs, of, n);
        for (int k = 0; k < n; k++)
            for (int64_t t = 0; t < runs[k].n_tokens; t++, row++)
                CHECK(!memcmp(want[of[k]][runs[k].start + t], row_of(l.p, l.out, row), sizeof want[0][0]),
                      "latent, %s, %d threads: other bits of sequence %d at %lld", isa, threads, of[k],
                      (long long)(runs[k].start + t));
    }
    test_weight *weights[] = {&l.uk_in, &l.uk_out, &l.uv};
    for (int i = 0; i < 3; i++)
        free_weight(weights[i]);
    kt_program_free(l.p);
    free(l.cache);
    kt_pool_free(pool);
}

int main(void)
{
    const char *rows[8];
    int n = usable_rows(rows);
    check_rows();
    kt_pool *pool = make_pool(own_row(), 2);
    check_refused(pool);
    kt_pool_free(pool);
    for (int i = 0; i < n; i++) {
        check_law(rows[i], 0);
        check_latent(rows[i], 2);
    }
    check_law(own_row(), 1);
    return report("test_batch");
}
