/* route.c - which experts each token is routed to, and with which weights.
 *
 * Plain loops per token: a few hundred experts are few. Chosen by score + bias, weighted by score
 * alone; experts of groups that were not chosen take no part at all (DeepSeek-V2 and -V3 as
 * transformers computes them: the former masks with 0 where all scores are positive, the latter with
 * -inf). Sources: DeepSeek-V2 report section 2.2.2, DeepSeek-V3 report section 2.1.2.
 */
#include "program.h"

#include <math.h>
#include <string.h>

typedef struct route {
    kt_route r;
    kt_view logits;
    int32_t routing, domain;
} route;

/* Scratch of one thread. */
typedef struct choice {
    float *score;       /* [experts] */
    float *rank;        /* [experts] score + bias: what is compared */
    float *group;       /* [n_group] */
    uint8_t *open;      /* [experts] may still be chosen */
    uint8_t *open_group;
} choice;

/* The open item with the greatest value, the first of equals; NaN loses to nothing but an open item is
 * always found. */
static int32_t best_of(const float *value, const uint8_t *open, int32_t n)
{
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++) {
        if (open[i] && (best < 0 || value[i] > value[best]))
            best = i;
    }
    return best;
}

static void softmax(const float *x, int32_t n, float *out)
{
    float max = x[0], sum = 0;
    for (int32_t i = 1; i < n; i++)
        max = x[i] > max ? x[i] : max;
    for (int32_t i = 0; i < n; i++)
        sum += out[i] = expf(x[i] - max);
    for (int32_t i = 0; i < n; i++)
        out[i] /= sum;
}

static void score(const kt_route *r, const float *logits, choice *c)
{
    if (r->score == KT_SCORE_SOFTMAX)
        softmax(logits, r->experts, c->score);
    else if (r->score == KT_SCORE_SIGMOID)
        for (int32_t e = 0; e < r->experts; e++)
            c->score[e] = 1 / (1 + expf(-logits[e]));
    else if (r->score == KT_SCORE_SPARSEMIXER)
        memcpy(c->score, logits, (size_t)r->experts * sizeof *logits);
    else    /* softplus is x itself where e^-x no longer counts */
        for (int32_t e = 0; e < r->experts; e++)
            c->score[e] = sqrtf(logits[e] > 20 ? logits[e] : log1pf(expf(logits[e])));
    for (int32_t e = 0; e < r->experts; e++)
        c->rank[e] = r->bias ? c->score[e] + r->bias[e] : c->score[e];
}

/* Greatest value of a group, or the sum of its two greatest. */
static float group_score(const float *rank, int32_t n, int32_t how)
{
    float first = -INFINITY, second = -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        if (rank[i] > first) {
            second = first;
            first = rank[i];
        } else if (rank[i] > second) {
            second = rank[i];
        }
    }
    return how == KT_GROUP_TOP2 && n > 1 ? first + second : first;
}

/* Open the experts of the topk_group best groups. */
static void open_groups(const kt_route *r, choice *c)
{
    int32_t size = r->experts / r->n_group;
    for (int32_t g = 0; g < r->n_group; g++)
        c->group[g] = group_score(c->rank + g * size, size, r->group_score);
    memset(c->open, 0, (size_t)r->experts);
    memset(c->open_group, 1, (size_t)r->n_group);
    for (int32_t i = 0; i < r->topk_group; i++) {
        int32_t g = best_of(c->group, c->open_group, r->n_group);
        c->open_group[g] = 0;
        memset(c->open + g * size, 1, (size_t)size);
    }
}

/* The softmax of an expert among the open ones that are near it. */
static float near_share(const kt_route *r, const choice *c, int32_t expert)
{
    float top = c->score[expert], sum = 0;
    for (int32_t e = 0; e < r->experts; e++) {
        float size = fabsf(c->score[e]);
        if (c->open[e] && !((top - c->score[e]) / (size > top ? size : top) > r->band))
            sum += expf(c->score[e] - top);
    }
    return 1 / sum;
}

