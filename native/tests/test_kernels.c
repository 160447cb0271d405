/* test_kernels.c - the products and the encoder of every row that this CPU can run, against plain loops: exactly
 * where the contract says so, else within a bound derived from it. */
#define _POSIX_C_SOURCE 200112L     /* posix_memalign */

#include "oracle.h"

static const int64_t sizes[] = {1, 2, 5, 15, 16, 17, 33, 64, 100, 130, 257};
enum { N_SIZES = sizeof sizes / sizeof sizes[0] };
static const int64_t token_counts[] = {1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 22};
enum { N_TOKENS = sizeof token_counts / sizeof token_counts[0], MAX_TOKENS = 22 };

/* ---- products ---- */

typedef struct problem {
    const kt_format *format;
    int64_t n, k;
    layout l;
    uint8_t *w;
    float *x, *bias, *expected, *tolerance;     /* x [MAX_TOKENS][k], expected [MAX_TOKENS][n] */
    act8 x8;
    uint16_t *xh;
} problem;

/* is_fine: x has a scale for each 64 columns, also where a row of weights has one. */
static problem make_problem(const kt_kernels *kernels, const kt_kernels *reference, const kt_format *f, int is_fine,
                            int64_t n, int64_t k, uint64_t *state)
{
    problem p = {.format = f, .n = n, .k = k, .l = layout_of(f, k)};
    int64_t panels = (n + 15) / 16, stride = (k + 127) / 128 * 128;
    float *source = random_floats_of((size_t)(n * k), state);
    for (int64_t i = 0; i < n * k && f->scale == KT_SCALE_E4M3 && k % 2; i++)   /* scales at both ends, too */
        source[i] = ldexpf(source[i], i / k % 3 == 0 ? 100 : i / k % 3 == 1 ? -50 : 0);
    p.w = allocate((size_t)panels * p.l.panel_bytes);
    kt_pack_error error = {0};
    for (int64_t i = 0; i < panels; i++)    /* much faster than the oracle; test_encode compares the two */
        encode_floats(kernels, f, n, k, source, i, p.w + (size_t)i * p.l.panel_bytes, &error);
    free(source);
    p.x = random_floats_of((size_t)(MAX_TOKENS * k), state);
    p.bias = random_floats_of((size_t)n, state);
    p.x8 = (act8){allocate((size_t)(MAX_TOKENS * stride)), allocate((size_t)(MAX_TOKENS * stride / 64) * sizeof(float)),
                  allocate((size_t)(MAX_TOKENS * stride / 32) * 4), f->group || is_fine ? stride / 64 : 1, stride};
    p.xh = allocate((size_t)(MAX_TOKENS * stride) * 2);
    for (int64_t t = 0; t < MAX_TOKENS; t++) {
        reference->quantize(p.x + t * k, k, -1.0f, &p.x8, t);
        reference->to_bf16(p.x + t * k, k, stride, p.xh + t * stride);
    }
    p.expected = allocate((size_t)(MAX_TOKENS * n) * sizeof(float));
    p.tolerance = allocate((size_t)(MAX_TOKENS * n) * sizeof(float));
    return p;
}

