/* lowrank.inc.c - the products of a low-rank update (kt_adapters.h) and of its gradient. An
 * output is the same operations in the same order however rows and ranks are cut into blocks. */

INLINE vf factor_at(const void *factor, int in_f32, int64_t at)
{
    return in_f32 ? vf_load((const float *)factor + at) : vf_from_bf16((const uint16_t *)factor + at);
}

/* A factor is read once by the first block of rows and comes from memory then: it fetches what the next ranks or panels
 * have at this place, since each rank is in a page of its own, where the CPU's prefetching ends. The others find it in the
 * cache. */
INLINE void prefetch_factor(const void *factor, int in_f32, int64_t at)
{
    __builtin_prefetch((const uint8_t *)factor + (size_t)at * (in_f32 ? sizeof(float) : sizeof(uint16_t)));
}

/* Calls BLOCK(n) with the constant n that is `rows`, 1..LOWRANK_ROWS, which is 6 at most. */
#define WITH_ROWS(rows, BLOCK)                                                                                               \
    switch (rows) {                                                                                                          \
    case 1: BLOCK(1); break;                                                                                                 \
    case 2: BLOCK(2); break;                                                                                                 \
    case 3: BLOCK(LOWRANK_ROWS < 3 ? LOWRANK_ROWS : 3); break;                                                               \
    case 4: BLOCK(LOWRANK_ROWS < 4 ? LOWRANK_ROWS : 4); break;                                                               \
    case 5: BLOCK(LOWRANK_ROWS < 5 ? LOWRANK_ROWS : 5); break;                                                               \
    default: BLOCK(LOWRANK_ROWS); break;                                                                                     \
    }

/* Rows of the next block where `left` are left: all blocks have about as many, as a row alone takes as long as three of a
 * full block. */
INLINE int64_t rows_of_block(int64_t left)
{
    int64_t blocks = (left + LOWRANK_ROWS - 1) / LOWRANK_ROWS;
    return (left + blocks - 1) / blocks;
}

INLINE void inner_block(const inner_product *p, int64_t row, int64_t rank, int rows, int ranks, int in_f32)
{
    const float *x[LOWRANK_ROWS];
    vf sum[LOWRANK_ROWS][LOWRANK_RANKS];
    for (int t = 0; t < rows; t++) {
        x[t] = p->x + row_of(p->x_rows, row + t) * p->x_stride;
        for (int i = 0; i < ranks; i++)
            sum[t][i] = vf_set1(0.0f);
    }
    for (int64_t j = 0; j < p->panels; j++) {
        vf a[LOWRANK_RANKS];
        for (int i = 0; i < ranks; i++) {
            int64_t at = (rank + i) * p->rank_stride + j * p->panel_stride;
            a[i] = factor_at(p->a, in_f32, at);
            if (row == 0)
                prefetch_factor(p->a, in_f32, at + ranks * p->rank_stride);
        }
        for (int t = 0; t < rows; t++) {
            vf values = vf_load_upto(x[t], j * p->step, p->columns);
            for (int i = 0; i < ranks; i++)
                sum[t][i] = vf_fma(values, a[i], sum[t][i]);
        }
    }
    for (int t = 0; t < rows; t++) {
        float *out = p->out + (row + t) * p->out_stride + rank, found[LOWRANK_RANKS];
        if (ranks == 4)
            vf_sum4(sum[t], found);
        else
            for (int i = 0; i < ranks; i++)
                found[i] = vf_sum(sum[t][i]);
        for (int i = 0; i < ranks; i++)
            out[i] = p->scale * found[i];
    }
}

INLINE void inner_rows(const inner_product *p, int64_t row, int rows, int in_f32)
{
    int64_t rank = 0;
    for (; rank + LOWRANK_RANKS <= p->ranks; rank += LOWRANK_RANKS)
        inner_block(p, row, rank, rows, LOWRANK_RANKS, in_f32);
    for (; rank < p->ranks; rank++)
        inner_block(p, row, rank, rows, 1, in_f32);
}

INLINE void inner_all(const inner_product *p, int in_f32)
{
    for (int64_t row = 0, rows; row < p->n_rows; row += rows) {
        rows = rows_of_block(p->n_rows - row);
#define BLOCK(n) inner_rows(p, row, n, in_f32)
        WITH_ROWS(rows, BLOCK)
#undef BLOCK
    }
}

static void inner(const inner_product *p)
{
    if (p->in_f32)
        inner_all(p, 1);
    else
        inner_all(p, 0);
}

