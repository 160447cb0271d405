/* mla_expanded.c - latent attention for many tokens: a stretch of pages is expanded to every head's own keys
 * and values (uk_out, uv), all queries of the run attend over them, and the next stretch follows.
 *
 * While the team attends over one stretch it already expands the next into the other half of the scratch, so
 * there is one barrier per stretch and few threads wait at it. A query meets its pages in ascending order,
 * whoever works on it; its sums stand in shared scratch and its weighted values in the output itself.
 */
#include "lowrank.h"
#include "mla.h"

#include <math.h>
#include <string.h>

#define STRETCH_BYTES ((size_t)8 << 20)     /* expanded keys and values of one stretch of pages */
#define MOST_PAGES 8                    /* of one stretch */

static size_t element(const mla *o)
{
    return o->a.kv_f32 ? sizeof(float) : sizeof(uint16_t);
}

static int64_t key_width(const mla *o)
{
    return o->s.nope + o->s.rope;
}

/* One head's share of a page: keys in panels (rows in f32), values [64][v]. */
static size_t keys_bytes(const mla *o)
{
    return (size_t)page_keys(key_width(o), o->a.kv_f32) * element(o);
}

static size_t head_page_bytes(const mla *o)
{
    return keys_bytes(o) + KT_PAGE_TOKENS * (size_t)o->s.v * element(o);
}

static int64_t stretch_pages(const mla *o)
{
    size_t page = head_page_bytes(o) * (size_t)o->s.heads;
    return max64(1, min64(MOST_PAGES, (int64_t)(STRETCH_BYTES / page)));
}

static size_t stretch_bytes(const mla *o)
{
    return size_mul(head_page_bytes(o), (size_t)(o->s.heads * stretch_pages(o)));
}

size_t mla_expanded_shared_bytes(const mla *o, int64_t max_tokens)
{
    size_t sums = size_mul((size_t)max_tokens * 2 * sizeof(float), (size_t)o->s.heads);
    return size_add(size_mul(2, stretch_bytes(o)), sums);
}

/* Local, while expanding: a product's results, latent rows in f32, latent rows as a product reads them, keys
 * as rows. While attending: queries as the kernel reads them, their weighted values. */
static int64_t result_width(const mla *o)
{
    return (max64(o->s.nope, o->s.v) + 15) / 16 * 16;
}

static int64_t latent_width(const mla *o)
{
    return (o->s.lora + 15) / 16 * 16;
}

static size_t act_offset(const mla *o)
{
    return KT_PAGE_TOKENS * (size_t)(result_width(o) + latent_width(o)) * sizeof(float);
}

static size_t row_offset(const mla *o)
{
    size_t keys = act_bytes(o->uk_out.kind, KT_PAGE_TOKENS, act_stride(o->uk_out.kind, o->s.lora));
    size_t values = act_bytes(o->uv.kind, KT_PAGE_TOKENS, act_stride(o->uv.kind, o->s.lora));
    return act_offset(o) + (keys > values ? keys : values);
}

/* Local: where the latent rows of a page of codes are decoded to, behind keys as rows. */
static size_t decoded_offset(const mla *o)
{
    return row_offset(o) + (KT_PAGE_TOKENS * (size_t)key_width(o) * element(o) + 63) / 64 * 64;
}

static size_t query_bytes(const mla *o)
{
    return BLOCK_QUERIES * (size_t)paired(key_width(o)) * sizeof(float);
}

size_t mla_expanded_local_bytes(const mla *o)
{
    size_t expanding = decoded_offset(o) + (o->a.fp8 ? KT_PAGE_TOKENS * (size_t)o->a.dk * element(o) : 0);
    size_t attending = query_bytes(o) + BLOCK_QUERIES * (size_t)o->s.v * sizeof(float);
    return expanding > attending ? expanding : attending;
}

/* Where the expanded page `page` of a head lies: in one half of the scratch or the other. */
static uint8_t *expanded_page(const mla *o, const worker *w, int64_t page, int64_t head)
{
    int64_t pages = stretch_pages(o), in_stretch = page % pages;
    size_t half = (size_t)(page / pages % 2) * stretch_bytes(o);
    return shared_scratch(w) + half + (size_t)(head * pages + in_stretch) * head_page_bytes(o);
}

/* ---- expanding ---------------------------------------------------------------------------------- */

/* A page of a run that is expanded: as many of its keys as the rows see. */
typedef struct latent_page {
    const kt_run *run;
    int64_t page, keys;
    const uint8_t *rows;    /* its latent rows, as they lie in the cache or decoded */
} latent_page;

static latent_page page_of(const kt_run *run, int64_t page, int64_t end)
{
    return (latent_page){.run = run, .page = page, .keys = min64(KT_PAGE_TOKENS, end - page * KT_PAGE_TOKENS)};
}

static const uint8_t *latent_row(const mla *o, const latent_page *l, int64_t key)
{
    return l->rows + (size_t)(key * o->a.k_stride) * element(o);
}

