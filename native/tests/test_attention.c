/* test_attention.c - GQA and MLA over a paged cache against plain loops: prefill in one piece, in chunks
 * and token by token; and the laws that thread counts never change a bit, nor, for GQA, how the prompt was
 * cut (MLA has two forms, and the cut decides which). */
#include "check.h"

enum { LAYER = 192 };           /* bytes in a page before this layer */
enum { FP8_CACHE = 3 };         /* `exact` of make_program */

typedef struct shape {
    const char *name;
    int32_t mla, heads, kv_heads, dim;          /* GQA */
    int32_t nope, rope, v, lora;                /* MLA */
    int format;
    int32_t window, sinks, values, chunked;     /* GQA; values: columns, 0: dim */
} shape;

static const shape shapes[] = {
    {"gqa 8/2 x 64", 0, 8, 2, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {"gqa 3/3 x 40", 0, 3, 3, 40, 0, 0, 0, 0, 0, 100, 0, 0, 0},
    {"gqa 72/1 x 16", 0, 72, 1, 16, 0, 0, 0, 0, 0, 0, 1, 0, 0},
    {"gqa 12/1 x 80", 0, 12, 1, 80, 0, 0, 0, 0, 0, 1, 1, 0, 0},
    {"mla 4, bf16", 1, 4, 1, 0, 32, 16, 32, 64, BF16, 0, 0, 0, 0},
    {"mla 3, int8", 1, 3, 1, 0, 24, 8, 40, 96, INT8, 0, 0, 0, 0},
    {"mla 5, f32", 1, 5, 1, 0, 16, 8, 16, 40, F32, 0, 0, 0, 0},
    {"gqa 6/2 x 8", 0, 6, 2, 8, 0, 0, 0, 0, 0, 513, 1, 0, 0},
    {"gqa 12/2 x 26, values of 17", 0, 12, 2, 26, 0, 0, 0, 0, 0, 70, 1, 17, 0},
    {"gqa 2/1 x 6, values of 50", 0, 2, 1, 6, 0, 0, 0, 0, 0, 0, 0, 50, 0},
    {"gqa 4/2 x 24, chunks of 90", 0, 4, 2, 24, 0, 0, 0, 0, 0, 90, 0, 0, 1},
    {"gqa 5/1 x 8, chunks of 192", 0, 5, 1, 8, 0, 0, 0, 0, 0, 192, 1, 0, 1},
};


static int32_t value_columns(const shape *s)
{
    return s->values ? s->values : s->dim;
}

typedef struct model {
    const shape *s;
    int32_t exact, q_width, kv_width, v_width, out_width;
    int32_t kv_heads;           /* with scales, of K and V together */
    float scale;
    size_t page_bytes;
    float sinks[80];
    test_weight uk_in, uk_out, uv;
} model;

typedef struct run {
    kt_program *program;
    kt_view q, k, v, out;       /* MLA: k is the latent */
    int32_t windowed;
} run;

/* uk_out holds the transposes of uk_in. */
static void make_mla(kt_pool *pool, model *m)
{
    const shape *s = m->s;
    const kt_format *f = &test_formats[s->format].format;
    m->uk_in = make_weight(pool, f, s->lora, s->nope, s->heads, 11);
    m->uk_out = make_transposed(pool, &m->uk_in);
    m->uv = make_weight(pool, f, s->v, s->lora, s->heads, 13);
}

static model make_model(kt_pool *pool, const shape *s, int32_t exact)
{
    model m = {.s = s, .exact = exact};
    fill(m.sinks, 80, 21);
    size_t element = exact == FP8_CACHE ? 1 : exact ? 4 : 2;
    if (s->mla) {
        make_mla(pool, &m);
        m.q_width = s->heads * (s->nope + s->rope);
        m.kv_width = m.v_width = s->lora + s->rope;
        m.out_width = s->heads * s->v;
        m.scale = 1 / sqrtf((float)(s->nope + s->rope));
        m.kv_heads = s->rope ? 2 : 1;
        m.page_bytes = LAYER + (size_t)m.kv_width * 64 * element;
    } else {
        m.q_width = s->heads * s->dim;
        m.out_width = s->heads * value_columns(s);
        m.kv_width = s->kv_heads * s->dim;
        m.v_width = s->kv_heads * value_columns(s);
        m.scale = 1 / sqrtf((float)s->dim);
        m.kv_heads = 2 * s->kv_heads;
        m.page_bytes = LAYER + (size_t)(m.kv_width + m.v_width) * 64 * element;
    }
    m.page_bytes += exact == FP8_CACHE ? 64 * (size_t)m.kv_heads : 0;
    return m;
}

static void free_model(model *m)
{
    if (m->s->mla) {
        free_weight(&m->uk_in);
        free_weight(&m->uk_out);
        free_weight(&m->uv);
    }
}

/* windowed: keys and values lie in window pages. */
static run record_in(kt_pool *pool, const model *m, int64_t tokens, int32_t windowed)
{
    const shape *s = m->s;
    run r = {.program = make_program(pool, tokens, 1, m->exact), .windowed = windowed};
    kt_program *p = r.program;
    r.q = make_view(p, m->q_width, KT_ROWS_TOKENS);
    r.k = make_view(p, m->kv_width, KT_ROWS_TOKENS);
    r.v = s->mla ? r.k : make_view(p, m->v_width, KT_ROWS_TOKENS);
    r.out = make_view(p, m->out_width, KT_ROWS_TOKENS);
    if (s->mla) {
        kt_mla a = {s->heads, s->nope, s->rope, s->v, s->lora, m->scale, LAYER, m->uk_in.w, m->uk_out.w, m->uv.w, 0};
        OK(kt_program_mla(p, r.out, r.q, r.k, &a), kt_program_error(p));
    } else {
        kt_gqa a = {s->heads, s->kv_heads, s->dim, m->scale, LAYER, s->window, s->sinks ? m->sinks : NULL, 0, s->values,
                    windowed, s->chunked};
        OK(kt_program_gqa(p, r.out, r.q, r.k, r.v, &a), kt_program_error(p));
    }
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    return r;
}

static run record(kt_pool *pool, const model *m, int64_t tokens)
{
    return record_in(pool, m, tokens, 0);
}

/* What token t brings; the same in every run. */
static void inputs(const model *m, int64_t t, float *q, float *k, float *v)
{
    if (q)
        fill(q, (size_t)m->q_width, 1000 + (uint64_t)t);
    if (k)
        fill(k, (size_t)m->kv_width, 500000 + (uint64_t)t);
    if (v && v != k)
        fill(v, (size_t)m->v_width, 900000 + (uint64_t)t);
}

typedef struct cache {
    void *data;
    int32_t *pages;
    int64_t n;
} cache;

/* Pages in a scrambled order, with one more than needed. */
static cache make_cache(const model *m, int64_t tokens)
{
    cache c = {.n = (tokens + 63) / 64};
    c.data = need((size_t)(c.n + 1) * m->page_bytes);
    c.pages = need((size_t)c.n * sizeof(int32_t));
    for (int64_t i = 0; i < c.n; i++)
        c.pages[i] = (int32_t)(c.n - i);
    return c;
}

static cache random_cache(const model *m, int64_t tokens)
{
    cache c = make_cache(m, tokens);
    uint64_t state = 5;
    for (size_t i = 0; i < (size_t)(c.n + 1) * m->page_bytes / 2; i++)
        ((uint16_t *)c.data)[i] = to_bf16(random_float(&state));
    for (int64_t i = 1; i <= c.n + 1 && m->exact == FP8_CACHE; i++) {      /* scales about 1 */
        uint8_t *end = (uint8_t *)c.data + (size_t)i * m->page_bytes;
        for (int64_t j = 1; j <= 64 * m->kv_heads; j++)
            end[-j] = (uint8_t)(117 + end[-j] % 5);
    }
    return c;
}

static void free_cache(cache *c)
{
    free(c->data);
    free(c->pages);
}

static void step(run *r, const model *m, const cache *c, int64_t start, int64_t n, float *out)
{
    for (int64_t t = 0; t < n; t++)
        inputs(m, start + t, row_of(r->program, r->q, t), row_of(r->program, r->k, t), row_of(r->program, r->v, t));
    /* MLA: the first third of many tokens absorbed, the rest expanded. */
    kt_step s = {RUN(.n_tokens = n, .start = start, .first_output = n, .pages = c->pages, .n_pages = c->n,
                     .expanded = start + n / 3, .expanded_end = n > 1 ? start + n : 0),
                 .cache = c->data, .cache_pages = c->n + 1, .page_bytes = m->page_bytes};
    kt_run in_windows = s.runs[0];
    in_windows.window_pages = c->pages;
    in_windows.pages = NULL;
    if (r->windowed)
        s = (kt_step){.runs = &in_windows, .n_runs = 1, .windows = c->data, .n_window_pages = c->n + 1,
                      .window_page_bytes = m->page_bytes};
    OK(kt_program_run(r->program, &s), kt_program_error(r->program));
    for (int64_t t = 0; t < n && out; t++)
        memcpy(out + t * m->out_width, row_of(r->program, r->out, t), sizeof(float) * (size_t)m->out_width);
}

static const char *const HOW[] = {"fast", "exact", "f32 cache", "fp8 cache"};

/* ---- the reference ------------------------------------------------------------------------------ */

/* The E4M3 number nearest to x / unit, times the unit, ties to the even code: all are tried. */
REFERENCE static double nearest_fp8(double x, double unit)
{
    static double values[127];      /* of the codes; ldexp() for each number would be most of this program's time */
    for (int code = 0; code < 127 && values[126] == 0; code++)
        values[code] = ldexp(code < 8 ? code : 8 + code % 8, (code < 8 ? 1 : code / 8) - 10);
    double best = 0, off = fabs(x);
    for (int code = 0; code < 127; code++) {
        double value = values[code] * unit, now = fabs(fabs(x) - value);
        if (now < off || (now == off && code % 2 == 0)) {
            best = value;
            off = now;
        }
    }
    return copysign(best, x);
}

/* The columns of a head as the cache keeps them: fp8 with the least power of two that lets none be more than 448. */
static void keep_head(const model *m, const float *x, int64_t n, double *out)
{
    double most = 0, unit = 0x1p-127;
    for (int64_t i = 0; i < n; i++)
        most = fmax(most, fabs((double)x[i]));
    while (most > 448 * unit)
        unit *= 2;
    for (int64_t i = 0; i < n; i++)
        out[i] = m->exact == FP8_CACHE ? nearest_fp8((double)x[i], unit)
                                       : (double)(m->exact ? x[i] : from_bf16(to_bf16(x[i])));
}

/* The same of the heads of a row: of MLA's the latent and what is rotated. */
static void keep_row(const model *m, const float *x, int64_t width, int64_t head, double *out)
{
    int64_t n = m->s->mla ? m->s->lora : head;
    for (int64_t i = 0; i < width; i += n)
        keep_head(m, x + i, n < width - i ? n : width - i, out + i);
}

/* Rows of d columns, `stride` apart. */
typedef struct rows {
    const double *at;
    int64_t d, stride;
} rows;

/* Softmax of q . keys and a sink (-Inf: none), weighted sum of the values. */
REFERENCE static void attend(const double *q, rows keys, rows values, int64_t n, double scale, double sink, double *out)
{
    double *weight = need(sizeof(double) * (size_t)n), max = sink, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        weight[j] = 0;
        for (int64_t i = 0; i < keys.d; i++)
            weight[j] += q[i] * keys.at[j * keys.stride + i] * scale;
        max = fmax(max, weight[j]);
    }
    memset(out, 0, sizeof(double) * (size_t)values.d);
    sum = exp(sink - max);
    for (int64_t j = 0; j < n; j++) {
        weight[j] = exp(weight[j] - max);
        sum += weight[j];
        for (int64_t i = 0; i < values.d; i++)
            out[i] += weight[j] * values.at[j * values.stride + i];
    }
    for (int64_t i = 0; i < values.d; i++)
        out[i] /= sum;
    free(weight);
}

