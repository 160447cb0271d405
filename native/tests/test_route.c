/* test_route.c - the choice of experts against a slow, obvious reference (sort all, take the first), for
 * the rules of DeepSeek-V2 and -V3, Qwen3, Phi-3.5-MoE and their mixtures; ties, negative biases and NaN included. */
#include "check.h"

typedef struct rule {
    const char *name;
    kt_route r;
    int32_t biased;
} rule;

static const rule rules[] = {
    {"qwen3", {.experts = 128, .top_k = 8, .normalize = 1, .scale = 1}, 0},
    {"softmax, not normalised", {.experts = 60, .top_k = 4, .scale = 1}, 0},
    {"deepseek-v2", {.experts = 160, .top_k = 6, .n_group = 8, .topk_group = 3, .scale = 16}, 0},
    {"deepseek-v3", {.experts = 256, .top_k = 8, .n_group = 8, .topk_group = 4, .score = KT_SCORE_SIGMOID,
                     .group_score = KT_GROUP_TOP2, .normalize = 1, .scale = 2.5f}, 1},
    {"kimi-k2", {.experts = 384, .top_k = 8, .n_group = 1, .topk_group = 1, .score = KT_SCORE_SIGMOID,
                 .group_score = KT_GROUP_TOP2, .normalize = 1, .scale = 2.827f}, 1},
    {"groups of one", {.experts = 6, .top_k = 2, .n_group = 6, .topk_group = 3, .score = KT_SCORE_SIGMOID,
                       .group_score = KT_GROUP_TOP2, .normalize = 1, .scale = 1}, 1},
    {"deepseek-v4", {.experts = 256, .top_k = 6, .score = KT_SCORE_SQRT_SOFTPLUS, .normalize = 1, .scale = 1.5f}, 1},
    {"phi-3.5-moe", {.experts = 16, .top_k = 2, .score = KT_SCORE_SPARSEMIXER, .band = 0.02f, .scale = 1}, 0},
    {"a wide band", {.experts = 40, .top_k = 3, .score = KT_SCORE_SPARSEMIXER, .band = 0.7f, .scale = 1.5f}, 0},
    {"all of them", {.experts = 5, .top_k = 5, .scale = 1}, 0},
};

enum { TOKENS = 40 };

static float group_of(const kt_route *r, const float *rank, int32_t g)
{
    int32_t size = r->experts / r->n_group;
    float first = -INFINITY, second = -INFINITY;
    for (int32_t i = g * size; i < (g + 1) * size; i++) {
        float x = rank[i];
        second = fmaxf(second, fminf(first, x));
        first = fmaxf(first, x);
    }
    return r->group_score == KT_GROUP_TOP2 && size > 1 ? first + second : first;
}

/* How many of 0..n-1 come before i: greater, or equal with a lower number. */
static int32_t place_of(const float *x, int32_t n, int32_t i)
{
    int32_t before = 0;
    for (int32_t j = 0; j < n; j++)
        before += x[j] > x[i] || (x[j] == x[i] && j < i);
    return before;
}

/* The softmax of an expert among those that come after it and are near. */
static double near_share(const kt_route *r, const float *logits, int32_t e)
{
    float top = logits[e];
    double sum = 0;
    for (int32_t i = 0; i < r->experts; i++) {
        int later = logits[i] < top || (logits[i] == top && i >= e);
        if (later && !((top - logits[i]) / fmaxf(fabsf(logits[i]), top) > r->band))
            sum += exp((double)(logits[i] - top));
    }
    return 1 / sum;
}

static void expect(const kt_route *r, const float *logits, int32_t *ids, double *gate)
{
    float score[512], rank[512], groups[64];
    double sum = 0, max = -INFINITY;
    for (int32_t e = 0; e < r->experts; e++)
        max = fmax(max, (double)logits[e]);
    for (int32_t e = 0; e < r->experts; e++)
        sum += exp((double)logits[e] - max);
    for (int32_t e = 0; e < r->experts; e++) {
        double x = (double)logits[e];
        double either = r->score == KT_SCORE_SIGMOID ? 1 / (1 + exp(-x)) : exp(x - max) / sum;
        score[e] = (float)(r->score == KT_SCORE_SQRT_SOFTPLUS ? sqrt(log1p(exp(x))) : either);
        if (r->score == KT_SCORE_SPARSEMIXER)
            score[e] = logits[e];
        rank[e] = r->bias ? score[e] + r->bias[e] : score[e];
    }
    for (int32_t g = 0; r->n_group > 1 && g < r->n_group; g++)
        groups[g] = group_of(r, rank, g);
    for (int32_t e = 0; r->n_group > 1 && e < r->experts; e++) {
        if (place_of(groups, r->n_group, e / (r->experts / r->n_group)) >= r->topk_group)
            rank[e] = -INFINITY;
    }
    sum = r->normalize ? 1e-20 : 1;
    for (int32_t e = 0; e < r->experts; e++) {
        int32_t place = place_of(rank, r->experts, e);
        if (place < r->top_k) {
            ids[place] = e;
            gate[place] = r->score == KT_SCORE_SPARSEMIXER ? near_share(r, logits, e) : (double)score[e];
            sum += r->normalize ? gate[place] : 0;
        }
    }
    for (int32_t k = 0; k < r->top_k; k++)
        gate[k] *= (double)r->scale / sum;
}