static void free_problem(problem *p)
{
    void *all[] = {p->w, p->x, p->bias, p->expected, p->tolerance, p->x8.q, p->x8.scale, p->x8.sum, p->xh};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

enum kind { INT8, BF16, F32 };
enum { MAX_K = 257 };

/* One row of weights as the oracle reads it: codes and a scale for each group, or values. */
typedef struct weights {
    int32_t codes[MAX_K];
    float scales[MAX_K], values[MAX_K];
} weights;

static void read_row(const problem *p, enum kind kind, int64_t r, weights *w)
{
    for (int64_t c = 0; c < p->k && kind != INT8; c++)
        w->values[c] = oracle_value(p->format, p->w, p->k, r, c);
    for (int64_t c = 0; c < p->k && kind == INT8; c++)
        w->codes[c] = oracle_code(p->format, p->w, p->k, r, c);
    for (int64_t g = 0; g < p->l.groups && kind == INT8; g++)
        w->scales[g] = oracle_scale(p->format, p->w, p->k, r, g * p->l.group);
}

static float expect_int8(const problem *p, int64_t t, const weights *w)
{
    int64_t width = p->x8.scales == 1 ? p->l.k_padded : p->format->group == 32 ? 32 : 64;
    const float *scale = p->x8.scale + t * p->x8.scales;
    int of_row = p->x8.scales > 1 && p->format->group == 0;
    float acc = 0.0f;
    for (int64_t first = 0; first < p->k; first += width) {
        int32_t sum = 0;
        for (int64_t c = first; c < first + width && c < p->k; c++)
            sum += w->codes[c] * p->x8.q[t * p->x8.stride + c];
        acc = fmaf((float)sum * (of_row ? 1.0f : w->scales[first / p->l.group]), scale[first / 64], acc);
    }
    return of_row ? acc * w->scales[0] : acc;
}

static float expect_f32(const problem *p, int64_t t, const weights *w)
{
    float acc = 0.0f;
    for (int64_t c = 0; c < p->k; c++)
        acc = fmaf(w->values[c], p->x[t * p->k + c], acc);
    return acc;
}

/* Exact up to rounding of doubles; the bound of product_float.inc.c. */
static float expect_bf16(const problem *p, int64_t t, int64_t r, const weights *w, float *tolerance)
{
    double sum = 0.0, size = 0.0;
    for (int64_t c = 0; c < p->k; c++) {
        double term = (double)w->values[c] * (double)float_of_bf16(p->xh[t * p->x8.stride + c]);
        sum += term;
        size += fabs(term);
    }
    *tolerance = (float)((double)(p->k + 2) * 0x1p-23 * (size + fabs((double)p->bias[r])));
    return (float)sum;
}

static void expect(problem *p, enum kind kind)
{
    weights w;
    for (int64_t r = 0; r < p->n; r++) {
        read_row(p, kind, r, &w);
        for (int64_t t = 0; t < MAX_TOKENS; t++) {
            float *tolerance = &p->tolerance[t * p->n + r];
            *tolerance = 0.0f;
            p->expected[t * p->n + r] = kind == INT8   ? expect_int8(p, t, &w)
                                        : kind == F32 ? expect_f32(p, t, &w)
                                                      : expect_bf16(p, t, r, &w, tolerance);
        }
    }
}

/* How rows lie: as they come; x reversed and y spread by two; the same, added to what y holds. What suits one CPU or
 * another changes with them. */
enum arrangement { PLAIN, SPREAD, ADDED, N_ARRANGEMENTS };

/* Run one product, panels in two calls. */
static int64_t check_product(const kt_kernels *kernels, const problem *p, enum kind kind, int64_t n_tokens,
                             enum arrangement how)
{
    int plain = how == PLAIN;
    int64_t y_stride = p->n + 3, panels = (p->n + 15) / 16, broken = 0;
    int32_t x_rows[MAX_TOKENS], y_rows[MAX_TOKENS];
    static const load_kind loads[N_ARRANGEMENTS] = {LOADS_NEAR, LOADS_FAR, LOADS_IN_ORDER};
    float gate[MAX_TOKENS];
    float *y = allocate((size_t)(2 * MAX_TOKENS * y_stride) * sizeof *y);
    void *scratch = allocate(kernels->product_scratch_bytes(p->format, p->k));
    for (int64_t t = 0; t < n_tokens; t++) {
        x_rows[t] = (int32_t)(n_tokens - 1 - t);
        y_rows[t] = (int32_t)(2 * t + 1);
        gate[t] = 0.25f * (float)(t + 1);
    }
    for (int64_t i = 0; how == ADDED && i < 2 * MAX_TOKENS * y_stride; i++)
        y[i] = 0.5f;
    product q = {.format = p->format, .n = p->n, .k = p->k, .w = p->w, .panel_bytes = p->l.panel_bytes,
                 .n_tokens = n_tokens, .x8 = &p->x8, .xh = p->xh, .xf = p->x,
                 .x_stride = kind == BF16 ? p->x8.stride : p->k, .y = y, .y_stride = y_stride,
                 .x_rows = plain ? NULL : x_rows, .y_rows = plain ? NULL : y_rows,
                 .y_gate = how == ADDED ? gate : NULL, .bias = plain ? NULL : p->bias, .scratch = scratch,
                 .tuning = {.ahead = 2048, .loads = loads[how], .near = how == ADDED, .stream_int4 = how == ADDED ? 4 : 2,
                            .stream_int8 = how == ADDED ? 8 : 6, .blocks_book4 = how != SPREAD}};
    int64_t cuts[3] = {0, panels > 1 ? panels - (panels > 3 ? 2 : 1) : 0, panels};
    for (int i = 0; i < 2; i++) {
        q.first_panel = cuts[i];
        q.last_panel = cuts[i + 1];
        (kind == INT8 ? kernels->product_int8 : kind == BF16 ? kernels->product_bf16 : kernels->product_f32)(&q);
    }
    for (int64_t t = 0; t < n_tokens; t++)
        for (int64_t r = 0; r < y_stride; r++) {
            float got = y[(plain ? t : 2 * t + 1) * y_stride + r];
            int64_t from = plain ? t : n_tokens - 1 - t;
            float want = r < p->n ? p->expected[from * p->n + r] : how == ADDED ? 0.5f : 0.0f;
            float bound = r < p->n ? p->tolerance[from * p->n + r] : 0.0f;
            if (!plain && r < p->n)
                want = want + p->bias[r];
            if (how == ADDED && r < p->n) {
                want = fmaf(gate[t], want, 0.5f);
                bound = 2 * gate[t] * bound;
            }
            broken += !(kind == BF16 ? fabsf(got - want) <= bound : got == want);
        }
    free(y);
    free(scratch);
    return broken;
}

static void test_product(const kt_kernels *kernels, enum kind kind, int is_fine, const char *name)
{
    int64_t cases = 0, broken = 0;
    uint64_t state = 1;
    const kt_kernels *reference = cpu_choose_row("portable", NULL, 0);
    for (int i = 0; i < N_FORMATS; i++) {
        const kt_format *f = &all_formats[i].format;
        if ((kind == INT8 && (f->bits > 8 || reads_f32(f))) || (kind == BF16 && f->bits != 16) || (is_fine && f->group))
            continue;
        for (int a = 0; a < N_SIZES; a++) {
            int64_t n = sizes[(a * 7 + i) % N_SIZES], k = sizes[a];
            problem p = make_problem(kernels, reference, f, is_fine, n, k, &state);
            expect(&p, kind);
            for (int t = 0; t < N_TOKENS; t++) {
                int64_t wrong = check_product(kernels, &p, kind, token_counts[t],
                                              (enum arrangement)((t + a) % N_ARRANGEMENTS));
                if (wrong)
                    printf("  %s n %lld k %lld tokens %lld: %lld values differ\n", all_formats[i].name,
                           (long long)n, (long long)k, (long long)token_counts[t], (long long)wrong);
                broken += wrong;
                cases++;
            }
            free_problem(&p);
        }
    }
    law(kernels->name, name, cases, broken);
}

/* ---- encoder ---- */

/* *kept: the oracle's bytes, made at the first call and kept for other rows. */
static int64_t check_encode(const kt_kernels *kernels, const kt_format *f, int64_t n, int64_t k, const float *x,
                            uint8_t **kept)
{
    layout l = layout_of(f, k);
    size_t bytes = (size_t)((n + 15) / 16) * l.panel_bytes;
    uint8_t *got = allocate(bytes);
    if (!*kept) {
        *kept = allocate(bytes);
        oracle_encode(f, n, k, x, *kept);
    }
    const uint8_t *want = *kept;
    kt_pack_error error = {0};
    double wrong = 0, square = 0;
    memset(got, 0xa5, bytes);
    for (int64_t i = 0; i < (n + 15) / 16; i++)
        encode_floats(kernels, f, n, k, x, i, got + (size_t)i * l.panel_bytes, &error);
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < k; c++) {
            double e = (double)x[r * k + c] - (double)oracle_value(f, want, k, r, c);
            wrong += e * e;
            square += (double)x[r * k + c] * (double)x[r * k + c];
        }
    int64_t broken = memcmp(want, got, bytes) != 0;
    broken += !(fabs(error.sum_sq_error - wrong) <= 1e-4 * wrong + 1e-12 * square);
    broken += !(fabs(error.sum_sq - square) <= 1e-4 * square);
    free(got);
    return broken;
}

