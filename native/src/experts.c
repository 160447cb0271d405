/* experts.c - recording the routed experts: the checks, each node's share, and the phases of
 * moe.c. */
#include "kernels/formats.h"
#include "moe.h"

static int check(kt_program *p, kt_view out, kt_view in, int32_t number)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "experts in", in, -1);
    if (!failed)
        failed = program_check_view(p, "experts out", out, program_domain(p, in));
    if (failed)
        return failed;
    if (number < 0 || number >= p->routings.n)
        return program_fail(p, KT_ERR_RANGE, "experts: routing %d of %d", number, p->routings.n);
    if (p->routings.at[number].domain != program_domain(p, in) || in.width != out.width)
        return program_fail(p, KT_ERR_SHAPE, "experts: %d columns to %d, rows of domain %d routed in domain %d",
                            in.width, out.width, program_domain(p, in), p->routings.at[number].domain);
    return program_check_overlap(p, "experts", out, in, 1);
}

/* Where the parts lie in their node's scratch. */
static void reserve(kt_program *p, moe *o)
{
    size_t rows_bytes = size_mul((size_t)program_rows(p, o->domain), (size_t)o->sum_stride * sizeof(float));
    int64_t widest = 0;
    for (int32_t i = 0; i < o->nodes; i++) {
        part *own = &o->parts[i];
        own->act_offset = size_mul(size_mul((size_t)o->max_slots, (size_t)own->h_stride), sizeof(float));
        size_t act_size = act_bytes(o->kind, o->max_slots, act_stride(o->kind, own->width));
        own->sum_offset = size_add(own->act_offset, size_add(act_size, 63)) / 64 * 64;
        own->inner_offset = o->nodes > 1 ? size_add(own->sum_offset, rows_bytes) : own->sum_offset;
        size_t inner = o->down_updates < 0 ? 0 : size_mul((size_t)o->max_slots, (size_t)p->ranks * sizeof(float));
        program_reserve_node(p, size_add(own->inner_offset, inner));
        widest = max64(widest, own->h_stride);
    }
    size_t rows = o->largest ? 0 : size_mul((size_t)min64(BLOCK_TOKENS, o->max_slots), (size_t)widest);
    program_reserve(p, 0, size_add(groups_size(o), size_mul(size_add(BLOCK_FLOATS, rows), sizeof(float))));
}

static void record(kt_program *p, moe *o, kt_view in)
{
    int32_t routed = p->routings.at[o->routing].resource;
    o->in = program_source(p, in, o->gate_up);
    p->late = p->routings.at[o->routing].late;
    if (o->gate_up_updates >= 0) {
        program_phase(p, gate_up_inner_run, o);
        program_touch_view(p, in, ANY_ROWS);
        program_touch(p, routed, 0, 1, ANY_ROWS);
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
    }
    program_phase(p, gate_up_run, o);
    program_touch_source(p, &o->in);
    program_touch(p, routed, 0, 1, ANY_ROWS);
    program_touch_node_scratch(p, ANY_ROWS | WRITES);
    if (o->down_updates >= 0) {
        program_phase(p, down_inner_run, o);
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
    }
    if (o->down->rotation) {
        program_phase(p, rotate_run, o);
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
    }
    if (o->kind != ACT_F32) {
        program_phase(p, quantize_run, o);
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
    }
    program_phase(p, down_run, o);
    program_touch_node_scratch(p, o->nodes > 1 ? ANY_ROWS | WRITES : ANY_ROWS);
    program_touch(p, routed, 0, 1, ANY_ROWS);
    if (o->nodes > 1) {
        program_phase(p, reduce_run, o);
        program_touch_node_scratch(p, ANY_ROWS);
    }
    program_touch_view(p, o->out, ANY_ROWS | WRITES);
    p->late = 0;
}