/* Absorbed: (uk_in q_nope, q_rope) against latent rows, then uv. */
static void expect_mla(const model *m, const float *q, const double *latents, int64_t n, double *out)
{
    const shape *s = m->s;
    double x[512], absorbed[512], latent[512];
    for (int64_t h = 0; h < s->heads; h++) {
        const float *mine = q + h * (s->nope + s->rope);
        for (int64_t i = 0; i < s->nope; i++)
            x[i] = (double)mine[i];
        multiply(m->uk_in.values + h * s->lora * s->nope, s->lora, s->nope, x, absorbed);
        for (int64_t i = 0; i < s->rope; i++)
            absorbed[s->lora + i] = (double)mine[s->nope + i];
        attend(absorbed, (rows){latents, s->lora + s->rope, m->kv_width}, (rows){latents, s->lora, m->kv_width}, n,
               (double)m->scale, -INFINITY, latent);
        multiply(m->uv.values + h * s->v * s->lora, s->v, s->lora, latent, out + h * s->v);
    }
}

static void expect_gqa(const model *m, const float *q, const double *k, const double *v, int64_t n, double *out)
{
    const shape *s = m->s;
    double x[512];
    int64_t first = s->window && n > s->window ? n - s->window : 0;
    first = s->chunked ? (n - 1) / s->window * s->window : first;
    for (int64_t h = 0; h < s->heads; h++) {
        int64_t at = h / (s->heads / s->kv_heads);
        rows keys = {k + at * s->dim + first * m->kv_width, s->dim, m->kv_width};
        rows seen = {v + at * value_columns(s) + first * m->v_width, value_columns(s), m->v_width};
        for (int64_t i = 0; i < s->dim; i++)
            x[i] = (double)q[h * s->dim + i];
        attend(x, keys, seen, n - first, (double)m->scale, s->sinks ? (double)m->sinks[h] : -INFINITY,
               out + h * value_columns(s));
    }
}