/* Let p read the latent rows of a page: as they lie in the cache, if it can, else converted. */
static void bind_latent(const mla *o, const worker *w, const matrices *m, const latent_page *l, act *a, product *p)
{
    float *rows = (float *)(void *)local_scratch(w) + KT_PAGE_TOKENS * result_width(o);
    int64_t width = latent_width(o);
    const void *first = latent_row(o, l, 0);
    p->x_stride = o->a.k_stride;
    p->xf = first;
    p->xh = first;
    /* bf16 products want zeros up to a multiple of 32: what follows a shorter latent row is its rope part. */
    if (m->kind == (o->a.kv_f32 ? ACT_F32 : ACT_BF16) && (o->a.kv_f32 || o->s.lora % 32 == 0))
        return;
    *a = act_for(m, local_scratch(w) + act_offset(o), KT_PAGE_TOKENS, o->s.lora);
    for (int64_t i = 0; i < p->n_tokens; i++) {
        const void *row = latent_row(o, l, i);
        if (o->a.kv_f32)
            memcpy(rows + i * width, row, (size_t)o->s.lora * sizeof *rows);
        else
            w->kernels->from_bf16(row, o->s.lora, rows + i * width);
        if (m->kind != ACT_F32)
            act_convert(w, a, rows + i * width, o->s.lora, -1.0f, i);
    }
    act_bind(a, p);
    if (m->kind == ACT_F32) {
        p->xf = rows;
        p->x_stride = width;
    }
}

/* What the run's adapter adds to a head's product of the latent rows of a page. */
static void update_rows(const mla *o, const worker *w, const matrices *m, int64_t head, const latent_page *l,
                        const product *p)
{
    int32_t product = o->updates[m == &o->uv ? 2 : 1];
    if (product < 0 || !l->run->adapter)
        return;
    float *rows = (float *)(void *)local_scratch(w) + KT_PAGE_TOKENS * result_width(o);
    adapted_input in = {.x = rows, .x_stride = latent_width(o), .k = o->s.lora};
    if (o->a.kv_f32)
        in = (adapted_input){.x = (const float *)(const void *)latent_row(o, l, 0), .x_stride = o->a.k_stride, .k = o->s.lora};
    for (int64_t i = 0; i < l->keys && !o->a.kv_f32; i++)
        w->kernels->from_bf16((const uint16_t *)(const void *)latent_row(o, l, i), o->s.lora, rows + i * in.x_stride);
    adapted_rows all = {.product = product, .domain = KT_ROWS_TOKENS, .matrix = head, .run = l->run, .n = l->keys};
    adapted_output out = {.y = p->y, .y_stride = p->y_stride, .columns = p->n, .last_panel = m->panels};
    lowrank_add(w, all, in, out, local_scratch(w) + o->inner_offset);
}

/* to[i][0..width) = the product of latent row i, in the cache's type. */
static void expand_rows(const mla *o, const worker *w, const matrices *m, int64_t head, const latent_page *l,
                        uint8_t *to, int64_t to_stride)
{
    act a;
    float *y = (float *)(void *)local_scratch(w);
    product p = {.n_tokens = l->keys, .y = y, .y_stride = result_width(o)};
    bind_latent(o, w, m, l, &a, &p);
    matrices_bind(w, m, head, 0, m->panels, &p);
    mla_tiles(&p, mla_tiled(w, m, KT_PAGE_TOKENS));
    product_run(w, m->kind, &p);
    update_rows(o, w, m, head, l, &p);
    for (int64_t i = 0; i < l->keys; i++, to += (size_t)to_stride * element(o)) {
        if (o->a.kv_f32)
            memcpy(to, y + i * p.y_stride, (size_t)m->weight.n * sizeof(float));
        else
            w->kernels->to_bf16(y + i * p.y_stride, m->weight.n, m->weight.n, (uint16_t *)(void *)to);
    }
}

/* Find the latent rows of a page. */
static void find_rows(const mla *o, const worker *w, latent_page *l)
{
    const uint8_t *page = cache_page(w, l->run, l->page);
    uint8_t *decoded = local_scratch(w) + decoded_offset(o);
    if (o->a.fp8)
        decode_rows(&o->a, w, page, l->keys, (uint16_t *)(void *)decoded);
    l->rows = o->a.fp8 ? decoded : page + o->a.k_offset;
}

static void expand_page(const mla *o, const worker *w, latent_page *l, int64_t head)
{
    find_rows(o, w, l);
    int64_t width = key_width(o);
    uint8_t *to = expanded_page(o, w, l->page, head), *rows = o->a.kv_f32 ? to : local_scratch(w) + row_offset(o);
    expand_rows(o, w, &o->uk_out, head, l, rows, width);
    for (int64_t i = 0; i < l->keys; i++)
        memcpy(rows + (size_t)(i * width + o->s.nope) * element(o),
               latent_row(o, l, i) + (size_t)o->s.lora * element(o), (size_t)o->s.rope * element(o));
    if (!o->a.kv_f32)
        w->kernels->pack_keys((const uint16_t *)(const void *)rows, width, l->keys, width, (uint16_t *)(void *)to);
    expand_rows(o, w, &o->uv, head, l, to + keys_bytes(o), o->s.v);
}

