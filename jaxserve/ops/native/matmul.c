// y [T, N] = x [T, K] times w [N, K] transposed, in float32: a linear layer with its weight as the checkpoint has it.
//
// A tile of y^T is held in registers: rows of w by vectors of tokens. Each step of k broadcasts one number of every row
// of w and multiplies it by the tokens' vectors, so w is read once, and in place unless many tokens meet it; x is packed,
// in panels [K, tokens of the panel]. Every y is one sum over k in order, whatever T is: a row's result has the same bits
// alone and among others. A weight in another form is widened a piece at a time for the rows of a tile: the bits are
// those of the float32 weight it stands for.
//
// The tile in registers is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008.
#include "weights.h"

#include <string.h>

// Tokens in the widest panel, and rows of w in its tile: as many sums as there are registers, but four.
#if defined(__AVX512F__)
enum { WIDE = 32, WIDE_ROWS = 12 };
typedef float wide_vector __attribute__((vector_size(64), aligned(4), may_alias));
#elif defined(__AVX__)
enum { WIDE = 16, WIDE_ROWS = 6 };
typedef float wide_vector __attribute__((vector_size(32), aligned(4), may_alias));
#elif defined(__aarch64__)
enum { WIDE = 16, WIDE_ROWS = 6 };
typedef float wide_vector __attribute__((vector_size(16), aligned(4), may_alias));
#else
enum { WIDE = 8, WIDE_ROWS = 6 };
typedef float wide_vector __attribute__((vector_size(16), aligned(4), may_alias));
#endif
#if defined(__AVX__)
typedef float vector8 __attribute__((vector_size(32), aligned(4), may_alias));
#endif
typedef float vector4 __attribute__((vector_size(16), aligned(4), may_alias));

enum {
  WIDE_COLUMNS = WIDE * sizeof(float) / sizeof(wide_vector),
  NARROW_ROWS = 8,  // of w in the tile of a panel of one vector; with 12 eight tokens took 22.4 ms instead of 20.8
  GROUP = 24,       // rows of w that meet one panel after another: whole tiles of either kind
  PIECES = 8,       // of all rows of w for each thread: the last to finish is late by at most so much
  LINE = 16,        // floats in a cache line
  AT_ONCE = 512,    // tokens packed at a time, whatever the step's size: what the scratch is for
  COPIED = 3,       // panels from which on a float32 weight is copied: its rows may share cache sets
  CHUNK = 128,      // numbers of a row that are widened at a time: at most 6 KiB for a tile
};

typedef struct Product Product;
// A piece of w: `height` rows from `row` on, of each `count` numbers from place k on.
typedef struct {
  int64_t row, height, k, count;
} Piece;
// Writes a piece as float32, with rows `apart` from one another.
typedef void Widen(const Product* p, Piece piece, float* out, int64_t apart);

struct Product {
  Weight w;
  Widen* widen;  // NULL: w is float32 and is read in place
  const float* x;
  float *packed, *y;
  int64_t tokens, apart;  // numbers from a row of w to the next
};

// Tokens of the panel that starts at `token`, zeros behind the last included.
INLINE int64_t panel_width(const Product* p, int64_t token) {
  int64_t width = WIDE;
  while (width > 4 && width / 2 >= p->tokens - token) width /= 2;
  return width;
}

static void pack(void* job, int64_t first, int64_t last) {
  Product* p = job;
  for (int64_t token = first * WIDE; token < min(last * WIDE, p->tokens); token += WIDE) {
    int64_t width = panel_width(p, token), live = min(width, p->tokens - token);
    float* panel = p->packed + token * p->w.depth;
    for (int64_t k = 0; k < p->w.depth; k += LINE) {  // a line of each token at a time: rows of x may share cache sets
      int64_t end = min(k + LINE, p->w.depth);
      for (int64_t t = 0; t < width; t++)
        for (int64_t i = k; i < end; i++) panel[i * width + t] = t < live ? p->x[(token + t) * p->w.depth + i] : 0;
    }
  }
}

INLINE void widen_rows(const Product* p, Piece piece, float* out, int64_t apart, Form form,
                       bool zeros) {
  int64_t end = piece.k + piece.count;
  for (int64_t row = piece.row; row < piece.row + piece.height; row++, out += apart) {
    int64_t k = piece.k;
    for (int64_t index = k / p->w.group; k + BLOCK <= end; index++) {
      Group group = group_at(&p->w, form, zeros, row, index);
      for (int64_t until = min(end, (index + 1) * p->w.group); k + BLOCK <= until; k += BLOCK) {
        __builtin_prefetch(place(&p->w, form, row + piece.height, k), 0, 3);
        widen(form, zeros, place(&p->w, form, row, k), &group, (vector*)(out + k - piece.k));
      }
    }
    for (; k < end; k++) out[k - piece.k] = widen_one(form, place(&p->w, form, row, k));
  }
}

