// y [T, N] = x [T, K] times w [N, K] transposed, all float32: a linear layer with its weight as the checkpoint has it.
//
// A tile of y^T is held in registers: rows of w by vectors of tokens. Each step of k broadcasts one number of every row
// of w and multiplies it by the tokens' vectors, so w is read once, in place and unpacked; only x is packed, in panels
// [K, tokens of the panel]. Every y is one sum over k in order, whatever T is: a row's result has the same bits alone
// and among others.
//
// The tile in registers is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008.
#include "call.h"

// Tokens in the widest panel, and rows of w in its tile: as many sums as there are registers, but four.
#if defined(__AVX512F__)
enum { WIDE = 32, WIDE_ROWS = 12 };
typedef float wide_vector __attribute__((vector_size(64), aligned(4), may_alias));
#elif defined(__AVX__)
enum { WIDE = 16, WIDE_ROWS = 6 };
typedef float wide_vector __attribute__((vector_size(32), aligned(4), may_alias));
#else
enum { WIDE = 8, WIDE_ROWS = 6 };
typedef float wide_vector __attribute__((vector_size(16), aligned(4), may_alias));
#endif
#if defined(__AVX512F__)
typedef float vector16 __attribute__((vector_size(64), aligned(4), may_alias));
#endif
#if defined(__AVX__)
typedef float vector8 __attribute__((vector_size(32), aligned(4), may_alias));
#endif
typedef float vector4 __attribute__((vector_size(16), aligned(4), may_alias));

enum {
  NARROW_ROWS = 8,  // of w in the tile of a panel of one vector; with 12 eight tokens took 22.4 ms instead of 20.8
  BLOCK = 24,       // rows of w that meet one panel after another: whole tiles of either kind
  PIECES = 8,       // of all rows of w for each thread: the last to finish is late by at most so much
  LINE = 16,        // floats in a cache line
  AT_ONCE = 512,    // tokens packed at a time, whatever the step's size: what the scratch is for
};

typedef struct {
  const float *x, *w;
  float *packed, *y;
  int64_t tokens, rows, depth;
} Product;

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
    float* panel = p->packed + token * p->depth;
    for (int64_t k = 0; k < p->depth; k += LINE) {  // a line of each token at a time: rows of x may share cache sets
      int64_t end = min(k + LINE, p->depth);
      for (int64_t t = 0; t < width; t++)
        for (int64_t i = k; i < end; i++) panel[i * width + t] = t < live ? p->x[(token + t) * p->depth + i] : 0;
    }
  }
}

// The next rows of w are asked for in time, one line each LINE steps and row; the processor by itself does not look
// beyond a page. Few tokens wait on memory, which is quickest in the order of its addresses: 20.7 ms instead of 22.9
// for eight. Many wait on arithmetic, and 33 ms instead of 37 are had for 32 where the order is that of the use.
#define NEXT_ROWS(HEIGHT, VECTORS)                                                                            \
  UNROLL for (int r = 0; r < HEIGHT; r++) {                                                                   \
    if (VECTORS == 1) __builtin_prefetch(w + HEIGHT * (depth + k) + r * LINE, 0, 3);                          \
    else __builtin_prefetch(w + (HEIGHT + r) * depth + k, 0, 2);                                              \
  }

// Empty assembly, for what the compiler would do otherwise: read a broadcast from memory once for each of two vectors;
// and in some tiles, not in others, take a sum's multiplication and addition apart, which rounds twice.
#if defined(__x86_64__)
#define IN_REGISTER(value) __asm__("" : "+v"(value))
#else
#define IN_REGISTER(value) __asm__("" : "+w"(value))
#endif

