/* sample.c - the choice of the next token. Almost all of a vocabulary is hopeless, and the summary of its blocks says
 * which part: blocks are judged by their peak and sum, and only tokens of blocks that stay are looked at.
 *
 * Where a row's logits are changed, the blocks that hold changed ones are copied and summed up anew; the row itself
 * stays as it is. Each row is one thread's, so nothing depends on how many there are.
 */
#include "pool.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_THREADS 8      /* more are not worth being woken, and each has scratch of 30 bytes per column */
#define UNCHANGED (-1)
#define EMPTY (-2)          /* nothing of the block may be taken */

typedef struct weighted {
    double chance;
    int32_t id;
} weighted;

typedef struct scratch {
    float *values;          /* [blocks][KT_BLOCK_COLUMNS], changed blocks */
    int32_t *changed;       /* [blocks]: UNCHANGED, EMPTY, or which of `values` */
    int32_t n_changed;
    float *peaks, *sums;    /* [blocks] */
    float *others;          /* [blocks * KT_BLOCK_COLUMNS] for selections, and the peaks of raw sums */
    double *masses;         /* [blocks] */
    weighted *kept, *some;    /* [vocab] */
} scratch;

struct kt_sampler {
    kt_pool *pool;
    int64_t vocab, blocks;
    int threads;
    scratch own[MOST_THREADS];
    void *memory[MOST_THREADS];
};

/* ---- one row as it is seen ---------------------------------------------------------------------- */

typedef struct view {
    const kt_choice *c;
    const kt_kernels *kernels;
    scratch *s;
    int64_t vocab, blocks;
    const float *peaks, *sums;  /* of the row with its changes */
    float top;                  /* its greatest value */
    float temperature;
} view;

static int columns_of(const view *v, int64_t block)
{
    int64_t left = v->vocab - block * KT_BLOCK_COLUMNS;
    return left < KT_BLOCK_COLUMNS ? (int)left : KT_BLOCK_COLUMNS;
}

static const float *block_of(const view *v, int64_t block)
{
    int32_t at = v->s->changed[block];
    return at >= 0 ? v->s->values + (int64_t)at * KT_BLOCK_COLUMNS : v->c->values + block * KT_BLOCK_COLUMNS;
}

static double chance_of(const view *v, float value)
{
    return (double)expf((value - v->top) / v->temperature);
}

/* Whether top-k drops anything. */
static int is_cut(const view *v)
{
    return v->c->top_k > 0 && v->c->top_k < v->vocab;
}

/* ---- changes ------------------------------------------------------------------------------------ */

static float *changed_value(view *v, int64_t id)
{
    scratch *s = v->s;
    int64_t block = id / KT_BLOCK_COLUMNS;
    if (s->changed[block] < 0) {
        s->changed[block] = s->n_changed++;
        memcpy(s->values + (int64_t)s->changed[block] * KT_BLOCK_COLUMNS, v->c->values + block * KT_BLOCK_COLUMNS,
               (size_t)columns_of(v, block) * sizeof(float));
    }
    return s->values + (int64_t)s->changed[block] * KT_BLOCK_COLUMNS + id % KT_BLOCK_COLUMNS;
}

static uint64_t mask_of(const view *v, int64_t block)
{
    const uint32_t *words = v->c->mask + 2 * block;
    int64_t n = (v->vocab + 31) / 32 - 2 * block;
    return n > 1 ? (uint64_t)words[1] << 32 | words[0] : words[0];
}

