// y [N] = x [K] times w [N, K] transposed, all float32: a linear layer for one token, bound by reading w.
//
// Each thread reads w in two straight lines, from the first and from the middle of its piece, and a row at a time in
// each. On two Zen 5 cores that is 48.9 GB/s, of 49.5 to 51.5 that any loop reads; one line 46.5, the 8 rows side by
// side of matmul.c 39, XLA's product 41.
#include "call.h"

enum { LANES = 16, LINES = 2, VECTORS = 2, PIECES = 4 };
typedef float vector __attribute__((vector_size(64), aligned(4), may_alias));

typedef struct {
  const float *x, *w;
  float* y;
  int64_t rows, depth;
} Product;

// The products of x with `lines` rows of w, `apart` rows from one another.
INLINE void multiply_rows(const Product* p, int64_t row, int lines, int64_t apart) {
  vector sums[LINES][VECTORS] = {0};
  const float* w = p->w + row * p->depth;
  int64_t k = 0;
  for (; k + VECTORS * LANES <= p->depth; k += VECTORS * LANES)
    UNROLL for (int l = 0; l < lines; l++)
      UNROLL for (int v = 0; v < VECTORS; v++)
        sums[l][v] += *(const vector*)(p->x + k + v * LANES) * *(const vector*)(w + l * apart * p->depth + k + v * LANES);
  UNROLL for (int l = 0; l < lines; l++) {
    vector sum = sums[l][0] + sums[l][1];
    float y = 0;
    UNROLL for (int i = 0; i < LANES; i++) y += sum[i];
    for (int64_t i = k; i < p->depth; i++) y += p->x[i] * w[l * apart * p->depth + i];
    p->y[row + l * apart] = y;
  }
}

static void multiply(void* job, int64_t first, int64_t last) {
  int64_t line = (last - first) / LINES;
  for (int64_t row = first; row < first + line; row++) multiply_rows(job, row, LINES, line);
  if (first + LINES * line < last) multiply_rows(job, last - 1, 1, 0);
}

EXPORT XLA_FFI_Error* jaxserve_matvec(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer *x = argument(frame, 0), *w = argument(frame, 1);
  Product p = {x->data, w->data, result(frame, 0)->data, w->dims[0], w->dims[1]};
  parallel_for(frame, p.rows, rows_in_piece(frame, p.rows, PIECES, p.depth), multiply, &p);
  return NULL;
}