/* Ids of the chosen, and the weight of each before it is normalised and scaled. */
static void choose(const kt_route *r, choice *c, int32_t *ids, float *gate)
{
    if (r->n_group > 1)
        open_groups(r, c);
    else
        memset(c->open, 1, (size_t)r->experts);
    for (int32_t k = 0; k < r->top_k; k++) {
        ids[k] = best_of(c->rank, c->open, r->experts);
        gate[k] = r->score == KT_SCORE_SPARSEMIXER ? near_share(r, c, ids[k]) : c->score[ids[k]];
        c->open[ids[k]] = 0;
    }
}

/* The same of a token's id, by the table. */
static void look_up(const kt_route *r, const choice *c, int32_t id, int32_t *ids, float *gate)
{
    for (int32_t k = 0; k < r->top_k; k++) {
        ids[k] = r->table[(int64_t)id * r->top_k + k];
        gate[k] = c->score[ids[k]];
    }
}

static void weigh(const kt_route *r, const int32_t *ids, float *gate)
{
    float sum = 0, scale = r->scale;
    for (int32_t k = 0; k < r->top_k; k++)
        sum += gate[k];
    for (int32_t k = 0; k < r->top_k; k++) {
        if (r->normalize)
            gate[k] /= sum + 1e-20f;        /* DeepSeek's guard against a zero sum */
        gate[k] *= r->factors ? scale * r->factors[ids[k]] : scale;
    }
}

static choice choice_at(uint8_t *memory, const kt_route *r)
{
    choice c;
    c.score = (float *)(void *)memory;
    c.rank = c.score + r->experts;
    c.group = c.rank + r->experts;
    c.open = (uint8_t *)(c.group + r->n_group);
    c.open_group = c.open + r->experts;
    return c;
}

static void count(const routing *r, int32_t expert)
{
    atomic_fetch_add_explicit(&r->chosen[expert], 1, memory_order_relaxed);
}

static void route_run(const void *arg, worker *w)
{
    const route *o = arg;
    const routing *to = &w->program->routings.at[o->routing];
    choice c = choice_at(local_scratch(w), &o->r);
    int64_t t, last;
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        int32_t *ids = to->ids + t * to->top_k;
        float *gate = to->gate + t * to->top_k;
        score(&o->r, view_row(w, o->logits, t), &c);
        if (o->r.table)
            look_up(&o->r, &c, w->step->ids[t], ids, gate);
        else
            choose(&o->r, &c, ids, gate);
        weigh(&o->r, ids, gate);
        for (int32_t k = 0; k < to->top_k; k++)
            count(to, ids[k]);
    }
}

static int check_table(kt_program *p, kt_view logits, const kt_route *r)
{
    if (program_domain(p, logits) != KT_ROWS_TOKENS || r->bias || r->n_group > 1 || r->vocab < 1 ||
        r->vocab > MAX_COLUMNS)
        return program_fail(p, KT_ERR_SHAPE, "route: a table of %lld tokens needs rows of tokens, no bias, no groups",
                            (long long)r->vocab);
    for (int64_t i = 0; i < r->vocab * r->top_k; i++)
        if (r->table[i] < 0 || r->table[i] >= r->experts)
            return program_fail(p, KT_ERR_RANGE, "route: the table gives token %lld expert %d of %d",
                                (long long)(i / r->top_k), r->table[i], r->experts);
    p->vocab = min64(p->vocab, r->vocab);
    return KT_OK;
}

static int check_router(kt_program *p, kt_view logits, const kt_route *r)
{
    if (r->experts != logits.width || r->experts < 1 || r->top_k < 1 || r->top_k > r->experts)
        return program_fail(p, KT_ERR_SHAPE, "route: top_k %d of %d experts from %d logits", r->top_k, r->experts,
                            logits.width);
    if (r->n_group > 1 && (r->experts % r->n_group != 0 || r->topk_group < 1 || r->topk_group > r->n_group ||
                           r->top_k > (int64_t)r->topk_group * (r->experts / r->n_group)))
        return program_fail(p, KT_ERR_SHAPE, "route: top_k %d from %d of %d groups of %d experts", r->top_k,
                            r->topk_group, r->n_group, r->experts);
    if (r->score < KT_SCORE_SOFTMAX || r->score > KT_SCORE_SPARSEMIXER || r->group_score < KT_GROUP_MAX ||
        r->group_score > KT_GROUP_TOP2)
        return program_fail(p, KT_ERR_RANGE, "route: score %d, group score %d: there are 0..3 and 0..1", r->score,
                            r->group_score);
    if (r->score == KT_SCORE_SPARSEMIXER && (r->bias || r->n_group > 1 || r->table || !(r->band >= 0)))
        return program_fail(p, KT_ERR_SHAPE, "route: SparseMixer with a band of %g needs no bias, no groups, no table",
                            (double)r->band);
    return r->table ? check_table(p, logits, r) : KT_OK;
}

