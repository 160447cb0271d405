/* test_factors.c - factors of adapters from the layouts of files: each number is where kernels read it, rounded to nearest
 * even, and padding stays zero; what is not finite, or beyond the factor, is refused. */
#include "check.h"
#include "kernels/formats.h"

enum { COUNT = 3, RANK = 5, COLUMNS = 37, WIDE = 48, ROWS = 21, PANELS = 2 };

/* Number n of a factor, exactly as f16 and as bf16. */
static float number(int n)
{
    return 0.125f * (float)(n % 201 - 100);
}

/* `n` numbers of a type, one behind the other. */
static void *numbers(int32_t dtype, int n)
{
    uint8_t *made = need((size_t)n * 4);
    for (int i = 0; i < n; i++) {
        float x = number(i);
        uint16_t half = bf16_of_float(x);
        if (dtype == KT_F16) {      /* found by trying: there is no encoder */
            uint32_t h = 0;
            while (float_of_f16((uint16_t)h) != x)
                h++;
            half = (uint16_t)h;
        }
        memcpy(made + i * (dtype == KT_F32 ? 4 : 2), dtype == KT_F32 ? (void *)&x : (void *)&half, dtype == KT_F32 ? 4 : 2);
    }
    return made;
}

static float value_of(const void *out, int64_t at, int in_f32)
{
    return in_f32 ? ((const float *)out)[at] : float_of_bf16(((const uint16_t *)out)[at]);
}

/* Experts alternate in the file, or follow each other. */
static kt_factor laid(int32_t dtype, int64_t rows, int64_t columns, int alternate, void *data)
{
    int64_t size = dtype == KT_F32 ? 4 : 2;
    if (alternate)
        return (kt_factor){dtype, COUNT, rows, columns, size, columns * COUNT * size, COUNT * size, data};
    return (kt_factor){dtype, COUNT, rows, columns, rows * columns * size, columns * size, size, data};
}

static float value_in(const kt_factor *f, int64_t i, int64_t r, int64_t c)
{
    return number((int)((i * f->matrix_bytes + r * f->row_bytes + c * f->column_bytes) / (f->dtype == KT_F32 ? 4 : 2)));
}

static void check_a(int32_t dtype, int in_f32, int alternate)
{
    void *data = numbers(dtype, COUNT * RANK * COLUMNS);
    float *out = need(COUNT * RANK * WIDE * sizeof *out);
    kt_factor a = laid(dtype, RANK, COLUMNS, alternate, data);
    memset(out, 0, COUNT * RANK * WIDE * sizeof *out);
    CHECK(kt_factor_a(&a, in_f32, out) == KT_OK, "type %d", (int)dtype);
    for (int64_t i = 0; i < COUNT; i++)
        for (int64_t r = 0; r < RANK; r++)
            for (int64_t c = 0; c < WIDE; c++) {
                float want = c < COLUMNS ? value_in(&a, i, r, c) : 0.0f;
                float got = value_of(out, (i * RANK + r) * WIDE + c, in_f32);
                CHECK(got == want, "A of type %d, %d %d %d", (int)dtype, (int)i, (int)r, (int)c);
            }
    free(out);
    free(data);
}

/* Rows of the factor in turned order, with a gap. */
static void check_b(int32_t dtype, int in_f32, int alternate)
{
    void *data = numbers(dtype, COUNT * RANK * ROWS);
    float *out = need(COUNT * PANELS * RANK * 16 * sizeof *out);
    kt_factor b = laid(dtype, ROWS, RANK, alternate, data);
    int32_t lanes[PANELS * 16];
    for (int i = 0; i < PANELS * 16; i++)
        lanes[i] = i < ROWS ? ROWS - 1 - i : -1;
    memset(out, 0, COUNT * PANELS * RANK * 16 * sizeof *out);
    CHECK(kt_factor_b(&b, lanes, PANELS, in_f32, out) == KT_OK, "type %d", (int)dtype);
    for (int64_t i = 0; i < COUNT; i++)
        for (int64_t at = 0; at < PANELS * 16; at++)
            for (int64_t r = 0; r < RANK; r++) {
                float want = lanes[at] < 0 ? 0.0f : value_in(&b, i, lanes[at], r);
                float got = value_of(out, ((i * PANELS + at / 16) * RANK + r) * 16 + at % 16, in_f32);
                CHECK(got == want, "B of type %d, %d %d %d", (int)dtype, (int)i, (int)at, (int)r);
            }
    lanes[3] = ROWS;
    CHECK(kt_factor_b(&b, lanes, PANELS, in_f32, out) == KT_ERR_SHAPE, "a row that is not there");
    free(out);
    free(data);
}

static void check_bad(void)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    int32_t lanes[16] = {0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    float x[20] = {1.0f}, out[32];
    uint16_t halves[32] = {0};
    kt_factor f = {KT_F32, 1, 1, 20, sizeof x, sizeof x, sizeof *x, x};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        x[19] = bad[i];
        CHECK(kt_factor_a(&f, 0, halves) == KT_ERR_VALUE && kt_factor_a(&f, 1, out) == KT_ERR_VALUE, "A with %g", (double)bad[i]);
        f.columns = 1;
        x[0] = bad[i];
        CHECK(kt_factor_b(&f, lanes, 1, 1, out) == KT_ERR_VALUE, "B with %g", (double)bad[i]);
        f.columns = 20;
        x[0] = 1.0f;
    }
    x[19] = 1.0f;
    x[0] = 1.0f + 0x1p-8f;      /* between two: the even one */
    x[1] = 1.0f + 0x3p-8f;
    CHECK(kt_factor_a(&f, 0, halves) == KT_OK && halves[0] == 0x3f80 && halves[1] == 0x3f82, "halves to even");
    f.dtype = KT_Q4_0;
    CHECK(kt_factor_a(&f, 0, halves) == KT_ERR_SHAPE, "blocks");
}

int main(void)
{
    static const int32_t types[] = {KT_F32, KT_BF16, KT_F16};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (int in_f32 = 0; in_f32 < 2; in_f32++)
            for (int alternate = 0; alternate < 2; alternate++) {
                check_a(types[t], in_f32, alternate);
                check_b(types[t], in_f32, alternate);
            }
    check_bad();
    return report("test_factors");
}
