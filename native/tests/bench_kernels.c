/* bench_kernels.c - how fast the kernels are, each figure beside its ceiling, taken right before and
 * after it: bandwidth of shared machines drifts, so the median of the ratios is what counts.
 * Times are CPU times of the threads, so that other work on the machine disturbs little; two numbers
 * beside each other still differ by what it does to caches and memory.
 * Not a test. Usage: bench_kernels [gemv|cached|gemm|few|encode|attend|all] [isa] [threads] [pairs] [format]
 *
 *   gemv     one token, matrices streamed from memory; ceiling: read_bytes over the same memory
 *   cached   the same on matrices that lie in L2
 *   gemm     many tokens, one matrix pair after another; ceiling: int8_ops or bf16_ops
 *   few      1 to 32 tokens, from memory and from L2; ceiling: the slower of reading and multiplying
 *   encode   bytes of bf16 source per second and thread
 *   attend   keys and values read per second, and operations; ceilings: read_bytes and bf16_ops
 */
#define _POSIX_C_SOURCE 200112L

#include <time.h>

#include "cpu.h"
#include "oracle.h"
#include "pool.h"

/* CPU time of the calling thread. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Run a task on the team; the mean CPU time of its threads, waiting left out. */
typedef struct timed {
    pool_task *task;
    void *arg;
    double seconds[64];
} timed;

static void run_timed(void *arg, int thread, int threads)
{
    timed *t = arg;
    double start = now();
    t->task(t->arg, thread, threads);
    t->seconds[thread] = now() - start;
}

static double seconds_of(kt_pool *pool, pool_task *task, void *arg)
{
    timed t = {task, arg, {0}};
    double sum = 0;
    pool_run(pool, run_timed, &t);
    for (int i = 0; i < kt_pool_threads(pool); i++)
        sum += t.seconds[i];
    return sum / kt_pool_threads(pool);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, compare);
    return x[n / 2];
}

