/* test_numbers.c - the numbers of checkpoints: every type is decoded, and packed from where it lies, in any order of
 * rows; what is NaN or infinite is found.
 */
#define _POSIX_C_SOURCE 200112L     /* posix_memalign */

#include "oracle.h"

static void test_decode(kt_pool *pool, const char *isa)
{
    int64_t broken = 0, bad_row;
    uint16_t half[64 * 1024], bf[300];
    float *dst = allocate(sizeof(float) * 64 * 1024);
    kt_numbers halves = {KT_F16, 64, 2048, 2, half, NULL}, bfs = {KT_BF16, 20, 30, 2, bf, NULL};
    for (int i = 0; i < 64 * 1024; i++)         /* all finite halves */
        half[i] = (uint16_t)((i >> 10 & 31) == 31 ? 0 : i);
    broken += decode_numbers(pool, &halves, 1024, dst, &bad_row) != KT_OK || bad_row != -1;
    for (int i = 0; i < 64 * 1024; i++)
        broken += (double)dst[i] != minifloat(half[i], 5, 10);
    for (int i = 0; i < 300; i++)
        bf[i] = (uint16_t)(i * 100);
    broken += decode_numbers(pool, &bfs, 15, dst, &bad_row) != KT_OK;
    for (int i = 0; i < 300; i++)
        broken += dst[i] != float_of_bf16(bf[i]);
    bf[77] = 0x7f80;
    bf[201] = 0xffc0;
    broken += decode_numbers(pool, &bfs, 15, dst, &bad_row) != KT_ERR_VALUE || bad_row != 5;
    broken += strcmp(kt_pool_error(pool), "value at row 5, column 2 is infinite") != 0;
    bfs.dtype = 4;
    broken += decode_numbers(pool, &bfs, 15, dst, &bad_row) != KT_ERR_SHAPE || bad_row != -1;
    free(dst);
    law(isa, "kt_decode: all types, NaN and Inf are found", 5, broken);
}

/* To bf16: rounded, and what is then too large is found. */
static void test_decode_to_bf16(kt_pool *pool, const char *isa)
{
    enum { N = 37, K = 75 };
    int64_t broken = 0, bad_row;
    uint64_t state = 3;
    float *x = random_floats_of(N * K, &state), divisors[K];
    uint16_t got[N * K];
    int32_t *rows = rows_in_order(N);
    kt_numbers numbers = floats_as_numbers(x, N, K);
    kt_gathered all = {N, K, 1, &numbers, rows, divisors};
    rows[2 * 4] = -1;
    for (int c = 0; c < K; c++)
        divisors[c] = 1.0f + (float)c;
    broken += kt_decode(pool, &all, KT_BF16, got, &bad_row) != KT_OK;
    for (int i = 0; i < N * K; i++)
        broken += got[i] != (i / K == 4 ? 0 : bf16_of_float(x[i] / divisors[i % K]));
    x[11 * K] = 3.4e38f;
    broken += kt_decode(pool, &all, KT_BF16, got, &bad_row) != KT_ERR_RANGE || bad_row != 11;
    broken += strcmp(kt_pool_error(pool), "value at row 11, column 0 is too large") != 0;
    x[9 * K + 2] = NAN;
    broken += kt_decode(pool, &all, KT_BF16, got, &bad_row) != KT_ERR_VALUE || bad_row != 9;
    broken += kt_decode(pool, &all, KT_F16, got, &bad_row) != KT_ERR_SHAPE;
    free(x);
    free(rows);
    law(isa, "kt_decode to bf16 rounds, divides and finds what is too large", 5, broken);
}