static void apply_mask(view *v)
{
    for (int64_t block = 0; block < v->blocks; block++) {
        int n = columns_of(v, block);
        uint64_t all = n < 64 ? (UINT64_C(1) << n) - 1 : UINT64_MAX, mask = mask_of(v, block) & all;
        if (mask == all)
            continue;
        if (mask == 0) {
            v->s->changed[block] = EMPTY;
            continue;
        }
        float *x = changed_value(v, block * KT_BLOCK_COLUMNS), kept[KT_BLOCK_COLUMNS];
        if (__builtin_popcountll(mask) > n / 2) {
            for (uint64_t out = all & ~mask; out; out &= out - 1)
                x[__builtin_ctzll(out)] = -INFINITY;
            continue;
        }
        memcpy(kept, x, (size_t)n * sizeof *x);
        for (int i = 0; i < n; i++)
            x[i] = -INFINITY;
        for (uint64_t in = mask; in; in &= in - 1)
            x[__builtin_ctzll(in)] = kept[__builtin_ctzll(in)];
    }
}

static int changes(const kt_choice *c)
{
    int penalised = c->n_seen && (c->repetition != 1.0f || c->presence != 0.0f || c->frequency != 0.0f);
    return penalised || c->n_bias || c->mask;
}

/* Peaks, sums and top of the row as changed; sums where `summed`, at the row's temperature. */
static void look(view *v, int summed)
{
    const kt_choice *c = v->c;
    scratch *s = v->s;
    float t = summed ? v->temperature : 0.0f;
    memset(s->changed, 0xff, (size_t)v->blocks * sizeof *s->changed);
    s->n_changed = 0;
    v->peaks = c->peaks;
    v->sums = c->sums;
    v->top = c->values[c->best];
    int all = summed && c->sums_temperature != v->temperature;
    if (!all && !changes(c))
        return;
    for (int32_t i = 0; i < c->n_bias; i++)
        *changed_value(v, c->bias_ids[i]) += c->bias[i];
    int penalised = c->repetition != 1.0f || c->presence != 0.0f || c->frequency != 0.0f;
    for (int32_t i = 0; penalised && i < c->n_seen; i++) {
        if (c->repetition == 1.0f && !c->answered[i])
            continue;
        float *x = changed_value(v, c->seen[i]);
        *x = *x < 0 ? *x * c->repetition : *x / c->repetition;
        if (c->answered[i])
            *x -= c->presence + c->frequency * (float)c->answered[i];
    }
    if (c->mask)
        apply_mask(v);
    memcpy(s->peaks, c->peaks, (size_t)v->blocks * sizeof(float));
    if (summed && !all)
        memcpy(s->sums, c->sums, (size_t)v->blocks * sizeof(float));
    for (int64_t block = 0; block < v->blocks; block++) {
        if (s->changed[block] == EMPTY)
            s->peaks[block] = -INFINITY;
        else if (all || s->changed[block] != UNCHANGED)
            v->kernels->summarize(block_of(v, block), columns_of(v, block), t, s->peaks + block, s->sums + block);
        if (s->peaks[block] == -INFINITY)
            s->sums[block] = 0.0f;
    }
    v->peaks = s->peaks;
    v->sums = s->sums;
    v->top = -INFINITY;
    for (int64_t block = 0; block < v->blocks; block++)
        v->top = v->peaks[block] > v->top ? v->peaks[block] : v->top;
}

static int32_t best_of(const view *v)
{
    int64_t block = 0;
    while (v->peaks[block] != v->top)
        block++;
    const float *x = block_of(v, block);
    int i = 0;
    while (x[i] != v->top)
        i++;
    return (int32_t)(block * KT_BLOCK_COLUMNS + i);
}

/* ---- selections --------------------------------------------------------------------------------- */

/* The k-th greatest of x[0..n), 1 <= k <= n; x is reordered. No NaN. */
static float kth(float *x, int64_t n, int64_t k)
{
    int64_t low = 0, high = n - 1;
    while (low < high) {
        float a = x[low], b = x[(low + high) / 2], c = x[high];
        float pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot)
                i++;
            while (x[j] < pivot)
                j--;
            if (i <= j) {
                float kept = x[i];
                x[i++] = x[j];
                x[j--] = kept;
            }
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            break;
    }
    return x[k - 1];
}

