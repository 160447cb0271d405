/* experts_backward.c - recording the gradients of routed experts: each node's share, its
 * memory, and the phases of moe_backward.c. */
#include "experts_backward.h"

#include "kernels/formats.h"

/* Where the rows of slots lie in a node's scratch, and how it multiplies with transposes. */
static int make_part(kt_program *p, experts_backward *o, int32_t node)
{
    const moe *f = &o->forward;
    const part *own = &f->parts[node];
    backward_part *b = &o->parts[node];
    size_t slots = (size_t)f->max_slots, inner = f->gate_up_updates < 0 ? 0 : (size_t)p->ranks * sizeof(float);
    if (own->width == 0)
        return KT_OK;
    int failed = transpose_of(p, &own->gate_up, 0, p->options.exact, f->max_slots, &b->gate_up);
    if (!failed)
        failed = transpose_of(p, &own->down, 0, p->options.exact, f->max_slots, &b->down);
    b->z_stride = own->gate_up.panels * KT_PANEL_ROWS;
    b->blocks = (own->width + TURNED_COLUMNS - 1) / TURNED_COLUMNS;
    size_t at = size_mul(slots, (size_t)own->h_stride * sizeof(float));
    const size_t sizes[5] = {size_mul(slots, (size_t)b->z_stride * sizeof(float)),
                             act_bytes(b->gate_up.as.kind, f->max_slots, act_stride(b->gate_up.as.kind, b->z_stride)),
                             size_mul(slots, (size_t)b->blocks * sizeof(float)), size_mul(slots, inner),
                             size_mul(slots, inner)};
    size_t *const offsets[5] = {&b->dz, &b->act, &b->sums, &b->gate_up_v, &b->down_v};
    for (int i = 0; i < 5; i++) {
        *offsets[i] = at = size_add(at, 63) / 64 * 64;
        at = size_add(at, sizes[i]);
    }
    f->parts[node].inner_offset = at = size_add(at, 63) / 64 * 64;
    o->dx.offset[node] = at = size_add(size_add(at, size_mul(slots, inner)), 63) / 64 * 64;
    size_t sums = o->dx.direct ? 0 : size_mul((size_t)program_rows(p, f->domain), (size_t)o->dx.stride * sizeof(float));
    program_reserve_node(p, size_add(at, sums));
    size_t turned = transpose_bytes(&b->gate_up) > transpose_bytes(&b->down) ? transpose_bytes(&b->gate_up)
                                                                            : transpose_bytes(&b->down);
    program_reserve(p, 0, size_add(groups_size(f), size_add(BLOCK_FLOATS * sizeof(float), turned)));
    return failed;
}

static void record_hidden(kt_program *p, experts_backward *o, int32_t routed)
{
    moe *f = &o->forward;
    if (f->gate_up_updates >= 0) {
        program_phase(p, gate_up_inner_run, f);
        program_touch_view(p, f->x, ANY_ROWS);
        program_touch(p, routed, 0, 1, ANY_ROWS);
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
        program_phase(p, down_back_inner_run, o);
        program_touch_view(p, o->dout, ANY_ROWS);
        program_touch(p, routed, 0, 1, ANY_ROWS);
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
    }
    program_phase(p, hidden_backward_run, o);
    program_touch_source(p, &o->in);
    program_touch(p, routed, 0, 1, ANY_ROWS);
    program_touch_node_scratch(p, ANY_ROWS | WRITES);
    program_touch_view(p, o->dgate, ANY_ROWS | WRITES);
    if (f->down->rotation) {
        program_phase(p, hidden_rotate_run, o);
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
    }
    program_phase(p, glu_backward_run, o);
    program_touch_source(p, &f->in);
    program_touch_node_scratch(p, ANY_ROWS | WRITES);
}

