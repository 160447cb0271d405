/* test_small_kernels.c - the elementwise kernels, the conversions of activations and the ceilings of every row that
 * this CPU can run, against plain loops. */
#define _POSIX_C_SOURCE 200112L     /* posix_memalign */

#include "oracle.h"

static const int64_t sizes[] = {1, 2, 5, 15, 16, 17, 33, 64, 100, 130, 257};
enum { N_SIZES = sizeof sizes / sizeof sizes[0] };

/* Rows to quantise, by number: random; zeros; subnormal; one value far larger than the rest, in each place. */
static float *row_to_quantize(int64_t k, int64_t number, uint64_t *state)
{
    float *x = random_floats_of((size_t)k, state);
    for (int64_t c = 0; c < k && (number == 1 || number == 2); c++)
        x[c] *= number == 1 ? 0.0f : 1e-42f;
    if (number > 2)
        x[number - 3] = number % 2 ? 1e30f : -3e4f;
    return x;
}

/* With one scale for a row, or one for 64 columns. */
static act8 rows_of_codes(int64_t rows, int64_t stride, int is_grouped)
{
    act8 out = {allocate((size_t)(rows * stride)), allocate((size_t)(rows * stride / 64) * 4),
                allocate((size_t)(rows * stride / 32) * 4), is_grouped ? stride / 64 : 1, stride};
    memset(out.q, 99, (size_t)(rows * stride));
    return out;
}

static void free_codes(act8 *x)
{
    free(x->q);
    free(x->scale);
    free(x->sum);
}

static int64_t check_quantize(const kt_kernels *kernels, const float *x, int64_t k, int is_grouped)
{
    int64_t stride = (k + 127) / 128 * 128, width = is_grouped ? 64 : stride, broken = 0;
    act8 out = rows_of_codes(1, stride, is_grouped);
    kernels->quantize(x, k, -1.0f, &out, 0);
    for (int64_t g = 0; g < stride; g += width) {
        float amax = 0.0f;
        for (int64_t c = g; c < g + width && c < k; c++)
            amax = fmaxf(amax, fabsf(x[c]));
        amax = amax < 0x1p-100f ? 0.0f : amax;
        broken += out.scale[g / width] != amax / 127.0f;
        for (int64_t c = g; c < g + width; c++)
            broken += out.q[c] != (c < k && amax > 0.0f ? (int)rintf(x[c] * (127.0f / amax)) : 0);
    }
    for (int64_t b = 0; b < stride; b += 32) {
        int32_t total = 0;
        for (int64_t c = b; c < b + 32; c++)
            total += out.q[c];
        broken += out.sum[b / 32] != total;
    }
    free_codes(&out);
    return broken;
}

static void test_quantize(const kt_kernels *kernels)
{
    int64_t broken = 0, cases = 0;
    uint64_t state = 3;
    for (int a = 0; a < N_SIZES; a++)
        for (int64_t number = 0; number < sizes[a] + 3; number++, cases += 2) {
            float *x = row_to_quantize(sizes[a], number, &state);
            broken += check_quantize(kernels, x, sizes[a], 0) + check_quantize(kernels, x, sizes[a], 1);
            free(x);
        }
    law(kernels->name, "quantize rounds steps of amax / 127 of a row or of 64 columns, halves to even", cases, broken);
}

/* Two rows of codes for one row: the first as quantize makes it, the second what that leaves over. */
static int64_t check_quantize_wide(const kt_kernels *kernels, const float *x, int64_t k, int is_grouped)
{
    int64_t stride = (k + 127) / 128 * 128, broken = 0;
    act8 wide = rows_of_codes(2, stride, is_grouped), first = rows_of_codes(1, stride, is_grouped);
    int64_t width = stride / wide.scales;
    const float *rest = wide.scale + wide.scales;
    kernels->quantize(x, k, -1.0f, &first, 0);
    kernels->quantize_wide(x, k, &wide, 0);
    broken += memcmp(wide.q, first.q, (size_t)stride) != 0;
    broken += memcmp(wide.scale, first.scale, (size_t)wide.scales * sizeof(float)) != 0;
    for (int64_t c = 0; c < stride; c++) {
        double got = (double)wide.q[c] * (double)wide.scale[c / width];
        got += (double)wide.q[stride + c] * (double)rest[c / width];
        double want = c < k ? (double)x[c] : 0.0;
        broken += !(fabs(got - want) <= 0.51 * (double)rest[c / width] + 0x1p-22 * fabs(want) + 0x1p-100);
    }
    for (int64_t g = 0; g < wide.scales; g++)
        broken += rest[g] > wide.scale[g] / 253.0f;
    free_codes(&wide);
    free_codes(&first);
    return broken;
}

