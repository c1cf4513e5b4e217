// The parts of matmul_rounded.c that differ between instruction sets, with AVX2, for INT8 and INT4: twice and three times
// the rate of float32.
//
// A step is a word of each token and of each row of w. For INT8 it has two numbers, both widened to 16 bits, whose products
// are summed in 32. For INT4 it has four bytes, those of w without sign. The products of a BLOCK are two sums of 16 in 16
// bits, each at most 16 * 15 * 127. For w without zeros the first starts from -8 times the sum of x, and still fits: if P
// and -N are the sums of its own positive and negative x and H is that of the other's, it ends between -8P + 8N - 8H - 15N
// and -8P + 8N - 8H + 15P, where P + N and |H| are at most 16 * 127.
#pragma once
#include "rounded_product.h"

#include <string.h>

enum {
  WIDE = 16,            // tokens in the widest panel
  TILE_ROWS = 6,        // rows of w in a tile
};

// Tokens of a panel for the `left` last tokens; numbers in a word, and words in a row of x; numbers of x whose products are
// summed in integers.
INLINE int64_t panel_width(int64_t left) { return left > 8 ? WIDE : 8; }
INLINE int64_t in_word(Form form) { return form == INT4 ? 4 : 2; }
INLINE int64_t words_of(const Weight* w) { return w->depth / in_word(w->form); }
INLINE int64_t summed_together(const Weight* w) { return w->form == INT4 ? BLOCK : group_of(w); }

static void pack_panel(const Product* p, int64_t token, int64_t live, int64_t width) {
  const int64_t group = group_of(&p->w), words = group / in_word(p->w.form);
  uint32_t* panel = p->packed + token * p->words;
  for (int64_t k = 0; k < p->w.depth; k += group, panel += words * width)
    for (int64_t t = 0; t < width; t++) {
      int8_t bytes[ROUNDED_GROUP];
      uint32_t packed[ROUNDED_GROUP / 2];
      int64_t place = token * p->groups + k / p->group * width + t;
      float scale;
      round_group(p->x + (token + min(t, live - 1)) * p->w.depth + k, group, bytes, &scale);
      for (int64_t i = 0; i < group; i += p->group, place += width) {
        p->scales[place] = scale;
        p->sums[place] = 0;
        for (int64_t b = 0; b < p->group; b += BLOCK) p->sums[place] += sum_of(bytes + i + b);
      }
      if (p->w.form == INT4) memcpy(packed, bytes, sizeof bytes);
      else for (int64_t i = 0; i < group; i++) ((int16_t*)packed)[i] = bytes[i];
      for (int64_t i = 0; i < words; i++) panel[i * width + t] = packed[i];
    }
}

// tile [height, columns of 8 tokens] of y^T, from row `row` of w on, whose words are `w`.
INLINE void fill_tile(const Product* p, int64_t token, const uint32_t* w, int64_t row, float* tile, int height,
                      int columns, Form form) {
  const int64_t width = columns * 8, steps = p->group / in_word(form), apart = p->words, parts = p->w.group / p->group;
  const uint32_t* panel = p->packed + token * p->words;
  const float* scales = p->scales + token * p->groups;
  const int32_t* totals = p->sums + token * p->groups;
  const int64_t w_groups = p->w.groups;
  const float *w_scales = p->w.scales + row * w_groups, *w_zeros = p->w.zeros ? p->w.zeros + row * w_groups : NULL;
  const __m256i ones = _mm256_set1_epi16(1), added = _mm256_set1_epi32(form == INT4 && !p->w.zeros ? -8 & 0xffff : 0);
  memset(tile, 0, (size_t)(height * width) * sizeof(float));
  for (int64_t place = 0; place < w_groups; place++)
    for (int64_t part = 0; part < parts; part++, w += steps, scales += width, totals += width) {
      __m256i sum[TILE_ROWS][2];
      UNROLL for (int v = 0; v < columns; v++) {
        __m256i start = _mm256_mullo_epi16(_mm256_loadu_si256((const __m256i*)(totals + 8 * v)), added);
        UNROLL for (int r = 0; r < height; r++) sum[r][v] = start;
      }
      const uint32_t *at[2] = {w, w + 4 * apart};
      __asm__("" : "+r"(at[1]), "+r"(tile));
      for (int64_t k = 0; k < steps; k++, panel += width) {
        __m256i x[2];
        UNROLL for (int v = 0; v < columns; v++) x[v] = _mm256_loadu_si256((const __m256i*)(panel + 8 * v));
        UNROLL for (int r = 0; r < height; r++) {
          __m256i weight = _mm256_set1_epi32((int32_t)at[r / 4][r % 4 * apart + k]);
          IN_REGISTER(weight);
          UNROLL for (int v = 0; v < columns; v++) add_products(form, &sum[r][v], weight, x[v]);
        }
      }
      __m256 scale[2];
      UNROLL for (int v = 0; v < columns; v++) scale[v] = _mm256_loadu_ps(scales + 8 * v);
      UNROLL for (int r = 0; r < height; r++) {
        __m256 number[2], of_w = _mm256_set1_ps(w_scales[r * w_groups + place]);
        UNROLL for (int v = 0; v < columns; v++)
          number[v] = _mm256_cvtepi32_ps(form == INT4 ? _mm256_madd_epi16(sum[r][v], ones) : sum[r][v]);
        if (w_zeros != NULL)
          UNROLL for (int v = 0; v < columns; v++) {
            __m256 total = _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)(totals + 8 * v)));
            number[v] = _mm256_fnmadd_ps(_mm256_set1_ps(w_zeros[r * w_groups + place]), total, number[v]);
          }
        UNROLL for (int v = 0; v < columns; v++) {
          __m256* out = (__m256*)tile + r * columns + v;
          *out = _mm256_fmadd_ps(number[v], _mm256_mul_ps(of_w, scale[v]), *out);
        }
      }
    }
}

