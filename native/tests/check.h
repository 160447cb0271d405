/* check.h - the little that the C tests share: checks that name the numbers, random data, random packed
 * weights with their decoded values, and a loop over the ISA rows this CPU can run.
 *
 * A test program prints one line per failure and returns their number. References are plain loops in
 * double precision; a tolerance is a bound on rounding, times the sum of the magnitudes added up.
 */
#ifndef KT_CHECK_H
#define KT_CHECK_H

#include "amxtrap/amxtrap.h"
#include "gather.h"
#include "kt.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;

/* The first few failures are enough to see what is wrong. */
#define CHECK(condition, ...)                                       \
    do {                                                            \
        if (!(condition) && failures++ < 20) {                      \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);         \
            fprintf(stderr, __VA_ARGS__);                           \
            fputc('\n', stderr);                                    \
        }                                                           \
    } while (0)

/* code == KT_OK, else the sentence of a pool or program. */
#define OK(code, sentence)                                          \
    do {                                                            \
        int code_ = (code);                                         \
        CHECK(code_ >= KT_OK, "code %d: %s", code_, sentence);      \
    } while (0)

/* An error is expected, and a sentence that contains `part`. */
#define REFUSED(code, wanted, sentence, part)                                                   \
    do {                                                                                        \
        int code_ = (code);                                                                     \
        CHECK(code_ == (wanted) && strstr(sentence, part), "code %d, not %d; \"%s\" without "   \
              "\"%s\"", code_, wanted, sentence, part);                                         \
    } while (0)

static inline uint64_t random_bits(uint64_t *state)     /* splitmix64 */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in -1..1 */
static inline float random_float(uint64_t *state)
{
    return (float)((double)(random_bits(state) >> 11) / (double)(1ull << 52) - 1.0);
}

static inline void fill(float *x, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        x[i] = random_float(&seed);
}

static inline void *need(size_t size)
{
    void *memory = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!memory) {
        fprintf(stderr, "no memory for a test\n");
        exit(1);
    }
    memset(memory, 0, (size + 63) / 64 * 64);
    return memory;
}

static inline float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* As rounded to bfloat16, nearest even. */
static inline uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* ---- pools and weights ------------------------------------------------------------------------ */

static inline kt_pool *make_pool_of(const kt_pool_options *o)
{
    char error[256] = "";
    kt_pool *pool = kt_pool_create(o, error, sizeof error);
    if (!pool) {
        fprintf(stderr, "no pool: %s\n", error);
        exit(1);
    }
    return pool;
}

static inline kt_pool *make_pool(const char *isa, int32_t threads)
{
    return make_pool_of(&(kt_pool_options){.isa = isa, .n_threads = threads, .spin_us = 20});
}

/* Names of the rows this CPU can run; their number. For data races it is enough to have one with vectors and the one
 * with tiles (tests/sanitized.py): rows differ in arithmetic, not in how threads share it. */
static inline int usable_rows(const char *names[8])
{
    kt_isa_info rows[8];
    int n = 0, built = kt_isa_rows(rows, 8);
    for (int i = 0; i < built && i < 8; i++) {
        if (rows[i].usable)
            names[n++] = rows[i].name;
    }
#ifdef __SANITIZE_THREAD__
    n -= n > 1 && strcmp(names[n - 1], "portable") == 0;
#endif
    return n;
}

/* The best row that this CPU runs by itself: the emulator of AMX takes its time. */
static inline const char *own_row(void)
{
    const char *rows[8];
    int n = usable_rows(rows), is_emulated = amxtrap_active && amxtrap_active();
    return rows[is_emulated && n > 1 && strcmp(rows[0], "amx") == 0];
}

static const struct named_format {
    const char *name;
    kt_format format;
} test_formats[] = {
    {"f32", {.bits = 32}},
    {"bf16", {.bits = 16}},
    {"int8", {.bits = 8, .scale = KT_SCALE_F32}},
    {"int4-g32", {.bits = 4, .group = 32, .scale = KT_SCALE_BF16,
                  .codebook = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}}},
    {"int4-g64", {.bits = 4, .group = 64, .scale = KT_SCALE_BF16,
                  .codebook = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}}},
    {"fp8", {.bits = 8, .group = 128, .scale = KT_SCALE_F32, .codes = KT_CODE_E4M3}},
    {"int4-rotated", {.bits = 4, .scale = KT_SCALE_F32, .rotation = 64,
                      .codebook = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}}},
    {"int6", {.bits = 6, .group = 32, .scale = KT_SCALE_E4M3}},
};
enum { F32, BF16, INT8, INT4_G32, INT4_G64, FP8, INT4_ROTATED, INT6, TEST_FORMATS };

/* What the fast path may lose, of the norm of a result: activations in 8 bits or in bfloat16. */
static inline double fast_tolerance(const kt_format *format)
{
    return format->codes == KT_CODE_E4M3 ? 1e-5 : format->bits <= 8 ? 0.03 : format->bits == 16 ? 0.01 : 1e-5;
}