/* Compare out [tokens][out_width] at every `every`-th token. */
static void compare(const model *m, const float *out, int64_t tokens, int64_t every, double tolerance,
                    const char *how)
{
    size_t width = (size_t)m->kv_width, wide = (size_t)m->v_width;
    double *k = need(sizeof(double) * width * (size_t)tokens), *v = need(sizeof(double) * wide * (size_t)tokens);
    double *want = need(sizeof(double) * (size_t)m->out_width);
    float *q = need(sizeof(float) * (size_t)m->q_width), *row = need(sizeof(float) * (width + wide));
    for (int64_t t = 0; t < tokens; t++) {
        inputs(m, t, NULL, row, row + width);
        keep_row(m, row, m->kv_width, m->s->dim, k + (size_t)t * width);
        keep_row(m, row + width, m->s->mla ? 0 : m->v_width, value_columns(m->s), v + (size_t)t * wide);
    }
    for (int64_t t = tokens - 1; t >= 0; t -= every) {
        inputs(m, t, q, NULL, NULL);
        if (m->s->mla)
            expect_mla(m, q, k, t + 1, want);
        else
            expect_gqa(m, q, k, v, t + 1, want);
        double off = distance(out + t * m->out_width, want, m->out_width);
        CHECK(off <= tolerance, "%s, %s, %s: token %lld of %lld is off by %g", m->s->name,
              HOW[m->exact], how, (long long)t, (long long)tokens, off);
    }
    free(k);
    free(v);
    free(want);
    free(q);
    free(row);
}

