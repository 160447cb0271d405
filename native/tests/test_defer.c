/* test_defer.c - given routings, their split and the parts of a program: a split against a slow, obvious reference
 * over random masks, depths and gates with ties; ids that are no expert; layers with deferral against the formula,
 * bit by bit; nothing deferred is nothing changed; parts alone and in any order. */
#include "everything.h"

enum { EXPERTS = 12, TOP_K = 5, TOKENS = 6, HIDDEN = 64, WIDTH = 64, LAYERS = 3 };

/* ---- split -------------------------------------------------------------------------------------- */

typedef struct choices {
    int32_t *ids;
    float *gate;
} choices;

static choices given_of(kt_program *p, int32_t routing)
{
    const float *gate;
    int32_t *ids = (int32_t *)kt_program_routing(p, routing, &gate);
    return (choices){ids, (float *)gate};
}

/* Distinct experts, some slots empty; gates on a coarse grid, so that equal ones occur. */
static void choose_randomly(choices c, int64_t tokens, uint64_t *state)
{
    for (int64_t t = 0; t < tokens; t++, c.ids += TOP_K, c.gate += TOP_K) {
        for (int k = 0; k < TOP_K; k++) {
            c.ids[k] = (int32_t)((random_bits(state) % 2 + 2 * (uint64_t)k) % EXPERTS);
            if (random_bits(state) % 6 == 0)
                c.ids[k] = -1;
            c.gate[k] = (float)(random_bits(state) % 4) / 4;
        }
    }
}

/* A slot goes to `late` if fewer of the token's own slots than may be deferred come before it: with a lower gate, or
 * an equal one and a later place. */
static void expect_split(const int32_t *ids, const float *gate, const uint8_t *elsewhere, int32_t defer, int32_t *now,
                         int32_t *late)
{
    int own[TOP_K], n = 0;
    for (int k = 0; k < TOP_K; k++)
        n += own[k] = ids[k] >= 0 && ids[k] < EXPERTS && !(elsewhere && elsewhere[ids[k]]);
    int most = n < 2 ? 0 : n - 2;
    most = defer < most ? defer : most;
    for (int k = 0; k < TOP_K; k++) {
        int before = 0;
        for (int j = 0; j < TOP_K; j++)
            before += own[j] && (gate[j] < gate[k] || (gate[j] == gate[k] && j > k));
        now[k] = own[k] && before >= most ? ids[k] : -1;
        late[k] = own[k] && before < most ? ids[k] : -1;
    }
}

static void check_split(int32_t threads)
{
    kt_pool *pool = make_pool("portable", threads);
    kt_program *p = make_program(pool, TOKENS, 1, 0);
    uint8_t mask[EXPERTS];
    int32_t given = kt_program_given(p, EXPERTS, TOP_K), now[3], late[3];
    OK(given, kt_program_error(p));
    for (int i = 0; i < 3; i++) {
        now[i] = kt_program_split(p, &(kt_split){given, i == 1 ? NULL : mask, EXPERTS, i < 2});
        OK(now[i], kt_program_error(p));
        late[i] = now[i] + 1;
    }
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    choices from = given_of(p, given);
    uint64_t state = 5;
    int64_t counts[EXPERTS] = {0};
    for (int round = 0; round < 300; round++) {
        int64_t tokens = 1 + (int64_t)(random_bits(&state) % TOKENS);
        int32_t defer = (int32_t)(random_bits(&state) % (TOP_K + 1));
        for (int e = 0; e < EXPERTS; e++)
            mask[e] = (uint8_t)(random_bits(&state) % 3 == 0);
        choose_randomly(from, tokens, &state);
        kt_step s = {RUN(.n_tokens = tokens, .first_output = tokens, .defer = defer)};
        OK(kt_program_run(p, &s), kt_program_error(p));
        for (int i = 0; i < 3; i++) {
            choices got = given_of(p, now[i]);
            CHECK(got.gate == from.gate, "the gate is not shared");
            for (int64_t t = 0; t < tokens; t++) {
                int32_t want[2][TOP_K];
                expect_split(from.ids + t * TOP_K, from.gate + t * TOP_K, i == 1 ? NULL : mask, i == 2 ? 0 : defer,
                             want[0], want[1]);
                CHECK(!memcmp(want[0], got.ids + t * TOP_K, sizeof want[0]), "now of round %d, token %d", round, (int)t);
                CHECK(i == 2 || !memcmp(want[1], given_of(p, late[i]).ids + t * TOP_K, sizeof want[1]),
                      "late of round %d, token %d", round, (int)t);
            }
        }
        for (int64_t i = 0; i < tokens * TOP_K; i++)
            counts[from.ids[i] < 0 ? 0 : from.ids[i]] += from.ids[i] < 0 ? 0 : 3;
    }
    CHECK(!memcmp(counts, kt_program_chosen(p, given, NULL), sizeof counts), "counted something else");
    CHECK(!kt_program_chosen(p, now[0], NULL) && !kt_program_chosen(p, 99, NULL), "counts of no routing");
    kt_program_free(p);
    kt_pool_free(pool);
}

