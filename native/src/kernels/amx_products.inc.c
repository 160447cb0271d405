/* amx_products.inc.c - the products of the row amx, in two forms, from tile_min tokens on;
 * fewer tokens use the vector kernels on the same bytes.
 *
 * PAIRS, for weights and x with one scale per row and for bf16: 2 x 2 output tiles, 32 tokens times two panels. A block
 * of columns (16 kB of weights) stays in the first cache while all tokens of the block run over it; partial sums are
 * kept in the scratch from one block of columns to the next, which is exact for int32, and for bf16 the same chain.
 *
 * PARTS, where x has a scale per 64 columns: int32 sums become floats after every 64 columns, or 32 in groups of 32.
 * With 2 x 2 tiles the floats of 64 rows would have to be read and written in memory, so one output tile at a time,
 * its floats in 16 registers. The sums of four parts rotate over four tiles, so that a sum is stored while later
 * parts are multiplied, and made a float one part later.
 *
 * On Sapphire Rapids a product takes 16 cycles of the tile unit, in which its port does no vector operation; loads,
 * stores and conversions are added to that, they hardly overlap: 6 ns for a product in pairs, 24 in parts. What was
 * measured, and tried, is in docs/amx.md.
 *
 * Integer formats do the operations of product_int8.inc.c in its order. A bf16 output is a chain over ascending steps
 * of 32 columns, each added at once: fma chains of its even and of its odd columns, then their sum; so tile_min,
 * unlike the token count above it, changes its last bits. The bound of product_float.inc.c holds.
 */

/* ---- pairs --------------------------------------------------------------------------------------- */

typedef struct pair {
    int64_t panel, tile;        /* the first of each */
    int64_t step, n;            /* the block of columns */
    const uint8_t *lines[2];
} pair;

INLINE uint8_t *sums_at(const amx_work *w, int64_t tile, int q)
{
    return w->sums + (2 * tile + q) * TILE_BYTES;
}

/* OP(number, where its partial sum is kept) for `tiles` times `panels` output tiles: sum (i, q) is tile 2 i + q. */
#define EACH_SUM(OP, w, a, tiles, panels)                   \
    do {                                                    \
        OP(0, sums_at(w, (a)->tile, 0), 64);                \
        if (panels > 1)                                     \
            OP(1, sums_at(w, (a)->tile, 1), 64);            \
        if (tiles > 1)                                      \
            OP(2, sums_at(w, (a)->tile + 1, 0), 64);        \
        if (tiles > 1 && panels > 1)                        \
            OP(3, sums_at(w, (a)->tile + 1, 1), 64);        \
    } while (0)