#define WIDEN(FORM)                                                                         \
  static void widen_##FORM(const Product* p, Piece piece, float* out, int64_t apart) {      \
    if (has_groups(FORM) && p->w.zeros) widen_rows(p, piece, out, apart, FORM, true);       \
    else widen_rows(p, piece, out, apart, FORM, false);                                     \
  }
WIDEN(FLOAT32)
WIDEN(BFLOAT16)
WIDEN(INT8)
WIDEN(INT4)
WIDEN(FP8)
WIDEN(MXFP4)
WIDEN(INT8_16)

// The next rows of w are asked for in time, one line each LINE steps and row; the processor by itself does not look
// beyond a page. Few tokens wait on memory, which is quickest in the order of its addresses: 20.7 ms instead of 22.9
// for eight. Many wait on arithmetic, and 33 ms instead of 37 are had for 32 where the order is that of the use.
#define NEXT_ROWS(HEIGHT, COLUMNS)                                                                            \
  UNROLL for (int r = 0; r < HEIGHT; r++) {                                                                   \
    if (COLUMNS == 1) __builtin_prefetch(w + HEIGHT * (depth + k) + r * LINE, 0, 2);                          \
    else __builtin_prefetch(w + (HEIGHT + r) * depth + k, 0, 2);                                              \
  }

// tile [HEIGHT, COLUMNS of tokens] of y^T, from row `row` of w on. With a pointer to every fourth row, all addresses of a
// step are in registers.
#define TILE(NAME, VECTOR, HEIGHT, COLUMNS)                                                                   \
  INLINE void NAME##_add(const float* panel, const float* w, int64_t count, int64_t depth, bool in_place,     \
                         VECTOR sum[HEIGHT][COLUMNS]) {                                                       \
    const float* quad[(HEIGHT + 3) / 4];                                                                      \
    UNROLL for (int r = 0; r < HEIGHT; r += 4) {                                                              \
      quad[r / 4] = w + r * depth;                                                                            \
      __asm__("" : "+r"(quad[r / 4]));                                                                        \
    }                                                                                                         \
    for (int64_t k = 0; k < count; k++) {                                                                     \
      VECTOR x[COLUMNS];                                                                                      \
      if (in_place && k % LINE == 0) {                                                                        \
        NEXT_ROWS(HEIGHT, COLUMNS)                                                                            \
      }                                                                                                       \
      UNROLL for (int v = 0; v < COLUMNS; v++) x[v] = ((const VECTOR*)panel)[k * COLUMNS + v];                \
      UNROLL for (int r = 0; r < HEIGHT; r++) {                                                               \
        VECTOR weight = quad[r / 4][r % 4 * depth + k] - (VECTOR){0};                                                       \
        if (COLUMNS > 1) { IN_VECTOR(weight); }                                                                \
        UNROLL for (int v = 0; v < COLUMNS; v++) {                                                            \
          sum[r][v] += weight * x[v];                                                                         \
          IN_REGISTER(sum[r][v]);                                                                             \
        }                                                                                                     \
      }                                                                                                       \
    }                                                                                                         \
  }                                                                                                           \
  INLINE void NAME(const Product* p, const float* panel, int64_t row, float* tile) {                          \
    VECTOR sum[HEIGHT][COLUMNS] = {0};                                                                        \
    if (p->widen == NULL) {                                                                                   \
      NAME##_add(panel, (const float*)p->w.values + row * p->apart, p->w.depth, p->apart, true, sum);         \
    } else {                                                                                                  \
      float w[HEIGHT * CHUNK] __attribute__((aligned(64)));                                                   \
      for (int64_t k = 0; k < p->w.depth; k += CHUNK) {                                                       \
        int64_t count = min(CHUNK, p->w.depth - k);                                                           \
        p->widen(p, (Piece){row, HEIGHT, k, count}, w, CHUNK);                                                \
        NAME##_add(panel + k * (COLUMNS * sizeof(VECTOR) / sizeof(float)), w, count, CHUNK, false, sum);      \
      }                                                                                                       \
    }                                                                                                         \
    memcpy(tile, sum, sizeof sum);                                                                            \
  }