/* ---- layers ------------------------------------------------------------------------------------- */

/* Of each of two nodes its part; a pool of one node takes the first for the whole. */
typedef struct experts {
    test_weight made[4];
    kt_weight gate_up[2], down[2];
} experts;

static experts make_experts(kt_pool *pool, int format)
{
    const kt_format *f = &test_formats[format].format;
    experts e;
    for (int i = 0; i < 2; i++) {
        e.made[i] = make_weight(pool, f, 2 * WIDTH, HIDDEN, EXPERTS, 1 + (uint64_t)i * EXPERTS);
        e.made[2 + i] = make_weight(pool, f, HIDDEN, WIDTH, EXPERTS, 100 + (uint64_t)i * EXPERTS);
        e.gate_up[i] = e.made[i].w;
        e.down[i] = e.made[2 + i].w;
    }
    return e;
}

static void free_experts(experts *e)
{
    for (int i = 0; i < 4; i++)
        free_weight(&e->made[i]);
}

/* Layers that are given their inputs and routings. split: with deferral, each in two parts. */
typedef struct stack {
    kt_program *program;
    kt_view x[LAYERS], out[LAYERS], after[LAYERS];
    int32_t given[LAYERS], now[LAYERS], late[LAYERS];   /* routings */
    int32_t part[LAYERS], late_part[LAYERS];
} stack;

static stack make_stack(kt_pool *pool, const experts *e, const uint8_t *mask, int split)
{
    stack s = {.program = make_program(pool, TOKENS, 1, 0)};
    kt_program *p = s.program;
    for (int i = 0; i < LAYERS; i++) {
        s.x[i] = make_view(p, HIDDEN, KT_ROWS_TOKENS);
        s.out[i] = make_view(p, HIDDEN, KT_ROWS_TOKENS);
        s.after[i] = make_view(p, HIDDEN, KT_ROWS_TOKENS);
        s.now[i] = s.given[i] = kt_program_given(p, EXPERTS, TOP_K);
        s.part[i] = kt_program_part(p);
        OK(kt_program_input(p, s.x[i]), kt_program_error(p));
        if (split)
            s.now[i] = kt_program_split(p, &(kt_split){s.given[i], mask, EXPERTS, i + 1 < LAYERS});
        OK(s.now[i], kt_program_error(p));
        s.late[i] = i + 1 < LAYERS ? s.now[i] + 1 : 0;
        OK(kt_program_experts(p, s.out[i], s.x[i],
                              &(kt_experts){.routing = s.now[i], .gate_up = e->gate_up, .down = e->down}),
           kt_program_error(p));
        if (split && i > 0)
            OK(kt_program_carry(p, s.out[i], s.after[i - 1]), kt_program_error(p));
        s.late_part[i] = kt_program_part(p);
        if (split && i + 1 < LAYERS)
            OK(kt_program_experts(p, s.after[i], s.x[i],
                                  &(kt_experts){.routing = s.late[i], .gate_up = e->gate_up, .down = e->down}),
               kt_program_error(p));
    }
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    return s;
}