/* Logits on a coarse grid, so that equal ones occur, and so that a rounding never decides. */
static void coarse(float *x, int32_t n, uint64_t seed)
{
    fill(x, (size_t)n, seed);
    for (int32_t i = 0; i < n; i++)
        x[i] = roundf(x[i] * 12) / 4;
}

static void check_rule(kt_pool *pool, const rule *u)
{
    float bias[512];
    kt_route r = u->r;
    coarse(bias, r.experts, 99);
    r.bias = u->biased ? bias : NULL;
    kt_program *p = make_program(pool, TOKENS, 1, 0);
    kt_view logits = make_view(p, r.experts, KT_ROWS_TOKENS);
    int32_t routing = kt_program_route(p, logits, &r);
    OK(routing, kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    const float *gate;
    const int32_t *ids = kt_program_routing(p, routing, &gate);
    for (int64_t t = 0; t < TOKENS; t++)
        coarse(row_of(p, logits, t), r.experts, 31 * (uint64_t)t);
    kt_step s = {RUN(.n_tokens = TOKENS, .first_output = TOKENS)};
    OK(kt_program_run(p, &s), kt_program_error(p));
    for (int64_t t = 0; t < TOKENS; t++) {
        int32_t want[16];
        double weight[16];
        expect(&r, row_of(p, logits, t), want, weight);
        for (int32_t k = 0; k < r.top_k; k++) {
            int64_t at = t * r.top_k + k;
            CHECK(ids[at] == want[k] && fabs((double)gate[at] - weight[k]) <= 2e-6 * weight[k],
                  "%s, token %lld, slot %d: expert %d x %g, not %d x %g", u->name, (long long)t, k, ids[at],
                  (double)gate[at], want[k], weight[k]);
        }
    }
    kt_program_free(p);
}

/* Experts by the token's id: their order is the table's, their weights the scores'. */
static void check_table(kt_pool *pool)
{
    enum { EXPERTS = 10, TOP_K = 3, VOCAB = 7 };
    int32_t table[VOCAB * TOP_K], ids[5] = {6, 0, 3, 3, 1};
    for (int32_t i = 0; i < VOCAB * TOP_K; i++)
        table[i] = i * 7 % EXPERTS;
    kt_route r = {.experts = EXPERTS, .top_k = TOP_K, .score = KT_SCORE_SQRT_SOFTPLUS, .normalize = 1, .scale = 1.5f,
                   .table = table, .vocab = VOCAB};
    kt_program *p = make_program(pool, 5, 1, 0);
    kt_view logits = make_view(p, EXPERTS, KT_ROWS_TOKENS);
    int32_t routing = kt_program_route(p, logits, &r);
    OK(routing, kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    const float *gate;
    const int32_t *chosen = kt_program_routing(p, routing, &gate);
    for (int64_t t = 0; t < 5; t++) {
        coarse(row_of(p, logits, t), EXPERTS, 41 * (uint64_t)t);
        row_of(p, logits, t)[table[ids[t] * TOP_K]] = 30;      /* beyond where softplus is a logarithm */
    }
    kt_step s = {RUN(.n_tokens = 5, .first_output = 5), .ids = ids};
    OK(kt_program_run(p, &s), kt_program_error(p));
    for (int64_t t = 0; t < 5; t++) {
        double score[TOP_K], sum = 1e-20;
        for (int32_t k = 0; k < TOP_K; k++)
            sum += score[k] = sqrt(log1p(exp((double)row_of(p, logits, t)[table[ids[t] * TOP_K + k]])));
        for (int32_t k = 0; k < TOP_K; k++) {
            double want = 1.5 * score[k] / sum;
            int64_t at = t * TOP_K + k;
            CHECK(chosen[at] == table[ids[t] * TOP_K + k] && fabs((double)gate[at] - want) <= 2e-6 * want,
                  "table, token %lld, slot %d: expert %d x %g", (long long)t, k, chosen[at], (double)gate[at]);
        }
    }
    ids[2] = VOCAB;
    REFUSED(kt_program_run(p, &s), KT_ERR_RANGE, kt_program_error(p), "7");
    kt_program_free(p);
}

/* Broken logits give some valid, distinct experts: nothing is read out of bounds later. */
static void check_nan(kt_pool *pool)
{
    kt_program *p = make_program(pool, 1, 1, 0);
    kt_view logits = make_view(p, 16, KT_ROWS_TOKENS);
    kt_route r = {.experts = 16, .top_k = 4, .n_group = 4, .topk_group = 2, .scale = 1};
    int32_t routing = kt_program_route(p, logits, &r);
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    for (int i = 0; i < 16; i++)
        row_of(p, logits, 0)[i] = i % 3 ? NAN : 1;
    kt_step s = {RUN(.n_tokens = 1, .first_output = 1)};
    OK(kt_program_run(p, &s), kt_program_error(p));
    const int32_t *ids = kt_program_routing(p, routing, NULL);
    uint32_t seen = 0;
    for (int k = 0; k < 4; k++) {
        CHECK(ids[k] >= 0 && ids[k] < 16 && !(seen >> ids[k] & 1), "slot %d is expert %d", k, ids[k]);
        seen |= 1u << (ids[k] & 15);
    }
    kt_program_free(p);
}

/* Logits so far out that scores are 0, or that e^x is no number any more: weights stay what they are in the limit. */
static void check_far(kt_pool *pool, int32_t score, float logit, double want)
{
    enum { EXPERTS = 8, TOP_K = 2 };
    kt_program *p = make_program(pool, 1, 1, 0);
    kt_view logits = make_view(p, EXPERTS, KT_ROWS_TOKENS);
    kt_route r = {.experts = EXPERTS, .top_k = TOP_K, .score = score, .normalize = 1, .scale = 3};
    int32_t routing = kt_program_route(p, logits, &r);
    OK(routing, kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
    for (int32_t e = 0; e < EXPERTS; e++)
        row_of(p, logits, 0)[e] = logit;
    kt_step s = {RUN(.n_tokens = 1, .first_output = 1)};
    OK(kt_program_run(p, &s), kt_program_error(p));
    const float *gate;
    const int32_t *ids = kt_program_routing(p, routing, &gate);
    for (int32_t k = 0; k < TOP_K; k++)
        CHECK(ids[k] == k && fabs((double)gate[k] - want) <= 1e-5, "score %d of %g, slot %d: expert %d x %g, not %g",
              score, (double)logit, k, ids[k], (double)gate[k], want);
    kt_program_free(p);
}

static void check_limits(kt_pool *pool)
{
    static const float far[] = {89, 1000, 3e38f};
    for (int i = 0; i < 3; i++) {
        check_far(pool, KT_SCORE_SIGMOID, -far[i] - 20, 0);     /* not one of them: nothing is divided by 0 */
        check_far(pool, KT_SCORE_SQRT_SOFTPLUS, -far[i] - 20, 0);
        check_far(pool, KT_SCORE_SIGMOID, far[i], 1.5);
        check_far(pool, KT_SCORE_SQRT_SOFTPLUS, far[i], 1.5);
        check_far(pool, KT_SCORE_SOFTMAX, far[i], 1.5);
        check_far(pool, KT_SCORE_SOFTMAX, -far[i], 1.5);
    }
}

static void check_refusals(kt_pool *pool)
{
    kt_program *p = make_program(pool, 1, 1, 0);
    kt_view logits = make_view(p, 16, KT_ROWS_TOKENS);
    kt_route r = {.experts = 16, .top_k = 17, .scale = 1};
    REFUSED(kt_program_route(p, logits, &r), KT_ERR_SHAPE, kt_program_error(p), "top_k 17 of 16");
    r = (kt_route){.experts = 15, .top_k = 2, .scale = 1};
    REFUSED(kt_program_route(p, logits, &r), KT_ERR_SHAPE, kt_program_error(p), "16 logits");
    r = (kt_route){.experts = 16, .top_k = 5, .n_group = 4, .topk_group = 1, .scale = 1};
    REFUSED(kt_program_route(p, logits, &r), KT_ERR_SHAPE, kt_program_error(p), "1 of 4 groups");
    r = (kt_route){.experts = 16, .top_k = 5, .n_group = 3, .topk_group = 3, .scale = 1};
    REFUSED(kt_program_route(p, logits, &r), KT_ERR_SHAPE, kt_program_error(p), "3 groups");
    r = (kt_route){.experts = 16, .top_k = 5, .score = 4, .scale = 1};
    REFUSED(kt_program_route(p, logits, &r), KT_ERR_RANGE, kt_program_error(p), "score 4");
    r = (kt_route){.experts = 16, .top_k = 2, .score = KT_SCORE_SPARSEMIXER, .n_group = 4, .topk_group = 2, .scale = 1};
    REFUSED(kt_program_route(p, logits, &r), KT_ERR_SHAPE, kt_program_error(p), "no groups");
    r = (kt_route){.experts = 16, .top_k = 2, .scale = 1, .table = (int32_t[4]){0, 15, 16, 1}, .vocab = 2};
    REFUSED(kt_program_route(p, logits, &r), KT_ERR_RANGE, kt_program_error(p), "token 1 expert 16 of 16");
    r.table = (int32_t[4]){0, -1, 15, 1};
    REFUSED(kt_program_route(p, logits, &r), KT_ERR_RANGE, kt_program_error(p), "token 0 expert -1 of 16");
    r.vocab = 0;
    REFUSED(kt_program_route(p, logits, &r), KT_ERR_SHAPE, kt_program_error(p), "0 tokens");
    kt_program_free(p);
}

int main(void)
{
    kt_pool *pool = make_pool(NULL, 2);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        check_rule(pool, &rules[i]);
    check_table(pool);
    check_nan(pool);
    check_limits(pool);
    check_refusals(pool);
    kt_pool_free(pool);
    return report("test_route");
}
