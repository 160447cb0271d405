/* test_summary.c - the summary of logits against plain loops, on every ISA row and with one to four threads:
 * sizes around blocks and runs, views inside wider buffers, ties, masked, infinite and broken values. */
#include "check.h"

enum { MOST = 5, BEFORE = 3 };

static const int widths[] = {1, 15, 17, 63, 64, 65, 130, 2048, 2049, 5000};

typedef struct fixture {
    kt_program *p;
    kt_view best, peaks, sums, logits;
} fixture;

static int blocks_of(int width)
{
    return (width + KT_BLOCK_COLUMNS - 1) / KT_BLOCK_COLUMNS;
}

static fixture record(kt_pool *pool, int width)
{
    fixture f = {.p = make_program(pool, MOST, MOST, 0)};
    f.best = make_view(f.p, 1, KT_ROWS_OUTPUTS);
    kt_view both = make_view(f.p, 2 * blocks_of(width), KT_ROWS_OUTPUTS);
    f.peaks = (kt_view){both.buffer, 0, blocks_of(width)};
    f.sums = (kt_view){both.buffer, blocks_of(width), blocks_of(width)};
    f.logits = (kt_view){make_view(f.p, width + BEFORE + 2, KT_ROWS_OUTPUTS).buffer, BEFORE, width};
    OK(kt_program_summary(f.p, f.best, f.peaks, f.sums, f.logits), kt_program_error(f.p));
    OK(kt_program_finish(f.p, NULL), kt_program_error(f.p));
    return f;
}

/* Row 0: plain numbers; 1: few values, so ties; 2: some masked; 3: a NaN; 4: an infinity, or all masked. */
static void set_row(float *x, int n, int kind, uint64_t seed)
{
    for (int i = -BEFORE; i < n + 2; i++)       /* around the view: not to be seen */
        x[i] = i % 2 ? INFINITY : NAN;
    for (int i = 0; i < n; i++) {
        float r = 10 * random_float(&seed);
        x[i] = kind == 1 ? rintf(r / 4) : kind == 2 && r < 3 ? -INFINITY : r;
    }
    int at = (int)(random_bits(&seed) % (uint64_t)n);
    if (kind == 3)
        x[at] = NAN;
    if (kind == 4 && n % 2)
        x[at] = INFINITY;
    for (int i = 0; kind == 4 && n % 2 == 0 && i < n; i++)
        x[i] = -INFINITY;
}

static void compare_block(const float *x, int n, float temperature, float peak, float sum)
{
    float top = -INFINITY;
    int broken = 0;
    double want = 0;
    for (int i = 0; i < n; i++) {
        top = x[i] > top ? x[i] : top;
        broken |= isnan(x[i]) || x[i] == INFINITY;
    }
    CHECK(peak == (broken ? INFINITY : top), "a peak of %g, not %g (%d)", (double)peak, (double)top, broken);
    if (temperature == 0)
        CHECK(sum == -1, "a sum was written: %g", (double)sum);
    if (temperature == 0 || isinf(peak))
        return;
    for (int i = 0; i < n; i++)
        want += exp(((double)x[i] - (double)top) / (double)temperature);
    /* A difference, a quotient and an exponential of at most 60, rounded; then 7 sums. */
    double bound = want * 0x1p-23 * (temperature < 1 ? 60 : 30);
    CHECK(sum >= 1 && fabs((double)sum - want) <= bound, "a sum of %.9g, not %.9g", (double)sum, want);
}

static void compare(const fixture *f, int row, float temperature)
{
    const float *x = row_of(f->p, f->logits, row);
    int n = f->logits.width, best = (int)row_of(f->p, f->best, row)[0], first = 0, broken = 0;
    for (int i = 0; i < n; i++) {
        first = x[i] > x[first] ? i : first;
        broken |= isnan(x[i]) || x[i] == INFINITY;
    }
    CHECK(best >= 0 && best < n, "best is column %d of %d", best, n);
    if (broken)
        CHECK(isnan(x[best]) || x[best] == INFINITY, "column %d has %g", best, (double)x[best]);
    else
        CHECK(best == first, "best is column %d, not %d", best, first);
    for (int b = 0; b < f->peaks.width; b++) {
        int from = b * KT_BLOCK_COLUMNS, length = n - from < KT_BLOCK_COLUMNS ? n - from : KT_BLOCK_COLUMNS;
        compare_block(x + from, length, temperature, row_of(f->p, f->peaks, row)[b], row_of(f->p, f->sums, row)[b]);
    }
}

