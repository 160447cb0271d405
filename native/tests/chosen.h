/* chosen.h - what the tests of chosen positions and of chosen blocks share: pages, and what a cache keeps of a value. */
#ifndef KT_TEST_CHOSEN_H
#define KT_TEST_CHOSEN_H

#include "check.h"

enum { TOKENS = 330, DIM = 22 };

typedef struct cache {
    uint8_t *data;
    int32_t pages[(TOKENS + 63) / 64];
} cache;

/* NaN, pages in descending order. */
static inline cache make_cache(size_t page_bytes)
{
    enum { PAGES = (TOKENS + 63) / 64 };
    cache c = {.data = need(PAGES * page_bytes)};
    memset(c.data, 0xff, PAGES * page_bytes);
    for (int i = 0; i < PAGES; i++)
        c.pages[i] = PAGES - 1 - i;
    return c;
}

static inline double kept(int32_t exact, float x)
{
    return (double)(exact ? x : from_bf16(to_bf16(x)));
}

#endif
