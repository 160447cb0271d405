/* ceiling.inc.c - plain loops that show the best speed of the machine; the kernels' figures are
 * given as shares of it. A row with tiles has its own of arithmetic, in amx_tiles.inc.c. */

static uint64_t read_bytes(const void *data, size_t size)
{
    const uint8_t *p = data, *end = p + size / 512 * 512;
    vi sum[8];
    for (int i = 0; i < 8; i++)
        sum[i] = vi_set1(0);
    for (; p < end; p += 512)
        for (int i = 0; i < 8; i++) {
            prefetch(p + 64 * i + 34 * 64);
            sum[i] = vi_add(sum[i], vi_load(p + 64 * i));
        }
    for (int i = 1; i < 8; i++)
        sum[0] = vi_add(sum[0], sum[i]);
    return (uint64_t)(uint32_t)vi_sum(sum[0]);
}

#ifndef KT_TILES
enum { CHAINS = 14 };       /* independent sums: more than latency times issue width of a dot product */

/* The operands are loaded from volatile memory before the loop, so that nothing is known about them and
 * everything stays in registers. */
static uint64_t int8_ops(uint64_t rounds, uint64_t *operations)
{
    static const volatile uint8_t one = 1;
    uint8_t ones[64];
    memset(ones, one, sizeof ones);
    vb w = vb_load(ones);
    vx x = vx_load(ones);
    vi sum[CHAINS];
    for (int i = 0; i < CHAINS; i++)
        sum[i] = vi_set1(i + one);
    for (uint64_t n = 0; n < rounds; n++)
        for (int i = 0; i < CHAINS; i++)
            sum[i] = vi_dot(sum[i], w, x);
    for (int i = 1; i < CHAINS; i++)
        sum[0] = vi_add(sum[0], sum[i]);
    *operations = rounds * CHAINS * 64 * 2;
    return (uint64_t)(uint32_t)vi_sum(sum[0]);
}

static uint64_t bf16_ops(uint64_t rounds, uint64_t *operations)
{
    static const volatile uint16_t one = 0x3f80;
    uint16_t ones[32];
    vf sum[CHAINS];
    for (int i = 0; i < 32; i++)
        ones[i] = one;
    vi w = vi_load(ones);
    vx x = vx_load(ones);
    for (int i = 0; i < CHAINS; i++)
        sum[i] = vf_set1((float)i);
    for (uint64_t n = 0; n < rounds; n++)
        for (int i = 0; i < CHAINS; i++)
            sum[i] = vf_dot_bf16(sum[i], w, x);
    for (int i = 1; i < CHAINS; i++)
        sum[0] = vf_add(sum[0], sum[i]);
    *operations = rounds * CHAINS * 32 * 2;
    return (uint64_t)bits_of_float(vf_sum(sum[0]));
}
#endif
