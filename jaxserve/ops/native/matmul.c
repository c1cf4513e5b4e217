// y [T, N] = x [T, K] times w [N, K] transposed, in float32: a linear layer with its weight as the checkpoint has it.
//
// A tile of y^T is held in registers: rows of w by vectors of tokens. Each step of k broadcasts one number of every row
// of w and multiplies it by the tokens' vectors, so w is read once, and in place unless many tokens meet it; x is packed,
// in panels [K, tokens of the panel]. Every y is one sum over k in order, whatever T is: a row's result has the same bits
// alone and among others. A weight in another form is widened a piece at a time for the rows of a tile: the bits are
// those of the float32 weight it stands for.
//
// The tile in registers is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008.
#include "transpose.h"
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
  PIECES = 32,      // of all rows of w for each thread: the last to finish is late by at most so much
  LINE = 16,        // floats in a cache line
  AT_ONCE = 512,    // tokens packed at a time, whatever the step's size: what the scratch is for
  IN_PLACE = 2,     // panels up to which a float32 weight is read in place; more are quicker with a copy
  CHUNK = 128,      // numbers of a row that meet all tokens at a time: GROUP rows and a panel are in the first cache
  APART = CHUNK + LINE,  // numbers from one copied row to the next: rows a power of two apart share cache sets
};

typedef struct Product Product;
// A piece of w: `height` rows from `row` on, of each `count` numbers from place k on.
typedef struct {
  int64_t row, height, k, count;
} Piece;
// Writes a piece as float32, with rows APART from one another.
typedef void Widen(const Product* p, Piece piece, float* out);

struct Product {
  Weight w;
  Widen* widen;
  const float* x;
  float *packed, *y;
  int64_t tokens;
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
    const float* x = p->x + token * p->w.depth;
    for (int64_t k = 0; k < p->w.depth; k += LINE) {  // a line of each token at a time: rows of x may share cache sets
      int64_t count = min(LINE, p->w.depth - k);
      transpose(x + k, p->w.depth, live, count, panel + k * width, width);
      for (int64_t i = 0; live < width && i < count; i++)
        memset(panel + (k + i) * width + live, 0, (size_t)(width - live) * sizeof(float));
    }
  }
}

INLINE void widen_rows(const Product* p, Piece piece, float* out, Form form, bool zeros) {
  int64_t end = piece.k + piece.count;
  for (int64_t row = piece.row; row < piece.row + piece.height; row++, out += APART) {
    int64_t k = piece.k;
    for (int64_t index = k / p->w.group; k + BLOCK <= end; index++) {
      Group group = group_at(&p->w, form, zeros, row, index);
      for (int64_t until = min(end, (index + 1) * p->w.group); k + BLOCK <= until; k += BLOCK)
        widen(form, zeros, place(&p->w, form, row, k), &group, (vector*)(out + k - piece.k));
    }
    for (; k < end; k++) out[k - piece.k] = widen_one(form, place(&p->w, form, row, k));
  }
}

#define WIDEN(FORM)                                                                         \
  static void widen_##FORM(const Product* p, Piece piece, float* out) {                     \
    if (has_groups(FORM) && p->w.zeros) widen_rows(p, piece, out, FORM, true);              \
    else widen_rows(p, piece, out, FORM, false);                                            \
  }
WIDEN(FLOAT32)
WIDEN(BFLOAT16)
WIDEN(INT8)
WIDEN(INT4)
WIDEN(FP8)
WIDEN(MXFP4)
WIDEN(INT8_16)
WIDEN(MXFP8)
WIDEN(NVFP4)

// What is asked for while a tile is made, every LINE steps: a line for each of its rows, `row` bytes from one to the next,
// and `step` bytes further each time. The processor by itself does not look beyond a page. NULL: nothing.
typedef struct {
  const char* at;
  int64_t row, step;
} Ahead;

