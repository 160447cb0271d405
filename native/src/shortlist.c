/* shortlist.c - see shortlist.h. Blocks are judged by their peak and sum, and only tokens of blocks that stay are looked
 * at; nothing is sorted: what top-p drops is found by adding up buckets of like chances, and by looking closely at the
 * one bucket where its tail ends.
 */
#include "shortlist.h"

#include <math.h>
#include <string.h>

#define BUCKET_SHIFT 17     /* 6 bits of the fraction and the exponent are left */
#define ONE_BITS UINT32_C(0x3f800000)
#define PEERS 16            /* values of which the greatest stands for all, in kth */
#define SAMPLE 128          /* blocks by which the bucket is guessed */
#define NEAR 2              /* buckets by which the guess is mostly wrong at most */

/* ---- top-k -------------------------------------------------------------------------------------- */

/* The k-th greatest of x[0..n), 1 <= k <= n; x is reordered. */
static float select_kth(float *x, int64_t n, int64_t k)
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

/* The greatest of each PEERS values; returns how many. */
static int64_t greatest(const float *x, int64_t n, float *out)
{
    int64_t groups = (n + PEERS - 1) / PEERS;
    for (int64_t g = 0; g < groups; g++) {
        int64_t end = g + 1 < groups ? (g + 1) * PEERS : n;
        float most = x[g * PEERS];
        for (int64_t i = g * PEERS + 1; i < end; i++)
            most = x[i] > most ? x[i] : most;
        out[g] = most;
    }
    return groups;
}

float kth(const float *x, int64_t n, int64_t k, float *spare)
{
    float least = -INFINITY;
    if (n > PEERS * k)      /* k groups reach the k-th of the groups' greatest, so k values do */
        least = select_kth(spare, greatest(x, n, spare), k);
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        spare[found] = x[i];
        found += x[i] >= least;
    }
    return select_kth(spare, found, k);
}

/* The ids of values from `least` on, and their chances; returns how many. */
static int64_t gather_best(const scores *v, float least)
{
    scratch *s = v->s;
    int64_t n = 0;
    for (int64_t block = 0; block < v->blocks; block++) {
        if (v->peaks[block] == -INFINITY || v->peaks[block] < least)
            continue;
        const float *x = scores_block(v, block);
        for (int i = 0, columns = columns_of(v, block); i < columns; i++) {
            s->spare[n] = x[i];
            s->ids[n] = (int32_t)(block * KT_BLOCK_COLUMNS + i);
            n += x[i] >= least && x[i] > -INFINITY;
        }
    }
    return n;
}

/* Keeps the k best; those that tie with the last of them stay. Of k blocks the best lies at or above the k-th greatest
 * peak, so at least k tokens do, the k best among them. */
static int64_t keep_top_k(const scores *v, int64_t k)
{
    scratch *s = v->s;
    float least = v->blocks > k ? kth(v->peaks, v->blocks, k, s->spare) : -INFINITY;
    int64_t found = gather_best(v, least), n = 0;
    least = found > k ? kth(s->spare, found, k, s->chances) : -INFINITY;
    for (int64_t i = 0; i < found; i++) {
        s->spare[n] = s->spare[i];
        s->ids[n] = s->ids[i];
        n += s->spare[i] >= least;
    }
    v->kernels->chances(s->spare, n, v->top, v->temperature, s->chances);
    return n;
}

/* ---- top-p -------------------------------------------------------------------------------------- */

double weigh(const scores *v)
{
    scratch *s = v->s;
    double total = 0;
    v->kernels->chances(v->peaks, v->blocks, v->top, v->temperature, s->likely);
    for (int64_t block = 0; block < v->blocks; block++) {
        double mass = v->peaks[block] == -INFINITY ? 0.0 : (double)s->likely[block] * (double)v->sums[block];
        s->masses[block] = mass;
        total += mass;
    }
    return total;
}

