/* test_sample.c - the choice of tokens against a plain loop over the whole vocabulary, on every ISA row and with one to
 * three threads: whatever the number drawn, the token is one that may be taken, at the place where that number lies. */
#include "check.h"

enum { ROWS = 12, WIDEST = 1000, BLOCKS = (WIDEST + KT_BLOCK_COLUMNS - 1) / KT_BLOCK_COLUMNS, SEEN = 30 };

static const int widths[] = {1, 63, 64, 65, 300, WIDEST};

typedef struct row {
    float values[WIDEST], peaks[BLOCKS], sums[BLOCKS];
    uint32_t mask[(WIDEST + 31) / 32];
    int32_t seen[SEEN], answered[SEEN], likeliest[4];
    float logprobs[4];
    double changed[WIDEST];     /* by the rules alone */
    kt_choice c;
} row;

static void summarise(row *r, int n)
{
    r->c.best = 0;
    for (int i = 0; i < n; i++)
        r->c.best = r->values[i] > r->values[r->c.best] ? i : r->c.best;
    for (int b = 0; b * KT_BLOCK_COLUMNS < n; b++) {
        int from = b * KT_BLOCK_COLUMNS, end = from + KT_BLOCK_COLUMNS < n ? from + KT_BLOCK_COLUMNS : n;
        r->peaks[b] = -INFINITY;
        r->sums[b] = 0;
        for (int i = from; i < end; i++)
            r->peaks[b] = r->values[i] > r->peaks[b] ? r->values[i] : r->peaks[b];
        for (int i = from; i < end; i++)
            r->sums[b] += expf((r->values[i] - r->peaks[b]) / 0.7f);
    }
}

static void set_row(row *r, int n, int kind, uint64_t seed)
{
    for (int i = 0; i < n; i++)
        r->values[i] = 8 * random_float(&seed);
    summarise(r, n);
    r->c = (kt_choice){.values = r->values, .peaks = r->peaks, .sums = r->sums, .best = r->c.best,
                       .sums_temperature = kind % 2 ? 0.7f : 0.0f, .temperature = kind == 5 ? 0.0f : 0.7f,
                       .top_k = kind % 3 == 1 ? 5 : 0, .top_p = kind % 4 == 2 ? 0.8 : 1.0,
                       .min_p = kind % 5 == 3 ? 0.1 : 0.0, .at = 0.5 + 0.499 * (double)random_float(&seed),
                       .repetition = 1.0f, .n_likeliest = kind % 3 - 1, .likeliest = r->likeliest,
                       .logprobs = r->logprobs};
    for (int i = 0; i < n; i++)
        r->changed[i] = (double)r->values[i];
    if (kind >= 6) {
        r->c.n_seen = n < SEEN ? n : SEEN;
        r->c.seen = r->seen;
        r->c.answered = r->answered;
        r->c.repetition = 1.25f;
        r->c.presence = 0.5f;
        r->c.frequency = 0.25f;
        for (int i = 0; i < r->c.n_seen; i++) {
            r->seen[i] = i * (n / r->c.n_seen);
            r->answered[i] = i % 3;
            double *x = &r->changed[r->seen[i]];
            *x = *x < 0 ? *x * 1.25 : *x / 1.25;
            *x -= r->answered[i] ? 0.5 + 0.25 * r->answered[i] : 0;
        }
    }
    if (kind >= 9) {
        r->c.mask = r->mask;
        for (int i = 0; i < (n + 31) / 32; i++)
            r->mask[i] = kind == 11 && i / 2 % 2 ? 0 : (uint32_t)random_bits(&seed);
        r->mask[0] |= 1;
        for (int i = 0; i < n; i++)
            r->changed[i] = r->mask[i / 32] >> i % 32 & 1 ? r->changed[i] : -INFINITY;
    }
}

/* How many of the changed values are greater, and the share of the chances before the id and with it. */
static void compare(const row *r, int n, int kind)
{
    int id = r->c.id, better = 0;
    CHECK(id >= 0 && id < n && r->changed[id] > -INFINITY, "kind %d of %d: id %d", kind, n, id);
    if (id < 0 || id >= n)
        return;
    double top = -INFINITY, before = 0, total = 0;
    for (int i = 0; i < n; i++) {
        better += r->changed[i] > r->changed[id] + 1e-5;
        top = r->changed[i] > top ? r->changed[i] : top;
    }
    CHECK(r->c.temperature > 0 || better == 0, "kind %d of %d: %d are better than the best", kind, n, better);
    CHECK(!r->c.top_k || better < r->c.top_k, "kind %d of %d: %d are better", kind, n, better);
    CHECK(r->changed[id] - top >= 0.7 * log(r->c.min_p) - 1e-5, "kind %d of %d: too unlikely", kind, n);
    if (r->c.temperature == 0 || r->c.top_k || r->c.top_p < 1 || r->c.min_p > 0)
        return;
    for (int i = 0; i < n; i++) {
        before += i < id ? exp((r->changed[i] - top) / (double)0.7f) : 0;
        total += exp((r->changed[i] - top) / (double)0.7f);
    }
    double end = before + exp((r->changed[id] - top) / (double)0.7f);
    CHECK(before / total <= r->c.at + 1e-5 && r->c.at <= end / total + 1e-5, "kind %d of %d: %g is not within %g..%g",
          kind, n, r->c.at, before / total, end / total);
}