/* ---- attending ---------------------------------------------------------------------------------- */

/* Rows first..first+n of a head's queries, as the kernel reads them. */
static void gather(const mla *o, const worker *w, int64_t head, int64_t first, int64_t n)
{
    int64_t width = key_width(o), to = paired(width);
    for (int64_t i = 0; i < n; i++) {
        const float *x = view_row(w, o->q, first + i) + head * width;
        if (o->a.kv_f32)
            memcpy((float *)(void *)local_scratch(w) + i * to, x, (size_t)width * sizeof *x);
        else
            w->kernels->to_bf16(x, width, to, (uint16_t *)(void *)local_scratch(w) + i * to);
    }
}

/* The weighted values of a block stand in the output between runs; in work they lie close together, since
 * rows of the output are far apart and would meet in few sets of the caches. */
static void begin_block(const mla *o, const worker *w, page_attention *k, int64_t head, int64_t first, int64_t page)
{
    for (int64_t i = 0; i < k->n_queries; i++) {
        if (page > 0) {
            memcpy(k->acc + i * k->acc_stride, view_row(w, o->out, first + i) + head * o->s.v,
                   (size_t)o->s.v * sizeof(float));
            continue;
        }
        k->max[i] = -INFINITY;
        k->sum[i] = 0;
        memset(k->acc + i * k->acc_stride, 0, (size_t)o->s.v * sizeof(float));
    }
}

static void end_block(const mla *o, const worker *w, const page_attention *k, int64_t head, int64_t first, int last)
{
    for (int64_t i = 0; i < k->n_queries; i++) {
        float *to = view_row(w, o->out, first + i) + head * o->s.v, scale = last ? 1 / k->sum[i] : 1;
        for (int64_t c = 0; c < o->s.v; c++)
            to[c] = k->acc[i * k->acc_stride + c] * scale;
    }
}

/* Queries first..first+n of a run, one head, against pages [page, last_page). */
static void attend_pages(const mla *o, const worker *w, mla_rows r, int64_t head, int64_t first, int64_t page,
                         int64_t last_page)
{
    int32_t limit[BLOCK_QUERIES];
    int64_t n = min64(BLOCK_QUERIES, r.n - first), row = r.first + first, width = key_width(o);
    int64_t position = position_of(w, row);
    int64_t pages = (position + n + KT_PAGE_TOKENS - 1) / KT_PAGE_TOKENS;    /* that these queries see */
    float *sums = (float *)(void *)(shared_scratch(w) + 2 * stretch_bytes(o)) + head * 2 * r.n + first;
    page_attention k = {.n_queries = n, .dk = width, .dv = o->s.v, .q = local_scratch(w), .q_stride = paired(width),
                        .k_stride = width, .v_stride = o->s.v, .limit = limit, .scale = o->s.scale,
                        .max = sums, .sum = sums + r.n,
                        .acc = (float *)(void *)(local_scratch(w) + query_bytes(o)), .acc_stride = o->s.v};
    if (page >= pages)
        return;
    gather(o, w, head, row, n);
    begin_block(o, w, &k, head, row, page);
    for (; page < min64(last_page, pages); page++) {
        for (int64_t i = 0; i < n; i++)
            limit[i] = (int32_t)max64(0, min64(KT_PAGE_TOKENS, position + i + 1 - page * KT_PAGE_TOKENS));
        k.k = expanded_page(o, w, page, head);
        k.v = (const uint8_t *)k.k + keys_bytes(o);
        (o->a.kv_f32 ? w->kernels->attend_f32 : w->kernels->attend_bf16)(&k);
    }
    end_block(o, w, &k, head, row, page == pages);
}

void mla_expanded(const mla *o, const worker *w, mla_rows r)
{
    const kt_run *run = run_of(w, r.first);
    int64_t heads = o->s.heads, stretch = stretch_pages(o);
    int64_t end = position_of(w, r.first) + r.n, pages = (end + KT_PAGE_TOKENS - 1) / KT_PAGE_TOKENS;
    int64_t blocks = (r.n + BLOCK_QUERIES - 1) / BLOCK_QUERIES;
    for (int64_t first = -stretch; first < pages; first += stretch) {
        int64_t next = first + stretch, n = max64(0, min64(stretch, pages - next));
        for (int64_t i; (i = worker_take(w, 1)) < n * heads;) {
            latent_page l = page_of(run, next + i / heads, end);
            expand_page(o, w, &l, i % heads);
        }
        pool_next_loop(w->pool, w->thread);
        for (int64_t i; first >= 0 && (i = worker_take(w, 1)) < blocks * heads;) {
            int64_t query = (blocks - 1 - i / heads) * BLOCK_QUERIES;   /* the last see the most keys */
            attend_pages(o, w, r, i % heads, query, first, min64(next, pages));
        }
        if (next < pages)
            worker_barrier(w);
    }
}
