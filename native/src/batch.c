/* batch.c - a step's runs: their checks, and the rows that they consist of.
 *
 * All that can be wrong with a step is found here, before the team starts, so no phase checks anything.
 */
#include "program.h"

#include <float.h>

/* ---- checks ------------------------------------------------------------------------------------- */

/* Run r by itself. */
static int check_run(kt_program *p, const kt_run *run, int64_t r)
{
    int64_t most = INT32_MAX - run->n_tokens;
    chunk c = chunk_of(run);
    if (run->n_tokens < 1 || run->n_tokens > p->options.max_tokens)
        return program_fail(p, KT_ERR_RANGE, "run %lld: n_tokens is %lld, outside 1..%lld", (long long)r,
                            (long long)run->n_tokens, (long long)p->options.max_tokens);
    if (run->start < 0 || run->start > most)
        return program_fail(p, KT_ERR_RANGE, "run %lld: start is %lld, outside 0..%lld", (long long)r,
                            (long long)run->start, (long long)most);
    if (run->first_output < 0 || run->first_output > run->n_tokens)
        return program_fail(p, KT_ERR_RANGE, "run %lld: first_output is %lld of %lld tokens", (long long)r,
                            (long long)run->first_output, (long long)run->n_tokens);
    if (c.start < 0 || c.tokens < 0 || c.tokens > INT32_MAX || c.start > run->start ||
        c.start + c.tokens <= run->start || (c.tokens > 1 && c.start + c.tokens < run_end(run)))
        return program_fail(p, KT_ERR_RANGE, "run %lld: positions %lld..%lld are not a piece of a chunk of %lld from %lld on",
                            (long long)r, (long long)run->start, (long long)run_end(run), (long long)c.tokens,
                            (long long)c.start);
    if (run->adapter < 0 || run->adapter > p->adapters)
        return program_fail(p, KT_ERR_RANGE, "run %lld: adapter is %d, outside 0..%d", (long long)r, run->adapter,
                            p->adapters);
    if (run->defer < 0)
        return program_fail(p, KT_ERR_RANGE, "run %lld: defer is %d; 0 or more is possible", (long long)r, run->defer);
    if (!(run->temperature >= 0 && run->temperature <= FLT_MAX))
        return program_fail(p, KT_ERR_RANGE, "run %lld: temperature is %g; 0 or more is possible", (long long)r,
                            (double)run->temperature);
    return KT_OK;
}

/* The runs together; *rows: the tokens of all. */
static int check_counts(kt_program *p, const kt_step *s, int64_t *rows)
{
    const kt_program_options *o = &p->options;
    int64_t outputs = 0;
    *rows = 0;
    if (!s->runs || s->n_runs < 1 || s->n_runs > o->max_tokens)
        return program_fail(p, KT_ERR_RANGE, "a step of %lld runs; 1..%lld are possible",
                            (long long)(s->runs ? s->n_runs : 0), (long long)o->max_tokens);
    for (int64_t r = 0; r < s->n_runs; r++) {
        int failed = check_run(p, &s->runs[r], r);
        if (failed)
            return failed;
        *rows += s->runs[r].n_tokens;
        outputs += s->runs[r].n_tokens - s->runs[r].first_output;
        if (*rows > o->max_tokens || outputs > o->max_outputs)
            return program_fail(p, KT_ERR_RANGE, "run %lld: %lld tokens and %lld outputs up to there; at most %lld "
                                "tokens and %lld outputs are possible", (long long)r, (long long)*rows,
                                (long long)outputs, (long long)o->max_tokens, (long long)o->max_outputs);
    }
    return KT_OK;
}

static int check_ids(kt_program *p, const kt_step *s, int64_t rows)
{
    if (p->vocab == INT64_MAX)
        return KT_OK;
    if (!s->ids)
        return program_fail(p, KT_ERR_RANGE, "no ids given");
    for (int64_t t = 0; t < rows; t++) {
        if (s->ids[t] < 0 || s->ids[t] >= p->vocab)
            return program_fail(p, KT_ERR_RANGE, "ids[%lld] is %d, outside 0..%lld", (long long)t, s->ids[t],
                                (long long)(p->vocab - 1));
    }
    return KT_OK;
}

static int64_t pages_for(int64_t positions)
{
    return (positions + KT_PAGE_TOKENS - 1) / KT_PAGE_TOKENS;
}

/* Pages of one kind, as a step gives them and as the program needs them. */
typedef struct page_kind {
    const char *name;
    const void *memory;
    int64_t count;
    size_t bytes, needed_bytes;
    int64_t window;         /* positions that a token sees in them; 0: all */
} page_kind;

static const int32_t *table_of(const page_kind *k, const kt_run *run)
{
    return k->window ? run->window_pages : run->pages;
}

static int check_pages(kt_program *p, const kt_step *s, const page_kind *k, int64_t r)
{
    const kt_run *run = &s->runs[r];
    const int32_t *pages = table_of(k, run);
    int64_t needed = pages_for(run_end(run)), given = k->memory && pages ? run->n_pages : 0;
    int64_t first = k->window ? max64(0, run->start + 1 - k->window) / KT_PAGE_TOKENS : 0;
    if (run_end(run) > p->positions)
        return program_fail(p, KT_ERR_RANGE, "run %lld ends at position %lld; sequences have %lld at most",
                            (long long)r, (long long)run_end(run), (long long)p->positions);
    if (given < needed)
        return program_fail(p, KT_ERR_RANGE, "run %lld: %lld %ss given; positions up to %lld need %lld",
                            (long long)r, (long long)given, k->name, (long long)run_end(run), (long long)needed);
    for (int64_t i = first; i < needed; i++) {
        if (pages[i] < 0 || pages[i] >= k->count)
            return program_fail(p, KT_ERR_RANGE, "run %lld: %ss[%lld] is %d, outside 0..%lld", (long long)r,
                                k->name, (long long)i, pages[i], (long long)(k->count - 1));
    }
    return KT_OK;
}