/* The least and the greatest number that can be drawn, where the first and the last tokens may not be taken. */
static void check_ends(kt_sampler *sampler, row *r, int n, int kind)
{
    static const double ends[] = {0.0, 1.0 - 0x1p-53};
    for (int edge = 0; edge < 2; edge++) {
        for (int out = 0; out < n / 3; out++) {
            int i = edge ? n - 1 - out : out;
            r->values[i] = -INFINITY;
            r->changed[i] = -INFINITY;
        }
    }
    if (r->c.mask)
        r->mask[n / 2 / 32] |= 1u << n / 2 % 32;
    if (r->c.mask && r->changed[n / 2] == -INFINITY)
        r->changed[n / 2] = (double)r->values[n / 2];
    summarise(r, n);
    for (int end = 0; end < 2; end++) {
        r->c.at = ends[end];
        CHECK(kt_sampler_choose(sampler, &r->c, 1) == KT_OK, "kind %d of %d", kind, n);
        compare(r, n, kind);
    }
}

/* Whether the second of two tokens may be drawn. */
static int second_stays(kt_sampler *sampler, row *r, double min_p)
{
    r->c.min_p = min_p;
    CHECK(kt_sampler_choose(sampler, &r->c, 1) == KT_OK, "min_p %.17g", min_p);
    return r->c.id == 1;
}

/* A token as likely as min_p says stays, and one that is less likely by the last bit of a double does not. */
static void check_edge_of_min_p(kt_pool *pool)
{
    char error[100] = "";
    kt_sampler *sampler = kt_sampler_create(pool, 2, error, sizeof error);
    for (int32_t top_k = 0; top_k <= 2; top_k += 2) {
        static row r;
        set_row(&r, 2, 0, 1);
        r.values[0] = 0.0f;
        r.values[1] = -0.5f;
        summarise(&r, 2);
        r.c.top_k = top_k;
        r.c.at = 1.0 - 0x1p-53;
        float chance = 0.0f, more = 1.0f;     /* the second one's lies in [chance, more) */
        while (nextafterf(chance, 1.0f) < more) {
            float middle = chance + (more - chance) / 2;
            if (second_stays(sampler, &r, (double)middle))
                chance = middle;
            else
                more = middle;
        }
        CHECK(fabsf(chance - expf(-0.5f / 0.7f)) < 1e-5f, "top_k %d: chance %g", top_k, (double)chance);
        CHECK(second_stays(sampler, &r, (double)chance), "top_k %d: %.17g is dropped", top_k, (double)chance);
        double next = nextafter((double)chance, 1.0);
        CHECK(!second_stays(sampler, &r, next), "top_k %d: %.17g stays at %.17g", top_k, (double)chance, next);
    }
    kt_sampler_free(sampler);
}

static void check_refusals(kt_pool *pool)
{
    static int32_t twice[65];
    static float bias[65];
    char error[100] = "";
    CHECK(!kt_sampler_create(pool, 0, error, sizeof error) && strstr(error, "0 tokens"), "\"%s\"", error);
    kt_sampler *sampler = kt_sampler_create(pool, 64, error, sizeof error);
    static row r;
    set_row(&r, 64, 6, 1);
    r.seen[2] = 64;
    CHECK(kt_sampler_choose(sampler, &r.c, 1) == KT_ERR_RANGE, "id 64 of 64 was taken");
    set_row(&r, 64, 0, 1);      /* more ids than there are: some are the same, and there is no scratch for them */
    r.c.seen = r.c.answered = r.c.bias_ids = twice;
    r.c.bias = bias;
    r.c.n_seen = 65;
    CHECK(kt_sampler_choose(sampler, &r.c, 1) == KT_ERR_RANGE, "65 seen ids of 64 were taken");
    r.c.n_seen = 0;
    r.c.n_bias = 65;
    CHECK(kt_sampler_choose(sampler, &r.c, 1) == KT_ERR_RANGE, "65 biases of 64 ids were taken");
    set_row(&r, 64, 9, 1);
    memset(r.mask, 0, sizeof r.mask);
    CHECK(kt_sampler_choose(sampler, &r.c, 1) == KT_OK && r.c.id == KT_CHOICE_NONE, "an id of none: %d", r.c.id);
    set_row(&r, 64, 0, 1);
    r.values[r.c.best] = NAN;
    CHECK(kt_sampler_choose(sampler, &r.c, 1) == KT_OK && r.c.id == KT_CHOICE_BROKEN, "an id of NaN: %d", r.c.id);
    kt_sampler_free(sampler);
    kt_sampler_free(NULL);
}

int main(void)
{
    static row all[ROWS];
    static kt_choice choices[ROWS];
    const char *rows[8];
    int n = usable_rows(rows);
    for (int i = 0; i < n; i++) {
        for (int32_t threads = 1; threads <= 3; threads++) {
            kt_pool *pool = make_pool(rows[i], threads);
            for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
                char error[100] = "";
                kt_sampler *sampler = kt_sampler_create(pool, widths[w], error, sizeof error);
                for (int k = 0; k < ROWS; k++) {
                    set_row(&all[k], widths[w], k, (uint64_t)(100 * k + widths[w]));
                    choices[k] = all[k].c;
                }
                OK(kt_sampler_choose(sampler, choices, ROWS), error);
                for (int k = 0; k < ROWS; k++) {
                    all[k].c = choices[k];
                    compare(&all[k], widths[w], k);
                    OK(kt_sampler_choose(sampler, &choices[k], 1), error);
                    CHECK(choices[k].id == all[k].c.id, "alone another id: %d, not %d", choices[k].id, all[k].c.id);
                    check_ends(sampler, &all[k], widths[w], k);
                }
                kt_sampler_free(sampler);
            }
            check_refusals(pool);
            check_edge_of_min_p(pool);
            kt_pool_free(pool);
        }
    }
    return report("test_sample");
}