// tile [HEIGHT, COLUMNS of tokens] of y^T plus the products of `count` numbers of rows of w, `apart` from one another. With
// a pointer to every fourth row, all addresses of a step are in registers.
#define TILE(NAME, VECTOR, HEIGHT, COLUMNS)                                                                   \
  static void NAME(const float* panel, const float* w, int64_t count, int64_t apart, Ahead ahead, float* tile) { \
    VECTOR sum[HEIGHT][COLUMNS];                                                                              \
    const float* quad[(HEIGHT + 3) / 4];                                                                      \
    UNROLL for (int r = 0; r < HEIGHT; r += 4) {                                                              \
      quad[r / 4] = w + r * apart;                                                                            \
      __asm__("" : "+r"(quad[r / 4]));                                                                        \
    }                                                                                                         \
    UNROLL for (int r = 0; r < HEIGHT; r++)                                                                   \
      UNROLL for (int v = 0; v < COLUMNS; v++) sum[r][v] = ((const VECTOR*)tile)[r * COLUMNS + v];            \
    for (int64_t k = 0, end; k < count; k = end) {                                                            \
      end = min(k + LINE, count);                                                                             \
      if (ahead.at != NULL) {                                                                                 \
        UNROLL for (int r = 0; r < HEIGHT; r++) __builtin_prefetch(ahead.at + r * ahead.row, 0, 2);           \
        ahead.at += ahead.step;                                                                               \
      }                                                                                                       \
      for (int64_t i = k; i < end; i++) {                                                                     \
        VECTOR x[COLUMNS];                                                                                    \
        UNROLL for (int v = 0; v < COLUMNS; v++) x[v] = ((const VECTOR*)panel)[i * COLUMNS + v];              \
        UNROLL for (int r = 0; r < HEIGHT; r++) {                                                             \
          VECTOR weight = quad[r / 4][r % 4 * apart + i] - (VECTOR){0};                                       \
          if (COLUMNS > 1) { IN_VECTOR(weight); }                                                             \
          UNROLL for (int v = 0; v < COLUMNS; v++) {                                                          \
            sum[r][v] += weight * x[v];                                                                       \
            IN_REGISTER(sum[r][v]);                                                                           \
          }                                                                                                   \
        }                                                                                                     \
      }                                                                                                       \
    }                                                                                                         \
    memcpy(tile, sum, sizeof sum);                                                                            \
  }

