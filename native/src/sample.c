/* sample.c - the choice of the next token of many rows. Each row is one thread's, so nothing depends on how many there
 * are. What the row looks like with its changes is scores.c, which tokens survive top-k, top-p and min-p shortlist.c.
 */
#include "shortlist.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define MOST_THREADS 8      /* more are not worth being woken, and each has scratch of 50 bytes per column */

struct kt_sampler {
    kt_pool *pool;
    int64_t vocab, blocks;
    int threads;
    scratch own[MOST_THREADS];
    void *memory[MOST_THREADS];
};

/* ---- drawing ------------------------------------------------------------------------------------ */

/* The index at which the share *at of all chances is reached; *at: the share of that index's chance that is used. */
static int64_t pick(const double *chances, int64_t n, double *at)
{
    double total = 0, before = 0;
    for (int64_t i = 0; i < n; i++)
        total += chances[i];
    double wanted = *at * total;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (chances[i] <= 0)
            continue;
        last = i;
        if (before + chances[i] > wanted)
            break;
        before += chances[i];
    }
    double used = (wanted - before) / chances[last];
    *at = used > 0 ? used : 0;
    return last;
}

/* The same of s->chances. */
static int64_t pick_of(const scratch *s, int64_t n, double at)
{
    for (int64_t i = 0; i < n; i++)
        s->wide[i] = (double)s->chances[i];
    return pick(s->wide, n, &at);
}

/* One of those that survive top-p and min-p without top-k. */
static int32_t draw_from_blocks(const scores *v)
{
    scratch *s = v->s;
    double at = v->c->at;
    float least;
    int64_t n = shortlist_blocks(v, &least);
    int64_t place = pick(s->masses, n, &at);
    const float *chances = s->spare + place * KT_BLOCK_COLUMNS;
    for (int i = 0; i < KT_BLOCK_COLUMNS; i++)
        s->chances[i] = chances[i] >= least ? chances[i] : 0.0f;
    return (int32_t)(s->order[place] * KT_BLOCK_COLUMNS + pick_of(s, KT_BLOCK_COLUMNS, at));
}

static int32_t draw(const scores *v)
{
    const kt_choice *c = v->c;
    scratch *s = v->s;
    double at = c->at;
    if (is_cut(v))
        return s->ids[pick_of(s, shortlist(v), at)];
    if (c->top_p < 1.0 || c->min_p > 0.0)
        return draw_from_blocks(v);
    weigh(v);
    int64_t block = pick(s->masses, v->blocks, &at);
    int columns = columns_of(v, block);
    v->kernels->chances(scores_block(v, block), columns, v->top, v->temperature, s->chances);
    return (int32_t)(block * KT_BLOCK_COLUMNS + pick_of(s, columns, at));
}

/* ---- logarithms --------------------------------------------------------------------------------- */

/* log(sum(e^value)) of the row as it came. */
static double log_sum(const scores *v)
{
    const kt_choice *c = v->c;
    const float *sums = c->sums;
    double top = (double)c->values[c->best], sum = 0;
    if (c->sums_temperature != 1.0f) {
        v->kernels->summarize(c->values, v->vocab, 1.0f, v->s->spare, v->s->spare + v->blocks);
        sums = v->s->spare + v->blocks;
    }
    for (int64_t block = 0; block < v->blocks; block++) {
        if (c->peaks[block] > -INFINITY)
            sum += exp((double)c->peaks[block] - top) * (double)sums[block];
    }
    return top + log(sum);
}

