/* amx_tiles.inc.c - the components of the products of the row amx: tile instructions and
 * configurations, activations and weights as tiles, and the ceilings of the tile unit.
 *
 * Whatever the format, a *step* is 64 bytes of a row of x and 16 lines of 64 bytes of a panel: 64 columns of int8
 * or 32 of bf16. Those 16 lines are just what a B tile wants, so 8-bit and bf16 panels are loaded where they lie;
 * 4-bit panels are unpacked to signed bytes, BLOCK_STEPS steps at a time, into the first cache. 16 tokens are an A
 * tile: it is loaded where the rows lie if they follow each other; else, and where fewer than 16 are left, from a
 * copy made once per token block. Integer sums of signed weights are exact, so they need no offset and no start.
 */

enum {
    TILE_ROWS = 16,
    TILE_BYTES = 1024,
    BLOCK_STEPS = 8,            /* of columns: a pair of panels is 16 kB, a third of Sapphire Rapids' first cache */
    PART_STEPS = 4,             /* the same of a panel in parts: 5 to 15 % faster than 8, 2 are slower than both */
    BLOCK_PARTS = 2 * PART_STEPS,
    ROWS_BYTES = 1 << 20,       /* of x in a token block: half of the second cache */
    TILE_TOKENS_LEAST = 32,     /* tokens of a block, whatever that takes, and at most: a multiple of 32 */
    TILE_TOKENS_MOST = 256,
};

/* ---- instructions --------------------------------------------------------------------------------
 * Macros, since the number of a tile is part of the instruction; assembly, since gcc 12's intrinsics do not say
 * which memory they read and write. Tiles 0-3 are sums, 4 and 5 rows of x (A), 6 and 7 weights (B). */

#define TILE_LOAD(t, at, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, at, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(at), "r"((int64_t)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : :)
/* sum += a * b; a tile's number in the sum, in x, in the weights */
#define TILE_DOT(is_bf16, sum, a, b)                                                        \
    do {                                                                                    \
        if (is_bf16)                                                                        \
            __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :);         \
        else                                                                                \
            __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : :);           \
    } while (0)