/* (table[code] - zero) * scale, from any row of a block on. */
static void test_decode_codes(kt_pool *pool, const char *isa)
{
    enum { N = 40, K = 75, MOST = 128 };
    int64_t broken = 0, cases = 0, bad_row;
    uint64_t state = 7;
    uint8_t *src = allocate(N * K);
    float table[256], *scale = allocate((N + MOST) * K * 4), *zero = allocate((N + MOST) * K * 4);
    float *dst = allocate(N * K * 4);
    for (int i = 0; i < 256; i++)
        table[i] = next_float(&state);
    for (int i = 0; i < N * K; i++)
        src[i] = (uint8_t)next_u32(&state);
    for (int i = 0; i < (N + MOST) * K; i++) {
        scale[i] = next_float(&state);
        zero[i] = next_float(&state);
    }
    static const int64_t block[][3] = {{128, 128, 0}, {128, 128, 100}, {1, 32, 0}, {1, 1, 0}, {7, 75, 3}};
    for (int bits = 4; bits <= 8; bits += 4)
        for (int i = 0; i < 10; i++, cases++) {
            const int64_t *b = block[i / 2], blocks = (K + b[1] - 1) / b[1], bytes = bits == 8 ? K : (K + 1) / 2;
            kt_codes how = {bits, b[0], b[1], b[2], table, scale, i % 2 ? zero : NULL};
            kt_numbers codes = {KT_CODES, N, bytes, 0, src, &how};
            broken += decode_numbers(pool, &codes, K, dst, &bad_row) != KT_OK;
            for (int64_t r = 0; r < N; r++)
                for (int64_t c = 0; c < K; c++) {
                    int64_t at = (b[2] + r) / b[0] * blocks + c / b[1];
                    uint8_t byte = src[r * bytes + (bits == 8 ? c : c / 2)];
                    uint8_t code = bits == 8 ? byte : c % 2 ? byte >> 4 : byte & 15;
                    broken += dst[r * K + c] != (table[code] - (i % 2 ? zero[at] : 0.0f)) * scale[at];
                }
        }
    kt_codes how = {8, 1, K, 0, table, scale, NULL};
    kt_numbers codes = {KT_CODES, N, K, 0, src, &how};
    scale[5] = INFINITY;
    broken += decode_numbers(pool, &codes, K, dst, &bad_row) != KT_ERR_VALUE || bad_row != 5;
    broken += strncmp(kt_pool_error(pool), "value at row 5, column 0 is", 27) != 0;
    how.bits = 5;
    broken += decode_numbers(pool, &codes, K, dst, &bad_row) != KT_ERR_SHAPE;
    how.bits = 4;
    how.block_columns = 0;
    broken += decode_numbers(pool, &codes, K, dst, &bad_row) != KT_ERR_SHAPE;
    free(src);
    free(scale);
    free(zero);
    free(dst);
    law(isa, "kt_decode of codes: 4 and 8 bits, blocks, zeros", cases + 3, broken);
}

/* Blocks of GGUF files, of just the bytes that they have: all codes 0, scales 2, minima 3. That the numbers are
 * those of the gguf package is a test in Python. */
static void test_blocks(kt_pool *pool, const char *isa)
{
    static const struct { int32_t dtype, elements, bytes, scale, minimum; float first; } rows[] = {
        {KT_Q4_0, 32, 18, 0, -1, -16}, {KT_Q4_1, 32, 20, 0, 2, 3},  {KT_Q5_0, 32, 22, 0, -1, -32},
        {KT_Q5_1, 32, 24, 0, 2, 3},    {KT_Q8_0, 32, 34, 0, -1, 0}, {KT_Q4_K, 256, 144, 0, 2, 0},
        {KT_Q5_K, 256, 176, 0, 2, 0},  {KT_Q6_K, 256, 210, 208, -1, 0}, {KT_GGUF_MXFP4, 32, 17, -1, -1, 0},
    };
    int broken = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const int32_t k = 3 * rows[i].elements, n = 5;
        const size_t blocks = (size_t)n * 3, bytes = (size_t)rows[i].bytes;
        uint8_t *src = calloc(blocks, bytes);
        float *dst = malloc((size_t)n * (size_t)k * sizeof *dst);
        for (size_t b = 0; b < blocks; b++) {
            if (rows[i].scale >= 0)
                src[b * bytes + (size_t)rows[i].scale + 1] = 0x40;      /* 2 in f16 */
            if (rows[i].minimum >= 0)
                memcpy(src + b * bytes + rows[i].minimum, &(uint16_t){0x4200}, 2);      /* 3 */
        }
        kt_numbers numbers = {rows[i].dtype, n, 3 * rows[i].bytes, 0, src, NULL};
        int64_t bad_row;
        broken += decode_numbers(pool, &numbers, k, dst, &bad_row) != KT_OK;
        broken += dst[0] != rows[i].first || dst[n * k - 1] != rows[i].first;
        broken += decode_numbers(pool, &numbers, k - 1, dst, &bad_row) != KT_ERR_SHAPE;
        free(src);
        free(dst);
    }
    law(isa, "kt_decode: blocks", 27, broken);
}

