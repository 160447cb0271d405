/* test_pack.c - whole matrices: sizes, pack and unpack with any number of threads, random weights, the choice of a
 * row, the ceilings.
 */
#define _POSIX_C_SOURCE 200112L     /* posix_memalign */

#include "cpu.h"
#include "oracle.h"

static void test_sizes(void)
{
    static const struct {
        const char *name;
        int64_t n, k;
        size_t bytes;
    } cases[] = {
        {"bf16", 16, 32, 1024},           {"bf16", 17, 33, 4096},         {"f32", 1, 1, 1024},
        {"int8", 16, 64, 1088},           {"int4", 16, 64, 576},          {"int4", 768, 2048, 48 * 17408},
        {"int4-g32", 32, 2048, 2 * 18432}, {"int4-g128", 1, 65, 1088},     {"mxfp4", 16, 2880, 24480},
        {"fp8", 17, 129, 2 * 4224},
    };
    int64_t broken = 0, n = sizeof cases / sizeof cases[0];
    for (int64_t i = 0; i < n; i++)
        for (int f = 0; f < N_FORMATS; f++)
            if (!strcmp(all_formats[f].name, cases[i].name)) {
                size_t got = kt_packed_bytes(&all_formats[f].format, cases[i].n, cases[i].k);
                if (got != (cases[i].bytes + 63) / 64 * 64)
                    printf("  %s: %zu bytes\n", cases[i].name, got), broken++;
            }
    static const kt_format bad[] = {{3, 0, 1, {0}}, {4, 48, 2, {0}}, {8, 64, 0, {0}}, {16, 64, 0, {0}},
                                    {4, 64, 2, {3, 1}}, {8, 0, 7, {0}}, {16, 0, 2, {0}},
                                    {4, 64, 2, {0}, 1}, {16, 0, 0, {0}, 1}, {8, 128, 1, {0}, 2}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        broken += kt_packed_bytes(&bad[i], 16, 64) != 0;
    broken += kt_packed_bytes(&all_formats[0].format, 0, 64) != 0;
    broken += kt_packed_bytes(&all_formats[0].format, 16, -1) != 0;
    broken += kt_packed_bytes(&all_formats[0].format, INT64_MAX, INT64_MAX) != 0;
    law("-", "kt_packed_bytes: known sizes, 0 for what is not valid", n + 13, broken);
}

static void test_pack(kt_pool *pool, const char *isa)
{
    int64_t broken = 0;
    uint64_t state = 23;
    for (int i = 0; i < N_FORMATS; i++) {
        const kt_format *f = &all_formats[i].format;
        int64_t n = 37 + i, k = 100 + 9 * i;
        size_t bytes = kt_packed_bytes(f, n, k);
        float *x = random_floats_of((size_t)(n * k), &state), *back = allocate((size_t)(n * k) * 4);
        uint8_t *want = allocate(bytes), *got = allocate(2 * bytes);
        kt_pack_error error = {0, 0}, again = {0, 0};
        oracle_encode(f, n, k, x, want);
        memset(got, 0x11, 2 * bytes);
        broken += pack_floats(pool, f, n, k, x, NULL, got, &error) != KT_OK || memcmp(got, want, bytes) != 0;
        broken += got[bytes] != 0x11;
        broken += pack_floats(pool, f, n, k, x, NULL, got + bytes, &again) != KT_OK;
        broken += error.sum_sq != again.sum_sq || error.sum_sq_error != again.sum_sq_error;
        kt_weight w = {*f, n, k, 2, got};
        broken += kt_unpack(pool, &w, 1, back) != KT_OK;
        for (int64_t j = 0; j < n * k; j++)
            broken += back[j] != oracle_value(f, want, k, j / k, j % k);
        broken += kt_unpack(pool, &w, 2, back) != KT_ERR_RANGE;
        free(x);
        free(back);
        free(want);
        free(got);
    }
    law(isa, "kt_pack and kt_unpack, same error twice", N_FORMATS, broken);
}

/* Integers of 4 bits times f32 scales, packed with those scales: the same values, though no division finds them. */
static void test_given_scales_of_integers(kt_pool *pool, const char *isa)
{
    static const kt_format f = {4, 32, KT_SCALE_F32, {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}, 0};
    enum { N = 37, K = 290, GROUPS = 10 };     /* 320 columns with padding */
    int64_t broken = 0;
    uint64_t state = 5;
    float *x = allocate(N * K * sizeof *x), *back = allocate(N * K * sizeof *x), scales[N * GROUPS];
    uint8_t *got = allocate(kt_packed_bytes(&f, N, K));
    for (int i = 0; i < N * GROUPS; i++)
        scales[i] = ldexpf(next_float(&state), (int)(next_u32(&state) % 80) - 40);
    for (int i = 0; i < N * K; i++)
        x[i] = (float)((int)(next_u32(&state) % 16) - 8) * scales[i / K * GROUPS + i % K / 32];
    kt_pack_error error = {0};
    broken += pack_floats(pool, &f, N, K, x, scales, got, &error) != KT_OK || error.sum_sq_error != 0.0;
    kt_weight w = {f, N, K, 1, got};
    broken += kt_unpack(pool, &w, 0, back) != KT_OK;
    for (int i = 0; i < N * K; i++)
        broken += x[i] != back[i];
    free(x);
    free(back);
    free(got);
    law(isa, "kt_pack with given scales: integers of 4 bits come back", N * K, broken);
}

/* E4M3 weights decoded by scales of blocks, packed with those scales: every code again, -0 too. */
static void test_given_scales(kt_pool *pool, const char *isa)
{
    static const kt_format fp8 = {8, 128, KT_SCALE_F32, {0}, KT_CODE_E4M3};
    enum { N = 150, K = 270, GROUPS = 3 };
    int64_t broken = 0;
    uint64_t state = 31;
    uint8_t *codes = allocate(N * K), *got = allocate(kt_packed_bytes(&fp8, N, K)), *want = allocate(300000);
    float *x = allocate(N * K * sizeof *x), *scales = allocate(N * GROUPS * sizeof *scales), blocks[2 * GROUPS];
    for (int i = 0; i < N * K; i++) {
        codes[i] = (uint8_t)next_u32(&state);
        codes[i] = (codes[i] & 127) == 127 ? 128 : codes[i];
    }
    for (int i = 0; i < 2 * GROUPS; i++)
        blocks[i] = ldexpf(next_float(&state), (int)(next_u32(&state) % 100) - 50);
    for (int i = 0; i < N * GROUPS; i++)
        scales[i] = blocks[i / GROUPS / 128 * GROUPS + i % GROUPS];
    float e4m3[256];
    for (int i = 0; i < 256; i++)
        e4m3[i] = (float)minifloat((uint32_t)i, 4, 3);
    kt_codes how = {8, 128, 128, 0, e4m3, blocks, NULL};
    kt_numbers source = {KT_CODES, N, K, 0, codes, &how};
    int64_t bad_row;
    broken += decode_numbers(pool, &source, K, x, &bad_row) != KT_OK;
    kt_pack_error error = {0};
    broken += pack_floats(pool, &fp8, N, K, x, scales, got, &error) != KT_OK || error.sum_sq_error != 0.0;
    for (int64_t i = 0; i < N * K; i++) {
        broken += (uint8_t)oracle_code(&fp8, got, K, i / K, i % K) != codes[i];
        broken += oracle_scale(&fp8, got, K, i / K, i % K) != scales[i / K * GROUPS + i % K / 128];
    }
    for (int i = 0; i < N * GROUPS; i++)        /* scales that do not fit the values */
        scales[i] = next_float(&state) + 4.0f;
    oracle_encode_scaled(&fp8, N, K, x, scales, want);
    broken += pack_floats(pool, &fp8, N, K, x, scales, got, NULL) != KT_OK;
    broken += memcmp(got, want, kt_packed_bytes(&fp8, N, K)) != 0;
    oracle_encode(&fp8, N, K, x, want);
    for (int i = 0; i < N * GROUPS; i++)        /* scales that are not used */
        scales[i] = i % 3 ? 0.0f : i % 2 ? 0x1p-61f : -INFINITY;
    broken += pack_floats(pool, &fp8, N, K, x, scales, got, NULL) != KT_OK;
    broken += memcmp(got, want, kt_packed_bytes(&fp8, N, K)) != 0;
    for (int i = 0; i < N_FORMATS; i++) {
        const kt_format *f = &all_formats[i].format;
        int fits = f->bits <= 8 && f->scale == KT_SCALE_F32 && !f->rotation;
        broken += !fits && pack_floats(pool, f, 16, 64, x, scales, want, NULL) != KT_ERR_SHAPE;
    }
    free(codes);
    free(got);
    free(want);
    free(x);
    free(scales);
    law(isa, "kt_pack with given scales: E4M3 comes back bit for bit", N * K, broken);
}

static void test_random(kt_pool *pool, const char *isa)
{
    int64_t broken = 0, n = 48, k = 512, count = 3;
    for (int i = 0; i < N_FORMATS; i++) {
        const kt_format *f = &all_formats[i].format;
        size_t bytes = kt_packed_bytes(f, n, k);
        uint8_t *data = allocate(bytes * (size_t)count);
        float *x = allocate((size_t)(n * k) * 4);
        kt_weight w = {*f, n, k, count, data};
        broken += kt_fill_random(pool, &w, 42) != KT_OK;
        for (int64_t m = 0; m < count; m++) {
            double square = 0, sum = 0;
            broken += kt_unpack(pool, &w, m, x) != KT_OK;
            for (int64_t j = 0; j < n * k; j++) {
                square += (double)x[j] * (double)x[j];
                sum += (double)x[j];
            }
            double rms = sqrt(square / (double)(n * k)) * sqrt((double)k);
            double mean = sum / (double)(n * k) * sqrt((double)k);
            if (!(rms > 0.6 && rms < 1.7 && fabs(mean) < 0.05))
                printf("  %s: rms %.3f, mean %.3f / sqrt(k)\n", all_formats[i].name, rms, mean), broken++;
        }
        broken += memcmp(data, data + bytes, bytes) == 0;
        free(data);
        free(x);
    }
    law(isa, "kt_fill_random: rms about 1 / sqrt(k), mean 0, matrices differ", N_FORMATS, broken);
}

static void test_rows(void)
{
    kt_isa_info rows[8];
    char error[256];
    int32_t n = kt_isa_rows(rows, 8);
    int64_t broken = n < 1 || strcmp(rows[n - 1].name, "portable") != 0 || !rows[n - 1].usable;
    broken += cpu_choose_row("sse9", error, sizeof error) != NULL;
    broken += strstr(error, "unknown ISA 'sse9'; this CPU runs ") == NULL || strstr(error, "portable") == NULL;
    const kt_kernels *best = cpu_choose_row(NULL, error, sizeof error);
    int found = 0;
    for (int32_t i = 0; i < n; i++) {
        const kt_kernels *row = cpu_choose_row(rows[i].name, error, sizeof error);
        broken += (row != NULL) != rows[i].usable || (rows[i].usable != 0) != (rows[i].missing[0] == 0);
        broken += !rows[i].usable && strstr(error, "which lacks ") == NULL;
        if (rows[i].usable && !found++)
            broken += row != best;
    }
    broken += kt_isa_rows(NULL, 0) != n;
    for (int level = 1; level <= 3; level++)
        broken += kt_cache_bytes(level) > (size_t)1 << 40;
    law("-", "rows: best first, unknown and unusable ones are refused by name", n, broken);
}

static void test_ceiling(kt_pool *pool, const char *isa)
{
    enum { SIZE = 1 << 20 };
    uint8_t *data = allocate(SIZE);
    const void *nodes[] = {data};
    double rate;
    int64_t broken = 0;
    for (int32_t kind = KT_CEILING_READ; kind <= KT_CEILING_BF16; kind++) {
        rate = 0;
        broken += kt_ceiling(pool, kind, nodes, SIZE, 1e-3, &rate) != KT_OK || !(rate > 0);
    }
    broken += kt_ceiling(pool, 9, nodes, SIZE, 1e-3, &rate) != KT_ERR_RANGE;
    broken += kt_ceiling(pool, KT_CEILING_READ, NULL, 0, 1e-3, &rate) != KT_ERR_RANGE;
    free(data);
    law(isa, "kt_ceiling gives rates", 3, broken);
}

int main(void)
{
    kt_isa_info rows[8];
    int32_t n = kt_isa_rows(rows, 8);
    test_sizes();
    test_rows();
    for (int32_t i = 0; i < n && i < 8; i++)
        for (int32_t threads = 1; threads <= 3 && rows[i].usable; threads += 2) {
            kt_pool *pool = make_pool(rows[i].name, threads);
            test_pack(pool, rows[i].name);
            test_given_scales(pool, rows[i].name);
            test_given_scales_of_integers(pool, rows[i].name);
            test_random(pool, rows[i].name);
            test_ceiling(pool, rows[i].name);
            kt_pool_free(pool);
        }
    return failures != 0;
}
