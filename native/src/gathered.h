/* gathered.h - attention of rows over their own keys, which are first gathered to pages: each
 * row is a run of one token, the last of its keys, whose pages are consecutive. All heads of a
 * row share its keys. */
#ifndef KT_GATHERED_H
#define KT_GATHERED_H

#include "attention.h"

#define GATHERED_BYTES ((size_t)16 << 20)   /* of the keys of some rows; one row at least */
#define GATHERED_ROWS 128                   /* at most */

typedef struct gathered {
    uint8_t *memory;            /* [n][pages][page_bytes] */
    const int32_t *identity;    /* 0, 1, ...: as many as pages can be */
    size_t page_bytes;
    int64_t first, n;           /* rows of the step */
    int64_t pages;              /* of a row, at most */
    int64_t count[GATHERED_ROWS];   /* keys of each */
} gathered;

static inline int64_t pages_of(int64_t keys)
{
    return (keys + KT_PAGE_TOKENS - 1) / KT_PAGE_TOKENS;
}

/* Bytes of memory for rows of up to so many keys, and *identity; KT_OK or KT_ERR_MEMORY. */
int gathered_reserve(kt_program *p, int64_t keys, size_t page_bytes, size_t *size, const int32_t **identity);
/* Take one more row, of so many keys, if there is room; the first one always has. */
int gathered_add(gathered *g, size_t size, int64_t count);
/* Where page `page` of row i lies; the page's keys, 0: it has none. */
uint8_t *gathered_page(const gathered *g, int64_t i, int64_t page, int64_t *keys);
/* As attend(); a: over one kv head, at offset 0 of a page. */
void attend_gathered(const attention *a, const worker *w, const gathered *g, head_rows q, head_rows out);

#endif