/* The ids of values from `least` on, ascending, with their chances; returns how many. */
static int64_t gather(const view *v, float least, double bound)
{
    weighted *kept = v->s->kept;
    int64_t n = 0;
    for (int64_t block = 0; block < v->blocks; block++) {
        if (v->peaks[block] == -INFINITY || v->peaks[block] < least)
            continue;
        if (bound > 0 && chance_of(v, v->peaks[block]) < bound)
            continue;
        const float *x = block_of(v, block);
        for (int i = 0, columns = columns_of(v, block); i < columns; i++) {
            if (x[i] >= least && x[i] > -INFINITY)
                kept[n++] = (weighted){chance_of(v, x[i]), (int32_t)(block * KT_BLOCK_COLUMNS + i)};
        }
    }
    return n;
}

/* Keeps the k best; those that tie with the last of them stay. Of k blocks the best lies at or above the k-th greatest
 * peak, so at least k tokens do, the k best among them. */
static int64_t keep_top_k(const view *v, int64_t k)
{
    float *others = v->s->others, least = -INFINITY;
    if (v->blocks > k) {
        memcpy(others, v->peaks, (size_t)v->blocks * sizeof(float));
        least = kth(others, v->blocks, k);
    }
    int64_t found = gather(v, least, 0.0), n = 0;
    if (found <= k)
        return found;
    weighted *kept = v->s->kept;
    for (int64_t i = 0; i < found; i++)
        others[i] = block_of(v, kept[i].id / KT_BLOCK_COLUMNS)[kept[i].id % KT_BLOCK_COLUMNS];
    least = kth(others, found, k);
    for (int64_t i = 0; i < found; i++) {
        if (block_of(v, kept[i].id / KT_BLOCK_COLUMNS)[kept[i].id % KT_BLOCK_COLUMNS] >= least)
            kept[n++] = kept[i];
    }
    return n;
}

/* The sum of the chances of each block's tokens, in s->masses; returns that of all. */
static double weigh(const view *v)
{
    double total = 0;
    for (int64_t block = 0; block < v->blocks; block++) {
        double mass = v->peaks[block] == -INFINITY ? 0.0 : chance_of(v, v->peaks[block]) * (double)v->sums[block];
        v->s->masses[block] = mass;
        total += mass;
    }
    return total;
}

/* A chance so low that all tokens below it lie in the tail of top-p: those of a block together weigh at most the
 * block's mass and at most 64 times that chance. The greatest chance for which the sum of these limits is no more than
 * the tail; each round more blocks are found to count by their mass. */
static double tail_bound(const view *v, double tail)
{
    double limit = tail / (double)v->blocks, light = 0;
    int64_t heavy = v->blocks;
    for (int64_t before = heavy + 1; heavy < before && heavy > 0;) {
        before = heavy;
        light = 0;
        heavy = 0;
        for (int64_t block = 0; block < v->blocks; block++) {
            int is_light = v->s->masses[block] <= limit;
            light += is_light ? v->s->masses[block] : 0.0;
            heavy += !is_light;
        }
        if (heavy)
            limit = (tail - light) / (double)heavy;
    }
    if (!heavy)
        return 1.0;
    double bound = 0.9999 * limit / KT_BLOCK_COLUMNS;   /* a little less, since masses are rounded */
    return bound < 1.0 ? bound : 1.0;                   /* the best token has 1 */
}

static int is_less(const weighted *a, const weighted *b)
{
    return a->chance < b->chance || (a->chance == b->chance && a->id < b->id);
}

/* Moves those of x[0..n) that are less than the pivot to the front; returns how many, and their chances together. */
static int64_t partition(weighted *x, int64_t n, weighted pivot, double *sum)
{
    int64_t less = 0;
    *sum = 0;
    for (int64_t i = 0; i < n; i++) {
        if (is_less(&x[i], &pivot)) {
            weighted kept = x[i];
            *sum += kept.chance;
            x[i] = x[less];
            x[less++] = kept;
        }
    }
    return less;
}

