/* finish.c - the end of recording: the single allocation of all memory, divided among
 * everything that was recorded. */
#include "program.h"

#include <stdlib.h>

#define ALIGN 64

static size_t align_up(size_t size)
{
    return size_add(size, ALIGN - 1) / ALIGN * ALIGN;
}

/* Two passes over the same list: with base NULL it only counts, then it hands out. */
static size_t lay_out(kt_program *p, uint8_t *base)
{
    size_t at = 0;
    uint8_t *rows = NULL;
#define PLACE(pointer, type, size)                                      \
    do {                                                                \
        if (base)                                                       \
            (pointer) = (type *)(void *)(base + at);                    \
        at = size_add(at, align_up(size));                              \
    } while (0)
    for (int32_t i = 0; i < p->buffers.n; i++) {
        buffer *b = &p->buffers.at[i];
        PLACE(b->data, float, size_mul((size_t)program_rows(p, b->domain), (size_t)b->stride * sizeof(float)));
    }
    for (int32_t i = 0; i < p->slots.n; i++) {
        slot *s = &p->slots.at[i];
        PLACE(s->data, uint8_t, act_bytes(s->kind, program_rows(p, s->domain), s->stride));
    }
    for (int32_t i = 0; i < p->tables.n; i++) {
        rope_table *t = &p->tables.at[i];
        PLACE(t->data, float, size_mul((size_t)p->options.max_tokens, (size_t)t->dim * sizeof(float)));
    }
    for (int32_t i = 0; i < p->routings.n; i++) {
        routing *r = &p->routings.at[i];
        size_t size = size_mul((size_t)program_rows(p, r->domain), (size_t)r->top_k * sizeof(float));
        PLACE(r->ids, int32_t, size);
        if (r->gates == i)
            PLACE(r->gate, float, size);
        r->gate = p->routings.at[r->gates].gate;
    }
    for (int32_t i = 0; i < p->selections.n; i++) {
        selection *s = &p->selections.at[i];
        size_t size = size_mul((size_t)p->options.max_tokens, (size_t)s->lists * sizeof(int32_t));
        PLACE(s->at, int32_t, size_mul(size, (size_t)s->top_k));
        PLACE(s->count, int32_t, size);
    }
    PLACE(p->scratch, uint8_t, p->scratch_bytes);
    PLACE(rows, uint8_t, batch_bytes(p->options.max_tokens));
#undef PLACE
    if (base)
        p->batch = batch_at(rows, p->options.max_tokens);
    return at;
}

static size_t node_size(const kt_program *p, int32_t node)
{
    size_t locals = size_mul(p->local_stride, (size_t)kt_pool_node_threads(p->pool, node));
    return size_add(align_up(p->node_bytes), locals);
}

/* The memory of a node's own threads; 0 if there is none. */
static int create_node(kt_program *p, int32_t node)
{
    node_memory *m = &p->nodes[node];
    m->arena = kt_arena_create(node_size(p, node), pool_memory(p->pool, node), p->error, sizeof p->error);
    if (!m->arena)
        return 0;
    m->scratch = kt_arena_data(m->arena);
    m->local = m->scratch + align_up(p->node_bytes);
    return 1;
}

int kt_program_finish(kt_program *p, size_t *size)
{
    int failed = program_open(p);
    if (failed)
        return failed;
    /* One page between two threads' scratch, less than a multiple of 4 kB apart. */
    p->local_stride = size_add(align_up(size_add(p->product_bytes, p->local_bytes)), 4096 + ALIGN);
    size_t bytes = lay_out(p, NULL), all = bytes;
    p->profile = calloc((size_t)p->operations + 1, sizeof *p->profile);
    if (!p->profile)
        return program_fail(p, KT_ERR_MEMORY, "no memory for the profile");
    p->arena = kt_arena_create(bytes, pool_all_memory(p->pool), p->error, sizeof p->error);
    int good = p->arena != NULL;
    for (int32_t i = 0; good && i < p->n_nodes; i++) {
        good = create_node(p, i);
        all = size_add(all, node_size(p, i));
    }
    if (!good) {
        program_release(p);
        return KT_ERR_MEMORY;
    }
    lay_out(p, kt_arena_data(p->arena));
    p->finished = 1;
    if (size)
        *size = all;
    return KT_OK;
}