static void test_quantize_wide(const kt_kernels *kernels)
{
    int64_t broken = 0, cases = 0;
    uint64_t state = 5;
    for (int a = 0; a < N_SIZES; a++)
        for (int64_t number = 0; number < sizes[a] + 3; number++, cases += 2) {
            float *x = row_to_quantize(sizes[a], number, &state);
            broken += check_quantize_wide(kernels, x, sizes[a], 0) + check_quantize_wide(kernels, x, sizes[a], 1);
            free(x);
        }
    law(kernels->name, "quantize_wide leaves half a step of amax / 127 / 254", cases, broken);
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

/* All halves but NaNs, in rows of any length. */
static void test_f16(const kt_kernels *kernels)
{
    static uint16_t h[1 << 16];
    static float x[1 << 16];
    int64_t broken = 0, n = 0;
    for (int32_t i = 0; i < 1 << 16; i++)
        if ((i & 0x7fff) <= 0x7c00)
            h[n++] = (uint16_t)i;
    for (int a = 0; a < N_SIZES; a++) {
        for (int64_t c = 0; c < n; c += sizes[a])
            kernels->from_f16(h + c, n - c < sizes[a] ? n - c : sizes[a], x + c);
        for (int64_t c = 0; c < n; c++)
            broken += bits_of_float(x[c]) != bits_of_float(float_of_f16(h[c]));
    }
    law(kernels->name, "from_f16 is exact", N_SIZES, broken);
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
        float *sum = allocate((size_t)n * 4), *ratio = allocate((size_t)n * 4), *by = allocate((size_t)n * 8);
        for (int64_t i = 0; i < 32 * runs; i++)
            both[i] *= i % 3 ? 3.0f : 40.0f;
        const kt_glu glus[] = {{1.702f, 7.0f, 1.0f, 9.0f, 0.0f, 0}, {1.0f, INFINITY, 0.0f, INFINITY, 0.0f, 0},
                               {1.5957691f, INFINITY, 0.0f, INFINITY, 0.044715f, 0}};
        const kt_glu glu = glus[a % 3];
        kernels->swiglu(both, n, &glu, out);
        kernels->add(both, out, n, sum);
        kernels->divide(both, out, n, ratio);
        kernels->gate(both, both + n, n, &(gate_by){0, KT_GATE_SIGMOID}, by);
        kernels->gate(both, both + n, n, &(gate_by){1, KT_GATE_SIGMOID}, by + n);
        float *squares = allocate((size_t)n * 4);
        kernels->swiglu(both, n, &(kt_glu){.ungated = 1}, squares);
        for (int64_t c = 0; c < n; c++) {
            broken += squares[c] != (both[c] > 0 ? both[c] * both[c] : 0);
            double gate = (double)both[c / 16 * 32 + c % 16], up = (double)both[c / 16 * 32 + 16 + c % 16];
            double limit = (double)glu.limit, alpha = (double)glu.alpha;
            gate = fmin(gate, (double)glu.gate_limit);
            up = fmax(-limit, fmin(up, limit)) + (double)glu.shift;
            double power = alpha * (gate + (double)glu.cubic * gate * gate * gate);
            double want = gate / (1.0 + exp(-power)) * up;
            /* A product is rounded before it is an exponent: the gelu's thrice, and far below zero e^x ends. */
            double bound = 5e-7 + (alpha == 1.0 ? 0.0 : (glu.cubic > 0 ? 3 : 1) * 0x1p-24 * fabs(power));
            if (power < -87)
                want = 0, bound = 0;
            broken += far((double)out[c], want, bound * fabs(want) + (power < -87 ? 1e-33 : 1e-35));
            broken += sum[c] != both[c] + out[c];
            broken += ratio[c] != both[c] / out[c];
            double each = (double)both[c] / (1.0 + exp(-(double)both[n + c]));
            double all = (double)both[c] / (1.0 + exp(-(double)both[n]));
            broken += far((double)by[c], each, 5e-7 * fabs(each) + 1e-35);
            broken += far((double)by[n + c], all, 5e-7 * fabs(all) + 1e-35);
        }
        free(both);
        free(out);
        free(sum);
        free(ratio);
        free(squares);
        free(by);
    }
    float nan[32] = {0}, out[16];
    nan[3] = nan[16 + 5] = NAN;         /* a limit does not hide what is no number */
    kernels->swiglu(nan, 16, &(kt_glu){1.702f, 7.0f, 1.0f, 7.0f, 0}, out);
    broken += !isnan(out[3]) || !isnan(out[5]) || isnan(out[4]);
    law(kernels->name, "swiglu, gate, add, divide", N_SIZES, broken);
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
        kernels->swiglu(both, 16, &(kt_glu){1.0f, INFINITY, 0.0f, INFINITY, 0}, out);
        for (int j = 0; j < 16; j++) {
            double want = (double)both[j] / (1.0 + exp(-(double)both[j]));
            worst = fmax(worst, fabs((double)out[j] / want - 1.0));
        }
    }
    law(kernels->name, "exp within 3e-7 from 0 to 80", 320000, worst > 3e-7);
}

