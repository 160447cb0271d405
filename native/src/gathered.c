/* gathered.c - see gathered.h. */
#include "gathered.h"

/* Pages that fit into the memory, or those of one row. */
static int64_t most_pages(int64_t row, size_t page_bytes)
{
    return max64(row, (int64_t)(GATHERED_BYTES / page_bytes));
}

int gathered_reserve(kt_program *p, int64_t keys, size_t page_bytes, size_t *size, const int32_t **identity)
{
    int64_t row = pages_of(keys), most = p->options.max_tokens == 1 ? row : most_pages(row, page_bytes);
    int32_t *numbers = program_new(p, (size_t)most * sizeof *numbers);
    if (!numbers)
        return KT_ERR_MEMORY;
    for (int64_t i = 0; i < most; i++)
        numbers[i] = (int32_t)i;
    *identity = numbers;
    *size = size_mul((size_t)most, page_bytes);
    return KT_OK;
}

int gathered_add(gathered *g, size_t size, int64_t count)
{
    int64_t pages = max64(g->pages, pages_of(count));
    if (g->n && (g->n == GATHERED_ROWS || (size_t)((g->n + 1) * pages) * g->page_bytes > size))
        return 0;
    g->pages = pages;
    g->count[g->n++] = count;
    return 1;
}

uint8_t *gathered_page(const gathered *g, int64_t i, int64_t page, int64_t *keys)
{
    *keys = max64(0, min64(KT_PAGE_TOKENS, g->count[i] - page * KT_PAGE_TOKENS));
    return g->memory + (size_t)(i * g->pages + page) * g->page_bytes;
}

void attend_gathered(const attention *a, const worker *w, const gathered *g, head_rows q, head_rows out)
{
    kt_run runs[GATHERED_ROWS];
    int64_t first[GATHERED_ROWS + 1];
    for (int64_t i = 0; i <= g->n; i++)
        first[i] = i;
    for (int64_t i = 0; i < g->n; i++)      /* one position, which sees them all */
        runs[i] = (kt_run){.n_tokens = 1, .start = g->count[i] - 1, .pages = g->identity + i * g->pages,
                           .n_pages = g->pages};
    batch rows = {.runs = runs, .n_runs = g->n, .rows = g->n, .first = first};
    kt_step step = {.runs = runs, .n_runs = g->n, .cache = g->memory, .page_bytes = g->page_bytes};
    worker over = *w;
    over.step = &step;
    over.batch = &rows;
    attend(a, &over, (run_range){0, g->n}, q, out);
}