INLINE void outer_block(const outer_product *p, int64_t row, int64_t panel, int rows, int panels, int in_f32)
{
    const float *x = p->x + row * p->x_stride;
    vf sum[LOWRANK_ROWS][LOWRANK_PANELS];
    for (int t = 0; t < rows; t++)
        for (int j = 0; j < panels; j++)
            sum[t][j] = vf_set1(0.0f);
    for (int64_t i = 0; i < p->ranks; i++) {
        vf b[LOWRANK_PANELS];
        for (int j = 0; j < panels; j++) {
            int64_t at = i * p->rank_stride + (panel + j) * p->panel_stride;
            b[j] = factor_at(p->b, in_f32, at);
            if (row == 0)
                prefetch_factor(p->b, in_f32, at + panels * p->panel_stride);
        }
        for (int t = 0; t < rows; t++) {
            vf value = vf_set1(x[t * p->x_stride + i]);
            for (int j = 0; j < panels; j++)
                sum[t][j] = vf_fma(value, b[j], sum[t][j]);
        }
    }
    for (int t = 0; t < rows; t++) {
        float *y = p->y + row_of(p->y_rows, row + t) * p->y_stride;
        vf gate = vf_set1(p->gate ? p->gate[row + t] : 1.0f);
        for (int j = 0; j < panels; j++) {
            int64_t column = (panel + j) * p->step;
            vf before = vf_load_upto(y, column, p->columns);
            vf_store_upto(y, column, p->columns, vf_fma(gate, sum[t][j], before));
        }
    }
}

INLINE void outer_panels(const outer_product *p, int64_t panel, int panels, int in_f32)
{
    for (int64_t row = 0, rows; row < p->n_rows; row += rows) {
        rows = rows_of_block(p->n_rows - row);
#define BLOCK(n) outer_block(p, row, panel, n, panels, in_f32)
        WITH_ROWS(rows, BLOCK)
#undef BLOCK
    }
}

INLINE void outer_all(const outer_product *p, int in_f32)
{
    int64_t panel = 0;
    for (; panel + LOWRANK_PANELS <= p->panels; panel += LOWRANK_PANELS)
        outer_panels(p, panel, LOWRANK_PANELS, in_f32);
    for (; panel < p->panels; panel++)
        outer_panels(p, panel, 1, in_f32);
}

static void outer(const outer_product *p)
{
    if (p->in_f32)
        outer_all(p, 1);
    else
        outer_all(p, 0);
}

INLINE void sums_block(const factor_sums *p, int64_t rank, int64_t panel, int ranks, int panels)
{
    vf sum[LOWRANK_ROWS][LOWRANK_PANELS];
    for (int i = 0; i < ranks; i++)
        for (int j = 0; j < panels; j++)
            sum[i][j] = vf_set1(0.0f);
    for (int64_t t = 0; t < p->n_rows; t++) {
        const float *x = p->x + t * p->x_stride + rank, *y = p->y + row_of(p->y_rows, t) * p->y_stride;
        vf gate = vf_set1(p->gate ? p->gate[t] : 1.0f), values[LOWRANK_PANELS];
        for (int j = 0; j < panels; j++)
            values[j] = vf_load_upto(y, (panel + j) * p->step, p->columns);
        for (int i = 0; i < ranks; i++) {
            vf by = vf_mul(gate, vf_set1(x[i]));
            for (int j = 0; j < panels; j++)
                sum[i][j] = vf_fma(by, values[j], sum[i][j]);
        }
    }
    for (int i = 0; i < ranks; i++)
        for (int j = 0; j < panels; j++) {
            float *out = p->sums + (rank + i) * p->rank_stride + (panel + j) * p->panel_stride;
            vf_store(out, vf_fma(vf_set1(p->scale), sum[i][j], vf_load(out)));
        }
}

INLINE void sums_panels(const factor_sums *p, int64_t panel, int panels)
{
    int64_t rank = 0;
    for (; rank + LOWRANK_ROWS <= p->ranks; rank += LOWRANK_ROWS)
        sums_block(p, rank, panel, LOWRANK_ROWS, panels);
    for (; rank < p->ranks; rank++)
        sums_block(p, rank, panel, 1, panels);
}

static void factor_sums_of(const factor_sums *p)
{
    int64_t panel = 0;
    for (; panel + LOWRANK_PANELS <= p->panels; panel += LOWRANK_PANELS)
        sums_panels(p, panel, LOWRANK_PANELS);
    for (; panel < p->panels; panel++)
        sums_panels(p, panel, 1);
}