/* Chances against double precision, and against those of the plain row, bit by bit. */
static void test_chances(const kt_kernels *kernels)
{
    enum { N = 20011 };
    const kt_row *plain = kt_rows;
    while (plain[1].kernels)
        plain++;
    int64_t broken = 0;
    float *x = allocate(N * sizeof *x), *out = allocate(N * sizeof *out), *same = allocate(N * sizeof *same);
    for (int i = 0; i < N; i++)
        x[i] = 3.0f - 110.0f * (float)i / N;
    x[7] = -INFINITY;
    kernels->chances(x, N, 3.0f, 0.9f, out);
    plain->kernels->chances(x, N, 3.0f, 0.9f, same);
    for (int i = 0; i < N; i++) {
        double want = exp((double)((x[i] - 3.0f) / 0.9f));
        broken += fabs((double)out[i] - want) > 0.51 * 0x1p-23 * want + 0x1p-149;
    }
    broken += memcmp(out, same, N * sizeof *out) != 0 || out[0] != 1.0f || out[7] != 0.0f;
    law(kernels->name, "chances within 0.51 units in the last place, the same in every row", N, broken);
    free(x);
    free(out);
    free(same);
}

static void test_masked(const kt_kernels *kernels)
{
    int64_t broken = 0;
    uint64_t state = 9;
    for (int n = 1; n <= 64; n++) {
        float *x = random_floats_of(64, &state), out[64];
        uint64_t mask = state ^ state << 23;
        kernels->masked(x, n, mask, out);
        for (int i = 0; i < n; i++)
            broken += out[i] != (mask >> i & 1 ? x[i] : -INFINITY);
        kernels->masked(x, n, mask, x);
        broken += memcmp(x, out, (size_t)n * sizeof *x) != 0;
        free(x);
    }
    law(kernels->name, "masked, also in place", 64, broken);
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

/* A block's chances in three parts, against plain sums, and against those of the plain row, bit by bit. */
static void test_split(const kt_kernels *kernels)
{
    const kt_row *plain = kt_rows;
    while (plain[1].kernels)
        plain++;
    int64_t broken = 0;
    uint64_t state = 5;
    for (int round = 0; round < 300; round++) {
        float *x = random_floats_of(KT_BLOCK_COLUMNS, &state), limits[2] = {round % 3 ? 0.4f : 0.0f, round % 5 ? 0.45f : INFINITY};
        double below = 0, above = 0;
        int between = 0;
        for (int i = 0; i < KT_BLOCK_COLUMNS; i++) {
            x[i] = fabsf(roundf(1024.0f * x[i])) / 1024.0f;
            below += x[i] < limits[0] ? (double)x[i] : 0;
            above += x[i] >= limits[1] ? (double)x[i] : 0;
            between |= (x[i] > 0.0f && x[i] >= limits[0] && x[i] < limits[1]) << i / 16;
        }
        chance_split found = kernels->split(x, limits[0], limits[1]), same = plain->kernels->split(x, limits[0], limits[1]);
        broken += found.between != between || found.below != below || found.above != above;     /* these sums are exact */
        broken += found.below != same.below || found.above != same.above;
        free(x);
    }
    law(kernels->name, "a block's chances are split into exact sums, the same in every row", 300, broken);
}

static void test_row(const kt_kernels *kernels)
{
    test_quantize(kernels);
    test_quantize_wide(kernels);
    test_bf16(kernels);
    test_f16(kernels);
    test_norm(kernels);
    test_rope(kernels);
    test_elementwise(kernels);
    test_exp(kernels);
    test_chances(kernels);
    test_split(kernels);
    test_masked(kernels);
    test_ceilings(kernels);
}

/* Every row has every kernel, its own or another's; only those with tiles have enter and leave. */
static void test_complete(void)
{
    for (const kt_row *row = kt_rows; row->kernels; row++) {
        const kt_kernels *k = row->kernels;
        const void *at[sizeof *k / sizeof(void *)];
        size_t none = (k->others == NULL) + 2 * (k->enter == NULL && k->leave == NULL);
        memcpy(at, k, sizeof at);
        for (size_t i = 0; i < sizeof at / sizeof *at; i++)
            none -= at[i] == NULL;
        law(k->name, "has all kernels", 1, none != 0);
    }
}

int main(void)
{
    test_complete();
    for_each_row(test_row);
    return failures != 0;
}
