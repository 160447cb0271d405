/* test_elementwise.c - embed, norm, rope, swiglu, gate, add, scale, temper, greatest and select against plain loops, on
 * every ISA row, for one token and for many, with views inside wider buffers. */
#include "check.h"

enum { MOST = 9, VOCAB = 50, HEADS = 3, HEAD = 24, ROPE = 16, WIDE = HEADS * HEAD, GATED = 40 };

typedef struct fixture {
    kt_program *p;
    kt_view table, centred, normed, heads, all, rotated[2], gated, act, open[4], sum, scaled, tempered, most, bent, picked;
    uint16_t *rows;
    float *wide_rows;       /* the same */
    float gain[HEAD], full_gain[WIDE], inv_freq[ROPE / 2];
} fixture;

static void record(fixture *f, kt_pool *pool)
{
    kt_program *p = f->p = make_program(pool, MOST, 4, 0);
    kt_view wide = make_view(p, 2 * WIDE + 7, KT_ROWS_TOKENS);
    f->rows = need(VOCAB * WIDE * sizeof *f->rows);
    f->wide_rows = need(VOCAB * WIDE * sizeof *f->wide_rows);
    uint64_t state = 1;
    for (int i = 0; i < VOCAB * WIDE; i++)
        f->wide_rows[i] = from_bf16(f->rows[i] = to_bf16(random_float(&state)));
    fill(f->gain, HEAD, 2);
    fill(f->full_gain, WIDE, 3);
    for (int i = 0; i < ROPE / 2; i++)
        f->inv_freq[i] = powf(10000, -2.0f * (float)i / ROPE);
    f->table = (kt_view){wide.buffer, 5, WIDE};
    f->normed = (kt_view){wide.buffer, WIDE + 6, WIDE};
    f->heads = make_view(p, WIDE, KT_ROWS_TOKENS);
    f->centred = make_view(p, WIDE, KT_ROWS_TOKENS);
    f->sum = make_view(p, WIDE, KT_ROWS_TOKENS);
    f->scaled = make_view(p, WIDE, KT_ROWS_TOKENS);
    f->tempered = make_view(p, WIDE, KT_ROWS_TOKENS);
    f->most = make_view(p, 1, KT_ROWS_TOKENS);
    f->bent = make_view(p, WIDE, KT_ROWS_TOKENS);
    f->picked = make_view(p, WIDE, KT_ROWS_OUTPUTS);
    f->gated = make_view(p, 96, KT_ROWS_TOKENS);
    f->act = make_view(p, GATED, KT_ROWS_TOKENS);
    OK(kt_program_embed(p, f->table, &(kt_embed){.table = f->rows, .vocab = VOCAB}), kt_program_error(p));
    OK(kt_program_norm(p, f->normed, f->table,
                       &(kt_norm){.gain = f->full_gain, .eps = 1e-6f, .head_width = WIDE}), kt_program_error(p));
    OK(kt_program_norm(p, f->heads, f->table,
                       &(kt_norm){.gain = f->gain, .eps = 1e-5f, .head_width = HEAD}), kt_program_error(p));
    kt_norm own = {.gain = f->full_gain, .eps = 1e-5f, .head_width = HEAD, .own_gains = 1};
    OK(kt_program_norm(p, f->heads, f->heads, &own), kt_program_error(p));
    OK(kt_program_layer_norm(p, f->centred, f->table,
                             &(kt_layer_norm){.gain = f->full_gain, .bias = f->full_gain, .eps = 1e-6f}),
       kt_program_error(p));
    kt_rope rope = {.dim = ROPE, .inv_freq = f->inv_freq, .scale = 1.25f, .head_width = HEAD, .first = HEAD - ROPE};
    for (int i = 0; i < 2; i++) {
        f->rotated[i] = make_view(p, WIDE, KT_ROWS_TOKENS);
        kt_embed embed = {.table = i ? NULL : f->rows, .table_f32 = i ? f->wide_rows : NULL, .vocab = VOCAB};
        OK(kt_program_embed(p, f->rotated[i], &embed), kt_program_error(p));
        rope.interleaved = i;
        OK(kt_program_rope(p, f->rotated[i], &rope), kt_program_error(p));
    }
    OK(kt_program_swiglu(p, f->act, f->gated, &(kt_swiglu){0}), kt_program_error(p));
    for (int i = 0; i < 4; i++) {   /* each column by another, all by one, and runs of eight; each kind */
        f->open[i] = make_view(p, GATED, KT_ROWS_TOKENS);
        kt_view by = {f->gated.buffer, 50, i == 2 ? GATED / 8 : i ? 1 : GATED};
        OK(kt_program_gate(p, f->open[i], f->act, by, &(kt_gate){.kind = i}), kt_program_error(p));
    }
    OK(kt_program_add(p, f->sum, f->table, f->normed), kt_program_error(p));
    OK(kt_program_add(p, f->sum, f->sum, f->table), kt_program_error(p));
    OK(kt_program_scale(p, f->scaled, f->sum, &(kt_scale){.by = 0.707f}), kt_program_error(p));
    OK(kt_program_scale(p, f->scaled, f->scaled, &(kt_scale){.by = -3}), kt_program_error(p));
    OK(kt_program_temper(p, f->tempered, f->sum, &(kt_temper){.beta = 0.3f, .every = 4, .shift = 1}), kt_program_error(p));
    kt_scale bent = {.by = 2, .limit = 3, .factor = f->gain};
    OK(kt_program_scale(p, f->bent, f->scaled, &bent), kt_program_error(p));
    OK(kt_program_greatest(p, f->most, f->sum), kt_program_error(p));
    OK(kt_program_select(p, f->picked, f->sum), kt_program_error(p));
    OK(kt_program_finish(p, NULL), kt_program_error(p));
}