/* The values that packed bytes mean, the source of a second encoding. */
static void decode_matrix(const kt_format *f, int64_t n, int64_t k, const uint8_t *w, float *x)
{
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < k; c++)
            x[r * k + c] = oracle_value(f, w, k, r, c);
}

static void test_encode(const kt_kernels *kernels)
{
    static uint8_t *wanted[N_FORMATS][N_SIZES];
    int64_t cases = 0, broken = 0, lossy = 0, repeats = 0;
    uint64_t state = 7;
    for (int i = 0; i < N_FORMATS; i++)
        for (int a = 0; a < N_SIZES; a++) {
            const kt_format *f = &all_formats[i].format;
            int64_t n = sizes[(a * 5 + i) % N_SIZES], k = sizes[a];
            float *x = random_floats_of((size_t)(n * k), &state);
            if (a % 3 == 1)                     /* small values, one of them tiny, and an all-zero group */
                for (int64_t c = 0; c < n * k; c++)
                    x[c] *= c % 7 == 0 ? 1e-30f : c / k == 1 ? 0.0f : 1e-3f;
            broken += check_encode(kernels, f, n, k, x, &wanted[i][a]);
            cases++;
            layout l = layout_of(f, k);
            if (f->bits == 4 && f->scale != KT_SCALE_F32 && (oracle_has_zero(f) || k == l.k_padded)) {
                uint8_t *w = allocate((size_t)((n + 15) / 16) * l.panel_bytes);
                kt_pack_error error = {0};
                decode_matrix(f, n, k, wanted[i][a], x);
                for (int64_t p = 0; p < (n + 15) / 16; p++)
                    encode_floats(kernels, f, n, k, x, p, w + (size_t)p * l.panel_bytes, &error);
                lossy += error.sum_sq_error != 0.0;
                repeats++;
                free(w);
            }
            free(x);
        }
    law(kernels->name, "encode_panel writes the specified bytes", cases, broken);
    law(kernels->name, "values a 4-bit format holds are encoded without loss", repeats, lossy);
}

static void test_row(const kt_kernels *kernels)
{
    test_product(kernels, INT8, 0, "product_int8 equals the integer sums to the bit");
    test_product(kernels, INT8, 1, "the same where x has a scale per 64 columns, but a row of weights one");
    test_product(kernels, F32, 0, "product_f32 equals the fma chain to the bit");
    test_product(kernels, BF16, 0, "product_bf16 within (k + 2) 2^-23 sum |w x|");
    test_encode(kernels);
}

int main(void)
{
    for_each_row(test_row);
    return failures != 0;
}
