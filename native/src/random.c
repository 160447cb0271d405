/* random.c - random weights, for benchmarks without a checkpoint.
 */
#include <inttypes.h>
#include <math.h>

#include "kernels/formats.h"
#include "pool.h"

typedef struct random_task {
    kt_pool *pool;
    const kt_format *format;
    layout l;
    int64_t panels;
    uint8_t *data;
    uint64_t seed;
    float rms;              /* wanted */
} random_task;

/* splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Random sign and mantissa and one of two exponents, e or e + 1: the mean square is 7/3 * 5/2 * 4^e. */
static void random_floats(int bits, float rms, uint64_t *state, uint8_t *dst, size_t size)
{
    uint64_t e = (uint64_t)(127 + lrintf(log2f(rms / sqrtf(35.0f / 6.0f))));
    uint64_t base = bits == 16 ? (e << 7) * 0x0001000100010001u : (e << 23) * 0x0000000100000001u;
    uint64_t keep = bits == 16 ? 0x80ff80ff80ff80ffu : 0x80ffffff80ffffffu;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t value = base + (next_random(state) & keep);
        memcpy(dst + i, &value, 8);
    }
}

/* 8 bits: -128 is no code, the lowest bit is set in all (odd codes, mean square 5461). E4M3: 1 to 15/8 of
 * either sign (mean square 2.148). 4 and 6 bits: all indices are codes. */
static void random_codes(const kt_format *f, uint64_t *state, uint8_t *dst, size_t size)
{
    int e4m3 = f->codes == KT_CODE_E4M3;
    uint64_t keep = e4m3 ? 0x8787878787878787u : ~(uint64_t)0;
    uint64_t set = e4m3 ? 0x3838383838383838u : f->bits == 8 ? 0x0101010101010101u : 0;
    for (size_t i = 0; i < size; i += 8) {
        uint64_t value = (next_random(state) & keep) | set;
        memcpy(dst + i, &value, 8);
    }
}

static float code_rms(const kt_format *f)
{
    float square = 0.0f;
    if (f->codes == KT_CODE_E4M3)
        return sqrtf(2.148f);
    for (int i = 0; i < 16; i++)
        square += (float)f->codebook[i] * (float)f->codebook[i] / 16.0f;
    if (f->bits == 6)
        return sqrtf(341.5f);
    return f->bits == 8 ? sqrtf(5461.0f) : sqrtf(square > 0.0f ? square : 1.0f);
}

/* Scales of one panel, each between 3/4 and 5/4 of what the wanted rms asks for, or the nearest power
 * of two. Of either sign where the type has one: the mean of linear 4-bit codes is -1/2, and with it all
 * outputs of a matrix would have much in common. */
static void random_scales(const random_task *t, uint64_t *state, uint8_t *panel)
{
    float middle = t->rms / code_rms(t->format);
    uint8_t row = row_e4m3(2.0f * middle);
    memset(panel + t->l.scale_offset, 0, t->l.panel_bytes - t->l.scale_offset);
    memset(panel + t->l.scale_offset, row, scale_head(t->format->scale));
    for (int64_t i = 0; i < t->l.groups * KT_PANEL_ROWS; i++) {
        uint64_t bits = next_random(state);
        float s = middle * (0.75f + 0.5f * (float)(bits >> 40) * 0x1p-24f) * (bits & 1 ? -1.0f : 1.0f);
        if (t->format->scale == KT_SCALE_E8M0)
            s = ldexpf(1.0f, (int)lrintf(log2f(middle)));
        else if (t->format->scale == KT_SCALE_BF16)
            s = float_of_bf16(bf16_of_float(s));
        else if (t->format->scale == KT_SCALE_E4M3)
            s = scale_e4m3(s, row);
        scale_store(t->format->scale, s, panel + t->l.scale_offset, i);
    }
}

static void random_panels(void *arg, int thread, int threads)
{
    random_task *t = arg;
    (void)threads;
    for (int64_t i; (i = pool_take(t->pool, thread, 1)) < t->panels;) {
        uint64_t state = t->seed ^ (uint64_t)i * 0xd1342543de82ef95u;
        uint8_t *panel = t->data + (size_t)i * t->l.panel_bytes;
        if (t->format->bits >= 16) {
            random_floats(t->format->bits, t->rms, &state, panel, t->l.panel_bytes);
            continue;
        }
        random_codes(t->format, &state, panel, t->l.scale_offset);
        random_scales(t, &state, panel);
    }
}

int kt_fill_random(kt_pool *pool, const kt_weight *w, uint64_t seed)
{
    if (!kt_packed_bytes(&w->format, w->n, w->k) || w->count < 1) {
        pool_set_error(pool, "cannot fill %" PRId64 " matrices [%" PRId64 ", %" PRId64 "]", w->count, w->n, w->k);
        return KT_ERR_SHAPE;
    }
    int64_t panels = round_up(w->n, KT_PANEL_ROWS) / KT_PANEL_ROWS * w->count;
    random_task t = {pool,   &w->format, layout_of(&w->format, w->k), panels, (uint8_t *)(uintptr_t)w->data, seed,
                     1.0f / sqrtf((float)w->k)};
    pool_run(pool, random_panels, &t);
    return KT_OK;
}
