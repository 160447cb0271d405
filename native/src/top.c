/* top.c - the best k of many scored positions, exactly, in bounded memory: keys have 64 bits,
 * the score above the position, so no two are equal and the best k are the same set in whatever
 * order and parts they are processed.
 *
 * Pushed keys fill a buffer of more than k; when it is full, a radix selection leaves the k greatest: byte by
 * byte from the top, what is above the byte of the k-th stays, what is below goes, and what is equal is looked at
 * again. That is linear whatever the scores are.
 */
#include "choose.h"

#include <string.h>

uint64_t top_key(float score, int64_t place)
{
    uint32_t bits;
    score += 0.0f;                                          /* -0 is no less than 0 */
    memcpy(&bits, &score, sizeof bits);
    bits ^= bits >> 31 ? UINT32_MAX : UINT32_C(1) << 31;    /* unsigned order is that of the values */
    return (uint64_t)bits << 32 | (UINT32_MAX - (uint32_t)place);
}

static void swap(uint64_t *a, uint64_t *b)
{
    uint64_t kept = *a;
    *a = *b;
    *b = kept;
}

/* The byte of the `wanted`-th greatest of keys[0..n); *above: how many have a greater one. */
static unsigned split_byte(const uint64_t *keys, int64_t n, int shift, int64_t wanted, int64_t *above)
{
    int64_t count[256] = {0};
    for (int64_t i = 0; i < n; i++)
        count[keys[i] >> shift & 255]++;
    unsigned byte = 255;
    for (*above = 0; *above + count[byte] < wanted; byte--)
        *above += count[byte];
    return byte;
}

void top_trim(top *t)
{
    int64_t sure = 0;                       /* keys[0..sure) stay, keys[sure..n) are in question */
    for (int shift = 56; shift >= 0 && t->n > t->most; shift -= 8) {
        int64_t above, equal = sure;
        unsigned byte = split_byte(t->keys + sure, t->n - sure, shift, t->most - sure, &above);
        for (int64_t i = sure; i < t->n; i++)
            if ((t->keys[i] >> shift & 255) > byte)
                swap(&t->keys[i], &t->keys[equal++]);
        sure = equal;
        for (int64_t i = sure; i < t->n; i++)
            if ((t->keys[i] >> shift & 255) == byte)
                swap(&t->keys[i], &t->keys[equal++]);
        t->n = equal;
    }
    if (t->n < t->most)
        return;
    t->above = UINT64_MAX;
    for (int64_t i = 0; i < t->n; i++)
        t->above = t->keys[i] < t->above ? t->keys[i] : t->above;
}

void top_push(top *t, uint64_t key)
{
    if (key <= t->above)
        return;
    if (t->n == t->capacity)
        top_trim(t);
    t->keys[t->n++] = key;
}

/* One pass of a radix sort by the 11 bits from `shift` on. */
static void sort_pass(const int32_t *from, int32_t *to, int64_t n, int shift)
{
    int64_t at[2048] = {0}, sum = 0;
    for (int64_t i = 0; i < n; i++)
        at[from[i] >> shift & 2047]++;
    for (int b = 0; b < 2048; b++) {
        int64_t count = at[b];
        at[b] = sum;
        sum += count;
    }
    for (int64_t i = 0; i < n; i++)
        to[at[from[i] >> shift & 2047]++] = from[i];
}

/* For so few that counters would cost more than they save. */
static void insert_sorted(int32_t *places, int64_t n, int32_t place)
{
    for (; n > 0 && places[n - 1] > place; n--)
        places[n] = places[n - 1];
    places[n] = place;
}

void top_places(const top *t, int32_t *out, int32_t *spare)
{
    for (int64_t i = 0; i < t->n && t->n <= 32; i++)
        insert_sorted(out, i, (int32_t)(UINT32_MAX - (uint32_t)t->keys[i]));
    if (t->n <= 32)
        return;
    for (int64_t i = 0; i < t->n; i++)
        spare[i] = (int32_t)(UINT32_MAX - (uint32_t)t->keys[i]);
    sort_pass(spare, out, t->n, 0);
    sort_pass(out, spare, t->n, 11);
    sort_pass(spare, out, t->n, 22);
}