/* A chance so low that all tokens below it lie in the tail of top-p: those of a block together weigh at most the
 * block's mass and at most 64 times that chance. The greatest chance for which the sum of these limits is no more than
 * the tail; each round more blocks are found to count by their mass. */
static double tail_bound(const scores *v, double tail)
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

/* The least of some[0..high) that stays when the others hold at most `tail`, less what is dropped already. */
static weighted find_least(weighted *some, int64_t high, double tail, double dropped)
{
    int64_t low = 0;        /* it is one of some[low..high) */
    double sum;
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
    return some[low];
}

/* The bucket of a chance of up to 1, from the likeliest to the least: 64 of each power of two. */
static int bucket_of(float chance)
{
    uint32_t bits;
    memcpy(&bits, &chance, sizeof bits);
    int from_one = (int)(ONE_BITS >> BUCKET_SHIFT) - (int)(bits >> BUCKET_SHIFT);
    return from_one < 0 ? 0 : from_one;
}

/* The least chance of a bucket; 0 of the last one and beyond. */
static float edge_of(int bucket)
{
    uint32_t last = ONE_BITS >> BUCKET_SHIFT, bits = (uint32_t)bucket < last ? (last - (uint32_t)bucket) << BUCKET_SHIFT : 0;
    float chance;
    memcpy(&chance, &bits, sizeof chance);
    return chance;
}

/* The least bucket of which anything stays when `tail` of all chances are dropped, roughly: by every so many blocks of
 * them. `sorted` is zeros, before and after. */
static int guess_bucket(double *sorted, const float *chances, int64_t blocks, double tail)
{
    int64_t every = 1 + blocks / SAMPLE;
    int last = 0;
    for (int64_t block = 0; block < blocks; block += every) {
        for (int64_t i = block * KT_BLOCK_COLUMNS; i < (block + 1) * KT_BLOCK_COLUMNS; i++) {
            int bucket = bucket_of(chances[i]);
            sorted[bucket] += (double)chances[i] * (double)every;
            last = bucket > last ? bucket : last;
        }
    }
    int found = last;
    for (double dropped = 0; found > 0 && dropped + sorted[found] <= tail; found--)
        dropped += sorted[found];
    memset(sorted, 0, (size_t)(last + 1) * sizeof *sorted);
    return found;
}

/* Chances as two limits split them. */
typedef struct limits {
    float low, high;
    double below, between;      /* the sums of those less than low, and from low to below high */
    int64_t n;                  /* the number of the latter, which lie in s->some with their places */
} limits;

/* Splits blocks of chances; the sums of those of each block that are not less than high to s->masses. */
static void split_blocks(const scores *v, const float *chances, int64_t blocks, limits *l)
{
    scratch *s = v->s;
    l->below = l->between = 0;
    l->n = 0;
    for (int64_t block = 0; block < blocks; block++) {
        chance_split found = v->kernels->split(chances + block * KT_BLOCK_COLUMNS, l->low, l->high);
        l->below += found.below;
        s->masses[block] = found.above;
        for (int64_t first = block * KT_BLOCK_COLUMNS; found.between; first += 16, found.between >>= 1) {
            for (int64_t i = first; found.between & 1 && i < first + 16; i++) {
                int is_between = chances[i] >= l->low && chances[i] < l->high;
                s->some[l->n] = (weighted){(double)chances[i], (int32_t)i};
                l->n += is_between;
                l->between += is_between ? (double)chances[i] : 0.0;
            }
        }
    }
}

/* The least chance that stays when the least likely are dropped that together hold at most `tail`, of equal ones the
 * first; one stays always. What is dropped beside an equal one becomes 0. The sums of those of each block that stay to
 * s->masses. */