static void expect_norm(const float *x, const float *gain, int n, double eps, double *out)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    for (int i = 0; i < n; i++)
        out[i] = (double)x[i] / sqrt(sum / n + eps) * (double)gain[i];
}

static void expect_layer_norm(const float *x, const float *gain, int n, double eps, double *out)
{
    double mean = 0, square = 0;
    for (int i = 0; i < n; i++)
        mean += (double)x[i] / n;
    for (int i = 0; i < n; i++)
        square += ((double)x[i] - mean) * ((double)x[i] - mean) / n;
    for (int i = 0; i < n; i++)
        out[i] = ((double)x[i] - mean) / sqrt(square + eps) * (double)gain[i] + (double)gain[i];
}

static void expect_rope(const fixture *f, const float *x, int64_t position, int interleaved, double *out)
{
    for (int i = 0; i < HEAD; i++)
        out[i] = (double)x[i];
    for (int i = 0; i < ROPE / 2; i++) {
        int a = HEAD - ROPE + (interleaved ? 2 * i : i), b = a + (interleaved ? 1 : ROPE / 2);
        double angle = (double)((float)position * f->inv_freq[i]);
        out[a] = 1.25 * ((double)x[a] * cos(angle) - (double)x[b] * sin(angle));
        out[b] = 1.25 * ((double)x[b] * cos(angle) + (double)x[a] * sin(angle));
    }
}

static void close_to(const char *what, const float *got, const double *want, int n)
{
    double off = distance(got, want, n);
    CHECK(off < 2e-6, "%s is off by %g", what, off);
}