/* No page that run r writes is written by a run before it. */
static int check_written(kt_program *p, const kt_step *s, const page_kind *k, int64_t r)
{
    const kt_run *run = &s->runs[r];
    const int32_t *pages = table_of(k, run);
    for (int64_t i = run->start / KT_PAGE_TOKENS; i < pages_for(run_end(run)); i++)
        for (int64_t q = 0; q < r; q++) {
            const kt_run *other = &s->runs[q];
            for (int64_t j = other->start / KT_PAGE_TOKENS; j < pages_for(run_end(other)); j++)
                if (pages[i] == table_of(k, other)[j])
                    return program_fail(p, KT_ERR_RANGE, "runs %lld and %lld both write %s %d", (long long)q,
                                        (long long)r, k->name, pages[i]);
        }
    return KT_OK;
}

static int check_kind(kt_program *p, const kt_step *s, const page_kind *k)
{
    if (k->needed_bytes == 0)
        return KT_OK;
    int failed = KT_OK;
    for (int64_t r = 0; r < s->n_runs && !failed; r++)
        failed = check_pages(p, s, k, r);
    if (!failed && (k->bytes < k->needed_bytes || k->bytes % 64 != 0))
        failed = program_fail(p, KT_ERR_RANGE, "%s_bytes is %zu; a multiple of 64 from %zu on is needed",
                              k->name, k->bytes, k->needed_bytes);
    for (int64_t r = 1; r < s->n_runs && !failed; r++)
        failed = check_written(p, s, k, r);
    return failed;
}

static int check_cache(kt_program *p, const kt_step *s)
{
    page_kind all = {"page", s->cache, s->cache_pages, s->page_bytes, p->page_bytes, 0};
    page_kind windows = {"window_page", s->windows, s->n_window_pages, s->window_page_bytes, p->window_bytes, p->window};
    int failed = check_kind(p, s, &all);
    return failed ? failed : check_kind(p, s, &windows);
}

static int check_slots(kt_program *p, const kt_step *s, int64_t r)
{
    const kt_run *run = &s->runs[r];
    if (run->next_state < 0 || run->next_state >= s->n_states || run->state < -1 || run->state >= s->n_states)
        return program_fail(p, KT_ERR_RANGE, "run %lld: states %d and %d of %lld", (long long)r, run->state,
                            run->next_state, (long long)s->n_states);
    if (run->state < 0 && run->start > 0)
        return program_fail(p, KT_ERR_RANGE, "run %lld: no state given of what is before position %lld", (long long)r,
                            (long long)run->start);
    for (int64_t q = 0; q < s->n_runs; q++) {
        if (run->next_state == s->runs[q].state || (q < r && run->next_state == s->runs[q].next_state))
            return program_fail(p, KT_ERR_RANGE, "run %lld writes state %d, which run %lld %s", (long long)r,
                                run->next_state, (long long)q,
                                run->next_state == s->runs[q].state ? "reads" : "writes");
    }
    return KT_OK;
}

static int check_states(kt_program *p, const kt_step *s)
{
    if (p->state_bytes == 0)
        return KT_OK;
    if (!s->states || s->state_bytes < p->state_bytes || s->state_bytes % 64 != 0)
        return program_fail(p, KT_ERR_RANGE, "states of %zu bytes given; a multiple of 64 from %zu on is needed",
                            s->states ? s->state_bytes : 0, p->state_bytes);
    int failed = KT_OK;
    for (int64_t r = 0; r < s->n_runs && !failed; r++)
        failed = check_slots(p, s, r);
    return failed;
}

int batch_check(kt_program *p, const kt_step *s)
{
    int64_t rows;
    int failed = check_counts(p, s, &rows);
    if (!failed)
        failed = check_ids(p, s, rows);
    if (!failed)
        failed = check_cache(p, s);
    return failed ? failed : check_states(p, s);
}

/* ---- rows --------------------------------------------------------------------------------------- */

size_t batch_bytes(int64_t max_tokens)
{
    return (size_t)(max_tokens + 1) * (sizeof(int64_t) + 3 * sizeof(int32_t));
}

batch batch_at(void *memory, int64_t max_tokens)
{
    batch b = {.first = memory};
    b.run = (int32_t *)(void *)(b.first + max_tokens + 1);
    b.position = b.run + max_tokens;
    b.output = b.position + max_tokens;
    return b;
}

void batch_derive(batch *b, const kt_step *s)
{
    b->runs = s->runs;
    b->n_runs = s->n_runs;
    b->rows = b->outputs = b->defer = b->adapted = 0;
    for (int64_t r = 0; r < s->n_runs; r++) {
        const kt_run *run = &s->runs[r];
        b->first[r] = b->rows;
        b->defer = run->defer > b->defer ? run->defer : b->defer;
        b->adapted |= run->adapter != 0;
        for (int64_t t = 0; t < run->n_tokens; t++, b->rows++) {
            b->run[b->rows] = (int32_t)r;
            b->position[b->rows] = (int32_t)(run->start + t);
            if (t >= run->first_output)
                b->output[b->outputs++] = (int32_t)b->rows;
        }
    }
    b->first[s->n_runs] = b->rows;
}
