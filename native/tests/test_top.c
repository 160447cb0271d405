/* test_top.c - the best k of a stream of scores against all of them sorted. */
#include "check.h"
#include "choose.h"

static int descending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* n scores of `values` different values, k of them chosen, of places that lie `stride` apart. */
static void check_top(int64_t n, int64_t k, int values, int64_t stride)
{
    uint64_t *all = need(sizeof(uint64_t) * (size_t)n), state = (uint64_t)(n + k + values);
    int32_t *places = need(sizeof(int32_t) * (size_t)k), *spare = need(sizeof(int32_t) * (size_t)k);
    top t = {.keys = need(sizeof(uint64_t) * (size_t)(k + 100)), .most = k, .capacity = k + 100};
    for (int64_t i = 0; i < n; i++) {
        float score = (float)(random_bits(&state) % (uint64_t)values) - (float)(values / 2);
        all[i] = top_key(score == 0 && i % 2 ? -0.0f : score, i * stride);
        top_push(&t, all[i]);
    }
    top_trim(&t);
    top_places(&t, places, spare);
    qsort(all, (size_t)n, sizeof *all, descending);
    int64_t expected = n < k ? n : k;
    CHECK(t.n == expected, "%lld of %lld scores: %lld chosen, not %lld", (long long)k, (long long)n, (long long)t.n,
          (long long)expected);
    for (int64_t i = 0; i < expected; i++) {
        int32_t place = (int32_t)(UINT32_MAX - (uint32_t)all[i]), found = 0;
        for (int64_t j = 0; j < t.n; j++)
            found |= places[j] == place;
        CHECK(found, "%lld of %lld scores: place %d is not chosen", (long long)k, (long long)n, place);
        CHECK(i == 0 || places[i] > places[i - 1], "places are not ascending");
    }
    free(all);
    free(places);
    free(spare);
    free(t.keys);
}

/* Keys have the order of the scores, and of equal ones the first place is the best; -0 is 0. */
static void check_keys(void)
{
    static const float ascending[] = {-INFINITY, -3e38f, -1, -1e-45f, 0, 1e-45f, 1, 3e38f, INFINITY};
    for (size_t i = 0; i + 1 < sizeof ascending / sizeof *ascending; i++)
        CHECK(top_key(ascending[i], 0) < top_key(ascending[i + 1], INT32_MAX), "%g is not below %g",
              (double)ascending[i], (double)ascending[i + 1]);
    CHECK(top_key(-0.0f, 7) == top_key(0.0f, 7), "-0 is another score than 0");
    CHECK(top_key(1, 7) > top_key(1, 8), "a later place is better");
}

int main(void)
{
    const int64_t sizes[][3] = {{1, 1, 1}, {50, 70, 9}, {3000, 70, 1}, {3000, 70, 3}, {3000, 70, 100000},
                                {3000, 1, 50}, {900, 899, 7}, {2500, 2048, 100000}, {3000, 31, 9},
                                {3000, 32, 9}, {3000, 33, 9}, {32, 40, 9}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int64_t stride = 1; stride < 1 << 20; stride *= 700)     /* up to the greatest places that there are */
            check_top(sizes[i][0], sizes[i][1], (int)sizes[i][2], stride);
    check_keys();
    return report("test_top");
}
