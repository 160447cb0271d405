/* test_kernels.c - every kernel of every row that runs on this CPU against a slow, obvious oracle:
 * formats x rows x awkward sizes. Integer products and f32 products to the bit, the rest within a bound
 * that follows from rounding. Rows the CPU lacks are skipped with the reason.
 */
#define _POSIX_C_SOURCE 200112L     /* posix_memalign */

#include "cpu.h"
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

static problem make_problem(const kt_kernels *reference, const kt_format *f, int64_t n, int64_t k,
                            uint64_t *state)
{
    problem p = {.format = f, .n = n, .k = k, .l = layout_of(f, k)};
    int64_t panels = (n + 15) / 16, stride = (k + 127) / 128 * 128;
    float *source = random_floats_of((size_t)(n * k), state);
    p.w = allocate((size_t)panels * p.l.panel_bytes);
    oracle_encode(f, n, k, source, p.w);
    free(source);
    p.x = random_floats_of((size_t)(MAX_TOKENS * k), state);
    p.bias = random_floats_of((size_t)n, state);
    p.x8 = (act8){allocate((size_t)(MAX_TOKENS * stride)), allocate(MAX_TOKENS * sizeof(float)),
                  allocate((size_t)(MAX_TOKENS * stride / 32) * 4), stride};
    p.xh = allocate((size_t)(MAX_TOKENS * stride) * 2);
    for (int64_t t = 0; t < MAX_TOKENS; t++) {
        reference->quantize(p.x + t * k, k, &p.x8, t);
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

static float expect_int8(const problem *p, int64_t t, int64_t r)
{
    float acc = 0.0f;
    for (int64_t g = 0; g < p->l.groups; g++) {
        int32_t sum = 0;
        for (int64_t c = g * p->l.group; c < (g + 1) * p->l.group; c++)
            if (c < p->k)
                sum += oracle_code(p->format, p->w, p->k, r, c) * p->x8.q[t * p->x8.stride + c];
        acc = fmaf((float)sum, oracle_scale(p->format, p->w, p->k, r, g * p->l.group), acc);
    }
    return acc * p->x8.scale[t];
}

static float expect_f32(const problem *p, int64_t t, int64_t r)
{
    float acc = 0.0f;
    for (int64_t c = 0; c < p->k; c++)
        acc = fmaf(oracle_value(p->format, p->w, p->k, r, c), p->x[t * p->k + c], acc);
    return acc;
}

/* Exact up to rounding of doubles; the bound of product_float.inc.c. */
static float expect_bf16(const problem *p, int64_t t, int64_t r, float *tolerance)
{
    double sum = 0.0, size = 0.0;
    for (int64_t c = 0; c < p->k; c++) {
        double term = (double)oracle_value(p->format, p->w, p->k, r, c) *
                      (double)float_of_bf16(p->xh[t * p->x8.stride + c]);
        sum += term;
        size += fabs(term);
    }
    *tolerance = (float)((double)(p->k + 2) * 0x1p-23 * (size + fabs((double)p->bias[r])));
    return (float)sum;
}

enum kind { INT8, BF16, F32 };

static void expect(problem *p, enum kind kind)
{
    for (int64_t t = 0; t < MAX_TOKENS; t++)
        for (int64_t r = 0; r < p->n; r++) {
            float *tolerance = &p->tolerance[t * p->n + r];
            *tolerance = 0.0f;
            p->expected[t * p->n + r] = kind == INT8   ? expect_int8(p, t, r)
                                        : kind == F32 ? expect_f32(p, t, r)
                                                      : expect_bf16(p, t, r, tolerance);
        }
}

/* How rows lie: as they come; x reversed and y spread by two; the same, added to what y holds. */
enum arrangement { PLAIN, SPREAD, ADDED, N_ARRANGEMENTS };

/* Run one product, panels in two calls. */
static int64_t check_product(const kt_kernels *kernels, const problem *p, enum kind kind, int64_t n_tokens,
                             enum arrangement how)
{
    int plain = how == PLAIN;
    int64_t y_stride = p->n + 3, panels = (p->n + 15) / 16, broken = 0;
    int32_t x_rows[MAX_TOKENS], y_rows[MAX_TOKENS];
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
                 .y_gate = how == ADDED ? gate : NULL, .bias = plain ? NULL : p->bias, .scratch = scratch};
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

static void test_product(const kt_kernels *kernels, enum kind kind, const char *name)
{
    int64_t cases = 0, broken = 0;
    uint64_t state = 1;
    const kt_kernels *reference = cpu_choose_row("portable", NULL, 0);
    for (int i = 0; i < N_FORMATS; i++) {
        const kt_format *f = &all_formats[i].format;
        if ((kind == INT8 && f->bits > 8) || (kind == BF16 && f->bits != 16))
            continue;
        for (int a = 0; a < N_SIZES; a++) {
            int64_t n = sizes[(a * 7 + i) % N_SIZES], k = sizes[a];
            problem p = make_problem(reference, f, n, k, &state);
            expect(&p, kind);
            for (int t = 0; t < N_TOKENS; t++) {
                int64_t wrong = check_product(kernels, &p, kind, token_counts[t], (enum arrangement)((t + a) % N_ARRANGEMENTS));
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

static int64_t check_encode(const kt_kernels *kernels, const kt_format *f, int64_t n, int64_t k, const float *x)
{
    layout l = layout_of(f, k);
    size_t bytes = (size_t)((n + 15) / 16) * l.panel_bytes;
    uint8_t *want = allocate(bytes), *got = allocate(bytes);
    double error[2] = {0, 0}, wrong = 0, square = 0;
    memset(got, 0xa5, bytes);
    oracle_encode(f, n, k, x, want);
    for (int64_t i = 0; i < (n + 15) / 16; i++)
        kernels->encode_panel(f, n, k, x, 16 * i, got + (size_t)i * l.panel_bytes, error);
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < k; c++) {
            double e = (double)x[r * k + c] - (double)oracle_value(f, want, k, r, c);
            wrong += e * e;
            square += (double)x[r * k + c] * (double)x[r * k + c];
        }
    int64_t broken = memcmp(want, got, bytes) != 0;
    broken += !(fabs(error[0] - wrong) <= 1e-4 * wrong + 1e-12 * square);
    broken += !(fabs(error[1] - square) <= 1e-4 * square);
    free(want);
    free(got);
    return broken;
}

/* Decoded values of a matrix, the source of a second encoding. */
static void decode_matrix(const kt_format *f, int64_t n, int64_t k, float *x)
{
    uint8_t *w = allocate((size_t)((n + 15) / 16) * layout_of(f, k).panel_bytes);
    oracle_encode(f, n, k, x, w);
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < k; c++)
            x[r * k + c] = oracle_value(f, w, k, r, c);
    free(w);
}

static void test_encode(const kt_kernels *kernels)
{
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
            broken += check_encode(kernels, f, n, k, x);
            cases++;
            layout l = layout_of(f, k);
            if (f->bits == 4 && f->scale != KT_SCALE_F32 && (oracle_has_zero(f) || k == l.k_padded)) {
                uint8_t *w = allocate((size_t)((n + 15) / 16) * l.panel_bytes);
                double error[2] = {0, 0};
                decode_matrix(f, n, k, x);
                for (int64_t p = 0; p < (n + 15) / 16; p++)
                    kernels->encode_panel(f, n, k, x, 16 * p, w + (size_t)p * l.panel_bytes, error);
                lossy += error[0] != 0.0;
                repeats++;
                free(w);
            }
            free(x);
        }
    law(kernels->name, "encode_panel writes the specified bytes", cases, broken);
    law(kernels->name, "values a 4-bit format holds are encoded without loss", repeats, lossy);
}

/* ---- small kernels ---- */

static void test_quantize(const kt_kernels *kernels)
{
    int64_t broken = 0;
    uint64_t state = 3;
    for (int a = 0; a < N_SIZES; a++) {
        int64_t k = sizes[a], stride = (k + 127) / 128 * 128;
        float *x = random_floats_of((size_t)k, &state), amax = 0.0f, scale = -1.0f;
        int8_t *q = allocate((size_t)stride);
        int32_t *sum = allocate((size_t)(stride / 32) * 4);
        act8 out = {q, &scale, sum, stride};
        for (int64_t c = 0; c < k; c++)
            amax = fmaxf(amax, fabsf(x[c]));
        memset(q, 99, (size_t)stride);
        kernels->quantize(x, k, &out, 0);
        broken += scale != amax / 127.0f;
        for (int64_t b = 0; b < stride; b += 32) {
            int32_t total = 0;
            for (int64_t c = b; c < b + 32; c++) {
                float want = c < k && amax > 0.0f ? rintf(x[c] * (127.0f / amax)) : 0.0f;
                broken += q[c] != (int)want;
                total += q[c];
            }
            broken += sum[b / 32] != total;
        }
        memset(x, 0, (size_t)k * sizeof *x);
        kernels->quantize(x, k, &out, 0);
        broken += scale != 0.0f || q[0] != 0;
        free(x);
        free(q);
        free(sum);
    }
    law(kernels->name, "quantize rounds amax / 127 steps, halves to even", N_SIZES, broken);
}

/* Two rows of codes for one row: the first as quantize makes it, the second what that leaves over. */
static void test_quantize_wide(const kt_kernels *kernels)
{
    int64_t broken = 0;
    uint64_t state = 5;
    for (int a = 0; a < N_SIZES; a++) {
        int64_t k = sizes[a], stride = (k + 127) / 128 * 128;
        float *x = random_floats_of((size_t)k, &state), scale[2], once;
        int8_t *q = allocate((size_t)(2 * stride)), *plain = allocate((size_t)stride);
        int32_t *sum = allocate((size_t)(2 * stride / 32) * 4);
        act8 wide = {q, scale, sum, stride}, first = {plain, &once, sum, stride};
        kernels->quantize(x, k, &first, 0);
        kernels->quantize_wide(x, k, &wide, 0);
        broken += scale[0] != once || memcmp(q, plain, (size_t)stride) != 0;
        for (int64_t c = 0; c < stride; c++) {
            double got = (double)q[c] * (double)scale[0] + (double)q[stride + c] * (double)scale[1];
            double want = c < k ? (double)x[c] : 0.0;
            broken += !(fabs(got - want) <= 0.51 * (double)scale[1] + 0x1p-23 * fabs(want));
        }
        broken += scale[1] > scale[0] / 253.0f;
        free(x);
        free(q);
        free(plain);
        free(sum);
    }
    law(kernels->name, "quantize_wide leaves half a step of amax / 127 / 254", N_SIZES, broken);
}

static void test_bf16(const kt_kernels *kernels)
{
    static const uint32_t special[] = {0x7fc00000, 0xff800000, 0x7f800000, 0x80000000, 0x3f808000, 0x3f818000,
                                       0x00000001, 0x7f7fffff, 0x7f800001, 0xffffffff, 0x3f807fff, 0x00408000};
    float x[257], back[257];
    uint16_t h[288];
    int64_t broken = 0;
    uint64_t state = 5;
    for (int i = 0; i < 257; i++)
        x[i] = i < 12 ? float_of_bits(special[i]) : next_float(&state);
    for (int a = 0; a < N_SIZES; a++) {
        kernels->to_bf16(x, sizes[a], sizes[a] + 31, h);
        kernels->from_bf16(h, sizes[a], back);
        for (int64_t c = 0; c < sizes[a] + 31; c++)
            broken += h[c] != (c < sizes[a] ? bf16_of_float(x[c]) : 0);
        for (int64_t c = 0; c < sizes[a]; c++)
            broken += bits_of_float(back[c]) != (uint32_t)h[c] << 16;
    }
    law(kernels->name, "to_bf16 rounds to nearest even, from_bf16 is exact", N_SIZES, broken);
}

static int64_t far(double got, double want, double tolerance)
{
    return !(fabs(got - want) <= tolerance);
}

static void test_norm(const kt_kernels *kernels)
{
    int64_t broken = 0;
    uint64_t state = 11;
    for (int a = 0; a < N_SIZES; a++) {
        int64_t n = sizes[a];
        float *x = random_floats_of((size_t)n, &state), *gain = random_floats_of((size_t)n, &state);
        float *out = allocate((size_t)n * sizeof *out);
        double square = 0;
        for (int64_t c = 0; c < n; c++)
            square += (double)x[c] * (double)x[c];
        kernels->norm(x, gain, n, 1e-6f, out);
        for (int64_t c = 0; c < n; c++) {
            double want = (double)x[c] / sqrt(square / (double)n + 1e-6) * (double)gain[c];
            broken += far((double)out[c], want, 1e-6 * fabs(want));
        }
        kernels->norm(x, gain, n, 1e-6f, x);        /* in place */
        broken += memcmp(x, out, (size_t)n * sizeof *x) != 0;
        free(x);
        free(gain);
        free(out);
    }
    law(kernels->name, "norm, also in place", N_SIZES, broken);
}

static void test_rope(const kt_kernels *kernels)
{
    static const int64_t dims[] = {2, 4, 6, 16, 30, 32, 34, 64, 128};
    int64_t broken = 0;
    uint64_t state = 13;
    for (size_t a = 0; a < sizeof dims / sizeof dims[0]; a++)
        for (int interleaved = 0; interleaved < 2; interleaved++) {
            int64_t dim = dims[a], half = dim / 2;
            float *x = random_floats_of((size_t)dim, &state), *was = allocate((size_t)dim * 4);
            float *co = random_floats_of((size_t)half, &state), *si = random_floats_of((size_t)half, &state);
            memcpy(was, x, (size_t)dim * 4);
            kernels->rope(x, co, si, dim, interleaved);
            for (int64_t i = 0; i < half; i++) {
                int64_t p = interleaved ? 2 * i : i, q = interleaved ? 2 * i + 1 : i + half;
                double c = (double)co[i], s = (double)si[i], u = (double)was[p], v = (double)was[q];
                broken += far((double)x[p], u * c - v * s, 2e-7 * (fabs(u * c) + fabs(v * s)));
                broken += far((double)x[q], v * c + u * s, 2e-7 * (fabs(u * s) + fabs(v * c)));
            }
            free(x);
            free(was);
            free(co);
            free(si);
        }
    law(kernels->name, "rope, both pairings", 18, broken);
}

static void test_elementwise(const kt_kernels *kernels)
{
    int64_t broken = 0;
    uint64_t state = 17;
    for (int a = 0; a < N_SIZES; a++) {
        int64_t n = sizes[a], runs = (n + 15) / 16;
        float *both = random_floats_of((size_t)(32 * runs), &state), *out = allocate((size_t)n * 4);
        float *sum = allocate((size_t)n * 4);
        for (int64_t i = 0; i < 32 * runs; i++)
            both[i] *= i % 3 ? 3.0f : 40.0f;
        kernels->swiglu(both, n, out);
        kernels->add(both, out, n, sum);
        for (int64_t c = 0; c < n; c++) {
            double gate = (double)both[c / 16 * 32 + c % 16], up = (double)both[c / 16 * 32 + 16 + c % 16];
            double want = gate / (1.0 + exp(-gate)) * up;
            broken += far((double)out[c], want, 5e-7 * fabs(want) + 1e-35);
            broken += sum[c] != both[c] + out[c];
        }
        free(both);
        free(out);
        free(sum);
    }
    law(kernels->name, "swiglu, add", N_SIZES, broken);
}

/* e^x through swiglu: gate / (1 + e^-gate) with up = 1, where e^-gate dominates. */
static void test_exp(const kt_kernels *kernels)
{
    float both[32], out[16];
    double worst = 0;
    for (int i = 0; i < 20000; i++) {
        for (int j = 0; j < 16; j++) {
            both[j] = -0.0001f - 80.0f * (float)(16 * i + j) / 320000.0f;
            both[16 + j] = 1.0f;
        }
        kernels->swiglu(both, 16, out);
        for (int j = 0; j < 16; j++) {
            double want = (double)both[j] / (1.0 + exp(-(double)both[j]));
            worst = fmax(worst, fabs((double)out[j] / want - 1.0));
        }
    }
    law(kernels->name, "exp within 3e-7 from 0 to 80", 320000, worst > 3e-7);
}

/* ---- attention ---- */

enum { ATTEND_PAGES = 3, ATTEND_KEYS = ATTEND_PAGES * 64 };

typedef struct attention_case {
    int64_t queries, dk, dv;
    int is_f32, shared;     /* shared: V is the beginning of K, as in latent attention */
} attention_case;

static const attention_case attention_cases[] = {
    {1, 16, 16, 0, 0},  {2, 64, 64, 1, 0},  {5, 128, 128, 0, 0}, {17, 33, 17, 0, 0},  {16, 48, 32, 0, 1},
    {7, 96, 80, 1, 1},  {3, 5, 2, 0, 0},    {33, 64, 64, 0, 0},  {12, 24, 24, 0, 0},  {4, 40, 40, 0, 0},
    {6, 80, 80, 0, 0},  {11, 96, 96, 0, 0}, {8, 192, 128, 0, 0}, {16, 576, 512, 0, 1}, {64, 192, 70, 0, 0},
    {9, 128, 100, 1, 0}, {3, 17, 5, 1, 0},
};
enum { ATTENTION_CASES = sizeof attention_cases / sizeof attention_cases[0] };

/* Three pages of rows, in f32 and as bf16 of the same values; q has a stride of its own. What lies beyond
 * every limit is NaN. */
typedef struct attention_data {
    const attention_case *t;
    int64_t k_stride, v_stride, q_stride, acc_stride;
    float *q, *k, *v, *max, *sum, *acc;
    uint16_t *qh, *kh, *vh, *panels;
    int32_t *limit;         /* [ATTEND_PAGES][queries] */
} attention_data;

static attention_data make_attention(const attention_case *t, uint64_t *state)
{
    int64_t nq = t->queries, even = round_up(t->dk, 2);
    attention_data d = {.t = t, .k_stride = t->dk + 3, .v_stride = t->shared ? t->dk + 3 : t->dv + 1,
                        .q_stride = even + 2, .acc_stride = t->dv + 2};
    d.q = random_floats_of((size_t)(nq * d.q_stride), state);
    d.k = random_floats_of((size_t)(ATTEND_KEYS * d.k_stride), state);
    d.v = t->shared ? d.k : random_floats_of((size_t)(ATTEND_KEYS * d.v_stride), state);
    d.qh = allocate((size_t)(nq * d.q_stride) * 2);
    d.kh = allocate((size_t)(ATTEND_KEYS * d.k_stride) * 2 + 64);
    d.vh = t->shared ? d.kh : allocate((size_t)(ATTEND_KEYS * d.v_stride) * 2 + 64);
    d.panels = allocate((size_t)(ATTEND_KEYS * even) * 2);
    d.max = allocate((size_t)nq * 4);
    d.sum = allocate((size_t)nq * 4);
    d.acc = allocate((size_t)(nq * d.acc_stride) * 4);
    d.limit = allocate((size_t)(ATTEND_PAGES * nq) * 4);
    for (int64_t i = 0; i < nq * d.q_stride; i++) {
        d.q[i] = float_of_bf16(d.qh[i] = bf16_of_float(d.q[i]));
        if (i % d.q_stride >= t->dk)
            d.qh[i] = 0;
    }
    int64_t most = 1;
    for (int64_t i = 0; i < ATTEND_PAGES * nq; i++) {       /* the last page is cut, for some queries to nothing */
        d.limit[i] = i / nq + 1 < ATTEND_PAGES ? 64 : (int32_t)((i % nq * 13 + 5 * t->dk) % 65);
        most = i / nq + 1 == ATTEND_PAGES && d.limit[i] > most ? d.limit[i] : most;
    }
    for (int64_t i = 0; i < ATTEND_KEYS * d.k_stride; i++) {
        int gone = i / d.k_stride >= (ATTEND_PAGES - 1) * 64 + most;
        d.k[i] = gone ? NAN : float_of_bf16(bf16_of_float(d.k[i]));
        d.kh[i] = gone ? 0xffff : bf16_of_float(d.k[i]);
    }
    for (int64_t i = 0; i < ATTEND_KEYS * d.v_stride && !t->shared; i++) {
        int gone = i / d.v_stride >= (ATTEND_PAGES - 1) * 64 + most;
        d.v[i] = gone ? NAN : float_of_bf16(bf16_of_float(d.v[i]));
        d.vh[i] = gone ? 0xffff : bf16_of_float(d.v[i]);
    }
    for (int64_t i = 0; i < ATTEND_KEYS * even; i++) {       /* straight from kernels.h */
        int64_t page = i / (64 * even), panel = i / (16 * even) % 4, c = i / 32 % (even / 2) * 2 + i % 2;
        int64_t key = page * 64 + panel * 16 + i / 2 % 16;
        d.panels[i] = c < t->dk ? d.kh[key * d.k_stride + c] : (uint16_t)0;
    }
    return d;
}

static void free_attention(attention_data *d)
{
    if (!d->t->shared) {
        free(d->v);
        free(d->vh);
    }
    void *all[] = {d->q, d->k, d->qh, d->kh, d->panels, d->max, d->sum, d->acc, d->limit};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* All pages; queries `each` at a time. */
static void attend_all(const kt_kernels *kernels, attention_data *d, int64_t each)
{
    const attention_case *t = d->t;
    memset(d->acc, 0, (size_t)(t->queries * d->acc_stride) * 4);
    for (int64_t i = 0; i < t->queries; i++) {
        d->max[i] = -INFINITY;
        d->sum[i] = 0;
    }
    for (int64_t i = 0; i < t->queries; i += each)
        for (int p = 0; p < ATTEND_PAGES; p++) {
            page_attention a = {.n_queries = i + each < t->queries ? each : t->queries - i, .dk = t->dk, .dv = t->dv,
                                .q_stride = d->q_stride, .k_stride = d->k_stride, .v_stride = d->v_stride,
                                .limit = d->limit + p * t->queries + i, .scale = 0.3f, .max = d->max + i,
                                .sum = d->sum + i, .acc = d->acc + i * d->acc_stride, .acc_stride = d->acc_stride};
            a.q = t->is_f32 ? (const void *)(d->q + i * d->q_stride) : (const void *)(d->qh + i * d->q_stride);
            a.k = t->is_f32 ? (const void *)(d->k + p * 64 * d->k_stride)
                            : (const void *)(d->panels + p * 64 * round_up(t->dk, 2));
            a.v = t->is_f32 ? (const void *)(d->v + p * 64 * d->v_stride)
                            : (const void *)(d->vh + p * 64 * d->v_stride);
            a.next_k = p == 0 ? a.k : NULL;
            a.next_v = p == 0 ? a.v : NULL;
            (t->is_f32 ? kernels->attend_f32 : kernels->attend_bf16)(&a);
        }
}

/* How many values lie outside the bound. f32: the score and the exponential are off by roundings of f32.
 * bf16: a weight is off by e = 2^-9 more, so the mean of the values by 2 e of their mean magnitude. */
static int64_t check_attention(const attention_data *d)
{
    const attention_case *t = d->t;
    int64_t broken = 0;
    for (int64_t i = 0; i < t->queries; i++) {
        int64_t n = (ATTEND_PAGES - 1) * 64 + d->limit[(ATTEND_PAGES - 1) * t->queries + i];
        double s[ATTEND_KEYS], top = -INFINITY, total = 0, size = 0;
        for (int64_t j = 0; j < n; j++) {
            s[j] = 0;
            for (int64_t c = 0; c < t->dk; c++) {
                s[j] += (double)d->q[i * d->q_stride + c] * (double)d->k[j * d->k_stride + c];
                size = fmax(size, fabs(s[j]));
            }
            s[j] *= (double)0.3f;
            top = fmax(top, s[j]);
        }
        for (int64_t j = 0; j < n; j++)
            total += s[j] = exp(s[j] - top);
        for (int64_t c = 0; c < t->dv; c++) {
            double want = 0, bound = 0, part = t->is_f32 ? 2e-6 * (1 + size) : 2.02 * 0x1p-9 + 4e-6 * (1 + size);
            for (int64_t j = 0; j < n; j++) {
                double v = (double)d->v[j * d->v_stride + c];
                want += s[j] / total * v;
                bound += s[j] / total * fabs(v);
            }
            broken += far((double)d->acc[i * d->acc_stride + c] / (double)d->sum[i], want, part * bound);
        }
    }
    return broken;
}

/* Panels of every count of keys; lanes beyond it are not looked at. */
static int64_t check_panels(const kt_kernels *kernels, const attention_data *d)
{
    int64_t broken = 0, even = round_up(d->t->dk, 2);
    uint16_t *panels = allocate((size_t)(64 * even) * 2);
    for (int64_t keys = 1; keys <= 64; keys += keys < 33 ? 8 : 31) {
        kernels->pack_keys(d->kh, d->k_stride, keys, d->t->dk, panels);
        for (int64_t i = 0; i < 64 * even; i++)
            broken += i / (16 * even) * 16 + i / 2 % 16 < keys && panels[i] != d->panels[i];
    }
    free(panels);
    return broken;
}

static void test_attention(const kt_kernels *kernels)
{
    int64_t broken = 0, split = 0, other = 0, packed = 0;
    uint64_t state = 19;
    const kt_row *plain = kt_rows;
    while (plain[1].kernels)
        plain++;
    for (int64_t i = 0; i < ATTENTION_CASES; i++) {
        attention_data d = make_attention(&attention_cases[i], &state);
        size_t size = (size_t)(d.t->queries * d.acc_stride) * 4;
        float *first = allocate(size);
        attend_all(kernels, &d, d.t->queries);
        int64_t wrong = check_attention(&d);
        if (wrong)
            printf("  attention case %lld: %lld values differ\n", (long long)i, (long long)wrong);
        broken += wrong;
        memcpy(first, d.acc, size);
        attend_all(kernels, &d, 3);
        split += memcmp(first, d.acc, size) != 0;
        attend_all(plain->kernels, &d, d.t->queries);
        other += memcmp(first, d.acc, size) != 0;
        packed += check_panels(kernels, &d);
        free(first);
        free_attention(&d);
    }
    law(kernels->name, "attention over pages is softmax attention", ATTENTION_CASES, broken);
    law(kernels->name, "attention has the same bits however queries are grouped", ATTENTION_CASES, split);
    law(kernels->name, "attention has the bits of the portable row", ATTENTION_CASES, other);
    law(kernels->name, "pack_keys makes panels", ATTENTION_CASES, packed);
}

static void test_ceilings(const kt_kernels *kernels)
{
    uint8_t *data = allocate(8192);
    uint64_t operations = 0, more = 0;
    memset(data, 1, 8192);
    int broken = kernels->read_bytes(data, 8192) == 0;
    kernels->int8_ops(3, &operations);
    kernels->bf16_ops(3, &more);
    broken += operations == 0 || more == 0;
    free(data);
    law(kernels->name, "ceiling loops run and count", 3, broken);
}

int main(void)
{
    uint64_t have = cpu_features();
    for (const kt_row *row = kt_rows; row->kernels; row++) {
        if (row->needs & ~have) {
            printf("skip %-12s this CPU lacks what it needs\n", row->kernels->name);
            continue;
        }
        test_product(row->kernels, INT8, "product_int8 equals the integer sums to the bit");
        test_product(row->kernels, F32, "product_f32 equals the fma chain to the bit");
        test_product(row->kernels, BF16, "product_bf16 within (k + 2) 2^-23 sum |w x|");
        test_encode(row->kernels);
        test_quantize_wide(row->kernels);
        test_quantize(row->kernels);
        test_bf16(row->kernels);
        test_norm(row->kernels);
        test_rope(row->kernels);
        test_elementwise(row->kernels);
        test_exp(row->kernels);
        test_attention(row->kernels);
        test_ceilings(row->kernels);
    }
    return failures != 0;
}