/* What LDTILECFG reads. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;
static_assert(sizeof(tile_config) == 64, "as the instruction reads it");

/* 8 tiles of 16 x 64 bytes. */
static const tile_config whole_tiles = {.palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                        .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
/* 32 columns at a time, for groups of 32: half as wide an A, half as high a B. */
static const tile_config half_tiles = {.palette = 1, .row_bytes = {64, 64, 64, 64, 32, 32, 64, 64},
                                       .rows = {16, 16, 16, 16, 16, 16, 8, 8}};

INLINE void configure(const tile_config *c)
{
    __asm__ volatile("ldtilecfg %0" : : "m"(*c));
}

/* Those, with fewer rows of x and of sums. */
static void configure_rows(tile_config c, int64_t rows)
{
    for (int i = 0; i < 6; i++)
        c.rows[i] = (uint8_t)rows;
    configure(&c);
}

static void enter(void)
{
    configure(&whole_tiles);
}

static void leave(void)
{
    __asm__ volatile("tilerelease" : :);
}

/* ---- one product, one token block ---------------------------------------------------------------- */

/* 16 rows of x. */
typedef struct tile_of_x {
    const uint8_t *at;
    int64_t stride;             /* bytes */
    const float *scales;        /* where there are parts: [k' / 64][16] */
} tile_of_x;

typedef struct amx_work {
    const product *p;
    layout l;
    int is_bf16, has_parts;     /* more than one */
    int64_t steps;              /* of a row */
    const uint8_t *x;           /* row 0 */
    int64_t x_stride;           /* bytes */
    int64_t first, n;           /* the token block */
    tile_of_x rows[TILE_TOKENS_MOST / TILE_ROWS];
    int unpacks_most;           /* unpacking takes longer than multiplying */
    const uint8_t *ahead;       /* next line of weights to prefetch, or NULL */
    int64_t ahead_lines;        /* per step */
    /* the thread's scratch */
    uint8_t *lines;             /* [2][BLOCK_STEPS][TILE_BYTES]: a block of columns of 4-bit panels, unpacked */
    float *scales;              /* [BLOCK_PARTS][16] */
    uint8_t *sums;              /* [tiles][2][TILE_BYTES]: what the blocks of columns before gave */
    float *x_scales;            /* [tiles][k' / 64][16] */
    uint8_t *copies;            /* [tokens][copy_stride]: rows of x that do not follow each other */
} amx_work;

/* Steps of a row of k columns. */
static int64_t steps_of(const layout *l, int is_bf16)
{
    return l->k_padded / (is_bf16 ? 32 : 64);
}

/* An odd number of lines: rows that lie so fall into different sets of a cache. */
static int64_t copy_stride(int64_t steps)
{
    return (steps | 1) * 64;
}

static int64_t block_tokens(int64_t steps)
{
    int64_t n = ROWS_BYTES / copy_stride(steps) / 32 * 32;
    return n < TILE_TOKENS_LEAST ? TILE_TOKENS_LEAST : n > TILE_TOKENS_MOST ? TILE_TOKENS_MOST : n;
}

static size_t amx_scratch_bytes(const kt_format *f, int64_t k)
{
    layout l = layout_of(f, k);
    int64_t steps = steps_of(&l, f->bits == 16), tokens = block_tokens(steps);
    return (size_t)(2 * BLOCK_STEPS * TILE_BYTES + BLOCK_PARTS * 64 + tokens / TILE_ROWS * 2 * TILE_BYTES +
                    tokens * (steps * 4 + copy_stride(steps)));
}

static amx_work amx_work_of(const product *p)
{
    amx_work w = {.p = p, .l = layout_of(p->format, p->k), .is_bf16 = p->format->bits == 16, .lines = p->scratch};
    w.steps = steps_of(&w.l, w.is_bf16);
    w.has_parts = !w.is_bf16 && p->x8->scales > 1;
    w.x = w.is_bf16 ? (const uint8_t *)p->xh : (const uint8_t *)p->x8->q;
    w.x_stride = w.is_bf16 ? 2 * p->x_stride : p->x8->stride;
    uint8_t *at = w.lines + 2 * BLOCK_STEPS * TILE_BYTES;
    w.scales = (float *)(void *)at;
    w.sums = at + BLOCK_PARTS * 64;
    at = w.sums + block_tokens(w.steps) / TILE_ROWS * 2 * TILE_BYTES;
    w.x_scales = (float *)(void *)at;
    w.copies = at + block_tokens(w.steps) * w.steps * 4;
    return w;
}

/* Tokens [t, t + n) of the product lie equally far apart, *apart rows of x. */
static int are_even(const product *p, int64_t t, int64_t n, int64_t *apart)
{
    *apart = p->x_rows && n > 1 ? (int64_t)p->x_rows[t + 1] - p->x_rows[t] : 1;
    for (int64_t i = 2; p->x_rows && i < n; i++)
        if (p->x_rows[t + i] - p->x_rows[t + i - 1] != *apart)
            return 0;
    return 1;
}

/* Tiles have the rows of x that a block has, so that a few cost less than 16. */
static int64_t tile_rows(const amx_work *w)
{
    return w->n < TILE_ROWS ? w->n : TILE_ROWS;
}

/* The scales of 16 rows of the block from row t on; of rows that are none, 0. */
static const float *take_scales(const amx_work *w, int64_t t)
{
    float *out = w->x_scales + t * w->steps;
    int64_t rows = w->n - t < TILE_ROWS ? w->n - t : TILE_ROWS;
    memset(out, 0, (size_t)(w->steps * LANES) * sizeof *out);
    for (int64_t i = 0; i < rows; i++) {
        const float *scales = x_scales(w->p, w->first + t + i);
        for (int64_t s = 0; s < w->steps; s++)
            out[LANES * s + i] = scales[s];
    }
    return out;
}

/* Make the n tokens from `first` on the block: every tile of it gets its rows. */
static void take_tokens(amx_work *w, int64_t first, int64_t n)
{
    int64_t stride = copy_stride(w->steps), size = w->steps * 64, apart;
    w->first = first;
    w->n = n;
    w->unpacks_most = w->has_parts && w->p->format->bits < 8 && n <= TILE_ROWS / 2;
    for (int64_t t = 0; t < n; t += TILE_ROWS) {
        tile_of_x *rows = &w->rows[t / TILE_ROWS];
        const float *scales = w->has_parts ? take_scales(w, t) : NULL;
        if (n - t >= tile_rows(w) && are_even(w->p, first + t, tile_rows(w), &apart)) {
            *rows = (tile_of_x){w->x + row_of(w->p->x_rows, first + t) * w->x_stride, apart * w->x_stride, scales};
            continue;
        }
        *rows = (tile_of_x){w->copies + t * stride, stride, scales};
        for (int64_t i = t; i < t + tile_rows(w); i++)
            if (i < n)
                memcpy(w->copies + i * stride, w->x + row_of(w->p->x_rows, first + i) * w->x_stride, (size_t)size);
            else
                memset(w->copies + i * stride, 0, (size_t)size);
    }
}

/* While these panels are multiplied, `turns` times, what comes after them is fetched, evenly. */
static void plan_ahead(amx_work *w, int64_t panel, int panels, int64_t turns)
{
    int64_t lines = (int64_t)(w->p->panel_bytes / 64) * panels;
    w->ahead = panels_after(w->p, panel + panels);
    w->ahead_lines = w->ahead ? (lines + turns - 1) / turns : 0;
}

INLINE void fetch_ahead(amx_work *w)
{
    for (int64_t i = 0; i < w->ahead_lines; i++, w->ahead += 64)
        prefetch_l2(w->ahead);
}

/* Steps [step, step + n) of panel `panel`, number q of its pair, as B tiles. Where that is most of the work, fetches
 * are spread over it, too: only so is the memory busy all the time. */
static const uint8_t *lines_of(amx_work *w, int64_t panel, int q, int64_t step, int64_t n)
{
    const uint8_t *codes = w->p->w + (size_t)panel * w->p->panel_bytes + (size_t)step * w->l.step_bytes;
    int bits = w->p->format->bits;
    if (bits >= 8)
        return codes;
    uint8_t *out = w->lines + q * BLOCK_STEPS * TILE_BYTES;
    __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->p->format->codebook));
    for (int64_t s = 0; s < n; s++, codes += w->l.step_bytes) {
#pragma GCC unroll 8
        for (int line = 0; line < 8; line++) {
            vb raw = vb_load(codes + 64 * line);
            if (w->unpacks_most)
                fetch_ahead(w);
            vb_store(out + s * TILE_BYTES + 64 * line, signed_low(bits, raw, table, codes, line));
            vb_store(out + s * TILE_BYTES + 64 * line + 512, signed_high(bits, raw, table, codes, line));
        }
    }
    return out;
}