enum { SOURCES = 7, SOURCE_ROWS = 29, SOURCE_K = 192 };

/* The same small numbers, exact in each type: in rows and across, as f32, bf16 and f16, and as codes. */
typedef struct many_sources {
    float x[SOURCE_ROWS][SOURCE_K], across[SOURCE_K][SOURCE_ROWS], table[256], scale[SOURCE_ROWS];
    uint16_t bf16[SOURCE_ROWS][SOURCE_K], f16[SOURCE_ROWS][SOURCE_K], f16_across[SOURCE_K][SOURCE_ROWS];
    uint16_t bf16_across[SOURCE_K][SOURCE_ROWS];
    uint8_t codes[SOURCE_ROWS][SOURCE_K];
    kt_codes how;
    kt_numbers numbers[SOURCES];
} many_sources;

static void fill_sources(many_sources *m, uint64_t *state)
{
    enum { N = SOURCE_ROWS, K = SOURCE_K };
    uint16_t half[256];
    for (int i = 0; i < 256; i++) {
        m->table[i] = (float)(i - 128) / 16.0f;
        for (half[i] = 0; float_of_f16(half[i]) != m->table[i]; half[i] = (uint16_t)(half[i] + 8))
            continue;
    }
    for (int r = 0; r < N; r++)
        for (int c = 0; c < K; c++) {
            uint8_t code = m->codes[r][c] = (uint8_t)next_u32(state);
            m->scale[r] = 1.0f;
            m->x[r][c] = m->across[c][r] = m->table[code];
            m->bf16[r][c] = m->bf16_across[c][r] = bf16_of_float(m->table[code]);
            m->f16[r][c] = m->f16_across[c][r] = half[code];
        }
    m->how = (kt_codes){8, 1, K, 0, m->table, m->scale, NULL};
    const kt_numbers numbers[] = {
        {KT_F32, N, 4 * K, 4, m->x, NULL},    {KT_F32, N, 4, 4 * N, m->across, NULL},
        {KT_BF16, N, 2 * K, 2, m->bf16, NULL}, {KT_BF16, N, 2, 2 * N, m->bf16_across, NULL},
        {KT_F16, N, 2 * K, 2, m->f16, NULL},  {KT_F16, N, 2, 2 * N, m->f16_across, NULL},
        {KT_CODES, N, K, 0, m->codes, &m->how},
    };
    memcpy(m->numbers, numbers, sizeof numbers);
}

