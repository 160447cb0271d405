/* test_amx.c - the products of the row amx: integer formats equal the row avx512 to the bit and bf16 the order of
 * TDPBF16PS, at every count of tokens around a tile and a token block; the tile instructions they take are those of
 * docs/amx.md; tile_min; and tiles are given back. Runs in the emulator where the CPU has no AMX. */
#define _POSIX_C_SOURCE 200112L     /* posix_memalign, nanosleep */

#include "amxtrap/amxtrap.h"
#include "oracle.h"
#include "pool.h"

#include <time.h>

#define SPARE 3                     /* rows of x before the first that is used */
#define SKIPPED 77                  /* exit code, as test_native_c.py reads it: nothing here can run */

static const kt_kernels *amx, *vectors;

static int is_emulated(void)
{
    return amxtrap_active && amxtrap_active() == 1;
}

/* ---- problems ---------------------------------------------------------------------------------- */

typedef struct problem {
    const kt_format *format;
    int64_t n, k, most;             /* tokens */
    layout l;
    uint8_t *w;
    float *bias, *gate;
    act8 x8;                        /* [SPARE + most] */
    uint16_t *xh;
    int32_t *reversed, *shifted, *spread;
    void *scratch;
} problem;

/* is_fine: x has a scale for each 64 columns, also where a row of weights has one. */
static problem make_any(const kt_format *f, int is_fine, int64_t n, int64_t k, int64_t most, uint64_t *state)
{
    problem p = {.format = f, .n = n, .k = k, .most = most, .l = layout_of(f, k)};
    int64_t panels = (n + 15) / 16, stride = (k + 127) / 128 * 128, rows = SPARE + most;
    kt_pack_error error = {0};
    float *source = random_floats_of((size_t)(n * k), state);
    p.w = allocate((size_t)panels * p.l.panel_bytes);
    for (int64_t i = 0; i < panels; i++)
        encode_floats(vectors, f, n, k, source, i, p.w + (size_t)i * p.l.panel_bytes, &error);
    free(source);
    p.bias = random_floats_of((size_t)n, state);
    p.gate = random_floats_of((size_t)most, state);
    p.x8 = (act8){allocate((size_t)(rows * stride)), allocate((size_t)(rows * stride / 64) * sizeof(float)),
                  allocate((size_t)(rows * stride / 32) * 4), f->group || is_fine ? stride / 64 : 1, stride};
    p.xh = allocate((size_t)(rows * stride) * 2);
    for (int64_t t = 0; t < rows; t++) {
        float *x = random_floats_of((size_t)k, state);
        vectors->quantize(x, k, -1.0f, &p.x8, t);
        vectors->to_bf16(x, k, stride, p.xh + t * stride);
        free(x);
    }
    p.reversed = allocate((size_t)most * 4);
    p.shifted = allocate((size_t)most * 4);
    p.spread = allocate((size_t)most * 4);
    for (int32_t t = 0; t < most; t++) {
        p.reversed[t] = (int32_t)rows - 1 - t;
        p.shifted[t] = SPARE + t;
        p.spread[t] = 2 * t + 1;
    }
    size_t bytes = amx->product_scratch_bytes(f, k), other = vectors->product_scratch_bytes(f, k);
    p.scratch = allocate(bytes > other ? bytes : other);
    return p;
}

static problem make_problem(const kt_format *f, int64_t n, int64_t k, int64_t most, uint64_t *state)
{
    return make_any(f, 0, n, k, most, state);
}