/* Drops the least likely that together hold at most `tail`; one stays always. */
static int64_t keep_top_p(const view *v, int64_t n, double tail)
{
    weighted *kept = v->s->kept, *some = v->s->some;
    memcpy(some, kept, (size_t)n * sizeof *kept);
    int64_t low = 0, high = n, left = 0;    /* the least that stays is one of some[low..high) */
    double dropped = 0, sum;                /* the chances before `low` */
    while (high - low > 1) {
        weighted a = some[low], b = some[(low + high) / 2], c = some[high - 1];
        weighted pivot = is_less(&a, &b) ? (is_less(&b, &c) ? b : is_less(&a, &c) ? c : a)
                                         : (is_less(&a, &c) ? a : is_less(&b, &c) ? c : b);
        int64_t less = partition(some + low, high - low, pivot, &sum);
        if (less == 0) {    /* two are left, or ids come twice: the pivot is the least */
            for (int64_t i = low; i < high; i++) {
                if (some[i].id == pivot.id) {
                    some[i] = some[low];
                    some[low] = pivot;
                }
            }
            less = 1;
            sum = pivot.chance;
        }
        if (dropped + sum > tail) {
            high = low + less;
        } else {
            dropped += sum;
            low += less;
        }
    }
    weighted least = some[low];
    for (int64_t i = 0; i < n; i++) {
        if (!is_less(&kept[i], &least))
            kept[left++] = kept[i];
    }
    return left;
}

/* What survives top-k, top-p and min-p, in s->kept; returns how many. */
static int64_t shortlist(const view *v)
{
    const kt_choice *c = v->c;
    weighted *kept = v->s->kept;
    double total = 0, below = 0, bound = c->min_p;
    int64_t found, n = 0;
    if (is_cut(v)) {
        found = keep_top_k(v, c->top_k);
        for (int64_t i = 0; i < found; i++)
            total += kept[i].chance;
    } else {
        if (c->top_p < 1.0) {
            total = weigh(v);
            double tail = tail_bound(v, (1.0 - c->top_p) * total);
            bound = tail > bound ? tail : bound;
            for (int64_t block = 0; block < v->blocks; block++)
                below += chance_of(v, v->peaks[block]) < bound ? v->s->masses[block] : 0.0;
        }
        found = gather(v, -INFINITY, bound);
    }
    for (int64_t i = 0; i < found; i++) {
        if (kept[i].chance >= bound)
            kept[n++] = kept[i];
        else
            below += kept[i].chance;
    }
    return c->top_p < 1.0 ? keep_top_p(v, n, (1.0 - c->top_p) * total - below) : n;
}

/* ---- drawing ------------------------------------------------------------------------------------ */

/* The index at which the share *at of all chances is reached; *at: the share of that index's chance that is used. */
static int64_t pick(const weighted *some, int64_t n, double *at)
{
    double total = 0, before = 0;
    for (int64_t i = 0; i < n; i++)
        total += some[i].chance;
    double wanted = *at * total;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i++) {
        if (some[i].chance <= 0)
            continue;
        last = i;
        if (before + some[i].chance > wanted)
            break;
        before += some[i].chance;
    }
    double used = (wanted - before) / some[last].chance;
    *at = used > 0 ? used : 0;
    return last;
}

static int32_t draw(const view *v)
{
    const kt_choice *c = v->c;
    weighted *kept = v->s->kept;
    double at = c->at;
    if (is_cut(v) || c->top_p < 1.0 || c->min_p > 0.0)
        return kept[pick(kept, shortlist(v), &at)].id;
    weigh(v);
    for (int64_t block = 0; block < v->blocks; block++)
        kept[block] = (weighted){v->s->masses[block], (int32_t)block};
    int64_t block = pick(kept, v->blocks, &at);
    const float *x = block_of(v, block);
    int columns = columns_of(v, block);
    for (int i = 0; i < columns; i++)
        kept[i] = (weighted){chance_of(v, x[i]), (int32_t)(block * KT_BLOCK_COLUMNS + i)};
    return kept[pick(kept, columns, &at)].id;
}