static void fill_stack(stack *s, uint64_t seed)
{
    for (int i = 0; i < LAYERS; i++) {
        uint64_t state = seed + (uint64_t)i;
        fill_rows(s->program, s->x[i], TOKENS, state);
        fill_rows(s->program, s->out[i], TOKENS, 7);
        fill_rows(s->program, s->after[i], TOKENS, 8);
        choose_randomly(given_of(s->program, s->given[i]), TOKENS, &state);
    }
}

static void run_stack(stack *s, int32_t defer, int by_parts)
{
    kt_step step = {RUN(.n_tokens = TOKENS, .first_output = TOKENS, .defer = defer)};
    if (!by_parts)
        OK(kt_program_run(s->program, &step), kt_program_error(s->program));
    for (int i = 0; by_parts && i < LAYERS; i++) {
        OK(kt_program_run_part(s->program, &step, s->part[i]), kt_program_error(s->program));
        OK(kt_program_run_part(s->program, &step, s->late_part[i]), kt_program_error(s->program));
    }
}

static int same_rows(stack *a, kt_view x, stack *b, kt_view y)
{
    int same = 1;
    for (int t = 0; t < TOKENS; t++)
        same &= !memcmp(row_of(a->program, x, t), row_of(b->program, y, t), HIDDEN * sizeof(float));
    return same;
}

/* `plain` computes what its given routings hold: those that `from` of layer i of s holds. */
static void take_choices(stack *plain, const stack *s, const int32_t *from)
{
    for (int i = 0; i < LAYERS; i++)
        memcpy(given_of(plain->program, plain->given[i]).ids, given_of(s->program, from[i]).ids,
               TOKENS * TOP_K * sizeof(int32_t));
}

/* out[i] = experts now of layer i + experts late of layer i - 1, to the last bit. */
static void check_formula(stack *s, stack *now, stack *late, int32_t defer)
{
    take_choices(now, s, s->now);
    take_choices(late, s, s->late);
    run_stack(now, 0, 0);
    run_stack(late, 0, 0);
    for (int i = 0; i < LAYERS; i++) {
        for (int t = 0; t < TOKENS; t++) {
            float *want = row_of(now->program, now->out[i], t);
            for (int c = 0; c < HIDDEN && i > 0 && defer; c++)
                want[c] += row_of(late->program, late->out[i - 1], t)[c];
        }
        CHECK(same_rows(now, now->out[i], s, s->out[i]), "layer %d with defer %d", i, defer);
    }
}

static void check_layers(int format, int32_t nodes)
{
    static const int32_t of_node[] = {2, 1};
    kt_pool *pool = make_pool_of(&(kt_pool_options){.isa = own_row(), .n_threads = 3, .spin_us = 20, .n_nodes = nodes,
                                                   .node_threads = nodes > 1 ? of_node : NULL});
    experts e = make_experts(pool, format);
    uint8_t mask[EXPERTS] = {0, 1, 0, 0, 1};
    stack s = make_stack(pool, &e, mask, 1), now = make_stack(pool, &e, NULL, 0), late = make_stack(pool, &e, NULL, 0);
    for (int32_t defer = 0; defer < 4; defer++) {
        for (int by_parts = 0; by_parts < 2; by_parts++) {
            uint64_t seed = 50 + (uint64_t)defer;
            fill_stack(&s, seed);
            fill_stack(&now, seed);
            fill_stack(&late, seed);
            run_stack(&s, defer, by_parts);
            check_formula(&s, &now, &late, defer);
        }
    }
    memset(mask, 0, sizeof mask);
    fill_stack(&s, 9);
    fill_stack(&now, 9);
    run_stack(&s, 0, 0);
    run_stack(&now, 0, 0);
    for (int i = 0; i < LAYERS; i++) {
        CHECK(same_rows(&s, s.out[i], &now, now.out[i]), "deferring nothing changes layer %d", i);
        CHECK(same_rows(&s, s.after[i], &now, now.after[i]), "deferring nothing writes what comes late, layer %d", i);
    }
    kt_program_free(s.program);
    kt_program_free(now.program);
    kt_program_free(late.program);
    free_experts(&e);
    kt_pool_free(pool);
}