static float drop_tail(const scores *v, float *chances, int64_t blocks, double tail)
{
    scratch *s = v->s;
    int guess = guess_bucket(s->sorted, chances, blocks, tail);
    limits l = {.low = 1.0f};
    for (int near = NEAR; l.low > 0.0f || l.high < INFINITY; near *= 2) {
        l.low = edge_of(guess + near);
        l.high = guess > near ? edge_of(guess - near - 1) : INFINITY;
        split_blocks(v, chances, blocks, &l);
        if (l.below <= tail && l.below + l.between > tail)
            break;
    }
    if (l.n == 0)
        return 0.0f;
    weighted least = find_least(s->some, l.n, tail, l.below);
    for (int64_t i = 0; i < l.n; i++) {
        const weighted *each = &s->some[i];
        if (!is_less(each, &least))
            s->masses[each->id / KT_BLOCK_COLUMNS] += each->chance;
        else if (each->chance == least.chance)
            chances[each->id] = 0.0f;
    }
    return (float)least.chance;
}

/* ---- all of them -------------------------------------------------------------------------------- */

/* The least chance that is at least x. */
static float from(double x)
{
    float least = (float)x;
    return (double)least < x ? nextafterf(least, INFINITY) : least;
}

int64_t shortlist(const scores *v)
{
    const kt_choice *c = v->c;
    scratch *s = v->s;
    int64_t found = keep_top_k(v, c->top_k), blocks = (found + KT_BLOCK_COLUMNS - 1) / KT_BLOCK_COLUMNS, n = 0;
    float least = from(c->min_p);
    if (c->top_p < 1.0) {
        double total = 0;
        for (int64_t i = 0; i < found; i++)
            total += (double)s->chances[i];
        for (int64_t i = found; i < blocks * KT_BLOCK_COLUMNS; i++)
            s->chances[i] = 0.0f;
        least = fmaxf(least, drop_tail(v, s->chances, blocks, (1.0 - c->top_p) * total));
    }
    for (int64_t i = 0; i < found; i++) {
        s->chances[n] = s->chances[i];
        s->ids[n] = s->ids[i];
        n += s->chances[i] >= least;
    }
    return n;
}

/* The blocks with chances from `bound` on to s->order, and all their chances to s->spare; returns how many. */
static int64_t gather_blocks(const scores *v, double bound)
{
    scratch *s = v->s;
    int64_t n = 0;
    v->kernels->chances(v->peaks, v->blocks, v->top, v->temperature, s->likely);
    for (int64_t block = 0; block < v->blocks; block++) {
        if (v->peaks[block] == -INFINITY || (double)s->likely[block] < bound)
            continue;
        float *chances = s->spare + n * KT_BLOCK_COLUMNS;
        v->kernels->chances(scores_block(v, block), columns_of(v, block), v->top, v->temperature, chances);
        for (int i = columns_of(v, block); i < KT_BLOCK_COLUMNS; i++)
            chances[i] = 0.0f;
        s->order[n++] = (int32_t)block;
    }
    return n;
}

int64_t shortlist_blocks(const scores *v, float *least)
{
    const kt_choice *c = v->c;
    scratch *s = v->s;
    double bound = c->min_p, tail = 0;
    if (c->top_p < 1.0) {
        tail = (1.0 - c->top_p) * weigh(v);
        bound = fmax(bound, tail_bound(v, tail));
    }
    int64_t n = gather_blocks(v, bound);
    float top_p = 0.0f;
    if (c->top_p < 1.0) {
        for (int64_t block = 0; block < v->blocks; block++)     /* blocks that are dropped count by their mass */
            tail -= (double)s->likely[block] < bound ? s->masses[block] : 0.0;
        top_p = drop_tail(v, s->spare, n, tail);
    }
    *least = fmaxf(top_p, from(c->min_p));
    for (int64_t i = 0; i < n && (*least > top_p || top_p == 0.0f); i++)
        s->masses[i] = v->kernels->split(s->spare + i * KT_BLOCK_COLUMNS, 0.0f, *least).above;
    return n;
}
