/* test_attend_kernels.c - attention over pages of every row that this CPU can run, against softmax attention in f64
 * and against the portable row. */
#define _POSIX_C_SOURCE 200112L     /* posix_memalign */

#include "oracle.h"

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
    int32_t *limit, *from;  /* [ATTEND_PAGES][queries] */
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
    d.from = allocate((size_t)(ATTEND_PAGES * nq) * 4);
    for (int64_t i = 0; i < nq * d.q_stride; i++) {
        d.q[i] = float_of_bf16(d.qh[i] = bf16_of_float(d.q[i]));
        if (i % d.q_stride >= t->dk)
            d.qh[i] = 0;
    }
    int64_t most = 1;
    for (int64_t i = 0; i < ATTEND_PAGES * nq; i++) {       /* the last page is cut, for some queries to nothing */
        d.limit[i] = i / nq + 1 < ATTEND_PAGES ? 64 : (int32_t)((i % nq * 13 + 5 * t->dk) % 65);
        most = i / nq + 1 == ATTEND_PAGES && d.limit[i] > most ? d.limit[i] : most;
        /* The first page is cut too, in every second case, for some queries to nothing. */
        d.from[i] = i < nq && t->queries % 2 ? (int32_t)((i * 29 + t->dv) % 66) : 0;
        d.limit[i] = d.from[i] < d.limit[i] ? d.limit[i] : 0;
        d.from[i] = d.from[i] < d.limit[i] ? d.from[i] : 0;
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
    void *all[] = {d->q, d->k, d->qh, d->kh, d->panels, d->max, d->sum, d->acc, d->limit, d->from};
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
                                .limit = d->limit + p * t->queries + i,
                                .from = t->queries % 2 ? d->from + p * t->queries + i : NULL, .scale = 0.3f, .max = d->max + i,
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
        int64_t first = d->limit[i] ? d->from[i] : 64;
        for (int64_t j = first; j < n; j++) {
            s[j] = 0;
            for (int64_t c = 0; c < t->dk; c++) {
                s[j] += (double)d->q[i * d->q_stride + c] * (double)d->k[j * d->k_stride + c];
                size = fmax(size, fabs(s[j]));
            }
            s[j] *= (double)0.3f;
            top = fmax(top, s[j]);
        }
        for (int64_t j = first; j < n; j++)
            total += s[j] = exp(s[j] - top);
        for (int64_t c = 0; c < t->dv; c++) {
            double want = 0, bound = 0, part = t->is_f32 ? 2e-6 * (1 + size) : 2.02 * 0x1p-9 + 4e-6 * (1 + size);
            for (int64_t j = first; j < n; j++) {
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

int main(void)
{
    for_each_row(test_attention);
    return failures != 0;
}
