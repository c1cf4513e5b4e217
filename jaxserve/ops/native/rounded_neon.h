// The parts of matmul_rounded.c that differ between instruction sets, with NEON's dot products of bytes, for INT8 and INT4.
//
// A step is a word of four numbers of each token and of each row of w. A vector has one word of four tokens, which meets a
// word of a row of w, out of a vector of four. The bytes of w have their sign: of INT4 without zeros they are numbers less 8.
#pragma once
#include "rounded_product.h"

#include <string.h>

enum {
  WIDE = 16,      // tokens in the widest panel
  TILE_ROWS = 4,  // rows of w in a tile
  WORDS = 4,      // in a vector
};

// Tokens of a panel for the `left` last tokens, and words in a row of x. A group of integers has a scale of its own.
INLINE int64_t panel_width(int64_t left) { return left > 8 ? WIDE : left > 4 ? 8 : 4; }
INLINE int64_t words_of(const Weight* w) { return w->depth / 4; }
INLINE int64_t summed_together(const Weight* w) { return group_of(w); }

static void pack_panel(const Product* p, int64_t token, int64_t live, int64_t width) {
  uint32_t* panel = p->packed + token * p->words;
  float* scales = p->scales + token * p->groups;
  int32_t* sums = p->sums + token * p->groups;
  for (int64_t index = 0; index < p->groups; index++, panel += p->group / 4 * width)
    for (int64_t t = 0; t < width; t++) {
      uint32_t words[ROUNDED_GROUP / 4];
      const float* x = p->x + (token + min(t, live - 1)) * p->w.depth + index * p->group;
      round_group(x, p->group, (int8_t*)words, scales + index * width + t, sums + index * width + t);
      for (int64_t i = 0; i < p->group / 4; i++) panel[i * width + t] = words[i];
    }
}

// Word LANE of the rows' vectors `weights` with the tokens' words at `at`.
#define ADD_WORD(LANE)                                                                              \
  UNROLL for (int c = 0; c < columns; c++) {                                                        \
    int8x16_t x = vld1q_s8(at + (LANE * columns + c) * 16);                                         \
    UNROLL for (int r = 0; r < height; r++)                                                         \
      whole[r][c] = vdotq_laneq_s32(whole[r][c], x, weights[r], LANE);                              \
  }

// tile [height, columns of 4 tokens] of y^T, from row `row` of w on, whose bytes are `w`.
INLINE void fill_tile(const Product* p, int64_t token, const int8_t* w, int64_t row, float* tile, int height,
                      int columns) {
  const int64_t width = columns * 4;
  const int8_t* at = (const int8_t*)(p->packed + token * p->words);
  const float* scales = p->scales + token * p->groups;
  const int32_t* totals = p->sums + token * p->groups;
  memset(tile, 0, (size_t)(height * width) * sizeof(float));
  for (int64_t index = 0; index < p->groups; index++, w += p->group, scales += width, totals += width) {
    int32x4_t whole[TILE_ROWS][WIDE / 4] = {0};
    for (int64_t k = 0; k < p->group; k += 16, at += WORDS * columns * 16) {
      int8x16_t weights[TILE_ROWS];
      UNROLL for (int r = 0; r < height; r++) weights[r] = vld1q_s8(w + r * p->w.depth + k);
      ADD_WORD(0) ADD_WORD(1) ADD_WORD(2) ADD_WORD(3)
    }
    const int64_t place = index * p->group / p->w.group;
    UNROLL for (int r = 0; r < height; r++) {
      const int64_t of_w = (row + r) * p->w.groups + place;
      UNROLL for (int c = 0; c < columns; c++) {
        float32x4_t number = vcvtq_f32_s32(whole[r][c]), total = vcvtq_f32_s32(vld1q_s32(totals + 4 * c));
        if (p->w.zeros) number = vfmsq_n_f32(number, total, p->w.zeros[of_w]);
        float* out = tile + r * width + 4 * c;
        float32x4_t scale = vmulq_n_f32(vld1q_f32(scales + 4 * c), p->w.scales[of_w]);
        vst1q_f32(out, vfmaq_f32(vld1q_f32(out), number, scale));
      }
    }
  }
}

// A tile of as many rows of w as one has, or of one: how many they were.
INLINE int64_t make_tile(const Product* p, int64_t token, int64_t width, const uint8_t* unpacked, int64_t row,
                         int64_t rows, float* tile) {
  const int8_t* w = (const int8_t*)unpacked;
#define MAKE(COLUMNS)                                                                                  \
  if (rows >= TILE_ROWS) return fill_tile(p, token, w, row, tile, TILE_ROWS, COLUMNS), TILE_ROWS;      \
  return fill_tile(p, token, w, row, tile, 1, COLUMNS), 1;
  if (width == WIDE) { MAKE(4) } else if (width == 8) { MAKE(2) } else { MAKE(1) }
#undef MAKE
}

// The bytes of rows [row, end) of w.
static void unpack_rows(const Product* p, int64_t row, int64_t end, uint8_t* out) {
  const Weight* w = &p->w;
  const char* at = place(w, w->form, row, 0);
  const int64_t numbers = (end - row) * w->depth;
  for (int64_t k = 0; k < numbers; k += BLOCK) {
    int8x16_t some[2];
    __builtin_prefetch(at + bytes(w->form, k) + 4096, 0, 3);
    block_of(w, w->form, at + bytes(w->form, k), some);
    vst1q_s8((int8_t*)out + k, some[0]);
    vst1q_s8((int8_t*)out + k + 16, some[1]);
  }
}