/* ---- logarithms --------------------------------------------------------------------------------- */

/* log(sum(e^value)) of the row as it came. */
static double log_sum(const view *v)
{
    const kt_choice *c = v->c;
    const float *sums = c->sums;
    double top = (double)c->values[c->best], sum = 0;
    if (c->sums_temperature != 1.0f) {
        v->kernels->summarize(c->values, v->vocab, 1.0f, v->s->others, v->s->others + v->blocks);
        sums = v->s->others + v->blocks;
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

static void find_likeliest(const view *v, kt_choice *c, double logarithm)
{
    weighted *kept = v->s->kept;
    int64_t k = c->n_likeliest, n = 0;
    float least = -INFINITY;
    if (v->blocks > k) {
        memcpy(v->s->others, c->peaks, (size_t)v->blocks * sizeof(float));
        least = kth(v->s->others, v->blocks, k);
    }
    for (int64_t i = 0; i < v->vocab; i++) {
        if (i % KT_BLOCK_COLUMNS == 0 && c->peaks[i / KT_BLOCK_COLUMNS] < least) {
            i += KT_BLOCK_COLUMNS - 1;
            continue;
        }
        if (c->values[i] >= least && c->values[i] > -INFINITY)
            kept[n++] = (weighted){(double)c->values[i], (int32_t)i};
    }
    qsort(kept, (size_t)n, sizeof *kept, likelier);
    for (int64_t i = 0; i < k; i++) {
        c->likeliest[i] = i < n ? kept[i].id : -1;
        c->logprobs[i] = i < n ? (float)(kept[i].chance - logarithm) : -INFINITY;
    }
}

/* ---- rows --------------------------------------------------------------------------------------- */

static void choose(const kt_sampler *sampler, kt_choice *c, int thread)
{
    view v = {.c = c, .kernels = pool_kernels(sampler->pool), .s = (scratch *)&sampler->own[thread],
              .vocab = sampler->vocab, .blocks = sampler->blocks, .temperature = c->temperature};
    c->id = KT_CHOICE_BROKEN;
    if (!isfinite(c->values[c->best]))
        return;
    int sums = c->temperature > 0.0f && !is_cut(&v) && (c->top_p < 1.0 || c->min_p == 0.0);
    look(&v, sums);
    if (v.top == -INFINITY) {
        c->id = KT_CHOICE_NONE;
        return;
    }
    if (c->temperature == 0.0f)
        c->id = v.peaks == c->peaks ? c->best : best_of(&v);
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

static int in_vocabulary(const int32_t *ids, int64_t n, int64_t vocab)
{
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= vocab)
            return 0;
    }
    return 1;
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
    size_t floats = 2 * columns + 2 * blocks, integers = blocks;
    size_t pairs = 2 * columns;
    /* Zeroed by the system: what is never used takes no memory. The widest elements come first. */
    char *at = calloc(1, pairs * sizeof(weighted) + blocks * sizeof(double) + floats * sizeof(float)
                         + integers * sizeof(int32_t));
    scratch *s = &sampler->own[thread];
    if (!at)
        return KT_ERR_MEMORY;
    sampler->memory[thread] = at;
    s->kept = (weighted *)(void *)at;
    s->some = s->kept + columns;
    s->masses = (double *)(void *)(s->some + columns);
    s->values = (float *)(void *)(s->masses + blocks);
    s->others = s->values + columns;
    s->peaks = s->others + columns;
    s->sums = s->peaks + blocks;
    s->changed = (int32_t *)(void *)(s->sums + blocks);
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
