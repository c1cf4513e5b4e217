// y [T, N] = x [T, K] times w [N, K] transposed, in float32, for at most FEW tokens: bound by reading w.
//
// Each thread reads w in two or three straight lines, each from its part of the piece, and a row at a time in each. For
// one token on two Zen 5 cores that is 48.9 GB/s, of 49.5 to 51.5 that any loop reads; one line 46.5, the 8 rows side by
// side of matmul.c 39, XLA's product 41. A number of w is widened once, in a register, and meets all tokens: 4 tokens
// with int8 weights take 7.4 ms where matmul.c takes 21.7. The bits are those of the float32 weight that w stands for.
#include "weights.h"

enum {
  LINES = 3,       // rows of w that meet a vector of x, at most
  PIECES = 4,      // of all rows of w for each thread
  AHEAD = 16384,   // bytes: the processor by itself asks for no line beyond a page, and stalls at each
  CACHE_LINE = 64,
#if defined(__aarch64__)
  PARTS = 4,  // of a sum of one token; with VECTORS of them the registers would not do
#else
  PARTS = VECTORS,
#endif
};

// Tokens and rows of w that meet at a time: as many as there are registers for their sums.
INLINE int tokens_for(int tokens) { return LANES == 16 || tokens < 4 ? tokens : 4; }
INLINE int lines_for(int tokens, Form form) { return tokens == FEW && !has_groups(form) ? LINES : 2; }

typedef struct {
  Weight w;
  const float* x;
  float* y;
  int64_t tokens;
} Product;

// The products of `tokens` rows of x, from `token` on, with lines_for rows of w, `apart` rows from one another. What would
// lie behind the last row of either is the last again. One token has PARTS sums, for one sum would wait on its last
// addition.
INLINE void multiply_rows(const Product* p, int64_t row, int64_t last, int64_t apart, int64_t token, int tokens, Form form,
                          bool zeros) {
  const int lines = lines_for(tokens, form), parts = tokens == 1 ? PARTS : 1;
  vector sums[LINES][FEW][VECTORS] = {0};
  int64_t numbers[LINES];
  const char* rows[LINES];
  int64_t k = 0, depth = p->w.depth;
  const float* x[FEW];
  UNROLL for (int l = 0; l < lines; l++) {
    numbers[l] = min(row + l * apart, last - 1);
    rows[l] = place(&p->w, form, numbers[l], 0);
  }
  UNROLL for (int t = 0; t < tokens; t++) x[t] = p->x + min(token + t, p->tokens - 1) * depth;
  for (int64_t index = 0; index < p->w.groups; index++) {
    Group groups[LINES];
    UNROLL for (int l = 0; l < lines; l++) groups[l] = group_at(&p->w, form, zeros, numbers[l], index);
    for (int64_t end = (index + 1) * p->w.group; k + BLOCK <= end; k += BLOCK) {
      vector w[LINES][VECTORS];
      UNROLL for (int l = 0; l < lines; l++) {
        const char* at = rows[l] + bytes(form, k);
        if (tokens > 1)  // one token is bound by reading anyway, and loses a tenth by asking
          UNROLL for (int i = 0; i < bytes(form, BLOCK); i += CACHE_LINE) __builtin_prefetch(at + AHEAD + i, 0, 2);
        widen(form, zeros, at, &groups[l], w[l]);
      }
      UNROLL for (int v = 0; v < VECTORS; v++)
        UNROLL for (int t = 0; t < tokens; t++) {
          vector some = *(const vector*)(x[t] + k + v * LANES);
          UNROLL for (int l = 0; l < lines; l++) {
            sums[l][t][v % parts] += some * w[l][v];
            IN_REGISTER(sums[l][t][v % parts]);
          }
        }
    }
  }
  UNROLL for (int l = 0; l < lines; l++)
    UNROLL for (int t = 0; t < tokens; t++) {
      float sum[BLOCK], y = 0;
      UNROLL for (int v = 0; v < parts; v++) *(vector*)(sum + v * LANES) = sums[l][t][v];
      const int half = parts * LANES / 2;
      UNROLL for (int i = 0; i < half; i++) y += sum[i] + sum[half + i];
      for (int64_t i = k; i < depth; i++) {
        y += x[t][i] * widen_one(form, rows[l] + bytes(form, i));
        IN_REGISTER(y);
      }
      if (token + t < p->tokens) p->y[(token + t) * p->w.rows + numbers[l]] = y;
    }
}

INLINE void multiply(const Product* p, int64_t first, int64_t last, int tokens, Form form, bool zeros) {
  const int together = tokens_for(tokens), lines = lines_for(together, form);
  int64_t line = (last - first + lines - 1) / lines;
  for (int64_t row = first; row < first + line; row++)
    for (int64_t token = 0; token < tokens; token += together)
      multiply_rows(p, row, last, line, token, together, form, zeros);
}

// For several tokens the zeros are not left out of the program: it is one of many, and compiles as long as all others.
#define MULTIPLY(FORM)                                                             \
  static void multiply_##FORM(void* job, int64_t first, int64_t last) {            \
    const Product* p = job;                                                        \
    if (p->tokens > 4) multiply(p, first, last, FEW, FORM, true);                  \
    else if (p->tokens > 2) multiply(p, first, last, 4, FORM, true);               \
    else if (p->tokens > 1) multiply(p, first, last, 2, FORM, true);               \
    else if (has_groups(FORM) && p->w.zeros) multiply(p, first, last, 1, FORM, true); \
    else multiply(p, first, last, 1, FORM, false);                                 \
  }
MULTIPLY(FLOAT32)
MULTIPLY(BFLOAT16)
MULTIPLY(INT8)
MULTIPLY(INT4)
MULTIPLY(FP8)
MULTIPLY(MXFP4)
MULTIPLY(INT8_16)
MULTIPLY(MXFP8)
MULTIPLY(NVFP4)

void multiply_few(XLA_FFI_CallFrame* frame, Weight w, const float* x, float* y, int64_t tokens) {
  static Work* const works[FORMS] = {multiply_FLOAT32, multiply_BFLOAT16, multiply_INT8, multiply_INT4, multiply_FP8,
                                      multiply_MXFP4, multiply_INT8_16, multiply_MXFP8, multiply_NVFP4};
  Product p = {w, x, y, tokens};
  parallel_for(frame, w.rows, rows_in_piece(frame, w.rows, PIECES, bytes(w.form, w.depth) / 4), works[w.form], &p);
}

EXPORT XLA_FFI_Error* jaxserve_matmul_few(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer* x = argument(frame, 0);
  multiply_few(frame, weight(frame, 0), x->data, result(frame, 0)->data, x->dims[0]);
  return NULL;
}