static const uint8_t *scales_of(const amx_work *w, int64_t panel)
{
    return w->p->w + (size_t)panel * w->p->panel_bytes + w->l.scale_offset;
}

/* Rows of y that are added to lie far apart: they come while their last columns are multiplied. */
INLINE void fetch_y(const amx_work *w, int64_t panel, int64_t tile)
{
    int64_t t = w->first + tile * TILE_ROWS, left = w->n - tile * TILE_ROWS;
    for (int i = 0; w->p->y_gate && i < TILE_ROWS && i < left; i++)
        prefetch(y_at(w->p, panel, t + i));
}

/* ---- ceilings ------------------------------------------------------------------------------------ */

/* Four sums: a product takes 16 cycles and gives its result after 52. A round of the other rows takes an
 * eighth of the time of four products. */
INLINE uint64_t tile_ops(int is_bf16, uint64_t rounds, uint64_t *operations)
{
    ALIGNED int32_t sum[256];
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    TILE_ZERO(4);
    TILE_ZERO(6);
    rounds = rounds / 8 + 1;
    for (uint64_t n = 0; n < rounds; n++) {
        TILE_DOT(is_bf16, 0, 4, 6);
        TILE_DOT(is_bf16, 1, 4, 6);
        TILE_DOT(is_bf16, 2, 4, 6);
        TILE_DOT(is_bf16, 3, 4, 6);
    }
    TILE_STORE(0, sum, 64);
    *operations = rounds * 4 * TILE_ROWS * 16 * (is_bf16 ? 32 : 64) * 2;
    return (uint64_t)(uint32_t)sum[0];
}

static uint64_t int8_ops(uint64_t rounds, uint64_t *operations)
{
    return tile_ops(0, rounds, operations);
}

static uint64_t bf16_ops(uint64_t rounds, uint64_t *operations)
{
    return tile_ops(1, rounds, operations);
}