/* ---- the laws ----------------------------------------------------------------------------------- */

static void check_shape(const char *isa, const shape *s, int32_t exact)
{
    enum { TOKENS = 580 };     /* into the second span of 512 keys */
    kt_pool *pool = make_pool(isa, 3);
    model m = make_model(pool, s, exact);
    /* Transposed 8-bit weights are rounded along other rows: the two forms of MLA then differ. */
    double fast = 0.01 + 2 * fast_tolerance(&test_formats[s->mla ? s->format : BF16].format);
    double tolerance = exact != 1 ? fast : s->format == INT8 ? 0.01 : 1e-5;
    size_t size = sizeof(float) * TOKENS * (size_t)m.out_width;
    float *out = need(size), *first = need(size);
    run whole = record(pool, &m, TOKENS), some = record(pool, &m, 77);
    cache c = make_cache(&m, TOKENS);
    step(&whole, &m, &c, 0, TOKENS, out);
    compare(&m, out, TOKENS, 41, tolerance, "one piece");
    memcpy(first, out, size);
    memset(c.data, 0xff, (size_t)(c.n + 1) * m.page_bytes);     /* NaN: what was not appended must not be read */
    for (int64_t t = 0; t < 539; t += 77)
        step(&some, &m, &c, t, 77, out + t * m.out_width);
    for (int64_t t = 539; t < 574; t += 7)
        step(&some, &m, &c, t, 7, out + t * m.out_width);
    for (int64_t t = 574; t < TOKENS; t++)
        step(&some, &m, &c, t, 1, out + t * m.out_width);
    compare(&m, out, TOKENS, 23, tolerance, "chunks");
    CHECK(s->mla || memcmp(first, out, size) == 0, "%s, %s: chunks give other bits than one piece", isa, s->name);
    for (int64_t t = 0; t < 70; t++)
        step(&some, &m, &c, t, 1, out + t * m.out_width);
    compare(&m, out, 70, 1, tolerance, "token by token");
    CHECK(s->mla || memcmp(first, out, size) == 0, "%s, %s: tokens give other bits than one piece", isa, s->name);
    free_cache(&c);
    free(out);
    free(first);
    kt_program_free(whole.program);
    kt_program_free(some.program);
    free_model(&m);
    kt_pool_free(pool);
}

