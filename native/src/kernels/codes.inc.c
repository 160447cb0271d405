/* codes.inc.c - lines of integer codes as they are stored, as bytes that are multiplied. */

/* How codes become the bytes of a dot product; constants in every loop below. */
typedef enum code_kind { CODES_INT8, CODES_LINEAR4, CODES_BOOK4, CODES_LINEAR6 } code_kind;

/* How many lines of codes have their products summed up in a short form; 0: none have. */
INLINE int short_lines(code_kind kind)
{
    return kind == CODES_LINEAR4 ? SHORT_SUMS : kind == CODES_LINEAR6 ? SHORT_SUMS_6 : 0;
}

/* The line with the two upper bits of the codes of line `line` (of 8) of a step; any line where there is none. */
INLINE vb line_two(code_kind kind, const uint8_t *step, int line)
{
    return vb_load(step + (kind == CODES_LINEAR6 ? 512 + 64 * (line / 2) : 0));
}

/* The codes of columns [4 line, 4 line + 4) of a step whose line `line` is raw, and its two upper bits `two`; not of
 * 8 bits. */
INLINE vb line_low(code_kind kind, vb raw, vb table, vb two, int line)
{
    if (kind == CODES_LINEAR6)
        return vb_six(vb_low_bits(raw), two, two_bits(line));
    return kind == CODES_LINEAR4 ? vb_low_bits(raw) : vb_low(raw, table);
}

/* Those of the columns 32 behind. */
INLINE vb line_high(code_kind kind, vb raw, vb table, vb two, int line)
{
    if (kind == CODES_LINEAR6)
        return vb_six(vb_high_bits(raw), two, two_bits(line + 8));
    return kind == CODES_LINEAR4 ? vb_high_bits(raw) : vb_high(raw, table);
}

/* The same as signed bytes; the table is that of vb_signed. */
INLINE vb signed_low(int bits, vb raw, vb table, const uint8_t *step, int line)
{
    return bits == 6 ? vb_less_32(line_low(CODES_LINEAR6, raw, table, line_two(CODES_LINEAR6, step, line), line)) : vb_low(raw, table);
}

INLINE vb signed_high(int bits, vb raw, vb table, const uint8_t *step, int line)
{
    return bits == 6 ? vb_less_32(line_high(CODES_LINEAR6, raw, table, line_two(CODES_LINEAR6, step, line), line)) : vb_high(raw, table);
}
