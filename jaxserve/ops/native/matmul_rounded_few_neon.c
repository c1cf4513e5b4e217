// The products of matmul_rounded_few.c with NEON's dot products of bytes, for INT8 and INT4. w is read as in matmul_few.c.
//
// A vector has 16 numbers of one row of w side by side, which meet the same numbers of each token. Products are summed in
// integers over the numbers of x that share a scale. Sums are in an order of their own, the same for any number of tokens.
#include "rounded.h"

#include <string.h>

#if ROUNDS == 1 && defined(__aarch64__)

enum {
  TOGETHER = 4,   // tokens that meet w at a time: as many as there are registers for their sums
  LINES = 2,      // rows of w that meet the tokens at a time
  PIECES = 4,     // of all rows of w for each thread
  AHEAD = 16384,  // bytes: as in matmul_few.c
  CACHE_LINE = 64,
};

typedef struct {
  Weight w;
  int8_t* x;      // [T, K]
  float* scales;  // of x [T, groups]
  float* totals;  // the sum of x in each group of w [T, w.groups]
  float* y;
  int64_t tokens, group, groups;  // numbers of x in a group, groups of a row of x
} Product;

// Subtracts the products of token t with the zeros of row `row`.
INLINE float without_zeros(const Product* p, int64_t row, int64_t t, float sum) {
  const int64_t groups = p->w.groups;
  for (int64_t index = 0; p->w.zeros && index < groups; index++)
    sum -= p->w.scales[row * groups + index] * p->w.zeros[row * groups + index] * p->totals[t * groups + index];
  return sum;
}

// The products of `tokens` rows of x, from `token` on, with LINES rows of w, `apart` from one another. What would lie behind
// the last row of either is the last again.
INLINE void multiply_rows(const Product* p, int64_t row, int64_t last, int64_t apart, int64_t token, int tokens,
                          Form form) {
  float32x4_t sums[LINES][TOGETHER] = {0};
  const char* at[LINES];
  const float* of_w[LINES];
  const int8_t* x[TOGETHER];
  const float* of_x[TOGETHER];
  int64_t numbers[LINES];
  UNROLL for (int l = 0; l < LINES; l++) {
    numbers[l] = min(row + l * apart, last - 1);
    at[l] = place(&p->w, form, numbers[l], 0);
    of_w[l] = p->w.scales + numbers[l] * p->w.groups;
  }
  UNROLL for (int t = 0; t < tokens; t++) {
    const int64_t number = min(token + t, p->tokens - 1);
    x[t] = p->x + number * p->w.depth;
    of_x[t] = p->scales + number * p->groups;
  }
  for (int64_t index = 0, k = 0; index < p->groups; index++) {
    int32x4_t whole[LINES][TOGETHER] = {0};
    const int64_t of_group = k / p->w.group;
    for (int64_t end = k + p->group; k < end; k += BLOCK) {
      int8x16_t w[LINES][2];
      UNROLL for (int l = 0; l < LINES; l++) {
        const char* some = at[l] + bytes(form, k);
        if (tokens > 1 && (uintptr_t)some % CACHE_LINE < (uintptr_t)bytes(form, BLOCK)) __builtin_prefetch(some + AHEAD, 0, 2);
        block_of(&p->w, form, some, w[l]);
      }
      UNROLL for (int t = 0; t < tokens; t++)
        UNROLL for (int i = 0; i < 2; i++) {
          int8x16_t some = vld1q_s8(x[t] + k + 16 * i);
          UNROLL for (int l = 0; l < LINES; l++) whole[l][t] = vdotq_s32(whole[l][t], w[l][i], some);
        }
    }
    UNROLL for (int l = 0; l < LINES; l++)
      UNROLL for (int t = 0; t < tokens; t++)
        sums[l][t] = vfmaq_n_f32(sums[l][t], vcvtq_f32_s32(whole[l][t]), of_w[l][of_group] * of_x[t][index]);
  }
  UNROLL for (int l = 0; l < LINES; l++)
    UNROLL for (int t = 0; t < tokens; t++)
      if (token + t < p->tokens)
        p->y[(token + t) * p->w.rows + numbers[l]] = without_zeros(p, numbers[l], token + t, vaddvq_f32(sums[l][t]));
}

INLINE void multiply(const Product* p, int64_t first, int64_t last, int together, Form form) {
  const int64_t apart = (last - first + LINES - 1) / LINES;
  for (int64_t row = first; row < first + apart; row++)
    for (int64_t token = 0; token < p->tokens; token += together)
      multiply_rows(p, row, last, apart, token, together, form);
}

#define MULTIPLY(FORM)                                                                \
  static void multiply_##FORM(void* job, int64_t first, int64_t last) {               \
    const Product* p = job;                                                           \
    if (p->tokens > 2) multiply(p, first, last, TOGETHER, FORM);                      \
    else if (p->tokens > 1) multiply(p, first, last, 2, FORM);                        \
    else multiply(p, first, last, 1, FORM);                                           \
  }
MULTIPLY(INT8)
MULTIPLY(INT4)

static void round_tokens(const Product* p, const float* x) {
  for (int64_t place = 0, groups = p->tokens * p->groups; place < groups; place++) {
    int32_t sum;
    const int64_t token = place / p->groups, k = place % p->groups * p->group;
    round_group(x + place * p->group, p->group, p->x + place * p->group, p->scales + place, &sum);
    p->totals[token * p->w.groups + k / p->w.group] += p->scales[place] * (float)sum;
  }
}

EXPORT XLA_FFI_Error* jaxserve_matmul_rounded_few(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer* x = argument(frame, 0);
  Weight w = weight(frame, 0);
  const int64_t tokens = x->dims[0], group = group_of(&w), groups = w.depth / group;
  const int64_t of_x = tokens * w.depth / 4, size = of_x + tokens * (groups + w.groups);
  float* memory = scratch(size);
  if (memory == NULL) return out_of_memory(frame);
  memset(memory, 0, (size_t)size * sizeof(float));
  Product p = {.w = w, .x = (int8_t*)memory, .scales = memory + of_x, .totals = memory + of_x + tokens * groups,
               .y = result(frame, 0)->data, .tokens = tokens, .group = group, .groups = groups};
  round_tokens(&p, x->data);
  Work* work = w.form == INT4 ? multiply_INT4 : multiply_INT8;
  parallel_for(frame, w.rows, rows_in_piece(frame, w.rows, PIECES, bytes(w.form, w.depth) / 4), work, &p);
  free(memory);
  return NULL;
}
#endif