/* Check the nodes' parts and fill them. */
static int make_parts(kt_program *p, moe *o, int64_t hidden, const kt_experts *given)
{
    const kt_weight *gate_up = given->gate_up, *down = given->down;
    int64_t width = 0;
    for (int32_t i = 0; i < o->nodes; i++) {
        part *own = &o->parts[i];
        if (down[i].k < 0 || down[i].k > MAX_COLUMNS)
            return program_fail(p, KT_ERR_SHAPE, "experts: a width of %lld", (long long)down[i].k);
        if (down[i].k == 0)
            continue;
        int64_t unit = kt_cut_columns(&down[i].format);
        int64_t padded = (down[i].k + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS * KT_PANEL_ROWS;
        if (unit && width % unit)
            return program_fail(p, KT_ERR_SHAPE, "experts: node %d begins at column %lld; they are cut every %lld", i,
                                (long long)width, (long long)unit);
        int failed = program_matrices(p, "experts gate_up", &gate_up[i],
                                      (int64_t[3]){o->glu.ungated ? down[i].k : 2 * padded, hidden, o->experts}, 0,
                                      &own->gate_up);
        if (!failed)
            failed = program_matrices(p, "experts down", &down[i], (int64_t[3]){hidden, down[i].k, o->experts}, 0,
                                      &own->down);
        if (failed)
            return failed;
        if (o->nodes > 1 && own->down.kind == ACT_ROUNDED)
            return program_fail(p, KT_ERR_SHAPE, "experts: input cannot be rounded where nodes share its columns");
        if (width && !(matrices_read_alike(&own->down, o->down) && matrices_read_alike(&own->gate_up, o->gate_up)))
            return program_fail(p, KT_ERR_SHAPE, "experts: node %d has another format", i);
        own->width = down[i].k;
        own->column = width;
        own->rotated = rotated_columns(&down[i].format, down[i].k);
        own->h_stride = max64(padded, own->rotated);
        own->gate_up_bias = given->gate_up_bias ? given->gate_up_bias + o->per_pair * width : NULL;
        own->down_bias = width ? NULL : given->down_bias;
        if (!width) {
            o->gate_up = &own->gate_up;
            o->down = &own->down;
            o->kind = own->down.kind;
        }
        width += own->width;
    }
    o->width = width;
    o->bias_stride = o->glu.ungated ? width : (width + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS * KT_PANEL_ROWS * 2;
    return width ? KT_OK : program_fail(p, KT_ERR_SHAPE, "experts: a width of 0");
}

int moe_make(kt_program *p, kt_view out, kt_view x, const kt_experts *given, moe **made)
{
    int32_t number = given->routing;
    kt_glu glu;
    int failed = check(p, out, x, number);
    if (!failed)
        failed = program_glu(p, "experts", given->glu, &glu);
    if (failed)
        return failed;
    const routing *r = &p->routings.at[number];
    moe *o = *made = program_new(p, sizeof *o);
    part *parts = program_new(p, (size_t)p->n_nodes * sizeof *parts);
    if (!o || !parts)
        return KT_ERR_MEMORY;
    *o = (moe){.out = out, .x = x, .routing = number, .domain = r->domain, .nodes = p->n_nodes, .top_k = r->top_k,
               .experts = r->experts, .max_slots = program_rows(p, r->domain) * r->top_k, .glu = glu, .parts = parts,
               .per_pair = glu.ungated ? 1 : 2,
               .sum_stride = ((int64_t)out.width + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS * KT_PANEL_ROWS + KT_PANEL_ROWS};
    if (o->max_slots > INT32_MAX)
        return program_fail(p, KT_ERR_SHAPE, "experts: %lld rows of %d experts each",
                            (long long)program_rows(p, r->domain), r->top_k);
    failed = make_parts(p, o, x.width, given);
    if (failed)
        return failed;
    program_operation(p);
    int64_t panels = (o->bias_stride + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS;
    o->gate_up_updates = lowrank_product(p, 0, o->experts, x.width, panels);
    o->down_updates = lowrank_product(p, 1, o->experts, o->width, (o->out.width + KT_PANEL_ROWS - 1) / KT_PANEL_ROWS);
    return KT_OK;
}

int kt_program_experts(kt_program *p, kt_view out, kt_view x, const kt_experts *given)
{
    moe *o = NULL;
    int failed = moe_make(p, out, x, given, &o);
    if (failed)
        return failed;
    if (o->nodes > 1 && o->kind == ACT_INT8) {
        o->largest = program_new(p, (size_t)o->max_slots * sizeof *o->largest);
        if (!o->largest)
            return KT_ERR_MEMORY;
    }
    reserve(p, o);
    record(p, o, x);
    return KT_OK;
}

int kt_program_keep_hidden(kt_program *p)
{
    int failed = program_open(p);
    if (failed)
        return failed;
    if (p->operations || p->n_nodes > 1)
        return program_fail(p, KT_ERR_SHAPE, "keep_hidden must be asked for before operations are recorded, on one node");
    p->keeps_hidden = 1;
    return KT_OK;
}

const float *kt_program_hidden(const kt_program *p)
{
    return p->keeps_hidden && p->finished ? (const float *)(const void *)p->nodes[0].scratch : NULL;
}