/* Keys and values in window pages give the bits that pages give, though the table has none before the window. */
static void check_window_pages(const char *isa, const shape *s, int32_t exact)
{
    enum { START = 1500, MOST = 70 };
    kt_pool *pool = make_pool(isa, 3);
    model m = make_model(pool, s, exact);
    run pages = record_in(pool, &m, MOST, 0), windows = record_in(pool, &m, MOST, 1);
    size_t size = sizeof(float) * (size_t)(MOST * m.out_width);
    float *out = need(size), *again = need(size);
    for (int64_t n = 1; n <= MOST; n += 23) {
        cache c = random_cache(&m, START + MOST), other = random_cache(&m, START + MOST);
        step(&pages, &m, &c, START, n, out);
        for (int64_t page = 0; page < (START + 1 - s->window) / 64; page++)
            other.pages[page] = -1;
        step(&windows, &m, &other, START, n, again);
        CHECK(memcmp(out, again, sizeof(float) * (size_t)(n * m.out_width)) == 0,
              "%s, %s: window pages give other bits", isa, s->name);
        other.pages[(START + 1 - s->window) / 64] = -1;
        kt_run run = {.n_tokens = 1, .start = START, .first_output = 1, .window_pages = other.pages, .n_pages = other.n};
        kt_step wrong = {.runs = &run, .n_runs = 1, .windows = other.data, .n_window_pages = other.n + 1,
                         .window_page_bytes = m.page_bytes};
        REFUSED(kt_program_run(windows.program, &wrong), KT_ERR_RANGE, kt_program_error(windows.program), "window_pages[");
        free_cache(&c);
        free_cache(&other);
    }
    free(out);
    free(again);
    kt_program_free(pages.program);
    kt_program_free(windows.program);
    free_model(&m);
    kt_pool_free(pool);
}

/* Deep in a long text, a page before the window is not read: it holds NaN. */
static void check_window(const char *isa, const shape *s, int32_t exact)
{
    enum { START = 1500, TOKENS = 3 };
    kt_pool *pool = make_pool(isa, 3);
    model m = make_model(pool, s, exact);
    run r = record(pool, &m, TOKENS);
    cache c = random_cache(&m, START + TOKENS);
    size_t size = sizeof(float) * (size_t)(TOKENS * m.out_width);
    float *out = need(size), *again = need(size);
    step(&r, &m, &c, START, TOKENS, out);
    for (int64_t page = 0; page < (START + 1 - s->window) / 64; page++)
        memset((uint8_t *)c.data + (size_t)c.pages[page] * m.page_bytes, 0xff, m.page_bytes);
    step(&r, &m, &c, START, TOKENS, again);
    CHECK(memcmp(out, again, size) == 0, "%s, %s: what lies before the window is read", isa, s->name);
    free(out);
    free(again);
    free_cache(&c);
    kt_program_free(r.program);
    kt_pool_free(pool);
}