static void free_problem(problem *p)
{
    void *all[] = {p->w, p->bias, p->gate, p->x8.q, p->x8.scale, p->x8.sum, p->xh, p->reversed, p->shifted, p->spread,
                   p->scratch};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* Rows as they come; x in runs that begin elsewhere, y spread; x backwards, y added to. */
enum arrangement { PLAIN, SHIFTED, REVERSED, N_ARRANGEMENTS };

static product product_of(const problem *p, int64_t n_tokens, enum arrangement how, float *y)
{
    int is_plain = how == PLAIN;
    return (product){.format = p->format, .n = p->n, .k = p->k, .w = p->w, .panel_bytes = p->l.panel_bytes,
                     .last_panel = (p->n + 15) / 16, .n_tokens = n_tokens, .x8 = &p->x8, .xh = p->xh,
                     .x_stride = p->x8.stride, .x_rows = is_plain ? NULL : how == SHIFTED ? p->shifted : p->reversed,
                     .y = y, .y_stride = p->n + 3, .y_rows = is_plain ? NULL : p->spread,
                     .y_gate = how == REVERSED ? p->gate : NULL, .bias = is_plain ? NULL : p->bias,
                     .scratch = p->scratch};
}

static size_t y_floats(const problem *p)
{
    return (size_t)(2 * p->most * (p->n + 3));
}

static float *new_y(const problem *p)
{
    float *y = allocate(y_floats(p) * sizeof *y);
    for (size_t i = 0; i < y_floats(p); i++)
        y[i] = 0.5f;
    return y;
}

static void run(const kt_kernels *kernels, const product *q)
{
    (q->format->bits == 16 ? kernels->product_bf16 : kernels->product_int8)(q);
}

/* ---- results ----------------------------------------------------------------------------------- */

/* The order in which TDPBF16PS adds: a chain over the even and one over the odd columns of 32, then their sum. */
static float tile_order(const problem *p, const uint16_t *x, int64_t r)
{
    float total = 0.0f;
    for (int64_t c = 0; c < p->l.k_padded; c += 32) {
        float even = 0.0f, odd = 0.0f;
        for (int64_t i = c; i < c + 32; i += 2) {
            even = fmaf(float_of_bf16(x[i]), oracle_value(p->format, p->w, p->k, r, i), even);
            odd = fmaf(float_of_bf16(x[i + 1]), oracle_value(p->format, p->w, p->k, r, i + 1), odd);
        }
        total += even + odd;
    }
    return total;
}

static void expect_bf16(const problem *p, const product *q)
{
    for (int64_t t = 0; t < q->n_tokens; t++)
        for (int64_t r = 0; r < p->n; r++) {
            float *y = q->y + (q->y_rows ? q->y_rows[t] : t) * q->y_stride + r;
            float v = tile_order(p, p->xh + (q->x_rows ? q->x_rows[t] : t) * p->x8.stride, r);
            v = q->bias ? v + q->bias[r] : v;
            *y = q->y_gate ? fmaf(q->y_gate[t], v, *y) : v;
        }
}

/* 1 if the row amx gives other bytes. */
static int64_t check(const problem *p, int64_t n_tokens, enum arrangement how)
{
    float *want = new_y(p), *got = new_y(p);
    product q = product_of(p, n_tokens, how, want);
    if (p->format->bits == 16)
        expect_bf16(p, &q);
    else
        run(vectors, &q);
    q.y = got;
    run(amx, &q);
    int64_t broken = memcmp(want, got, y_floats(p) * sizeof *got) != 0;
    free(want);
    free(got);
    return broken;
}

static void test_results(void)
{
    static const int64_t shapes[][2] = {{37, 100}, {16, 512}, {80, 1100}, {1, 1}};
    static const int64_t tokens[] = {1, 2, 15, 16, 17, 33, 48};
    int64_t cases = 0, broken = 0;
    uint64_t state = 3;
    for (int i = 0; i < N_FORMATS; i++)
        for (int s = 0; s < 8 && !reads_f32(&all_formats[i].format); s++) {
            problem p = make_any(&all_formats[i].format, s / 4, shapes[s % 4][0], shapes[s % 4][1], 48, &state);
            for (int t = 0; t < 7; t++, cases++) {
                enum arrangement how = (enum arrangement)((t + s + i) % N_ARRANGEMENTS);
                int64_t wrong = check(&p, tokens[t], how);
                if (wrong)
                    printf("  %s n %lld k %lld tokens %lld arrangement %d\n", all_formats[i].name,
                           (long long)p.n, (long long)p.k, (long long)tokens[t], how);
                broken += wrong;
            }
            free_problem(&p);
        }
    law("amx", "equals avx512, and bf16 the order of TDPBF16PS", cases, broken);
}

/* More tokens than the 256 of a block, or, where a row has 32 kB, than its 32. */
static void test_token_blocks(void)
{
    int64_t cases = 0, broken = 0;
    uint64_t state = 5;
    for (int i = 0; i < N_FORMATS; i++) {
        int bits = all_formats[i].format.bits;
        if (reads_f32(&all_formats[i].format))
            continue;
        for (int is_long = 0; is_long < 2; is_long++, cases++) {
            int64_t k = !is_long ? 70 : bits == 16 ? 17000 : 33000;
            problem p = make_problem(&all_formats[i].format, is_long ? 5 : 37, k, is_long ? 35 : 290, &state);
            broken += check(&p, p.most, i % 2 ? REVERSED : SHIFTED);
            free_problem(&p);
        }
    }
    law("amx", "the same for more tokens than a block has", cases, broken);
}

/* ---- counts ------------------------------------------------------------------------------------ */

typedef struct counts {
    int64_t loads, products, stores;
} counts;

static counts counts_now(void)
{
    return (counts){(int64_t)amxtrap_count("tileloadd"),
                    (int64_t)(amxtrap_count("tdpbssd") + amxtrap_count("tdpbf16ps")),
                    (int64_t)amxtrap_count("tilestored")};
}

/* The model of docs/amx.md, for one token block. */
static counts expected_counts(const product *q)
{
    layout l = layout_of(q->format, q->k);
    int64_t tiles = (q->n_tokens + 15) / 16, panels = q->last_panel;
    int64_t steps = l.k_padded / (q->format->bits == 16 ? 32 : 64), blocks = (steps + 7) / 8;
    if (q->format->group) {
        int64_t products = tiles * panels * (l.group == 32 ? 2 * steps : steps);
        return (counts){2 * products, products, products};
    }
    int64_t of_x = tiles * ((panels + 1) / 2), of_weights = (tiles + 1) / 2 * panels;
    return (counts){(of_x + of_weights) * steps + tiles * panels * (blocks - 1), tiles * panels * steps,
                    tiles * panels * blocks};
}

static void test_counts(void)
{
    static const int64_t shapes[][3] = {{32, 1024, 32}, {48, 1100, 33}, {20, 200, 100}};
    int64_t cases = 0, broken = 0;
    uint64_t state = 9;
    for (int i = 0; i < N_FORMATS; i++)
        for (int s = 0; s < 3 && !reads_f32(&all_formats[i].format); s++, cases++) {
            problem p = make_problem(&all_formats[i].format, shapes[s][0], shapes[s][1], shapes[s][2], &state);
            float *y = new_y(&p);
            product q = product_of(&p, p.most, PLAIN, y);
            counts before = counts_now(), want = expected_counts(&q);
            run(amx, &q);
            counts now = counts_now();
            broken += now.loads - before.loads != want.loads || now.products - before.products != want.products ||
                      now.stores - before.stores != want.stores;
            free(y);
            free_problem(&p);
        }
    law("amx", "takes the tile loads, products and stores of the model", cases, broken);
}

/* ---- pools ------------------------------------------------------------------------------------- */

/* Palette of this thread's configuration: 0 where it has none. */
static int palette(void)
{
    uint8_t config[64] = {0};
    __asm__ volatile("sttilecfg %0" : "=m"(config));
    return config[0];
}

/* A product of n tokens in a pool with its own tile_min; its tile products, or -1. */
static int64_t products_of(const problem *p, int64_t n, int32_t threads, const int32_t *least)
{
    char error[300] = "";
    kt_pool_options o = {.isa = "amx", .n_threads = threads, .tile_min = {least[0], least[1], least[2]}};
    kt_pool *pool = kt_pool_create(&o, error, sizeof error);
    kt_program_options po = {.max_tokens = n};
    kt_program *program = pool ? kt_program_create(pool, &po, error, sizeof error) : NULL;
    int32_t x = kt_program_buffer(program, p->k, KT_ROWS_TOKENS), y = kt_program_buffer(program, p->n, KT_ROWS_TOKENS);
    kt_weight w = {*p->format, p->n, p->k, 1, p->w};
    kt_run run = {.n_tokens = n, .first_output = n};
    kt_step step = {.runs = &run, .n_runs = 1};
    int64_t before = counts_now().products;
    int failed = x < 0 || y < 0 ||
                 kt_program_linear(program, (kt_view){y, 0, (int32_t)p->n}, (kt_view){x, 0, (int32_t)p->k},
                                   &(kt_linear){.weight = &w}) < 0 ||
                 kt_program_finish(program, NULL) < 0 || kt_program_run(program, &step) < 0 || palette() != 0;
    kt_program_free(program);
    kt_pool_free(pool);
    return failed ? -1 : counts_now().products - before;
}

static void test_pools(void)
{
    static const int32_t least[] = {5, 7, 3}, standard[] = {0, 0, 0};
    int64_t cases = 0, broken = 0;
    uint64_t state = 11;
    for (int i = 0; i < N_FORMATS; i++) {
        int bits = all_formats[i].format.bits;
        if (reads_f32(&all_formats[i].format))
            continue;
        int64_t from = least[bits < 8 ? KT_TILE_INT4 : bits == 8 ? KT_TILE_INT8 : KT_TILE_BF16];
        problem p = make_problem(&all_formats[i].format, 70, 130, 1, &state);
        for (int32_t threads = 1; threads <= 3; threads += 2, cases++) {
            broken += products_of(&p, from - 1, threads, least) != 0 || products_of(&p, 1, threads, standard) != 0;
            broken += products_of(&p, from, threads, least) <= 0 || products_of(&p, 2, threads, standard) <= 0;
        }
        free_problem(&p);
    }
    law("amx", "tiles are used from tile_min tokens on, and given back", cases, broken);
}

static void note_palette(void *arg, int thread, int threads)
{
    (void)threads;
    ((int *)arg)[thread] = palette();
}

/* Every thread has its tiles in every task, and has given them back when all have gone to sleep: a worker does so by
 * itself, so this waits until it has, for ten seconds at most. */
static void test_sleep(void)
{
    enum { THREADS = 3, RUNS = 4 };
    char error[300] = "";
    int64_t broken = 0;
    unsigned long taken = amxtrap_count("ldtilecfg"), given = amxtrap_count("tilerelease");
    kt_pool_options o = {.isa = "amx", .n_threads = THREADS};       /* spin_us 0: who has nothing to do, sleeps */
    kt_pool *pool = kt_pool_create(&o, error, sizeof error);
    for (int run = 0; run < RUNS && pool; run++) {
        int seen[THREADS] = {0};
        pool_run(pool, note_palette, seen);
        for (int i = 0; i < THREADS; i++)
            broken += seen[i] != 1;
    }
    unsigned long all = RUNS + (THREADS - 1) * (RUNS + 1);          /* workers also when they are started */
    for (int i = 0; i < 10000 && amxtrap_count("tilerelease") - given < all; i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    broken += !pool || amxtrap_count("tilerelease") - given != all || amxtrap_count("ldtilecfg") - taken != all;
    kt_pool_free(pool);
    law("amx", "threads have tiles in a task, and none asleep", THREADS * RUNS, broken);
}

static void test_facts(void)
{
    kt_amx_info a;
    kt_amx(&a);
    law("amx", "kt_amx says why the row runs", 1,
        !a.tile || !a.int8 || !a.bf16 || !a.shape || !a.os_state || a.permission != 0 || a.emulated != is_emulated());
}

int main(void)
{
    char error[300] = "";
    amx = cpu_choose_row("amx", error, sizeof error);
    vectors = cpu_choose_row("avx512", NULL, 0);
    if (!amx) {
        printf("skip %s\n", error);
        return SKIPPED;
    }
    test_facts();
    amx->enter();
    test_results();
    test_token_blocks();
    if (is_emulated())
        test_counts();
    amx->leave();
    if (is_emulated()) {
        test_pools();
        test_sleep();
        law("amx", "tile products ran", 2, !amxtrap_count("tdpbssd") + !amxtrap_count("tdpbf16ps"));
    }
    return failures != 0;
}