static int likelier(const void *left, const void *right)
{
    const weighted *a = left, *b = right;
    if (a->chance != b->chance)
        return a->chance > b->chance ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

static void find_likeliest(const scores *v, kt_choice *c, double logarithm)
{
    weighted *found = v->s->some;
    int64_t k = c->n_likeliest, n = 0;
    float least = v->blocks > k ? kth(c->peaks, v->blocks, k, v->s->spare) : -INFINITY;
    for (int64_t i = 0; i < v->vocab; i++) {
        if (i % KT_BLOCK_COLUMNS == 0 && c->peaks[i / KT_BLOCK_COLUMNS] < least) {
            i += KT_BLOCK_COLUMNS - 1;
            continue;
        }
        if (c->values[i] >= least && c->values[i] > -INFINITY)
            found[n++] = (weighted){(double)c->values[i], (int32_t)i};
    }
    qsort(found, (size_t)n, sizeof *found, likelier);
    for (int64_t i = 0; i < k; i++) {
        c->likeliest[i] = i < n ? found[i].id : -1;
        c->logprobs[i] = i < n ? (float)(found[i].chance - logarithm) : -INFINITY;
    }
}

/* ---- rows --------------------------------------------------------------------------------------- */

static void choose(const kt_sampler *sampler, kt_choice *c, int thread)
{
    scores v = {.c = c, .kernels = pool_kernels(sampler->pool), .s = (scratch *)&sampler->own[thread],
                .vocab = sampler->vocab, .blocks = sampler->blocks, .temperature = c->temperature};
    c->id = KT_CHOICE_BROKEN;
    if (!isfinite(c->values[c->best]))
        return;
    int sums = c->temperature > 0.0f && !is_cut(&v) && (c->top_p < 1.0 || c->min_p == 0.0);
    scores_look(&v, sums);
    if (v.top == -INFINITY) {
        c->id = KT_CHOICE_NONE;
        return;
    }
    if (c->temperature == 0.0f)
        c->id = v.peaks == c->peaks ? c->best : scores_best(&v);
    else
        c->id = draw(&v);
    if (c->n_likeliest < 0)
        return;
    double logarithm = log_sum(&v);
    c->logprob = (float)((double)c->values[c->id] - logarithm);
    if (c->n_likeliest > 0)
        find_likeliest(&v, c, logarithm);
}

typedef struct choosing {
    const kt_sampler *sampler;
    kt_choice *rows;
    int64_t n;
} choosing;

static void choose_run(void *arg, int thread, int threads)
{
    const choosing *all = arg;
    (void)threads;
    if (thread >= all->sampler->threads)
        return;
    for (int64_t i; (i = pool_take(all->sampler->pool, thread, 1)) < all->n;)
        choose(all->sampler, all->rows + i, thread);
}

/* Without a way out of the loop, so that it is done for many ids at once. */
static int in_vocabulary(const int32_t *ids, int64_t n, int64_t vocab)
{
    int outside = n > vocab;
    for (int64_t i = 0; i < n; i++)
        outside |= (uint32_t)ids[i] >= (uint32_t)vocab;
    return !outside;
}

int kt_sampler_choose(kt_sampler *sampler, kt_choice *rows, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const kt_choice *c = rows + i;
        if (!in_vocabulary(&c->best, 1, sampler->vocab) || !in_vocabulary(c->seen, c->n_seen, sampler->vocab)
            || !in_vocabulary(c->bias_ids, c->n_bias, sampler->vocab))
            return KT_ERR_RANGE;
    }
    choosing all = {sampler, rows, n};
    if (n == 1)     /* nobody has to be woken */
        choose(sampler, rows, 0);
    else if (n > 1)
        pool_run(sampler->pool, choose_run, &all);
    return KT_OK;
}

/* ---- create and free ---------------------------------------------------------------------------- */

static int set_up(kt_sampler *sampler, int thread)
{
    size_t blocks = (size_t)sampler->blocks, columns = blocks * KT_BLOCK_COLUMNS;
    size_t numbers = blocks + CHANCE_BUCKETS + columns, floats = 3 * columns + 3 * blocks;
    size_t integers = 3 * blocks + 3 * columns;
    /* Zeroed by the system: what is never used takes no memory. The widest elements come first. */
    char *at = calloc(1, columns * sizeof(weighted) + numbers * sizeof(double) + floats * sizeof(float)
                         + integers * sizeof(int32_t));
    scratch *s = &sampler->own[thread];
    if (!at)
        return KT_ERR_MEMORY;
    sampler->memory[thread] = at;
    s->some = (weighted *)(void *)at;
    s->masses = (double *)(void *)(s->some + columns);
    s->sorted = s->masses + blocks;
    s->wide = s->sorted + CHANCE_BUCKETS;
    s->values = (float *)(void *)(s->wide + columns);
    s->spare = s->values + columns;
    s->chances = s->spare + columns;
    s->peaks = s->chances + columns;
    s->sums = s->peaks + blocks;
    s->likely = s->sums + blocks;
    s->written = (int32_t *)(void *)(s->likely + blocks);
    s->last = s->written + blocks;
    s->order = s->last + blocks;
    s->before = s->order + blocks;
    s->ids = s->before + 2 * columns;
    return KT_OK;
}

kt_sampler *kt_sampler_create(kt_pool *pool, int64_t vocab, char *error, size_t error_size)
{
    if (vocab < 1 || vocab > 1 << 24) {
        snprintf(error, error_size, "a vocabulary of %lld tokens; 1 to 2^24 are possible", (long long)vocab);
        return NULL;
    }
    kt_sampler *sampler = calloc(1, sizeof *sampler);
    int threads = kt_pool_threads(pool), failed = sampler ? KT_OK : KT_ERR_MEMORY;
    if (sampler) {
        *sampler = (kt_sampler){.pool = pool, .vocab = vocab,
                                .blocks = (vocab + KT_BLOCK_COLUMNS - 1) / KT_BLOCK_COLUMNS,
                                .threads = threads < MOST_THREADS ? threads : MOST_THREADS};
        for (int i = 0; i < sampler->threads && !failed; i++)
            failed = set_up(sampler, i);
    }
    if (failed) {
        snprintf(error, error_size, "no memory for choosing among %lld tokens", (long long)vocab);
        kt_sampler_free(sampler);
        return NULL;
    }
    return sampler;
}

void kt_sampler_free(kt_sampler *sampler)
{
    for (int i = 0; sampler && i < sampler->threads; i++)
        free(sampler->memory[i]);
    free(sampler);
}