/* `tokens` tokens at `start` on a cache of random pages: the same bits with 1, 1 + more, ... up to 4 threads. */
static void check_threads(const char *isa, const shape *s, int32_t exact, int64_t start, int64_t tokens, int32_t more)
{
    float *out[5] = {0};
    for (int32_t threads = 1; threads <= 4; threads += more) {
        kt_pool *pool = make_pool(isa, threads);
        model m = make_model(pool, s, exact);
        run r = record(pool, &m, tokens);
        cache c = random_cache(&m, start + tokens);
        size_t size = sizeof(float) * (size_t)(tokens * m.out_width);
        out[threads] = need(size);
        step(&r, &m, &c, start, tokens, out[threads]);
        CHECK(memcmp(out[1], out[threads], size) == 0, "%s, %s: %d threads give other bits at %lld", isa, s->name,
              threads, (long long)start);
        free_cache(&c);
        kt_program_free(r.program);
        free_model(&m);
        kt_pool_free(pool);
    }
    for (int32_t threads = 1; threads <= 4; threads++)
        free(out[threads]);
}

/* The same step by every row, on a cache of random pages: the same bits, since the bf16 products are the same
 * operations in all of them as long as none uses tiles. (8-bit weights are the same by the law of the integer
 * products.) */
static void check_rows(const char *const *rows, int n, const shape *s, int32_t exact, int64_t start, int64_t tokens)
{
    float *out[8] = {0};
    for (int row = 0; row < n; row++) {
        kt_pool_options o = {.isa = rows[row], .n_threads = 2, .tile_min[KT_TILE_BF16] = INT32_MAX};
        kt_pool *pool = make_pool_of(&o);
        model m = make_model(pool, s, exact);
        run r = record(pool, &m, tokens);
        cache c = random_cache(&m, start + tokens);
        size_t size = sizeof(float) * (size_t)(tokens * m.out_width);
        out[row] = need(size);
        step(&r, &m, &c, start, tokens, out[row]);
        CHECK(memcmp(out[0], out[row], size) == 0, "%s: %s gives other bits than %s at %lld", s->name, rows[row],
              rows[0], (long long)start);
        free_cache(&c);
        kt_program_free(r.program);
        free_model(&m);
        kt_pool_free(pool);
    }
    for (int row = 0; row < n; row++)
        free(out[row]);
}

int main(void)
{
    const char *rows[8];
    int n = usable_rows(rows), is_emulated = strcmp(rows[0], own_row()) != 0;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_shape(own_row(), &shapes[i], 0);
        if (is_emulated && i == 0)
            check_shape(rows[0], &shapes[i], 0);
        check_shape(own_row(), &shapes[i], 1);
        check_shape(own_row(), &shapes[i], FP8_CACHE);
        if (shapes[i].mla && shapes[i].format != F32)
            check_shape(own_row(), &shapes[i], 2);
        for (int32_t exact = 0; exact <= FP8_CACHE && shapes[i].window; exact += exact == 1 ? 2 : 1) {
            check_window(own_row(), &shapes[i], exact);
            check_window_pages(own_row(), &shapes[i], exact);
        }
        for (int32_t exact = 0; exact <= FP8_CACHE; exact += FP8_CACHE) {
            check_rows(rows, n, &shapes[i], exact, 570, 3);
            check_rows(rows, n, &shapes[i], exact, 60, 70);
        }
        for (int row = is_emulated && i > 0; row < n; row++) {
            int32_t more = strcmp(rows[row], own_row()) == 0 ? 1 : 2;
            check_threads(rows[row], &shapes[i], 0, 1100, 1, more);
            check_threads(rows[row], &shapes[i], i % 2 ? 0 : FP8_CACHE, 500, 19, more);
        }
    }
    check_shape("portable", &shapes[1], 0);
    check_shape("portable", &shapes[4], FP8_CACHE);
    check_shape("portable", &shapes[3], 1);
    /* So long, and of so many wide heads, that the partials need several waves. */
    const shape wide = {"mla 64 x 512", 1, 64, 1, 0, 16, 8, 16, 512, BF16, 0, 0, 0, 0};
    check_threads(own_row(), &wide, 0, 2600, 7, 2);
    check_threads(own_row(), &wide, FP8_CACHE, 2600, 7, 2);
    return report("test_attention");
}
