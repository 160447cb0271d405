/* defer.c - which experts of a token are computed now and which later, and where the later ones
 * are added.
 *
 * A routing is split, token by token, into one for now and one for later; both have the slots of the first, some
 * of them negative, and read its gate. What is computed later is a buffer of its own, which the next layer adds
 * to its output: only the point of addition moves, input and weight of an expert stay those of its layer. In a
 * step that defers nothing the phases over late routings are left out (phase.late).
 */
#include "program.h"

#define LEFT_NOW 2      /* fewest experts of a token that are not deferred: "at least 2 immediate" (KTransformers) */

typedef struct split {
    int32_t from, now, late, domain;    /* routings; late -1: none */
    const uint8_t *elsewhere;           /* [experts] or NULL */
} split;

/* now = ids without those elsewhere and those that are no expert; how many are left. */
static int32_t keep_own(const routing *r, const int32_t *ids, const uint8_t *elsewhere, int32_t *now)
{
    int32_t n = 0;
    for (int32_t k = 0; k < r->top_k; k++) {
        int own = ids[k] >= 0 && ids[k] < r->experts && !(elsewhere && elsewhere[ids[k]]);
        now[k] = own ? ids[k] : -1;
        n += own;
    }
    return n;
}

/* The slot of least gate, the last of equals; some slot is not negative. */
static int32_t least(const int32_t *ids, const float *gate, int32_t top_k)
{
    int32_t best = -1;
    for (int32_t k = 0; k < top_k; k++) {
        if (ids[k] >= 0 && (best < 0 || gate[k] <= gate[best]))
            best = k;
    }
    return best;
}

static void split_run(const void *arg, worker *w)
{
    const split *o = arg;
    const routing *all = w->program->routings.at, *from = &all[o->from];
    int64_t t, last;
    routing_check(w, o->from, 1);
    for (own_rows(w, o->domain, &t, &last); t < last; t++) {
        int64_t at = t * from->top_k;
        int32_t *now = all[o->now].ids + at, *late = o->late < 0 ? NULL : all[o->late].ids + at;
        int32_t n = keep_own(from, from->ids + at, o->elsewhere, now);
        for (int32_t k = 0; late && k < from->top_k; k++)
            late[k] = -1;
        int32_t most = run_of(w, token_row(w, o->domain, t))->defer;
        for (int32_t i = 0; late && i < most && i < n - LEFT_NOW; i++) {
            int32_t k = least(now, from->gate + at, from->top_k);
            late[k] = now[k];
            now[k] = -1;
        }
    }
}

/* A routing with the shape and the gate of another. */
static int32_t derive(kt_program *p, int32_t from, int32_t late)
{
    if (!ROOM(p, p->routings))
        return KT_ERR_MEMORY;
    routing r = p->routings.at[from];
    p->routings.at[p->routings.n] = (routing){.experts = r.experts, .top_k = r.top_k, .domain = r.domain, .late = late,
                                              .gates = r.gates, .resource = program_resource(p)};
    return p->routings.n++;
}

int32_t kt_program_split(kt_program *p, const kt_split *s)
{
    int32_t from = s->routing;
    int failed = program_open(p);
    if (failed)
        return failed;
    if (from < 0 || from >= p->routings.n)
        return program_fail(p, KT_ERR_RANGE, "split: routing %d of %d", from, p->routings.n);
    if (s->elsewhere && s->experts != p->routings.at[from].experts)
        return program_fail(p, KT_ERR_SHAPE, "split: elsewhere says it of %d, not of each of %d experts", s->experts,
                            p->routings.at[from].experts);
    split *o = program_new(p, sizeof *o);
    int32_t first = o ? derive(p, from, 0) : KT_ERR_MEMORY;
    int32_t second = o && s->defers && first >= 0 ? derive(p, from, 1) : -1;
    if (first < 0 || (s->defers && second < 0))
        return KT_ERR_MEMORY;
    *o = (split){.from = from, .now = first, .late = second, .domain = p->routings.at[from].domain,
                 .elsewhere = s->elsewhere};
    program_operation(p);
    program_phase(p, split_run, o);
    program_touch(p, p->routings.at[from].resource, 0, 1, OWN_ROWS);
    program_touch(p, p->routings.at[first].resource, 0, 1, OWN_ROWS | WRITES);
    if (s->defers)
        program_touch(p, p->routings.at[second].resource, 0, 1, OWN_ROWS | WRITES);
    return first;
}

int kt_program_carry(kt_program *p, kt_view x, kt_view late)
{
    p->late = 1;
    int failed = kt_program_add(p, x, x, late);
    p->late = 0;
    return failed;
}