/* Experts over ids that are none give what they give without them, and the run says so. */
static void check_strays(kt_pool *pool)
{
    experts e = make_experts(pool, INT8);
    stack s[2] = {make_stack(pool, &e, NULL, 0), make_stack(pool, &e, NULL, 1)}, clean = make_stack(pool, &e, NULL, 0);
    static const int32_t strays[] = {EXPERTS, -2, INT32_MAX, INT32_MIN};
    fill_stack(&clean, 70);
    for (int k = 0; k < 4; k++)
        given_of(clean.program, clean.given[1]).ids[2 * TOP_K + k] = -1;
    run_stack(&clean, 0, 0);
    for (int i = 0; i < 2; i++) {
        kt_step step = {RUN(.n_tokens = TOKENS, .first_output = TOKENS)};
        fill_stack(&s[i], 70);
        for (int k = 0; k < 4; k++)
            given_of(s[i].program, s[i].given[1]).ids[2 * TOP_K + k] = strays[k];
        REFUSED(kt_program_run(s[i].program, &step), KT_ERR_RANGE, kt_program_error(s[i].program), "token 2 of routing");
        REFUSED(kt_program_run_part(s[i].program, &step, s[i].part[1]), KT_ERR_RANGE, kt_program_error(s[i].program),
                "outside -1..11");
        OK(kt_program_run_part(s[i].program, &step, s[i].part[0]), kt_program_error(s[i].program));
        CHECK(same_rows(&clean, clean.out[1], &s[i], s[i].out[1]), "strays changed the result");
        kt_program_free(s[i].program);
    }
    kt_program_free(clean.program);
    free_experts(&e);
}

/* ---- parts -------------------------------------------------------------------------------------- */

enum { PARTS = 9 };

/* Parts that do not need one another, each with a rotation, conversions and products of its own input. */
static void check_parts(kt_pool *pool)
{
    kt_program *p = make_program(pool, TOKENS, 1, 0);
    test_weight w = make_weight(pool, &test_formats[INT8].format, HIDDEN, HIDDEN, 1, 3);
    kt_view x[PARTS], y[PARTS], z[PARTS];
    float inv_freq[8] = {1, 0.5f, 0.25f}, want[PARTS][HIDDEN];
    kt_rope rope = {.dim = 16, .inv_freq = inv_freq, .scale = 1, .head_width = 16};
    int32_t order[PARTS];
    for (int i = 0; i < PARTS; i++) {
        order[i] = i == 0 ? 0 : kt_program_part(p);
        CHECK(order[i] == i, "part %d has number %d", i, order[i]);
        x[i] = i > 0 && i % 3 == 0 ? x[0] : make_view(p, HIDDEN, KT_ROWS_TOKENS);
        y[i] = make_view(p, HIDDEN, KT_ROWS_TOKENS);
        z[i] = make_view(p, HIDDEN, KT_ROWS_TOKENS);
        OK(kt_program_input(p, x[i]), kt_program_error(p));
        OK(kt_program_linear(p, y[i], x[i], &(kt_linear){.weight = &w.w}), kt_program_error(p));
        OK(kt_program_rope(p, y[i], &rope), kt_program_error(p));
        OK(kt_program_linear(p, z[i], y[i], &(kt_linear){.weight = &w.w}), kt_program_error(p));
    }
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    uint64_t state = 11;
    for (int round = 0; round < 20; round++) {
        kt_step step = {RUN(.n_tokens = 1 + round % TOKENS, .start = round, .first_output = 1 + round % TOKENS)};
        for (int i = 0; i < PARTS; i++)
            fill_rows(p, x[i], TOKENS, random_bits(&state) % 1000);
        OK(kt_program_run(p, &step), kt_program_error(p));
        for (int i = 0; i < PARTS; i++) {
            memcpy(want[i], row_of(p, z[i], step.runs->n_tokens - 1), sizeof want[i]);
            fill_rows(p, y[i], TOKENS, 1);
            fill_rows(p, z[i], TOKENS, 1);
        }
        for (int i = 0; i < PARTS; i++) {
            int j = i + (int)(random_bits(&state) % (uint64_t)(PARTS - i)), part = order[j];
            order[j] = order[i];
            order[i] = part;
            OK(kt_program_run_part(p, &step, part), kt_program_error(p));
        }
        for (int i = 0; i < PARTS; i++)
            CHECK(!memcmp(want[i], row_of(p, z[i], step.runs->n_tokens - 1), sizeof want[i]), "round %d, part %d", round, i);
    }
    kt_step step = {RUN(.n_tokens = 1, .first_output = 1)};
    REFUSED(kt_program_run_part(p, &step, PARTS), KT_ERR_RANGE, kt_program_error(p), "part 9 of 9");
    REFUSED(kt_program_run_part(p, &step, -1), KT_ERR_RANGE, kt_program_error(p), "part -1");
    REFUSED(kt_program_part(p), KT_ERR_SHAPE, kt_program_error(p), "finished");
    kt_program_free(p);
    free_weight(&w);
}