// As many rows of w as a tile has, or 4, or 1: how many they were.
#define TILES(NAME, VECTOR, HEIGHT, COLUMNS)                                                                  \
  TILE(NAME##_full, VECTOR, HEIGHT, COLUMNS)                                                                  \
  TILE(NAME##_of_4, VECTOR, 4, COLUMNS)                                                                       \
  TILE(NAME##_of_1, VECTOR, 1, COLUMNS)                                                                       \
  static int64_t NAME(const Product* p, const float* panel, int64_t row, int64_t rows, float* tile) {         \
    if (rows >= HEIGHT) return NAME##_full(p, panel, row, tile), HEIGHT;                                      \
    if (rows >= 4) return NAME##_of_4(p, panel, row, tile), 4;                                                \
    return NAME##_of_1(p, panel, row, tile), 1;                                                               \
  }

TILES(tile_wide, wide_vector, WIDE_ROWS, WIDE_COLUMNS)
TILES(tile_4, vector4, NARROW_ROWS, 1)
#if defined(__AVX__)
TILES(tile_8, vector8, NARROW_ROWS, 1)
#elif defined(__aarch64__)
TILES(tile_8, vector4, NARROW_ROWS, 2)
#endif
#if defined(__AVX512F__)
TILES(tile_16, wide_vector, NARROW_ROWS, 1)
#endif

INLINE int64_t make_tile(const Product* p, int64_t width, const float* panel, int64_t row, int64_t rows,
                         float* tile) {
  if (width == WIDE) return tile_wide(p, panel, row, rows, tile);
#if defined(__AVX512F__)
  if (width == 16) return tile_16(p, panel, row, rows, tile);
#endif
#if defined(__AVX__) || defined(__aarch64__)
  if (width == 8) return tile_8(p, panel, row, rows, tile);
#endif
  return tile_4(p, panel, row, rows, tile);
}

// The rows [row, end) of w, at most GROUP, with all tokens.
static void multiply_group(const Product* p, int64_t row, int64_t end) {
  float tile[WIDE_ROWS * WIDE] __attribute__((aligned(64)));
  for (int64_t token = 0; token < p->tokens; token += WIDE) {
    int64_t width = panel_width(p, token), live = min(width, p->tokens - token);
    for (int64_t first = row, height; first < end; first += height) {
      height = make_tile(p, width, p->packed + token * p->w.depth, first, end - first, tile);
      for (int64_t t = 0; t < live; t++)
        for (int64_t r = 0; r < height; r++) p->y[(token + t) * p->w.rows + first + r] = tile[r * width + t];
    }
  }
}

// Rows that meet several panels are widened once for all of them, if there is memory for it. They are a line further
// apart than in w, for rows a power of two apart push each other out of the first cache.
static void multiply(void* job, int64_t first, int64_t last) {
  const Product* p = job;
  const int64_t apart = p->w.depth + LINE;
  float* wide = p->widen && p->tokens > WIDE ? scratch(GROUP * apart) : NULL;
  for (int64_t row = first; row < last; row += GROUP) {
    int64_t end = min(row + GROUP, last);
    Product widened = *p;
    if (wide != NULL) {
      p->widen(p, (Piece){row, end - row, 0, p->w.depth}, wide, apart);
      widened.w.values = (const char*)(wide - row * apart);
      widened.apart = apart;
      widened.widen = NULL;
    }
    multiply_group(&widened, row, end);
  }
  free(wide);
}

int64_t scratch_for(const Weight* w, int64_t tokens) { return (min(tokens, AT_ONCE) + WIDE) * w->depth; }

void multiply_all(XLA_FFI_CallFrame* frame, Weight w, const float* x, float* y, int64_t tokens, float* packed) {
  static Widen* const widens[FORMS] = {widen_FLOAT32, widen_BFLOAT16, widen_INT8, widen_INT4, widen_FP8, widen_MXFP4,
                                      widen_INT8_16};
  for (int64_t token = 0; token < tokens; token += AT_ONCE) {
    int64_t count = min(tokens - token, AT_ONCE), panels = (count + WIDE - 1) / WIDE;
    Widen* widen = w.form == FLOAT32 && count <= COPIED * WIDE ? NULL : widens[w.form];
    Product p = {w, widen, x + token * w.depth, packed, y + token * w.rows, count, w.depth};
    int64_t groups = rows_in_piece(frame, (w.rows + GROUP - 1) / GROUP, PIECES, panels * GROUP * w.depth);
    parallel_for(frame, panels, 1, pack, &p);
    parallel_for(frame, w.rows, groups * GROUP, multiply, &p);
  }
}

EXPORT XLA_FFI_Error* jaxserve_matmul(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer* x = argument(frame, 0);
  Weight w = weight(frame, 0);
  float* packed = scratch(scratch_for(&w, x->dims[0]));
  if (packed == NULL) return out_of_memory(frame);
  multiply_all(frame, w, x->data, result(frame, 0)->data, x->dims[0], packed);
  free(packed);
  return NULL;
}