// As many rows of w as a tile has, or 4, or 1: how many they were.
#define TILES(NAME, VECTOR, HEIGHT, COLUMNS)                                                                  \
  TILE(NAME##_full, VECTOR, HEIGHT, COLUMNS)                                                                  \
  TILE(NAME##_of_4, VECTOR, 4, COLUMNS)                                                                       \
  TILE(NAME##_of_1, VECTOR, 1, COLUMNS)                                                                       \
  static int64_t NAME(const float* panel, const float* w, int64_t count, int64_t apart, Ahead ahead, int64_t rows, \
                      float* tile) {                                                                          \
    if (rows >= HEIGHT) return NAME##_full(panel, w, count, apart, ahead, tile), HEIGHT;                      \
    if (rows >= 4) return NAME##_of_4(panel, w, count, apart, ahead, tile), 4;                                \
    return NAME##_of_1(panel, w, count, apart, ahead, tile), 1;                                               \
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

INLINE int64_t make_tile(int64_t width, const float* panel, const float* w, int64_t count, int64_t apart, Ahead ahead,
                         int64_t rows, float* tile) {
  if (width == WIDE) return tile_wide(panel, w, count, apart, ahead, rows, tile);
#if defined(__AVX512F__)
  if (width == 16) return tile_16(panel, w, count, apart, ahead, rows, tile);
#endif
#if defined(__AVX__) || defined(__aarch64__)
  if (width == 8) return tile_8(panel, w, count, apart, ahead, rows, tile);
#endif
  return tile_4(panel, w, count, apart, ahead, rows, tile);
}

// The sums [rows, width] of each panel of tokens to y.
static void write_sums(const Product* p, int64_t row, int64_t rows, const float* sums) {
  for (int64_t token = 0; token < p->tokens; token += WIDE) {
    int64_t width = panel_width(p, token), live = min(width, p->tokens - token);
    transpose(sums + token * GROUP, width, rows, live, p->y + token * p->w.rows + row, p->w.rows);
  }
}

// What is asked for in the tile of rows from `first` on whose piece of w starts at k. In place it is the next tile's rows:
// few tokens wait on memory, which is quickest in the order of its addresses, 20.7 ms instead of 22.9 for eight, and more
// of them on arithmetic, where that of the use takes 33 ms instead of 37 for 32. Else it is the next numbers to be copied.
INLINE Ahead ahead_of(const Weight* w, int64_t first, int64_t k, int64_t width, bool in_place) {
  const int64_t row = bytes(w->form, w->depth), line = LINE * sizeof(float);
  if (in_place && width < WIDE) return (Ahead){place(w, w->form, first + NARROW_ROWS, 0), line, NARROW_ROWS * line};
  if (in_place) return (Ahead){place(w, w->form, first + WIDE_ROWS, 0), row, line};
  bool last = k + CHUNK >= w->depth;
  return (Ahead){place(w, w->form, first + (last ? GROUP : 0), last ? 0 : k + CHUNK), row, bytes(w->form, LINE)};
}

// The rows [row, end) of w, at most GROUP, with all tokens. Those that meet many are copied as float32, CHUNK numbers at a
// time.
static void multiply_group(const Product* p, int64_t row, int64_t end) {
  float sums[GROUP * (AT_ONCE + WIDE)] __attribute__((aligned(64))), wide[GROUP * APART] __attribute__((aligned(64)));
  const bool in_place = p->w.form == FLOAT32 && p->tokens <= IN_PLACE * WIDE;
  const int64_t depth = p->w.depth, step = in_place ? depth : CHUNK, apart = in_place ? depth : APART;
  memset(sums, 0, (size_t)(GROUP * (p->tokens + WIDE)) * sizeof(float));
  for (int64_t k = 0; k < depth; k += step) {
    const int64_t count = min(step, depth - k);
    const float* w = in_place ? (const float*)p->w.values + row * depth : wide;
    if (!in_place) p->widen(p, (Piece){row, end - row, k, count}, wide);
    for (int64_t token = 0; token < p->tokens; token += WIDE) {
      int64_t width = panel_width(p, token);
      float* tile = sums + token * GROUP;
      const float* panel = p->packed + token * depth + k * width;
      for (int64_t first = row, height; first < end; first += height, tile += height * width) {
        Ahead ahead = token == 0 ? ahead_of(&p->w, first, k, width, in_place) : (Ahead){NULL, 0, 0};
        height = make_tile(width, panel, w + (first - row) * apart, count, apart, ahead, end - first, tile);
      }
    }
  }
  write_sums(p, row, end - row, sums);
}

static void multiply(void* job, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; row += GROUP) multiply_group(job, row, min(row + GROUP, last));
}

int64_t scratch_for(const Weight* w, int64_t tokens) { return (min(tokens, AT_ONCE) + WIDE) * w->depth; }

void multiply_all(XLA_FFI_CallFrame* frame, Weight w, const float* x, float* y, int64_t tokens, float* packed) {
  static Widen* const widens[FORMS] = {widen_FLOAT32, widen_BFLOAT16, widen_INT8, widen_INT4, widen_FP8, widen_MXFP4,
                                      widen_INT8_16, widen_MXFP8, widen_NVFP4};
  for (int64_t token = 0; token < tokens; token += AT_ONCE) {
    int64_t count = min(tokens - token, AT_ONCE), panels = (count + WIDE - 1) / WIDE;
    Product p = {w, widens[w.form], x + token * w.depth, packed, y + token * w.rows, count};
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