/* What was converted is converted again after kt_program_input, and only then. */
static void check_input(kt_pool *pool)
{
    kt_program *p = make_program(pool, TOKENS, 1, 0);
    test_weight w = make_weight(pool, &test_formats[INT8].format, HIDDEN, HIDDEN, 1, 3);
    kt_view x = make_view(p, HIDDEN, KT_ROWS_TOKENS), y[3];
    for (int i = 0; i < 3; i++) {
        y[i] = make_view(p, HIDDEN, KT_ROWS_TOKENS);
        if (i == 2)
            OK(kt_program_input(p, part(x, 8, 8)), kt_program_error(p));
        if (i > 0)
            OK(kt_program_part(p), kt_program_error(p));
        OK(kt_program_linear(p, y[i], x, &(kt_linear){.weight = &w.w}), kt_program_error(p));
    }
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    kt_step step = {RUN(.n_tokens = TOKENS, .first_output = TOKENS)};
    for (int i = 0; i < 3; i++) {
        fill_rows(p, x, TOKENS, 20 + (uint64_t)i);
        OK(kt_program_run_part(p, &step, i), kt_program_error(p));
    }
    size_t size = HIDDEN * sizeof(float);
    CHECK(!memcmp(row_of(p, y[0], 5), row_of(p, y[1], 5), size), "converted although nothing was written");
    CHECK(memcmp(row_of(p, y[0], 5), row_of(p, y[2], 5), size), "an input was not converted");
    kt_program_free(p);
    free_weight(&w);
}

static void check_refusals(kt_pool *pool)
{
    kt_program *p = make_program(pool, TOKENS, 1, 0);
    const char *(*why)(const kt_program *) = kt_program_error;
    kt_view a = make_view(p, 64, KT_ROWS_TOKENS);
    REFUSED(kt_program_given(p, 0, 1), KT_ERR_SHAPE, why(p), "top_k 1 of 0");
    REFUSED(kt_program_given(p, 4, 0), KT_ERR_SHAPE, why(p), "top_k 0 of 4");
    REFUSED(kt_program_split(p, &(kt_split){0}), KT_ERR_RANGE, why(p), "routing 0 of 0");
    kt_split split = {.routing = kt_program_given(p, 4, 1), .elsewhere = (uint8_t[3]){1}, .experts = 3};
    REFUSED(kt_program_split(p, &split), KT_ERR_SHAPE, why(p), "of 3, not of each of 4 experts");
    REFUSED(kt_program_carry(p, a, part(a, 0, 32)), KT_ERR_SHAPE, why(p), "columns");
    REFUSED(kt_program_input(p, (kt_view){9, 0, 1}), KT_ERR_RANGE, why(p), "buffer 9");
    OK(kt_program_finish(p, NULL), why(p));
    kt_step s = {RUN(.n_tokens = 1, .first_output = 1, .defer = -1)};
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, why(p), "defer is -1");
    kt_program_free(p);
}

int main(void)
{
    check_split(1);
    check_split(3);
    check_layers(INT8, 1);
    check_layers(INT4_G32, 2);
    check_layers(BF16, 1);
    kt_pool *pool = make_pool(own_row(), 2);
    check_strays(pool);
    check_parts(pool);
    check_input(pool);
    check_refusals(pool);
    kt_pool_free(pool);
    return report("test_defer");
}