static int32_t add_routing(kt_program *p, int32_t experts, int32_t top_k, int32_t domain)
{
    _Atomic int64_t *chosen = program_new(p, (size_t)experts * sizeof *chosen);
    if (!chosen || !ROOM(p, p->routings))
        return KT_ERR_MEMORY;
    p->routings.at[p->routings.n] = (routing){.experts = experts, .top_k = top_k, .domain = domain, .chosen = chosen,
                                              .resource = program_resource(p), .gates = p->routings.n};
    return p->routings.n++;
}

int32_t kt_program_route(kt_program *p, kt_view logits, const kt_route *router)
{
    int failed = program_open(p);
    if (!failed)
        failed = program_check_view(p, "route", logits, -1);
    if (!failed)
        failed = check_router(p, logits, router);
    route *o = failed ? NULL : program_new(p, sizeof *o);
    if (!o)
        return failed ? failed : KT_ERR_MEMORY;
    int32_t domain = program_domain(p, logits), number = add_routing(p, router->experts, router->top_k, domain);
    if (number < 0)
        return number;
    *o = (route){.r = *router, .logits = logits, .routing = number, .domain = domain};
    o->r.n_group = router->n_group > 1 ? router->n_group : 1;
    program_reserve(p, 0, (size_t)router->experts * 9 + (size_t)o->r.n_group * 5);
    program_operation(p);
    program_phase(p, route_run, o);
    program_touch_view(p, logits, OWN_ROWS);
    program_touch(p, p->routings.at[number].resource, 0, 1, OWN_ROWS | WRITES);
    return number;
}

const int32_t *kt_program_routing(kt_program *p, int32_t number, const float **gate)
{
    if (!p->finished || number < 0 || number >= p->routings.n)
        return NULL;
    if (gate)
        *gate = p->routings.at[number].gate;
    return p->routings.at[number].ids;
}

const int64_t *kt_program_chosen(kt_program *p, int32_t number, int32_t *experts)
{
    const routing *r = number >= 0 && number < p->routings.n ? &p->routings.at[number] : NULL;
    if (!r || !r->chosen)
        return NULL;
    if (experts)
        *experts = r->experts;
    return (const int64_t *)(const void *)r->chosen;
}

/* ---- given ---------------------------------------------------------------------------------------- */

void routing_check(const worker *w, int32_t number, int counted)
{
    const routing *r = &w->program->routings.at[number];
    stray *s = w->program->stray;
    int64_t t, last;
    if (!r->given)
        return;
    for (own_rows(w, r->domain, &t, &last); t < last; t++) {
        for (const int32_t *id = r->ids + t * r->top_k; id < r->ids + (t + 1) * r->top_k; id++) {
            int32_t none = 0;
            if (*id >= 0 && *id < r->experts && counted)
                count(r, *id);
            else if ((*id < -1 || *id >= r->experts) && atomic_compare_exchange_strong(&s->found, &none, 1)) {
                s->routing = number;
                s->id = *id;
                s->row = t;
            }
        }
    }
}

int32_t kt_program_given(kt_program *p, int32_t experts, int32_t top_k)
{
    int failed = program_open(p);
    if (failed)
        return failed;
    if (experts < 1 || top_k < 1 || experts > MAX_COLUMNS || top_k > MAX_COLUMNS)
        return program_fail(p, KT_ERR_SHAPE, "given: top_k %d of %d experts", top_k, experts);
    if (!p->stray && !(p->stray = program_new(p, sizeof *p->stray)))
        return KT_ERR_MEMORY;
    int32_t number = add_routing(p, experts, top_k, KT_ROWS_TOKENS);
    if (number >= 0)
        p->routings.at[number].given = 1;
    return number;
}
