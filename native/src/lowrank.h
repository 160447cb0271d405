/* lowrank.h - what adapters add to products (kt_adapters.h): the products, and their updates.
 *
 * A product that may be updated is two more pieces of work: before it A x of each row, beside it B (A x). Both look up
 * whose update a row gets by the row's run.
 */
#ifndef KT_LOWRANK_H
#define KT_LOWRANK_H

#include "kt_gradients.h"
#include "program.h"

#define INNER_RANKS 4           /* of a task, where there are few rows or experts */
#define MAX_ADAPTERS 4096
#define MAX_RANKS 4096          /* of one product's updates, */
#define MAX_UPDATES 8           /* and how many there are */

typedef struct adapted {
    int32_t n;
    kt_update updates[MAX_UPDATES];
    kt_gradient gradients[MAX_UPDATES];     /* NULL: not wanted */
} adapted;

/* A product that adapters may update. */
typedef struct adaptable {
    int32_t operation, part;
    int64_t count, k, panels;   /* matrices, their columns and their panels of 16 rows, of all nodes */
    adapted *of;                /* [adapters] */
} adaptable;

/* A norm whose gain adapters may replace. */
typedef struct adaptable_gain {
    int32_t operation;
    const float **of;           /* [adapters]; NULL: its own */
} adaptable_gain;

/* Of the norm recorded next: its number, or -1 where there are no adapters, or no memory. */
int32_t lowrank_gain(kt_program *p);
/* The gain of a row of a domain. */
const float *lowrank_gain_of(const worker *w, int32_t gain, const float *own, int32_t domain, int64_t row);

/* Of the operation just recorded: its number, or -1 where there are no adapters, or no memory. */
int32_t lowrank_product(kt_program *p, int32_t part, int64_t count, int64_t k, int64_t panels);
/* Where the A x of rows of a domain lie between the two pieces of work of a product. */
kt_view lowrank_inner_view(kt_program *p, int32_t domain);

/* Rows of one matrix's product, and what A made of them. */
typedef struct adapted_rows {
    int32_t product, domain;
    int64_t matrix, n;
    int64_t first;              /* row i is row first + i of the domain, */
    const int32_t *tokens;      /* or tokens[i], ascending, where this is not NULL */
    const kt_run *run;          /* whose all rows are; NULL: each is of its own */
    float *inner;               /* [n][inner_stride] */
    int64_t inner_stride;
} adapted_rows;

/* inner = scale * A x, of ranks [first, last) of each product's updates, one behind the other. x: of row 0, the columns
 * from column `column` of A on, k of them; of row i the row x_rows[i] from there, or i where that is NULL. */
typedef struct adapted_input {
    const float *x;
    int64_t x_stride, column, k;
    const int32_t *x_rows;
} adapted_input;
void lowrank_inner(const worker *w, const adapted_rows *rows, const adapted_input *in, int64_t first, int64_t last);

/* y += gate * B inner, for panels [panel, last_panel) of the product. y: row 0, column 16 * panel; of row i the row
 * y_rows[i], or i; columns: of those panels, as far as there are. */
typedef struct adapted_output {
    float *y;
    int64_t y_stride, columns, panel, last_panel;
    const int32_t *y_rows;
    const float *gate;
} adapted_output;
void lowrank_outer(const worker *w, const adapted_rows *rows, const adapted_output *out);

/* The updates of a product's rows, found one after the other by next_update. It begins with zeros. */
typedef struct found_update {
    const kt_update *update;
    const kt_gradient *gradient;
    int64_t row, last_row;      /* neighbours that have it */
    int64_t rank;               /* its first among those of all updates that they have */
    const adapted *its;
    int32_t number;
} found_update;
int next_update(const worker *w, const adapted_rows *rows, found_update *u);     /* 0: there are no more */

/* The panels of B among [panel, last_panel) of the product: how many, none perhaps; the column of the first from there
 * on, and its number in B. */
typedef struct panels_of_b {
    int64_t n, column, at;
} panels_of_b;
panels_of_b panels_among(const kt_update *u, int64_t matrix, int64_t panel, int64_t last_panel);

/* Numbers of A from one rank to the next, and the number of a column. */
static inline int64_t rank_stride_of_a(const worker *w, const adapted_rows *rows)
{
    return (w->program->adaptables.at[rows->product].k + 15) / 16 * 16;
}
static inline int64_t number_of_a(const kt_update *u, int64_t matrix, int64_t rank_stride, int64_t column)
{
    return (u->one_a ? 0 : matrix) * u->rank * rank_stride + column;
}
static inline const void *factor_number(const void *of, int64_t at, int32_t in_f32)
{
    return (const uint8_t *)of + (size_t)at * (in_f32 ? sizeof(float) : sizeof(uint16_t));
}
/* Where row i begins of columns that lie row by row, or all of them where `rows` says of each which it is. */
static inline int64_t begin_of_row(const int32_t *rows, int64_t i, int64_t stride)
{
    return rows ? 0 : i * stride;
}

/* Both at once, of a thread's own rows; memory: lowrank_bytes of them. */
void lowrank_add(const worker *w, adapted_rows rows, adapted_input in, adapted_output out, void *memory);
size_t lowrank_bytes(const kt_program *p);

/* Ranks of a task of A x where there are `others` more tasks beside each other: all, so that x is read once, unless threads
 * would have nothing to do. */
static inline int64_t ranks_of_task(const worker *w, int64_t others)
{
    return others >= 2 * w->threads ? w->program->ranks : INNER_RANKS;
}

/* A linear product's A x: the rows of its domain shared out among all threads. */
void lowrank_inner_shared(const worker *w, int32_t product, int32_t domain, kt_view x, kt_view inner);

#endif