/* Bits of all results: the same for any row and number of threads. */
static uint64_t step(const fixture *f, int rows, float temperature)
{
    int32_t ids[MOST] = {0};
    uint64_t hash = 0;
    for (int t = 0; t < rows; t++) {
        set_row(row_of(f->p, f->logits, t), f->logits.width, t, (uint64_t)(f->logits.width + t));
        for (int b = 0; b < f->sums.width; b++)
            row_of(f->p, f->sums, t)[b] = -1;
    }
    kt_step s = {RUN(.n_tokens = MOST, .first_output = MOST - rows, .temperature = temperature), .ids = ids};
    OK(kt_program_run(f->p, &s), kt_program_error(f->p));
    for (int t = 0; t < rows; t++) {
        compare(f, t, temperature);
        for (int b = 0; b < 2 * f->sums.width; b++) {
            uint32_t bits;
            memcpy(&bits, row_of(f->p, f->peaks, t) + b, sizeof bits);
            hash = hash * 1000003 + (bits == 0x80000000u ? 0 : bits);    /* which zero is the peak is open */
        }
        hash = hash * 31 + (uint64_t)row_of(f->p, f->best, t)[0];
    }
    return hash;
}

static void check_refusals(kt_pool *pool)
{
    kt_program *p = make_program(pool, MOST, MOST, 0);
    kt_view best = make_view(p, 1, KT_ROWS_OUTPUTS), peaks = make_view(p, 2, KT_ROWS_OUTPUTS);
    kt_view sums = make_view(p, 2, KT_ROWS_OUTPUTS), logits = make_view(p, 100, KT_ROWS_OUTPUTS);
    kt_view few = {sums.buffer, 0, 1}, tokens = make_view(p, 2, KT_ROWS_TOKENS);
    REFUSED(kt_program_summary(p, best, peaks, few, logits), KT_ERR_SHAPE, kt_program_error(p), "2 peaks and 1 sums");
    REFUSED(kt_program_summary(p, peaks, peaks, sums, logits), KT_ERR_SHAPE, kt_program_error(p), "2 best");
    REFUSED(kt_program_summary(p, best, peaks, peaks, logits), KT_ERR_SHAPE, kt_program_error(p), "overlap");
    REFUSED(kt_program_summary(p, best, peaks, tokens, logits), KT_ERR_SHAPE, kt_program_error(p), "domain");
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    int32_t id = 0;
    const float wrong[] = {-1, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        kt_step s = {RUN(.n_tokens = 1, .temperature = wrong[i]), .ids = &id};
        REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, kt_program_error(p), "temperature is");
    }
    kt_program_free(p);
}

int main(void)
{
    const char *rows[8];
    int n = usable_rows(rows);
    enum { WIDTHS = sizeof widths / sizeof *widths };
    uint64_t first[WIDTHS] = {0};
    for (int i = 0; i < n; i++) {
        for (int32_t threads = 1; threads <= 4; threads++) {
            kt_pool *pool = make_pool(rows[i], threads);
            for (int j = 0; j < WIDTHS; j++) {
                fixture f = record(pool, widths[j]);
                step(&f, 1, 0);
                uint64_t hash = step(&f, 1, 0.6f) + 3 * step(&f, MOST, 1.5f) + 5 * step(&f, MOST, 1e-30f);
                first[j] = first[j] ? first[j] : hash;
                CHECK(hash == first[j], "%s, %d threads, %d columns: other bits", rows[i], threads, widths[j]);
                kt_program_free(f.p);
            }
            check_refusals(pool);
            kt_pool_free(pool);
        }
    }
    return report("test_summary");
}
