/* test_choose_blocks.c - chosen blocks of positions, and attention over them alone, against plain loops: pieces of a
 * prompt and threads change no bit. */
#include "chosen.h"

enum { BLOCK = 128, BLOCKS = 2, LISTS = 3, GROUP = 2, HEAD = 18, QUERY = LISTS * GROUP * HEAD };

typedef struct block_run {
    kt_program *p;
    kt_view index_q, key, q, k, v, out;
    int32_t choice;
} block_run;

static block_run record_blocks(kt_pool *pool, int32_t exact, int64_t tokens)
{
    size_t behind = (size_t)(2 * LISTS * HEAD * 64) * (exact ? 4 : 2);
    block_run r = {.p = make_program(pool, tokens, 1, exact)};
    r.index_q = make_view(r.p, LISTS * DIM, KT_ROWS_TOKENS);
    r.key = make_view(r.p, DIM, KT_ROWS_TOKENS);
    r.q = make_view(r.p, QUERY, KT_ROWS_TOKENS);
    r.k = make_view(r.p, LISTS * HEAD, KT_ROWS_TOKENS);
    r.v = make_view(r.p, LISTS * HEAD, KT_ROWS_TOKENS);
    r.out = make_view(r.p, QUERY, KT_ROWS_TOKENS);
    kt_choose s = {LISTS, DIM, BLOCKS, BLOCK, 1, 1, behind};
    r.choice = kt_program_choose(r.p, r.index_q, r.key, (kt_view){0, 0, 0}, &s);
    OK(r.choice, kt_program_error(r.p));
    kt_gqa a = {LISTS * GROUP, LISTS, HEAD, 0.3f, 0, 0, NULL, r.choice};
    OK(kt_program_gqa(r.p, r.out, r.q, r.k, r.v, &a), kt_program_error(r.p));
    OK(kt_program_finish(r.p, NULL), kt_program_error(r.p));
    return r;
}

/* What every token brought so far. */
typedef struct history {
    float key[TOKENS][DIM], k[TOKENS][LISTS * HEAD], v[TOKENS][LISTS * HEAD];
} history;

static void bring(const block_run *r, history *h, int64_t row, int64_t t)
{
    const kt_view views[] = {r->index_q, r->q, r->key, r->k, r->v};
    for (uint64_t i = 0; i < 5; i++)
        fill(row_of(r->p, views[i], row), (size_t)views[i].width, 70000 * i + (uint64_t)t);
    memcpy(h->key[t], row_of(r->p, r->key, row), sizeof h->key[t]);
    memcpy(h->k[t], row_of(r->p, r->k, row), sizeof h->k[t]);
    memcpy(h->v[t], row_of(r->p, r->v, row), sizeof h->v[t]);
}

/* Token t, in the third block, chose its own and the better of the two others. */
static void check_block_choice(int32_t exact, const history *h, const float *q, const int32_t *got, int32_t count)
{
    double best[2] = {-INFINITY, -INFINITY};
    for (int64_t j = 0; j < 2 * BLOCK; j++) {
        double dot = 0;
        for (int i = 0; i < DIM; i++)
            dot += kept(exact, q[i]) * kept(exact, h->key[j][i]);
        best[j / BLOCK] = fmax(best[j / BLOCK], dot);
    }
    int32_t other = fabs(best[0] - best[1]) < 1e-5 ? got[0] : best[1] > best[0];
    CHECK(count == 2 && got[0] == other && got[1] == 2, "blocks %d and %d of %d", got[0], got[1], count);
}

REFERENCE static void expect_blocks(int32_t exact, const history *h, const float *q, const int32_t *places,
                                    int64_t list, int64_t t, double *out)
{
    double weight[TOKENS], max = -INFINITY, sum = 0;
    memset(out, 0, sizeof(double) * HEAD);
    for (int64_t j = 0; j <= t; j++) {
        weight[j] = places[0] == j / BLOCK || places[1] == j / BLOCK ? 0 : -INFINITY;
        for (int i = 0; i < HEAD; i++)
            weight[j] += 0.3 * kept(exact, q[i]) * kept(exact, h->k[j][list * HEAD + i]);
        max = fmax(max, weight[j]);
    }
    for (int64_t j = 0; j <= t; j++)
        sum += weight[j] = exp(weight[j] - max);
    for (int64_t j = 0; j <= t; j++)
        for (int i = 0; i < HEAD; i++)
            out[i] += weight[j] / sum * kept(exact, h->v[j][list * HEAD + i]);
}

static void check_row(int32_t exact, const block_run *r, const history *h, int64_t row, int64_t t)
{
    const int32_t *count, *places = kt_program_choice(r->p, r->choice, &count);
    for (int64_t list = 0; list < LISTS; list++) {
        const int32_t *got = places + (row * LISTS + list) * BLOCKS;
        check_block_choice(exact, h, row_of(r->p, r->index_q, row) + list * DIM, got, count[row * LISTS + list]);
        for (int64_t head = list * GROUP * HEAD; head < (list + 1) * GROUP * HEAD; head += HEAD) {
            double want[HEAD], off;
            expect_blocks(exact, h, row_of(r->p, r->q, row) + head, got, list, t, want);
            off = distance(row_of(r->p, r->out, row) + head, want, HEAD);
            CHECK(off <= (exact ? 1e-5 : 0.01), "token %lld over blocks is off by %g", (long long)t, off);
        }
    }
}

/* Blocks of 128 positions: each head's best, by the best position of each that the token sees, and attention over
 * those blocks alone. last: what the last token attended to. */
static void check_blocks(const char *isa, int32_t exact, int64_t piece, int32_t threads, float *last)
{
    kt_pool *pool = make_pool(isa, threads);
    block_run r = record_blocks(pool, exact, piece);
    size_t page_bytes = (size_t)((2 * LISTS * HEAD + DIM) * 64) * (exact ? 4 : 2);
    cache c = make_cache(page_bytes);
    history *h = need(sizeof *h);
    for (int64_t start = 0; start < TOKENS; start += piece) {
        int64_t n = piece < TOKENS - start ? piece : TOKENS - start;
        for (int64_t t = 0; t < n; t++)
            bring(&r, h, t, start + t);
        kt_step step = {RUN(.n_tokens = n, .start = start, .first_output = n, .pages = c.pages,
                            .n_pages = (TOKENS + 63) / 64),
                        .cache = c.data, .cache_pages = (TOKENS + 63) / 64, .page_bytes = page_bytes};
        OK(kt_program_run(r.p, &step), kt_program_error(r.p));
        for (int64_t t = start > 2 * BLOCK ? 0 : 2 * BLOCK - start; t < n; t += 7)
            check_row(exact, &r, h, t, start + t);
        memcpy(last, row_of(r.p, r.out, n - 1), sizeof(float) * QUERY);
    }
    free(h);
    free(c.data);
    kt_program_free(r.p);
    kt_pool_free(pool);
}

int main(void)
{
    float blocks[4][QUERY];
    check_blocks(own_row(), 1, TOKENS, 3, blocks[0]);
    check_blocks(own_row(), 0, TOKENS, 2, blocks[0]);
    check_blocks(own_row(), 0, 47, 3, blocks[1]);
    check_blocks(own_row(), 0, 1, 1, blocks[2]);
    check_blocks(own_row(), 0, 1, 4, blocks[3]);
    for (int i = 1; i < 4; i++)
        CHECK(memcmp(blocks[0], blocks[i], sizeof blocks[0]) == 0, "pieces or threads give other bits over blocks");
    return report("test_choose_blocks");
}