static void compare_row(const fixture *f, int64_t t, int64_t position, int32_t id)
{
    double want[WIDE];
    float x[WIDE];
    for (int i = 0; i < WIDE; i++)
        want[i] = (double)(x[i] = from_bf16(f->rows[id * WIDE + i]));
    close_to("embed", row_of(f->p, f->table, t), want, WIDE);
    expect_norm(x, f->full_gain, WIDE, 1e-6, want);
    close_to("norm", row_of(f->p, f->normed, t), want, WIDE);
    for (int i = 0; i < WIDE; i++)
        want[i] = want[i] + 2 * (double)x[i];
    double centred[WIDE];
    expect_layer_norm(x, f->full_gain, WIDE, 1e-6, centred);
    close_to("layer_norm", row_of(f->p, f->centred, t), centred, WIDE);
    close_to("add", row_of(f->p, f->sum, t), want, WIDE);
    double by = 1 + (double)0.3f * log(1 + floor((double)(position + 1) / 4)), tempered[WIDE];
    for (int i = 0; i < WIDE; i++)
        tempered[i] = want[i] * by;
    close_to("temper", row_of(f->p, f->tempered, t), tempered, WIDE);
    double most = want[0];
    for (int i = 1; i < WIDE; i++)
        most = want[i] > most ? want[i] : most;
    close_to("greatest", row_of(f->p, f->most, t), &most, 1);
    for (int i = 0; i < WIDE; i++)
        want[i] *= -3 * (double)0.707f;
    close_to("scale", row_of(f->p, f->scaled, t), want, WIDE);
    for (int i = 0; i < WIDE; i++)
        want[i] = 3 * tanh(want[i] * 2 * (double)f->gain[0] / 3);
    close_to("scale with a limit", row_of(f->p, f->bent, t), want, WIDE);
    for (int h = 0; h < HEADS; h++) {
        float once[HEAD];
        expect_norm(x + h * HEAD, f->gain, HEAD, 1e-5, want);
        for (int i = 0; i < HEAD; i++)
            once[i] = (float)want[i];
        expect_norm(once, f->full_gain + h * HEAD, HEAD, 1e-5, want);
        close_to("norm of heads", row_of(f->p, f->heads, t) + h * HEAD, want, HEAD);
        for (int i = 0; i < 2; i++) {
            expect_rope(f, x + h * HEAD, position, i, want);
            close_to("rope", row_of(f->p, f->rotated[i], t) + h * HEAD, want, HEAD);
        }
    }
    const float *gated = row_of(f->p, f->gated, t);
    for (int i = 0; i < GATED; i++) {
        double g = (double)gated[i / 16 * 32 + i % 16], u = (double)gated[i / 16 * 32 + 16 + i % 16];
        want[i] = g / (1 + exp(-g)) * u;
    }
    close_to("swiglu", row_of(f->p, f->act, t), want, GATED);
    for (int k = 0; k < 4; k++) {
        for (int i = 0; i < GATED; i++) {
            double by = (double)gated[50 + (k == 2 ? i / 8 : k ? 0 : i)];
            double opened = k == KT_GATE_LINEAR ? by
                : k == KT_GATE_SOFTPLUS ? log1p(exp(by)) : (k ? by : 1) / (1 + exp(-by));
            want[i] = (double)row_of(f->p, f->act, t)[i] * opened;
        }
        close_to("gate", row_of(f->p, f->open[k], t), want, GATED);
    }
}

static void step(const fixture *f, int64_t n, int64_t start, int64_t first_output)
{
    int32_t ids[MOST];
    for (int64_t t = 0; t < n; t++) {
        ids[t] = (int32_t)((start + 7 * t) % VOCAB);
        fill(row_of(f->p, f->gated, t), 96, 40 + (uint64_t)t);
        for (int i = 0; i < 96; i++)
            row_of(f->p, f->gated, t)[i] *= 20;
    }
    kt_step s = {RUN(.n_tokens = n, .start = start, .first_output = first_output), .ids = ids};
    OK(kt_program_run(f->p, &s), kt_program_error(f->p));
    for (int64_t t = 0; t < n; t++)
        compare_row(f, t, start + t, ids[t]);
    for (int64_t t = first_output; t < n; t++)
        CHECK(memcmp(row_of(f->p, f->picked, t - first_output), row_of(f->p, f->sum, t), WIDE * sizeof(float)) == 0,
              "output %lld is not token %lld", (long long)(t - first_output), (long long)t);
}

int main(void)
{
    const char *rows[8];
    int n = usable_rows(rows);
    for (int i = 0; i < n; i++) {
        for (int32_t threads = 1; threads <= 3; threads++) {
            fixture f = {0};
            kt_pool *pool = make_pool(rows[i], threads);
            record(&f, pool);
            step(&f, 1, 0, 0);
            step(&f, 1, 31000, 1);
            step(&f, MOST, 3, MOST - 4);
            step(&f, 2, 130000, 0);
            kt_program_free(f.p);
            kt_pool_free(pool);
            free(f.rows);
            free(f.wide_rows);
        }
    }
    return report("test_elementwise");
}
