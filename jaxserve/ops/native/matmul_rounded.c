// y [T, N] = x [T, K] times w [N, K] transposed, by the processor's products of bfloat16 or of integers: up to four times
// the rate of float32. x is rounded for it, each row by itself: to bfloat16 for a weight in bfloat16, and for one in INT8
// or INT4 to 8 bits, with a scale for each group of at most ROUNDED_GROUP numbers.
//
// A tile of y^T is held in registers as in matmul.c. Integers are summed exactly in a group, and the groups in order in
// float32, so that a row's result has the same bits alone and among others.
#include "rounded.h"

#if ROUNDS == 2
#include "rounded_avx512.h"
#elif ROUNDS == 1 && defined(__aarch64__)
#include "rounded_neon.h"
#elif ROUNDS == 1
#include "rounded_avx2.h"
#endif

#if ROUNDS > 0
enum {
  GROUP = 24,           // rows of w that meet one panel after another
  PIECES = 32,          // of all rows of w for each thread
  AT_ONCE = 512,        // tokens packed at a time
  LINE_BYTES = 64,      // in a cache line
};

static void pack(void* job, int64_t first, int64_t last) {
  const Product* p = job;
  for (int64_t token = first * WIDE; token < min(last * WIDE, p->tokens); token += WIDE) {
    int64_t width = panel_width(p->tokens - token);
    pack_panel(p, token, min(width, p->tokens - token), width);
  }
}

// Asks for the rows [row, row + rows) of w and their scales: a tile takes as long as they need to come, and the processor
// by itself asks for them only when they are unpacked.
INLINE void ask_for(const Weight* w, int64_t row, int64_t rows) {
  const char* at = place(w, w->form, row, 0);
  const float* scales = w->scales + row * w->groups;
  for (int64_t i = 0; i < rows * bytes(w->form, w->depth); i += LINE_BYTES) __builtin_prefetch(at + i, 0, 2);
  for (int64_t i = 0; i < rows * w->groups; i += LINE_BYTES / 4) __builtin_prefetch(scales + i, 0, 2);
}

// The rows [row, end) of w, at most GROUP, with all tokens. unpacked: their words, if w is not in bfloat16.
static void multiply_group(const Product* p, int64_t row, int64_t end, const uint8_t* unpacked) {
  float tile[TILE_ROWS * WIDE] __attribute__((aligned(64)));
  for (int64_t token = 0; token < p->tokens; token += WIDE) {
    int64_t width = panel_width(p->tokens - token), live = min(width, p->tokens - token);
    for (int64_t first = row, height; first < end; first += height) {
      const uint8_t* w = unpacked == NULL ? NULL : unpacked + (first - row) * p->words * 4;
      if (token == 0 && w != NULL) ask_for(&p->w, first + GROUP, min(TILE_ROWS, end - first));
      height = make_tile(p, token, width, w, first, end - first, tile);
      for (int64_t t = 0; t < live; t++)
        for (int64_t r = 0; r < height; r++) p->y[(token + t) * p->w.rows + first + r] = tile[r * width + t];
    }
  }
}

static void multiply(void* job, int64_t first, int64_t last) {
  Product* p = job;
  uint8_t* unpacked = NULL;
  if (p->w.form != BFLOAT16 && (unpacked = (uint8_t*)scratch(GROUP * p->words)) == NULL) p->failed = true;
  if (p->failed) last = first;
  for (int64_t row = first; row < last; row += GROUP) {
    int64_t end = min(row + GROUP, last);
    if (unpacked != NULL) unpack_rows(p, row, end, unpacked);
    multiply_group(p, row, end, unpacked);
  }
  free(unpacked);
}

EXPORT XLA_FFI_Error* jaxserve_matmul_rounded(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer* x = argument(frame, 0);
  Weight w = weight(frame, 0);
  bool failed = false;
  int64_t tokens = x->dims[0], room = min(tokens, AT_ONCE) + WIDE, words = words_of(&w);
  int64_t group = w.form == BFLOAT16 ? 0 : summed_together(&w), groups = group == 0 ? 0 : w.depth / group;
  float* memory = scratch(room * (words + 2 * groups));
  if (memory == NULL) return out_of_memory(frame);
  for (int64_t token = 0; token < tokens; token += AT_ONCE) {
    int64_t count = min(tokens - token, AT_ONCE), panels = (count + WIDE - 1) / WIDE;
    Product p = {.w = w, .x = (const float*)x->data + token * w.depth, .packed = (uint32_t*)memory,
                 .scales = memory + room * words, .sums = (int32_t*)memory + room * (words + groups),
                 .y = (float*)result(frame, 0)->data + token * w.rows,
                 .tokens = count, .words = words, .group = group, .groups = groups};
    int64_t pieces = rows_in_piece(frame, (w.rows + GROUP - 1) / GROUP, PIECES, panels * GROUP * words);
    parallel_for(frame, panels, 1, pack, &p);
    parallel_for(frame, w.rows, pieces * GROUP, multiply, &p);
    failed |= p.failed;
  }
  free(memory);
  return failed ? out_of_memory(frame) : NULL;
}
#else

// Not called: the server refuses to start.
EXPORT XLA_FFI_Error* jaxserve_matmul_rounded(XLA_FFI_CallFrame* frame) {
  return answered_metadata(frame) ? NULL : out_of_memory(frame);
}
#endif

EXPORT int32_t jaxserve_rounds(void) { return ROUNDS; }