#define TILE(NAME, HEIGHT, COLUMNS, FORM)                                                                         \
  static int64_t NAME(const Product* p, int64_t token, const uint32_t* w, int64_t row, float* tile) {             \
    fill_tile(p, token, w, row, tile, HEIGHT, COLUMNS, FORM);                                                     \
    return HEIGHT;                                                                                                \
  }
TILE(int8_6_2, TILE_ROWS, 2, INT8)
TILE(int8_1_2, 1, 2, INT8)
TILE(int8_6_1, TILE_ROWS, 1, INT8)
TILE(int8_1_1, 1, 1, INT8)
TILE(int4_6_2, TILE_ROWS, 2, INT4)
TILE(int4_1_2, 1, 2, INT4)
TILE(int4_6_1, TILE_ROWS, 1, INT4)
TILE(int4_1_1, 1, 1, INT4)

// A tile of as many rows of w as one has, or of one: how many they were.
INLINE int64_t make_tile(const Product* p, int64_t token, int64_t width, const uint8_t* unpacked, int64_t row,
                         int64_t rows, float* tile) {
  typedef int64_t Fill(const Product* p, int64_t token, const uint32_t* w, int64_t row, float* tile);
  static Fill* const fills[2][2][2] = {{{int8_1_1, int8_1_2}, {int8_6_1, int8_6_2}},
                                       {{int4_1_1, int4_1_2}, {int4_6_1, int4_6_2}}};
  return fills[p->w.form == INT4][rows >= TILE_ROWS][width == WIDE](p, token, (const uint32_t*)unpacked, row, tile);
}

// The numbers of rows [row, end) of w: in 16 bits, or in bytes without sign.
static void unpack_rows(const Product* p, int64_t row, int64_t end, uint8_t* out) {
  const Weight* w = &p->w;
  const char* at = place(w, w->form, row, 0);
  int64_t numbers = (end - row) * w->depth;
  for (int64_t k = 0; k < numbers; k += BLOCK) {
    __builtin_prefetch(at + bytes(w->form, k) + 4096, 0, 3);
    __m128i some = _mm_loadu_si128((const __m128i*)(at + bytes(w->form, k))), low = _mm_set1_epi8(15);
    if (w->form == INT8) {
      __m128i others = _mm_loadu_si128((const __m128i*)(at + k + 16));
      _mm256_storeu_si256((__m256i*)(out + 2 * k), _mm256_cvtepi8_epi16(some));
      _mm256_storeu_si256((__m256i*)(out + 2 * k + 32), _mm256_cvtepi8_epi16(others));
    } else {
      _mm_storeu_si128((__m128i*)(out + k), _mm_and_si128(some, low));
      _mm_storeu_si128((__m128i*)(out + k + 16), _mm_and_si128(_mm_srli_epi16(some, 4), low));
    }
  }
}