static void record(kt_program *p, experts_backward *o)
{
    moe *f = &o->forward;
    int32_t routed = p->routings.at[f->routing].resource;
    record_hidden(p, o, routed);
    if (f->gate_up_updates >= 0) {
        program_phase(p, gate_up_back_inner_run, o);
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
    }
    if (!p->options.exact) {
        program_phase(p, convert_dz_run, o);
        program_touch_node_scratch(p, ANY_ROWS | WRITES);
    }
    program_phase(p, dx_run, o);
    program_touch_node_scratch(p, ANY_ROWS | WRITES);
    if (o->dx.direct)
        program_touch_view(p, f->out, ANY_ROWS | WRITES);
    program_phase(p, backward_finish_run, o);
    program_touch_node_scratch(p, ANY_ROWS);
    program_touch_view(p, o->dout, ANY_ROWS);
    program_touch(p, routed, 0, 1, ANY_ROWS);
    program_touch_view(p, f->out, ANY_ROWS | WRITES);
    program_touch_view(p, o->dgate, ANY_ROWS | WRITES);
    if (f->gate_up_updates < 0)
        return;
    program_phase(p, gate_up_gradients_run, o);
    program_touch_node_scratch(p, ANY_ROWS);
    program_touch_view(p, f->x, ANY_ROWS);
    program_phase(p, down_inner_run, f);
    program_touch_node_scratch(p, ANY_ROWS | WRITES);
    program_phase(p, down_gradients_run, o);
    program_touch_node_scratch(p, ANY_ROWS);
    program_touch_view(p, o->dout, ANY_ROWS);
}

static int check(kt_program *p, kt_view dx, kt_view dgate, kt_view x, kt_view dout, int32_t number)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "experts_backward x", x, -1);
    if (!failed)
        failed = program_check_view(p, "experts_backward dx", dx, program_domain(p, x));
    if (!failed)
        failed = program_check_view(p, "experts_backward dgate", dgate, program_domain(p, x));
    if (!failed)
        failed = program_check_view(p, "experts_backward dout", dout, program_domain(p, x));
    const kt_view apart[5][2] = {{dx, x}, {dx, dout}, {dgate, dx}, {dgate, x}, {dgate, dout}};
    for (int i = 0; i < 5 && !failed; i++)
        failed = program_check_overlap(p, "experts_backward", apart[i][0], apart[i][1], 0);
    if (failed)
        return failed;
    if (number < 0 || number >= p->routings.n || dgate.width != p->routings.at[number].top_k || dout.width != dx.width)
        return program_fail(p, KT_ERR_SHAPE, "experts_backward: routing %d of %d, %d columns of dgate and %d of dout for "
                            "%d of dx", number, p->routings.n, dgate.width, dout.width, dx.width);
    return KT_OK;
}

int kt_program_experts_backward(kt_program *p, kt_view dx, kt_view dgate, kt_view x, kt_view dout,
                                const kt_experts_backward *given)
{
    const kt_experts forward = {.routing = given->routing, .gate_up = given->gate_up, .down = given->down,
                                .glu = given->glu, .gate_up_bias = given->gate_up_bias, .down_bias = given->down_bias};
    int failed = check(p, dx, dgate, x, dout, given->routing);
    moe *made = NULL;
    if (!failed)
        failed = moe_make(p, dx, x, &forward, &made);
    if (failed)
        return failed;
    experts_backward *o = program_new(p, sizeof *o);
    backward_part *parts = program_new(p, (size_t)p->n_nodes * sizeof *parts);
    size_t *offset = program_new(p, (size_t)p->n_nodes * sizeof *offset);
    int32_t *some = program_new(p, (size_t)p->n_nodes * sizeof *some);
    if (!o || !parts || !offset || !some)
        return KT_ERR_MEMORY;
    *o = (experts_backward){.forward = *made, .dgate = dgate, .dout = dout, .parts = parts};
    o->dx = (sums){.out = dx, .domain = made->domain, .nodes = p->n_nodes, .offset = offset, .given = some,
                   .direct = p->n_nodes == 1 && !made->gate_up->rotation,
                   .stride = round_up(x.width, TURNED_COLUMNS)};
    const backward_part *first = NULL;
    for (int32_t i = 0; i < p->n_nodes && !failed; i++) {
        some[i] = made->parts[i].width > 0;
        failed = make_part(p, o, i);
        first = !first && some[i] ? &parts[i] : first;
    }
    if (failed)
        return failed;
    o->forward.in = program_source(p, x, made->gate_up);
    o->in = program_source(p, dout, &first->down.as);
    record(p, o);
    return KT_OK;
}