// tile [HEIGHT, VECTORS of tokens] of y^T.
#define TILE(NAME, VECTOR, HEIGHT, VECTORS)                                                                   \
  INLINE void NAME(const float* panel, const float* w, int64_t depth, float* tile) {                          \
    enum { LANES = sizeof(VECTOR) / sizeof(float) };                                                          \
    VECTOR sum[HEIGHT][VECTORS] = {0};                                                                        \
    for (int64_t k = 0; k < depth; k++) {                                                                     \
      VECTOR x[VECTORS];                                                                                      \
      if (k % LINE == 0) {                                                                                    \
        NEXT_ROWS(HEIGHT, VECTORS)                                                                            \
      }                                                                                                       \
      UNROLL for (int v = 0; v < VECTORS; v++) x[v] = *(const VECTOR*)(panel + (k * VECTORS + v) * LANES);    \
      UNROLL for (int r = 0; r < HEIGHT; r++) {                                                               \
        VECTOR weight = w[r * depth + k] - (VECTOR){0};                                                       \
        if (VECTORS > 1) IN_REGISTER(weight);                                                                 \
        UNROLL for (int v = 0; v < VECTORS; v++) {                                                            \
          sum[r][v] += weight * x[v];                                                                         \
          IN_REGISTER(sum[r][v]);                                                                             \
        }                                                                                                     \
      }                                                                                                       \
    }                                                                                                         \
    UNROLL for (int r = 0; r < HEIGHT; r++)                                                                   \
      UNROLL for (int v = 0; v < VECTORS; v++) *(VECTOR*)(tile + (r * VECTORS + v) * LANES) = sum[r][v];      \
  }

// As many rows of w as a tile has, or 4, or 1: how many they were.
#define TILES(NAME, VECTOR, HEIGHT, VECTORS)                                                                  \
  TILE(NAME##_full, VECTOR, HEIGHT, VECTORS)                                                                  \
  TILE(NAME##_of_4, VECTOR, 4, VECTORS)                                                                       \
  TILE(NAME##_of_1, VECTOR, 1, VECTORS)                                                                       \
  static int64_t NAME(const float* panel, const float* w, int64_t rows, int64_t depth, float* tile) {         \
    if (rows >= HEIGHT) return NAME##_full(panel, w, depth, tile), HEIGHT;                                    \
    if (rows >= 4) return NAME##_of_4(panel, w, depth, tile), 4;                                              \
    return NAME##_of_1(panel, w, depth, tile), 1;                                                             \
  }

TILES(tile_wide, wide_vector, WIDE_ROWS, 2)
TILES(tile_4, vector4, NARROW_ROWS, 1)
#if defined(__AVX__)
TILES(tile_8, vector8, NARROW_ROWS, 1)
#endif
#if defined(__AVX512F__)
TILES(tile_16, vector16, NARROW_ROWS, 1)
#endif

INLINE int64_t make_tile(int64_t width, const float* panel, const float* w, int64_t rows, int64_t depth, float* tile) {
  if (width == WIDE) return tile_wide(panel, w, rows, depth, tile);
#if defined(__AVX512F__)
  if (width == 16) return tile_16(panel, w, rows, depth, tile);
#endif
#if defined(__AVX__)
  if (width == 8) return tile_8(panel, w, rows, depth, tile);
#endif
  return tile_4(panel, w, rows, depth, tile);
}

static void multiply(void* job, int64_t first, int64_t last) {
  const Product* p = job;
  float tile[WIDE_ROWS * WIDE] __attribute__((aligned(64)));
  for (int64_t block = first; block < last; block += BLOCK) {
    for (int64_t token = 0; token < p->tokens; token += WIDE) {
      int64_t width = panel_width(p, token), live = min(width, p->tokens - token), end = min(block + BLOCK, last);
      for (int64_t row = block, height; row < end; row += height) {
        height = make_tile(width, p->packed + token * p->depth, p->w + row * p->depth, end - row, p->depth, tile);
        for (int64_t t = 0; t < live; t++)
          for (int64_t r = 0; r < height; r++) p->y[(token + t) * p->rows + row + r] = tile[r * width + t];
      }
    }
  }
}

EXPORT XLA_FFI_Error* jaxserve_matmul(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer *x = argument(frame, 0), *w = argument(frame, 1);
  int64_t tokens = x->dims[0], depth = w->dims[1], rows = w->dims[0];
  float* packed = scratch((min(tokens, AT_ONCE) + WIDE) * depth);
  if (packed == NULL) return out_of_memory(frame);
  for (int64_t token = 0; token < tokens; token += AT_ONCE) {
    float *some = (float*)x->data + token * depth, *y = (float*)result(frame, 0)->data + token * rows;
    Product p = {some, w->data, packed, y, min(tokens - token, AT_ONCE), rows, depth};
    int64_t panels = (p.tokens + WIDE - 1) / WIDE;
    int64_t blocks = rows_in_piece(frame, (rows + BLOCK - 1) / BLOCK, PIECES, panels * BLOCK * depth);
    parallel_for(frame, panels, 1, pack, &p);
    parallel_for(frame, rows, blocks * BLOCK, multiply, &p);
  }
  free(packed);
  return NULL;
}