static double greatest(const double *x, int n)
{
    double top = 0;
    for (int i = 0; i < n; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

static const kt_format *find_format(const char *name)
{
    for (int i = 0; i < N_FORMATS; i++)
        if (!strcmp(all_formats[i].name, name))
            return &all_formats[i].format;
    exit(2);
}

typedef struct bench {
    kt_pool *pool;
    const kt_kernels *kernels;
    kt_arena *arena;
    size_t size;
    int pairs;
    const char *format;     /* only this one, or "" */
} bench;

static int wanted(const bench *b, const char *format)
{
    return !*b->format || !strcmp(b->format, format);
}

/* ---- products ---- */

typedef struct product_bench {
    const bench *b;
    product p;
    int64_t panels, matrices, repeat;
    size_t matrix_bytes;
    float *y[64];
    void *scratch[64];
} product_bench;

static void run_products(void *arg, int thread, int threads)
{
    product_bench *t = arg;
    product p = t->p;
    p.y = t->y[thread];
    p.scratch = t->scratch[thread];
    int64_t first = t->panels * thread / threads, last = t->panels * (thread + 1) / threads;
    for (int64_t n = 0; n < t->repeat; n++)
        for (int64_t m = 0; m < t->matrices; m++)
            for (int64_t i = first; i < last; i += 32) {
                p.w = (const uint8_t *)kt_arena_data(t->b->arena) + (size_t)m * t->matrix_bytes;
                p.first_panel = i;
                p.last_panel = i + 32 < last ? i + 32 : last;
                p.next = p.w + (size_t)p.last_panel * p.panel_bytes;    /* within the arena, if not of this thread */
                (p.format->bits == 16 ? t->b->kernels->product_bf16 : t->b->kernels->product_int8)(&p);
            }
}

typedef struct read_bench {
    const bench *b;
    size_t size;
    uint64_t used;
} read_bench;

static void run_read(void *arg, int thread, int threads)
{
    read_bench *t = arg;
    size_t part = t->size / (size_t)threads / 64 * 64;
    __atomic_fetch_add(&t->used, t->b->kernels->read_bytes((const uint8_t *)kt_arena_data(t->b->arena) + part * (size_t)thread, part),
                       __ATOMIC_RELAXED);
}

static product_bench make_bench(const bench *b, const kt_format *f, int64_t n, int64_t k, int64_t tokens,
                                size_t size)
{
    int threads = kt_pool_threads(b->pool);
    product_bench t = {.b = b, .panels = n / 16, .repeat = 1, .matrix_bytes = kt_packed_bytes(f, n, k)};
    t.matrices = (int64_t)(size / t.matrix_bytes);
    kt_weight w = {*f, n, k, t.matrices, kt_arena_data(b->arena)};
    kt_fill_random(b->pool, &w, 1);
    layout l = layout_of(f, k);
    int64_t stride = round_up(l.k_padded, 128);
    uint64_t state = 1;
    act8 *x8 = allocate(sizeof *x8);
    uint16_t *xh = allocate((size_t)(tokens * stride) * 2);
    *x8 = (act8){allocate((size_t)(tokens * stride)), allocate((size_t)(tokens * stride / 64) * 4),
                 allocate((size_t)(tokens * stride / 32) * 4), f->group ? stride / 64 : 1, stride};
    float *x = random_floats_of((size_t)k, &state);
    for (int64_t i = 0; i < tokens; i++) {
        b->kernels->quantize(x, k, -1.0f, x8, i);
        b->kernels->to_bf16(x, k, stride, xh + i * stride);
    }
    free(x);
    t.p = (product){.format = f, .n = n, .k = k, .panel_bytes = l.panel_bytes, .n_tokens = tokens, .x8 = x8, .xh = xh,
                    .x_stride = stride, .y_stride = n, .tuning = cpu_tuned()};
    for (int i = 0; i < threads; i++) {
        t.y[i] = allocate((size_t)(tokens * n) * 4);
        t.scratch[i] = allocate(b->kernels->product_scratch_bytes(f, k));
    }
    return t;
}

static void free_bench(product_bench *t)
{
    act8 *x8 = (act8 *)(uintptr_t)t->p.x8;
    for (int i = 0; i < kt_pool_threads(t->b->pool); i++) {
        free(t->y[i]);
        free(t->scratch[i]);
    }
    free(x8->q);
    free(x8->scale);
    free(x8->sum);
    free(x8);
    free((uint16_t *)(uintptr_t)t->p.xh);
}

static void bench_gemv(const bench *b)
{
    static const struct { const char *format; int64_t n, k; } cases[] = {
        {"int4", 1536, 2048}, {"int4", 2048, 768}, {"int4", 4096, 7168}, {"int4-g32", 1536, 2048}, {"nl4", 1536, 2048}, {"int4-s8", 1536, 2048}, {"int4-s8", 2048, 768}, {"nl4-s8", 1536, 2048}, {"nl4-s8", 2048, 768},
        {"int8", 1536, 2048}, {"int6", 1536, 2048}, {"int6-g32-s8", 1536, 2048}, {"int8", 2048, 768}, {"bf16", 1536, 2048}, {"bf16", 2048, 768},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        if (!wanted(b, cases[c].format))
            continue;
        product_bench t = make_bench(b, find_format(cases[c].format), cases[c].n, cases[c].k, 1, b->size);
        size_t bytes = (size_t)t.matrices * t.matrix_bytes;
        read_bench r = {b, bytes, 0};
        double ratio[64], rate[64], read[64];
        for (int i = 0; i < b->pairs; i++) {
            double before = seconds_of(b->pool, run_read, &r);
            double work = seconds_of(b->pool, run_products, &t);
            double after = seconds_of(b->pool, run_read, &r);
            ratio[i] = (before + after) / 2 / work;
            rate[i] = (double)bytes / work * 1e-9;
            read[i] = (double)bytes * 2 / (before + after) * 1e-9;
        }
        printf("gemv %-9s n %5lld k %5lld: %5.1f GB/s (best %5.1f), read %5.1f (best %5.1f), ratio %.3f\n",
               cases[c].format, (long long)cases[c].n, (long long)cases[c].k, median(rate, b->pairs),
               greatest(rate, b->pairs), median(read, b->pairs), greatest(read, b->pairs), median(ratio, b->pairs));
        free_bench(&t);
    }
}

static void bench_cached(const bench *b)
{
    static const char *const formats[] = {"int4", "int4-g32", "nl4", "int4-s8", "nl4-s8", "int6", "int6-g32-s8", "int8", "bf16"};
    for (size_t c = 0; c < sizeof formats / sizeof formats[0]; c++) {
        if (!wanted(b, formats[c]))
            continue;
        product_bench t = make_bench(b, find_format(formats[c]), 32 * kt_pool_threads(b->pool) * (c < 3 ? 8 : 4), 2048, 1, 0);
        t.matrices = 1;
        kt_weight w = {*find_format(formats[c]), t.p.n, 2048, 1, kt_arena_data(b->arena)};
        kt_fill_random(b->pool, &w, 1);
        t.repeat = 2000;
        double rate[64];
        for (int i = 0; i < b->pairs; i++) {
            double work = seconds_of(b->pool, run_products, &t);
            rate[i] = (double)t.matrix_bytes * (double)t.repeat / work * 1e-9;
        }
        printf("cached %-9s %4zu kB per thread: %5.1f GB/s (best %5.1f)\n", formats[c],
               t.matrix_bytes / 1024 / (size_t)kt_pool_threads(b->pool), median(rate, b->pairs), greatest(rate, b->pairs));
        free_bench(&t);
    }
}

typedef struct ops_bench {
    const bench *b;
    int bf16;
    uint64_t rounds, used, operations;
} ops_bench;

static void run_ops(void *arg, int thread, int threads)
{
    ops_bench *t = arg;
    uint64_t operations;
    uint64_t used = (t->bf16 ? t->b->kernels->bf16_ops : t->b->kernels->int8_ops)(t->rounds, &operations);
    __atomic_fetch_add(&t->used, used, __ATOMIC_RELAXED);
    t->operations = operations * (uint64_t)threads;
    (void)thread;
}

static void bench_gemm(const bench *b)
{
    static const char *const formats[] = {"int4", "int4-g32", "nl4", "int4-s8", "nl4-s8", "int6", "int6-g32-s8", "int8", "bf16"};
    static const int64_t tokens[] = {2, 4, 8, 12, 32, 64, 128, 256};
    for (size_t c = 0; c < sizeof formats / sizeof formats[0]; c++)
        for (size_t n = 0; n < sizeof tokens / sizeof tokens[0] && wanted(b, formats[c]); n++) {
            product_bench t = make_bench(b, find_format(formats[c]), 1536, 2048, tokens[n], b->size / 4);
            double ops = 2.0 * 1536 * 2048 * (double)tokens[n], ratio[64], rate[64], peak[64];
            t.matrices = (int64_t)(3e10 / ops) + 1 < t.matrices ? (int64_t)(3e10 / ops) + 1 : t.matrices;
            ops *= (double)t.matrices;
            ops_bench r = {b, t.p.format->bits == 16, 1000000, 0, 0};
            for (int i = 0; i < b->pairs; i++) {
                double before = seconds_of(b->pool, run_ops, &r);
                double work = seconds_of(b->pool, run_products, &t);
                double after = seconds_of(b->pool, run_ops, &r);
                peak[i] = (double)r.operations * 2 / (before + after) * 1e-9;
                rate[i] = ops / work * 1e-9;
                ratio[i] = rate[i] / peak[i];
            }
            printf("gemm %-9s %4lld tokens: %6.0f GOP/s (best %6.0f), peak %6.0f, ratio %.3f\n", formats[c],
                   (long long)tokens[n], median(rate, b->pairs), greatest(rate, b->pairs), median(peak, b->pairs),
                   median(ratio, b->pairs));
            free_bench(&t);
        }
}

/* Steps of few tokens, of which the slower of reading and multiplying is the limit. */
static void bench_few(const bench *b)
{
    static const char *const formats[] = {"int4", "int4-g32", "nl4", "int4-s8", "nl4-s8", "mxfp4", "int6-g32-s8", "int8"};
    static const int64_t tokens[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
    for (size_t c = 0; c < sizeof formats / sizeof formats[0]; c++)
        for (size_t n = 0; n < sizeof tokens / sizeof tokens[0] && wanted(b, formats[c]); n++) {
            product_bench t = make_bench(b, find_format(formats[c]), 1536, 2048, tokens[n], b->size / 2);
            read_bench r = {b, (size_t)t.matrices * t.matrix_bytes, 0};
            ops_bench o = {b, 0, 300000, 0, 0};
            double ops = 2.0 * 1536 * 2048 * (double)(tokens[n] * t.matrices);
            double share[64], cached[64], reading[64], multiplying[64], time[64];
            int64_t matrices = t.matrices, panels = t.panels;
            for (int i = 0; i < b->pairs; i++) {
                double read = seconds_of(b->pool, run_read, &r), peak = seconds_of(b->pool, run_ops, &o);
                time[i] = seconds_of(b->pool, run_products, &t);
                t.matrices = 1, t.panels = 16 * kt_pool_threads(b->pool), t.repeat = 200;
                double inside = seconds_of(b->pool, run_products, &t);
                double all = ops / (double)matrices * (double)t.panels / (double)panels * (double)t.repeat;
                t.matrices = matrices, t.panels = panels, t.repeat = 1;
                peak = (peak + seconds_of(b->pool, run_ops, &o)) / 2;
                reading[i] = (read + seconds_of(b->pool, run_read, &r)) / 2;
                multiplying[i] = ops / (double)o.operations * peak;
                cached[i] = all / (double)o.operations * peak / inside;
                share[i] = (reading[i] > multiplying[i] ? reading[i] : multiplying[i]) / time[i];
            }
            printf("few %-9s %2lld tokens: %.3f of the slower of reading (%.3f s) and multiplying (%.3f s); in L2 %.3f "
                   "of the peak\n", formats[c], (long long)tokens[n], median(share, b->pairs), median(reading, b->pairs),
                   median(multiplying, b->pairs), median(cached, b->pairs));
            free_bench(&t);
        }
}

/* ---- encoder ---- */

static void bench_encode(const bench *b)
{
    static const char *const formats[] = {"int4", "int4-g32", "int4-g128", "nl4", "int4-s8", "nl4-s8", "mxfp4", "int6", "int8", "bf16"};
    int64_t n = 64, k = 2048;
    uint64_t state = 1;
    float *x = random_floats_of((size_t)(n * k), &state);
    for (size_t c = 0; c < sizeof formats / sizeof formats[0]; c++) {
        const kt_format *f = find_format(formats[c]);
        layout l = layout_of(f, k);
        uint8_t *dst = allocate(l.panel_bytes);
        double rate[64];
        kt_pack_error error = {0};
        for (int i = 0; i < b->pairs; i++) {
            double a = now();
            error = (kt_pack_error){0};
            for (int64_t panel = 0; panel < n / 16; panel++)
                encode_floats(b->kernels, f, n, k, x, panel, dst, &error);
            rate[i] = (double)(n * k) * 2 / (now() - a) * 1e-6;
        }
        printf("encode %-9s %6.0f MB/s of bf16 source per core (best %6.0f), relative error %.4f\n", formats[c],
               median(rate, b->pairs), greatest(rate, b->pairs), sqrt(error.sum_sq_error / error.sum_sq));
        free(dst);
    }
    free(x);
}

/* ---- attention ---- */

/* kv heads x pages, each page of a head as the cache has it; a thread has its range of them. */
typedef struct attend_bench {
    const bench *b;
    page_attention a;
    int64_t pages, page_elements, v_offset;
    int latent;
    float *max[64], *sum[64], *acc[64];
    uint16_t *panels[64];
} attend_bench;

/* Pages of one span, as attention.c walks them. */
static void run_span(const attend_bench *t, page_attention *a, int64_t first, int64_t last, int64_t end, uint16_t *panels)
{
    for (int64_t i = 0; i < a->n_queries; i++) {
        a->max[i] = -INFINITY;
        a->sum[i] = 0;
    }
    memset(a->acc, 0, (size_t)(a->n_queries * a->acc_stride) * 4);
    for (int64_t p = first; p < last; p++) {
        const uint16_t *at = (const uint16_t *)kt_arena_data(t->b->arena) + p * t->page_elements;
        const uint16_t *next = p + 1 < end ? at + t->page_elements : NULL;
        a->k = at;
        a->v = at + t->v_offset;
        a->next_k = next;
        a->next_v = next ? next + t->v_offset : NULL;
        if (t->latent) {
            t->b->kernels->pack_keys(a->k, a->dk, 64, a->dk, panels);
            a->k = panels;
            a->next_k = NULL;
        }
        t->b->kernels->attend_bf16(a);
    }
}

static void run_attend(void *arg, int thread, int threads)
{
    attend_bench *t = arg;
    page_attention a = t->a;
    a.max = t->max[thread];
    a.sum = t->sum[thread];
    a.acc = t->acc[thread];
    int64_t first = t->pages * thread / threads, last = t->pages * (thread + 1) / threads;
    for (int64_t p = first; p < last; p += 8)
        run_span(t, &a, p, p + 8 < last ? p + 8 : last, last, t->panels[thread]);
}

typedef struct attend_case {
    const char *name;
    int64_t queries, dk, dv;
    int latent;
    int64_t pages;      /* of each thread; 0: as many as memory holds */
} attend_case;

static const attend_case attend_cases[] = {
    {"gqa, 1 token, 8 heads per kv head", 8, 128, 128, 0, 0},
    {"gqa, 1 token, 4 heads per kv head", 4, 128, 128, 0, 0},
    {"gqa, 1 token, 12 heads per kv head", 12, 128, 128, 0, 0},
    {"gqa, 1 token, 1 head per kv head", 1, 128, 128, 0, 0},
    {"mla, 1 token, 16 heads", 16, 576, 512, 1, 0},
    {"mla, 1 token, 64 heads", 64, 576, 512, 1, 0},
    {"mla, 1 token, 128 heads, 2 blocks", 64, 576, 512, 1, 64},
    {"gqa, 512 tokens on 4k, block of 64", 64, 128, 128, 0, 64},
    {"gqa, 64 columns, block of 64", 64, 64, 64, 0, 64},
    {"mla expanded, 512 tokens on 4k", 64, 192, 128, 0, 64},
};

static attend_bench make_attend(const bench *b, const attend_case *c)
{
    int threads = kt_pool_threads(b->pool);
    uint64_t state = 1;
    attend_bench t = {.b = b, .latent = c->latent, .page_elements = c->latent ? 64 * c->dk : 64 * (c->dk + c->dv),
                      .v_offset = c->latent ? 0 : 64 * c->dk};
    t.pages = c->pages ? c->pages * threads : (int64_t)(b->size / 4) / (t.page_elements * 2);
    double ops = 2.0 * 64 * (double)(c->queries * (c->dk + c->dv));
    if (ops * (double)t.pages > 4e10)
        t.pages = (int64_t)(4e10 / ops);
    float *q = random_floats_of((size_t)(c->queries * c->dk), &state);
    uint16_t *half = allocate((size_t)(c->queries * c->dk) * 2);
    b->kernels->to_bf16(q, c->queries * c->dk, c->queries * c->dk, half);
    free(q);
    int32_t *limit = allocate((size_t)c->queries * 4);
    for (int64_t i = 0; i < c->queries; i++)
        limit[i] = 64;
    t.a = (page_attention){.n_queries = c->queries, .dk = c->dk, .dv = c->dv, .q = half, .q_stride = c->dk,
                           .k_stride = c->dk, .v_stride = c->latent ? c->dk : c->dv, .limit = limit, .scale = 0.1f,
                           .acc_stride = c->dv};
    for (int i = 0; i < threads; i++) {
        t.max[i] = allocate((size_t)c->queries * 4);
        t.sum[i] = allocate((size_t)c->queries * 4);
        t.acc[i] = allocate((size_t)(c->queries * c->dv) * 4);
        t.panels[i] = allocate((size_t)(64 * c->dk) * 2);
    }
    return t;
}

static void free_attend(attend_bench *t)
{
    for (int i = 0; i < kt_pool_threads(t->b->pool); i++) {
        free(t->max[i]);
        free(t->sum[i]);
        free(t->acc[i]);
        free(t->panels[i]);
    }
    free((void *)(uintptr_t)t->a.q);
    free((void *)(uintptr_t)t->a.limit);
}

static void bench_attend(const bench *b)
{
    kt_weight w = {{16, 0, KT_SCALE_NONE, {0}}, 16, 1024, (int64_t)(b->size / (16 * 1024 * 2)), kt_arena_data(b->arena)};
    kt_fill_random(b->pool, &w, 1);
    for (size_t c = 0; c < sizeof attend_cases / sizeof attend_cases[0]; c++) {
        const attend_case *s = &attend_cases[c];
        attend_bench t = make_attend(b, s);
        size_t bytes = (size_t)(t.pages * t.page_elements * 2);
        double ops = 2.0 * 64 * (double)(s->queries * (s->dk + s->dv) * t.pages);
        read_bench r = {b, (size_t)(b->size / 4), 0};
        ops_bench o = {b, 1, 1000000, 0, 0};
        double time[64], of_read[64], of_peak[64], peak[64], read[64];
        for (int i = 0; i < b->pairs; i++) {
            double reading = seconds_of(b->pool, run_read, &r), computing = seconds_of(b->pool, run_ops, &o);
            time[i] = seconds_of(b->pool, run_attend, &t);
            reading += seconds_of(b->pool, run_read, &r);
            computing += seconds_of(b->pool, run_ops, &o);
            read[i] = 2 * (double)r.size / reading;
            peak[i] = 2 * (double)o.operations / computing;
            of_read[i] = (double)bytes / time[i] / read[i];
            of_peak[i] = ops / time[i] / peak[i];
        }
        double middle = median(time, b->pairs);
        printf("attend %-34s %5.1f GB/s, %.3f of read %5.1f; %4.0f GFLOP/s, %.3f of peak %4.0f\n", s->name,
               (double)bytes / middle * 1e-9, median(of_read, b->pairs), median(read, b->pairs) * 1e-9,
               ops / middle * 1e-9, median(of_peak, b->pairs), median(peak, b->pairs) * 1e-9);
        free_attend(&t);
    }
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "all", *isa = argc > 2 && strcmp(argv[2], "best") ? argv[2] : NULL;
    int32_t threads = argc > 3 ? atoi(argv[3]) : 2, cpus[64];
    char error[256] = "";
    for (int i = 0; i < 64; i++)
        cpus[i] = i;
    kt_pool_options options = {isa, threads, cpus, 1000};
    bench b = {.size = (size_t)1 << 30, .pairs = argc > 4 ? atoi(argv[4]) : 9, .format = argc > 5 ? argv[5] : ""};
    b.pool = kt_pool_create(&options, error, sizeof error);
    b.arena = b.pool ? kt_arena_create(b.size, 0, error, sizeof error) : NULL;
    if (!b.arena || b.pairs < 1 || b.pairs > 64) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    b.kernels = pool_kernels(b.pool);
    static const struct { const char *name; void (*run)(const bench *); } parts[] = {
        {"gemv", bench_gemv}, {"cached", bench_cached}, {"gemm", bench_gemm}, {"few", bench_few}, {"encode", bench_encode},
        {"attend", bench_attend},
    };
    printf("isa %s, %d threads\n", kt_pool_isa(b.pool), (int)kt_pool_threads(b.pool));
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (!strcmp(what, "all") || !strcmp(what, parts[i].name))
            parts[i].run(&b);
    kt_arena_free(b.arena);
    kt_pool_free(b.pool);
    return 0;
}