typedef struct test_weight {
    kt_weight w;
    float *values;      /* [count][n][k] as decoded */
    void *data;
} test_weight;

/* Random matrices with values of size 1/sqrt(k). */
static inline test_weight make_weight(kt_pool *pool, const kt_format *format, int64_t n, int64_t k, int64_t count,
                                      uint64_t seed)
{
    size_t size = kt_packed_bytes(format, n, k), values = (size_t)(n * k);
    test_weight t = {.values = need(values * (size_t)count * sizeof(float)), .data = need(size * (size_t)count)};
    t.w = (kt_weight){.format = *format, .n = n, .k = k, .count = count, .data = t.data};
    float *source = need(values * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        fill(source, values, seed + (uint64_t)i);
        for (size_t j = 0; j < values; j++)
            source[j] *= 1.7f / sqrtf((float)k);
        OK(pack_floats(pool, format, n, k, source, NULL, (uint8_t *)t.data + (size_t)i * size, NULL),
           kt_pool_error(pool));
        OK(kt_unpack(pool, &t.w, i, t.values + (size_t)i * values), kt_pool_error(pool));
    }
    free(source);
    return t;
}

/* The transposes of from's values, in its format. */
static inline test_weight make_transposed(kt_pool *pool, const test_weight *from)
{
    const kt_format *format = &from->w.format;
    int64_t n = from->w.k, k = from->w.n, count = from->w.count;
    size_t size = kt_packed_bytes(format, n, k), values = (size_t)(n * k);
    test_weight t = {.values = need(values * (size_t)count * sizeof(float)), .data = need(size * (size_t)count)};
    t.w = (kt_weight){.format = *format, .n = n, .k = k, .count = count, .data = t.data};
    for (int64_t i = 0; i < count; i++) {
        float *to = t.values + (size_t)i * values;
        for (int64_t j = 0; j < n * k; j++)
            to[j] = from->values[(size_t)i * values + (size_t)(j % k * n + j / k)];
        OK(pack_floats(pool, format, n, k, to, NULL, (uint8_t *)t.data + (size_t)i * size, NULL),
           kt_pool_error(pool));
        OK(kt_unpack(pool, &t.w, i, to), kt_pool_error(pool));
    }
    return t;
}

static inline void free_weight(test_weight *t)
{
    free(t->values);
    free(t->data);
}

/* The slow loops of a reference touch nobody else's memory: without the sanitizers they take seconds. */
#define REFERENCE __attribute__((no_sanitize("address", "thread", "undefined")))

/* y[n] = W x, in double */
REFERENCE static inline void multiply(const float *w, int64_t n, int64_t k, const double *x, double *y)
{
    for (int64_t i = 0; i < n; i++) {
        y[i] = 0;
        for (int64_t j = 0; j < k; j++)
            y[i] += (double)w[i * k + j] * x[j];
    }
}

/* ---- comparisons ------------------------------------------------------------------------------ */

/* |got - want| over |want|, as norms of the whole row. */
static inline double distance(const float *got, const double *want, int64_t n)
{
    double error = 0, size = 1e-30;
    for (int64_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    return sqrt(error / size);      /* NaN if anything is, and then no comparison holds */
}

/* exact 2: only the cache is f32; 3: it is fp8. */
static inline kt_program *make_program(kt_pool *pool, int64_t tokens, int64_t outputs, int32_t exact)
{
    char error[256] = "";
    kt_program_options o = {.max_tokens = tokens, .max_outputs = outputs, .exact = exact == 1,
                            .cache = exact == 1 || exact == 2 ? KT_CACHE_F32 : exact == 3 ? KT_CACHE_FP8 : KT_CACHE_BF16};
    kt_program *program = kt_program_create(pool, &o, error, sizeof error);
    if (!program) {
        fprintf(stderr, "no program: %s\n", error);
        exit(1);
    }
    return program;
}

/* A buffer of its own and the view of all its columns. */
static inline kt_view make_view(kt_program *program, int32_t width, int32_t domain)
{
    int32_t buffer = kt_program_buffer(program, width, domain);
    OK(buffer, kt_program_error(program));
    return (kt_view){.buffer = buffer, .column = 0, .width = width};
}

static inline float *row_of(kt_program *program, kt_view view, int64_t row)
{
    int64_t stride;
    float *data = kt_program_data(program, view.buffer, &stride);
    return data + row * stride + view.column;
}

static inline void fill_rows(kt_program *program, kt_view view, int64_t rows, uint64_t seed)
{
    for (int64_t t = 0; t < rows; t++)
        fill(row_of(program, view, t), (size_t)view.width, seed * 1000003 + (uint64_t)t);
}

/* What a step says of its only run. */
#define RUN(...) .runs = &(kt_run){__VA_ARGS__}, .n_runs = 1

static inline int report(const char *name)
{
    if (failures)
        fprintf(stderr, "%s: %d checks failed\n", name, failures);
    return failures != 0;
}

#endif