INLINE void load_sums(const amx_work *w, const pair *a, int tiles, int panels)
{
    if (a->step > 0) {
        EACH_SUM(TILE_LOAD, w, a, tiles, panels);
        return;
    }
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

INLINE void multiply_pair(amx_work *w, const pair *a, int is_bf16, int tiles, int panels)
{
    const tile_of_x *x = &w->rows[a->tile];
    load_sums(w, a, tiles, panels);
    for (int64_t s = 0; s < a->n; s++) {
        int64_t column = 64 * (a->step + s), line = TILE_BYTES * s;
        fetch_ahead(w);
        TILE_LOAD(4, x[0].at + column, x[0].stride);
        TILE_LOAD(6, a->lines[0] + line, 64);
        TILE_DOT(is_bf16, 0, 4, 6);
        if (panels > 1) {
            TILE_LOAD(7, a->lines[1] + line, 64);
            TILE_DOT(is_bf16, 1, 4, 7);
        }
        if (tiles > 1) {
            TILE_LOAD(5, x[1].at + column, x[1].stride);
            TILE_DOT(is_bf16, 2, 5, 6);
        }
        if (tiles > 1 && panels > 1)
            TILE_DOT(is_bf16, 3, 5, 7);
    }
    EACH_SUM(TILE_STORE, w, a, tiles, panels);
}

/* All columns are summed up: rows of y. */
static void finish_tile(const amx_work *w, int64_t panel, int q, int64_t tile)
{
    const product *p = w->p;
    const uint8_t *sums = sums_at(w, tile, q);
    int64_t t = w->first + tile * TILE_ROWS, left = w->n - tile * TILE_ROWS;
    for (int i = 0; i < TILE_ROWS && i < left; i++)
        if (w->is_bf16)
            store_values(p, panel + q, t + i, vf_load((const float *)(const void *)(sums + 64 * i)));
        else
            store_values(p, panel + q, t + i,
                         add_part(vf_set1(0.0f), vi_load(sums + 64 * i), vf_set1(*x_scales(p, t + i)),
                                  vf_load(w->scales + LANES * q)));
}

INLINE void pair_of(amx_work *w, const pair *a, int is_bf16, int tiles, int panels)
{
    if (tiles > 1)
        panels > 1 ? multiply_pair(w, a, is_bf16, 2, 2) : multiply_pair(w, a, is_bf16, 2, 1);
    else
        panels > 1 ? multiply_pair(w, a, is_bf16, 1, 2) : multiply_pair(w, a, is_bf16, 1, 1);
}

/* All tokens of the block times one or two panels. */
static void multiply_panels(amx_work *w, int64_t panel, int panels)
{
    int64_t tiles = (w->n + TILE_ROWS - 1) / TILE_ROWS;
    pair a = {.panel = panel};
    plan_ahead(w, panel, panels, (tiles + 1) / 2 * w->steps);
    for (int q = 0; q < panels && !w->is_bf16; q++)
        vf_store(w->scales + LANES * q, load_scales(w->p->format->scale, scales_of(w, panel + q), 0));
    for (; a.step < w->steps; a.step += a.n) {
        a.n = w->steps - a.step < BLOCK_STEPS ? w->steps - a.step : BLOCK_STEPS;
        for (int q = 0; q < panels; q++)
            a.lines[q] = lines_of(w, panel + q, q, a.step, a.n);
        for (a.tile = 0; a.tile < tiles; a.tile += 2) {
            int both = tiles - a.tile > 1 ? 2 : 1, is_last = a.step + a.n == w->steps;
            for (int i = 0; i < both && is_last; i++)
                fetch_y(w, panel, a.tile + i);
            w->is_bf16 ? pair_of(w, &a, 1, both, panels) : pair_of(w, &a, 0, both, panels);
            for (int i = 0; i < both && is_last; i++)
                for (int q = 0; q < panels; q++)
                    finish_tile(w, panel, q, a.tile + i);
        }
    }
}

/* ---- parts --------------------------------------------------------------------------------------- */

enum {
    SUMS = 4,               /* tiles over which the parts rotate */
    STORE_LATER = 3,        /* parts between the product and the store of a sum: 48 of the 52 cycles it takes */
};

/* Sum number `q` = the products of a part of x and of the panel. */
INLINE void multiply_part(int q, const uint8_t *x, int64_t stride, const uint8_t *lines)
{
#define PART(q, a, b)               \
    TILE_ZERO(q);                   \
    TILE_LOAD(a, x, stride);        \
    TILE_LOAD(b, lines, 64);        \
    TILE_DOT(0, q, a, b);
    if (q == 0) {
        PART(0, 4, 6)
    } else if (q == 1) {
        PART(1, 5, 7)
    } else if (q == 2) {
        PART(2, 4, 6)
    } else {
        PART(3, 5, 7)
    }
#undef PART
}

INLINE void store_part(int q, int32_t *sum)
{
    if (q == 0)
        TILE_STORE(0, sum, 64);
    else if (q == 1)
        TILE_STORE(1, sum, 64);
    else if (q == 2)
        TILE_STORE(2, sum, 64);
    else
        TILE_STORE(3, sum, 64);
}

/* acc[i], i < most, after row i of the `n` parts of `width` columns from column `column` on. */
INLINE void multiply_parts(amx_work *w, const tile_of_x *rows, const uint8_t *lines, int64_t column, int64_t n,
                           int64_t width, int most, vf *acc)
{
    ALIGNED int32_t sums[SUMS][TILE_BYTES / 4];
    const uint8_t *x = rows->at + column;
    for (int64_t first = 0; first < n + SUMS; first += SUMS)
#pragma GCC unroll 4
        for (int q = 0; q < SUMS; q++) {
            int64_t g = first + q;
            if (g < n) {
                fetch_ahead(w);
                multiply_part(q, x + g * width, rows->stride, lines + 16 * g * width);
            }
            if (g >= STORE_LATER && g - STORE_LATER < n)
                store_part((q + SUMS - STORE_LATER) % SUMS, sums[(q + SUMS - STORE_LATER) % SUMS]);
            if (g < SUMS || g - SUMS >= n)
                continue;
            const float *by = rows->scales + LANES * ((column + (g - SUMS) * width) / KT_ACT_GROUP);
            vf scale = vf_load(w->scales + LANES * (g - SUMS));
#pragma GCC unroll 16
            for (int i = 0; i < most; i++)
                acc[i] = add_part(acc[i], vi_load(sums[q] + LANES * i), vf_set1(by[i]), scale);
        }
}

/* One output tile, columns [column, column + n * width): added to its floats, or finished. */
INLINE void part_tile(amx_work *w, int64_t panel, int64_t tile, const uint8_t *lines, int64_t column, int64_t n,
                      int64_t width, int most, vf in_the_end)
{
    float *kept = (float *)(void *)sums_at(w, tile, 0);
    int64_t t = w->first + tile * TILE_ROWS, left = w->n - tile * TILE_ROWS;
    int is_last = column + n * width == w->l.k_padded;
    vf acc[TILE_ROWS];
    if (is_last)
        fetch_y(w, panel, tile);
#pragma GCC unroll 16
    for (int i = 0; i < most; i++)
        acc[i] = column ? vf_load(kept + LANES * i) : vf_set1(0.0f);
    multiply_parts(w, &w->rows[tile], lines, column, n, width, most, acc);
#pragma GCC unroll 16
    for (int i = 0; i < most; i++)
        if (!is_last)
            vf_store(kept + LANES * i, acc[i]);
        else if (i < left)
            store_values(w->p, panel, t + i, vf_mul(acc[i], in_the_end));
}

/* All tokens of the block times one panel, its parts `width` columns wide, in tiles of up to `most` rows. */
INLINE void panel_parts(amx_work *w, int64_t panel, int64_t width, int most)
{
    const uint8_t *scales = scales_of(w, panel);
    int64_t tiles = (w->n + TILE_ROWS - 1) / TILE_ROWS;
    int of_row = part_kind_of(w->p) == PARTS_OF_ROW;
    vf one = vf_set1(1.0f), in_the_end = of_row ? load_scales(w->p->format->scale, scales, 0) : one;
    plan_ahead(w, panel, 1, tiles * (w->l.k_padded / width) + (w->unpacks_most ? 8 * w->steps : 0));
    for (int64_t step = 0; step < w->steps; step += PART_STEPS) {
        int64_t steps = w->steps - step < PART_STEPS ? w->steps - step : PART_STEPS;
        int64_t first = 64 * step / width, n = 64 * steps / width;
        const uint8_t *lines = lines_of(w, panel, 0, step, steps);
        for (int64_t g = 0; g < n; g++)
            vf_store(w->scales + LANES * g, of_row ? one : load_scales(w->p->format->scale, scales,
                                                                      group_of_part(w->p->format, first + g)));
        for (int64_t tile = 0; tile < tiles; tile++)
            part_tile(w, panel, tile, lines, 64 * step, n, width, most, in_the_end);
    }
}

/* Width and rows become constants of the inner loops. */
INLINE void multiply_panel_of(amx_work *w, int64_t panel, int most)
{
    if (w->l.group == 32)
        panel_parts(w, panel, 32, most);
    else
        panel_parts(w, panel, 64, most);
}

static void multiply_panel(amx_work *w, int64_t panel)
{
    if (w->n <= 2)
        multiply_panel_of(w, panel, 2);
    else if (w->n <= 4)
        multiply_panel_of(w, panel, 4);
    else if (w->n <= 8)
        multiply_panel_of(w, panel, 8);
    else
        multiply_panel_of(w, panel, TILE_ROWS);
}

/* ---- both ---------------------------------------------------------------------------------------- */

/* The two shapes of work for every token block and all panels. */
static void amx_product(const product *p)
{
    amx_work w = amx_work_of(p);
    int64_t most = block_tokens(w.steps);
    int is_whole = p->format->group != 32 && p->n_tokens >= TILE_ROWS;
    for (int64_t t = 0; t < p->n_tokens; t += most) {
        take_tokens(&w, t, p->n_tokens - t < most ? p->n_tokens - t : most);
        is_whole &= w.n >= TILE_ROWS;
        if (!is_whole)
            configure_rows(p->format->group == 32 ? half_tiles : whole_tiles, tile_rows(&w));
        for (int64_t panel = p->first_panel; panel < p->last_panel;) {
            int panels = !w.has_parts && p->last_panel - panel > 1 ? 2 : 1;
            w.has_parts ? multiply_panel(&w, panel) : multiply_panels(&w, panel, panels);
            panel += panels;
        }
    }
    if (!is_whole)
        configure(&whole_tiles);
}

static void amx_product_int8(const product *p)
{
    p->n_tokens < p->tile_min ? kernels_avx512.product_int8(p) : amx_product(p);
}

static void amx_product_bf16(const product *p)
{
    p->n_tokens < p->tile_min ? product_bf16(p) : amx_product(p);
}
