/* scores.c - see scores.h.
 *
 * The changes of a block are a list, bias first: most are never looked at again, since almost all of a vocabulary is
 * hopeless. A penalty that takes from a value below the block's peak leaves the peak as it is.
 */
#include "scores.h"

#include <math.h>
#include <string.h>

#define AHEAD 16            /* values of seen ids are fetched so early: each lies elsewhere */

enum {                      /* of scratch.written, of blocks that are not there */
    UNCHANGED = -1,
    EMPTY = -2,             /* nothing of it may be taken */
    CHANGED = -3,           /* its peak is known, and its sum if it is needed */
    UNKNOWN = -4,           /* changed, and neither is known yet */
};

/* ---- changes ------------------------------------------------------------------------------------ */

static int penalises(const kt_choice *c)
{
    return c->repetition != 1.0f || c->presence != 0.0f || c->frequency != 0.0f;
}

/* x of the i-th seen id with its penalties. */
static float penalised(const kt_choice *c, int32_t i, float x)
{
    float more = x * c->repetition, less = x / c->repetition;   /* both, since signs cannot be foreseen */
    x = x < 0 ? more : less;
    return c->answered[i] ? x - (c->presence + c->frequency * (float)c->answered[i]) : x;
}

/* Change i of a block: the penalties of seen id i, or from n_seen on a bias. */
static void note(scratch *s, int64_t block, int32_t i)
{
    s->before[i] = s->last[block];
    s->last[block] = i;
}

static void note_penalties(scores *v)
{
    const kt_choice *c = v->c;
    scratch *s = v->s;
    for (int32_t i = 0; i < c->n_seen; i++) {
        if (c->repetition == 1.0f && !c->answered[i])
            continue;
        if (i + AHEAD < c->n_seen)
            __builtin_prefetch(c->values + c->seen[i + AHEAD]);
        int64_t block = c->seen[i] / KT_BLOCK_COLUMNS;
        float x = c->values[c->seen[i]], y = penalised(c, i, x);
        note(s, block, i);
        if (x >= c->peaks[block])       /* the peak itself may be lower now */
            s->written[block] = UNKNOWN;
        else
            s->written[block] = s->written[block] == UNKNOWN ? UNKNOWN : CHANGED;
        s->peaks[block] = y > s->peaks[block] ? y : s->peaks[block];
    }
}

static void note_bias(scores *v)
{
    for (int32_t i = 0; i < v->c->n_bias; i++) {
        int64_t block = v->c->bias_ids[i] / KT_BLOCK_COLUMNS;
        note(v->s, block, v->c->n_seen + i);
        v->s->written[block] = UNKNOWN;
    }
}

/* The mask's bits of a block's columns, and all of them in *all. */
static uint64_t mask_of(const scores *v, int64_t block, uint64_t *all)
{
    int columns = columns_of(v, block);
    *all = columns < 64 ? (UINT64_C(1) << columns) - 1 : UINT64_MAX;
    if (!v->c->mask)
        return *all;
    const uint32_t *words = v->c->mask + 2 * block;
    int64_t n = (v->vocab + 31) / 32 - 2 * block;
    return (n > 1 ? (uint64_t)words[1] << 32 | words[0] : words[0]) & *all;
}

static void note_mask(scores *v)
{
    for (int64_t block = 0; block < v->blocks; block++) {
        uint64_t all, mask = mask_of(v, block, &all);
        if (mask != all)
            v->s->written[block] = mask ? UNKNOWN : EMPTY;
    }
}

/* The block with its changes. */
static void write_block(const scores *v, int64_t block, float *out)
{
    const kt_choice *c = v->c;
    uint64_t all, mask = mask_of(v, block, &all);
    memcpy(out, c->values + block * KT_BLOCK_COLUMNS, (size_t)columns_of(v, block) * sizeof *out);
    for (int32_t i = v->s->last[block]; i >= 0; i = v->s->before[i]) {
        if (i < c->n_seen)
            out[c->seen[i] % KT_BLOCK_COLUMNS] = penalised(c, i, out[c->seen[i] % KT_BLOCK_COLUMNS]);
        else
            out[c->bias_ids[i - c->n_seen] % KT_BLOCK_COLUMNS] += c->bias[i - c->n_seen];
    }
    if (mask != all)
        v->kernels->masked(out, columns_of(v, block), mask, out);
}

const float *scores_block(const scores *v, int64_t block)
{
    scratch *s = v->s;
    if (s->written[block] == UNCHANGED)
        return v->c->values + block * KT_BLOCK_COLUMNS;
    if (s->written[block] < 0) {
        s->written[block] = s->n_written++;
        write_block(v, block, s->values + (int64_t)s->written[block] * KT_BLOCK_COLUMNS);
    }
    return s->values + (int64_t)s->written[block] * KT_BLOCK_COLUMNS;
}

/* ---- peaks and sums ----------------------------------------------------------------------------- */

/* Find the peak, and the sum at temperature t if that is not 0, of a block that is not as it came. */
static void look_at(scores *v, int64_t block, float t)
{
    scratch *s = v->s;
    float once[KT_BLOCK_COLUMNS];
    const float *x = once;
    if (t != 0.0f)      /* sums mostly mean that many blocks stay */
        x = scores_block(v, block);
    else
        write_block(v, block, once);
    v->kernels->summarize(x, columns_of(v, block), t, s->peaks + block, s->sums + block);
    if (s->written[block] == UNKNOWN)
        s->written[block] = CHANGED;
}

static void look_at_blocks(scores *v, float t, int all)
{
    scratch *s = v->s;
    for (int64_t block = 0; block < v->blocks; block++) {
        int32_t known = s->written[block];
        if (known == EMPTY)
            s->peaks[block] = -INFINITY;
        else if (known == UNKNOWN || (t != 0.0f && (all || known != UNCHANGED)))
            look_at(v, block, t);
        if (s->peaks[block] == -INFINITY)
            s->sums[block] = 0.0f;
    }
}

void scores_look(scores *v, int summed)
{
    const kt_choice *c = v->c;
    scratch *s = v->s;
    memset(s->written, 0xff, (size_t)v->blocks * sizeof *s->written);
    s->n_written = 0;
    v->peaks = c->peaks;
    v->sums = c->sums;
    v->top = c->values[c->best];
    int all = summed && c->sums_temperature != v->temperature, penalties = c->n_seen && penalises(c);
    if (!all && !penalties && !c->n_bias && !c->mask)
        return;
    memcpy(s->peaks, c->peaks, (size_t)v->blocks * sizeof(float));
    if (summed && !all)
        memcpy(s->sums, c->sums, (size_t)v->blocks * sizeof(float));
    memset(s->last, 0xff, (size_t)v->blocks * sizeof *s->last);
    if (penalties)
        note_penalties(v);
    note_bias(v);
    if (c->mask)
        note_mask(v);
    look_at_blocks(v, summed ? v->temperature : 0.0f, all);
    v->peaks = s->peaks;
    v->sums = s->sums;
    v->top = -INFINITY;
    for (int64_t block = 0; block < v->blocks; block++)
        v->top = v->peaks[block] > v->top ? v->peaks[block] : v->top;
}

int32_t scores_best(const scores *v)
{
    int64_t block = 0;
    while (v->peaks[block] != v->top)
        block++;
    const float *x = scores_block(v, block);
    int i = 0;
    while (x[i] != v->top)
        i++;
    return (int32_t)(block * KT_BLOCK_COLUMNS + i);
}