/* Rows gathered from sources of all types are packed as the same numbers in one f32 matrix. */
static void test_gathered(kt_pool *pool, const char *isa)
{
    enum { N = 90, K = SOURCE_K };
    int64_t broken = 0, bad_row;
    uint64_t state = 77;
    many_sources *m = allocate(sizeof *m);
    float *x = allocate(N * K * sizeof *x), divisors[K];
    int32_t rows[2 * N];
    uint8_t *want = allocate(1 << 20), *got = allocate(1 << 20);
    fill_sources(m, &state);
    for (int c = 0; c < K; c++)
        divisors[c] = 0.5f + (float)(c % 3);
    for (int i = 0; i < N; i++) {
        int32_t source = rows[2 * i] = (int32_t)(next_u32(&state) % (SOURCES + 1)) - 1;
        int32_t row = rows[2 * i + 1] = source < 0 ? -1 : (int32_t)(next_u32(&state) % SOURCE_ROWS);
        for (int c = 0; c < K; c++)
            x[i * K + c] = source < 0 ? 0.0f : m->x[row][c];
    }
    kt_gathered all = {N, K, SOURCES, m->numbers, rows, NULL};
    for (int i = 0; i < N_FORMATS; i++) {
        const kt_format *f = &all_formats[i].format;
        kt_pack_error error = {0}, again = {0};
        broken += pack_floats(pool, f, N, K, x, NULL, want, &error) != KT_OK;
        broken += kt_pack(pool, f, &all, NULL, NULL, got, &again, &bad_row) != KT_OK || bad_row != -1;
        broken += memcmp(want, got, kt_packed_bytes(f, N, K)) != 0 || memcmp(&error, &again, sizeof error) != 0;
    }
    all.divisors = divisors;
    for (int i = 0; i < N * K; i++)
        x[i] /= divisors[i % K];
    const kt_format *f32 = &all_formats[0].format;
    broken += pack_floats(pool, f32, N, K, x, NULL, want, NULL) != KT_OK;
    broken += kt_pack(pool, f32, &all, NULL, NULL, got, NULL, &bad_row) != KT_OK;
    broken += memcmp(want, got, kt_packed_bytes(f32, N, K)) != 0;
    rows[2 * 70] = SOURCES;
    broken += kt_pack(pool, f32, &all, NULL, NULL, got, NULL, &bad_row) != KT_ERR_RANGE || bad_row != -1;
    rows[2 * 70] = 0;
    rows[2 * 70 + 1] = SOURCE_ROWS;
    broken += kt_pack(pool, f32, &all, NULL, NULL, got, NULL, &bad_row) != KT_ERR_RANGE;
    free(m);
    free(x);
    free(want);
    free(got);
    law(isa, "kt_pack gathers rows of any type, transposed or not", N_FORMATS + 3, broken);
}

/* In every format, in two kinds of sources each. */
static void test_bad_values(kt_pool *pool, const char *isa)
{
    enum { N = 40, K = SOURCE_K };
    int64_t broken = 0, cases = 0, bad_row;
    uint64_t state = 78;
    many_sources *m = allocate(sizeof *m);
    uint8_t *got = allocate(1 << 20);
    fill_sources(m, &state);
    for (int i = 0; i < N_FORMATS; i++)
        for (int j = 0; j < 2; j++, cases++) {
            int32_t rows[2 * N], s = (i + j) % SOURCES;
            for (int r = 0; r < N; r++) {
                rows[2 * r] = r < 3 ? -1 : s;
                rows[2 * r + 1] = (r + 5) % SOURCE_ROWS;
            }
            int is_nan = (i + s) % 2;           /* row 17 of the source is row 12 of the matrix */
            m->x[17][190] = m->across[190][17] = m->scale[17] = is_nan ? NAN : -INFINITY;
            m->bf16[17][190] = m->bf16_across[190][17] = is_nan ? 0xffc0 : 0xff80;
            m->f16[17][190] = m->f16_across[190][17] = is_nan ? 0xfe00 : 0xfc00;
            kt_gathered all = {N, K, SOURCES, m->numbers, rows, NULL};
            kt_pack_error error = {0};
            broken += kt_pack(pool, &all_formats[i].format, &all, NULL, NULL, got, &error, &bad_row) != KT_ERR_VALUE;
            broken += bad_row != 12 || strncmp(kt_pool_error(pool), "value at row 12, column ", 24) != 0;
        }
    free(m);
    free(got);
    law(isa, "kt_pack finds NaN and Inf", cases, broken);
}

int main(void)
{
    kt_isa_info rows[8];
    int32_t n = kt_isa_rows(rows, 8);
    for (int32_t i = 0; i < n && i < 8; i++)
        for (int32_t threads = 1; threads <= 3 && rows[i].usable; threads += 2) {
            kt_pool *pool = make_pool(rows[i].name, threads);
            test_decode(pool, rows[i].name);
            test_decode_to_bf16(pool, rows[i].name);
            test_decode_codes(pool, rows[i].name);
            test_blocks(pool, rows[i].name);
            test_gathered(pool, rows[i].name);
            test_bad_values(pool, rows[i].name);
            kt_pool_free(pool);
        }
    return failures != 0;
}
