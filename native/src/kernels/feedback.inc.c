/* feedback.inc.c - encodes the columns of a rotated block one after another, each making up for the errors of those
 * before it, as specified in formats.h. Sixteen rows at once, those of a panel: lane r is row r. */

/* A block of columns of a panel's rows. */
typedef struct block_rows {
    float x[ROTATION_UNIT][LANES] ALIGNED;          /* as they are encoded */
    float e[ROTATION_UNIT][LANES] ALIGNED;          /* errors: decoded less x */
    float left[ROTATION_UNIT][LANES] ALIGNED;       /* x less what errors before a column call for */
    int32_t index[ROTATION_UNIT][LANES] ALIGNED;
} block_rows;

enum { AT_ONCE = 8 };   /* columns whose errors are passed on together */

/* One column: its index and error. */
INLINE void encode_column(const codebook *b, vf scale, vf inv, int64_t i, block_rows *rows)
{
    vf v = vf_mul(vf_load(rows->left[i]), inv), code;
    vi index;
    if (b->is_linear) {
        code = nearest_value(b, 1, v);
        index = vi_of_vf(vf_sub(code, vf_set1(b->value[0])));
    } else {
        index = nearest_index(b, v);
        code = vf_lookup(b->value, index);
    }
    vi_store(rows->index[i], index);
    vf_store(rows->e[i], vf_sub(vf_mul(code, scale), vf_load(rows->x[i])));
}

/* left[j] -= feedback[j][i] e[i], for i = first, first + 1 ... last - 1. */
INLINE void pass_on(const float *feedback, int64_t first, int64_t last, int64_t j, block_rows *rows)
{
    vf left = vf_load(rows->left[j]);
    for (int64_t i = first; i < last; i++)
        left = vf_sub(left, vf_mul(vf_set1(feedback[j * ROTATION_UNIT + i]), vf_load(rows->e[i])));
    vf_store(rows->left[j], left);
}

/* The rows of a block times its Hadamard matrix: what they were before they were rotated. */
static void turn_back(float (*x)[LANES])
{
    for (int64_t h = 1; h < ROTATION_UNIT; h *= 2)
        for (int64_t i = 0; i < ROTATION_UNIT; i++)
            if (!(i & h)) {
                vf a = vf_load(x[i]), b = vf_load(x[i + h]);
                vf_store(x[i], vf_add(a, b));
                vf_store(x[i + h], vf_sub(a, b));
            }
    for (int64_t i = 0; i < ROTATION_UNIT; i++)
        vf_store(x[i], vf_mul(vf_load(x[i]), vf_set1((float)(1.0 / sqrt((double)ROTATION_UNIT)))));
}

/* The lines of a step of 4 or 6 bits, see kt_weights.h. */
static void store_step(int bits, int32_t (*index)[LANES], uint8_t *step)
{
    for (int64_t line = 0; line < 8; line++) {
        vi word = vi_set1(0);
        for (int j = 0; j < 4; j++) {
            vi low = vi_and(vi_load(index[4 * line + j]), 15), high = vi_and(vi_load(index[32 + 4 * line + j]), 15);
            word = vi_add(word, vi_shl(vi_add(low, vi_shl(high, 4)), 8 * j));
        }
        vi_store(step + 64 * line, word);
    }
    for (int64_t line = 0; bits == 6 && line < 4; line++) {
        vi word = vi_set1(0);
        for (int j = 0; j < 4; j++)
            for (int q = 0; q < 4; q++) {
                int64_t column = 32 * (q / 2) + 8 * line + 4 * (q % 2) + j;
                word = vi_add(word, vi_shl(vi_shr(vi_load(index[column]), 4), 8 * j + 2 * q));
            }
        vi_store(step + 512 + 64 * line, word);
    }
}

/* The block that begins at column c, whose groups have these scales; adds to the errors, lane r those of row r. */
static void encode_block(const kt_format *f, const layout *l, const codebook *b, const panel_rows *rows, int64_t c,
                         float (*scale)[LANES], uint8_t *panel, row_error *error)
{
    const float *feedback = rows->feedback + c * ROTATION_UNIT;
    block_rows block;
    row_groups all = {rows->x, NULL, NULL, c, ROTATION_UNIT, rows->k - c};
    turn_piece(&all, 0, ROTATION_UNIT, block.x, NULL);
    memcpy(block.left, block.x, sizeof block.x);
    for (int64_t first = 0; first < ROTATION_UNIT; first += AT_ONCE) {
        vf s = vf_load(scale[first / l->group]), none = vf_set1(0.0f);
        vf inv = vf_less(none, vf_abs(s), vf_div(vf_set1(1.0f), s), none);
        for (int64_t i = first; i < first + AT_ONCE; i++) {
            pass_on(feedback, first, i, i, &block);
            encode_column(b, s, inv, i, &block);
        }
        for (int64_t j = first + AT_ONCE; j < ROTATION_UNIT; j++)
            pass_on(feedback, first, first + AT_ONCE, j, &block);
    }
    store_step(f->bits, block.index, panel + (size_t)(c / ROTATION_UNIT) * l->step_bytes);
    turn_back(block.x);
    turn_back(block.e);
    for (int64_t i = 0; i < ROTATION_UNIT && c + i < rows->columns; i++) {
        vf x = vf_load(block.x[i]);
        add_row_error(error, x, vf_add(x, vf_load(block.e[i])), vf_set1(rows->counts[c + i]));
    }
}
