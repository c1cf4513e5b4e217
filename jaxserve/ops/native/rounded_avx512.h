// The parts of matmul_rounded.c that differ between instruction sets, with AVX512_BF16 and VNNI.
//
// A step is two or four numbers of K, which lie side by side in w: one word of each row of w is broadcast. Products of 8
// bits are of w without its sign: 128 is added to INT8, and the sum of x times what was added is what the integers start
// from.
#pragma once
#include "rounded_product.h"

#include <string.h>

enum {
  WIDE = 32,            // tokens in the widest panel
  TILE_ROWS = 12,       // rows of w in a tile of pairs
  BYTE_ROWS = 6,        // and of bytes, which have sums in integers and in float32
  LINE = 16,            // words in a cache line
};

// Tokens of a panel for the `left` last tokens, and words in a row of x. A group of integers has a scale of its own.
INLINE int64_t panel_width(int64_t left) {
  return left > 16 ? WIDE : left > 8 ? 16 : 8;
}
INLINE int64_t words_of(const Weight* w) { return w->depth / (w->form == BFLOAT16 ? 2 : 4); }
INLINE int64_t summed_together(const Weight* w) { return group_of(w); }

static void pack_pairs(const Product* p, int64_t token, int64_t live, int64_t width) {
  uint32_t* panel = p->packed + token * p->words;
  for (int64_t t = 0; t < width; t++)
    for (int64_t word = 0; word < p->words; word += 8) {
      uint32_t pairs[8] = {0};
      int64_t count = min(8, p->words - word);
      if (t < live) {
        __m256bh halves = _mm512_cvtneps_pbh(numbers_at(p->x + (token + t) * p->w.depth + 2 * word, 2 * count));
        memcpy(pairs, &halves, sizeof pairs);
      }
      for (int64_t i = 0; i < count; i++) panel[(word + i) * width + t] = pairs[i];
    }
}

static void pack_bytes(const Product* p, int64_t token, int64_t live, int64_t width) {
  uint32_t* panel = p->packed + token * p->words;
  float* scales = p->scales + token * p->groups;
  int32_t* sums = p->sums + token * p->groups;
  for (int64_t index = 0; index < p->groups; index++)
    for (int64_t t = 0; t < width; t++) {
      uint32_t words[ROUNDED_GROUP / 4];
      const float* x = p->x + (token + min(t, live - 1)) * p->w.depth + index * p->group;
      round_group(x, p->group, (int8_t*)words, scales + index * width + t, sums + index * width + t);
      for (int64_t i = 0; i < p->group / 4; i++) panel[(index * p->group / 4 + i) * width + t] = words[i];
    }
}

static void pack_panel(const Product* p, int64_t token, int64_t live, int64_t width) {
  if (p->w.form == BFLOAT16) pack_pairs(p, token, live, width);
  else pack_bytes(p, token, live, width);
}

// Names for vectors of 16 and of 8 words.
#define FLOATS_16 __m512
#define WORDS_16 __m512i
#define FLOATS_8 __m256
#define WORDS_8 __m256i
#define ALL_16(name) _mm512_##name
#define ALL_8(name) _mm256_##name
#define PAIRS_16(sum, x, w) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(w))
#define PAIRS_8(sum, x, w) _mm256_dpbf16_ps(sum, (__m256bh)(x), (__m256bh)(w))
#define LOAD_16(at) _mm512_loadu_si512(at)
#define LOAD_8(at) _mm256_loadu_si256((const __m256i*)(at))

// tile [HEIGHT, COLUMNS of LANES_ tokens] of y^T, from row `row` of w on.
#define PAIR_TILE(HEIGHT, COLUMNS, LANES_)                                                                       \
  static void pairs_##HEIGHT##_##COLUMNS##_##LANES_(const Product* p, const uint32_t* panel, int64_t row,        \
                                                    float* tile) {                                               \
    FLOATS_##LANES_ sum[HEIGHT][COLUMNS];                                                                        \
    const int64_t words = p->words;                                                                              \
    const uint32_t *w = (const uint32_t*)p->w.values + row * words, *quad[(HEIGHT + 3) / 4];                     \
    UNROLL for (int r = 0; r < HEIGHT; r += 4) {                                                                 \
      quad[r / 4] = w + r * words;                                                                               \
      __asm__("" : "+r"(quad[r / 4]));                                                                           \
    }                                                                                                            \
    UNROLL for (int r = 0; r < HEIGHT; r++)                                                                      \
      UNROLL for (int v = 0; v < COLUMNS; v++) sum[r][v] = ALL_##LANES_(setzero_ps)();                           \
    for (int64_t k = 0; k < words; k++) {                                                                        \
      WORDS_##LANES_ x[COLUMNS];                                                                                 \
      if (k % LINE == 0)                                                                                         \
        UNROLL for (int r = 0; r < HEIGHT; r++) {                                                                \
          if (COLUMNS == 1) __builtin_prefetch(w + HEIGHT * (words + k) + r * LINE, 0, 2);                       \
          else __builtin_prefetch(w + (HEIGHT + r) * words + k, 0, 2);                                           \
        }                                                                                                        \
      UNROLL for (int v = 0; v < COLUMNS; v++) x[v] = LOAD_##LANES_(panel + (k * COLUMNS + v) * LANES_);         \
      UNROLL for (int r = 0; r < HEIGHT; r++) {                                                                  \
        WORDS_##LANES_ weight = ALL_##LANES_(set1_epi32)((int32_t)quad[r / 4][r % 4 * words + k]);               \
        IN_REGISTER(weight);                                                                                     \
        UNROLL for (int v = 0; v < COLUMNS; v++) {                                                               \
          sum[r][v] = PAIRS_##LANES_(sum[r][v], x[v], weight);                                                   \
          IN_REGISTER(sum[r][v]);                                                                                \
        }                                                                                                        \
      }                                                                                                          \
    }                                                                                                            \
    memcpy(tile, sum, sizeof sum);                                                                               \
  }

// The same of bytes `w` without sign, rows `apart`. `added`: what they are larger by, if w has no zeros.
#define BYTE_TILE(HEIGHT, COLUMNS, LANES_)                                                                       \
  static void bytes_##HEIGHT##_##COLUMNS##_##LANES_(const Product* p, int64_t token, const uint8_t* w,           \
                                                    int64_t row, int32_t added, float* tile) {                   \
    const int64_t width = COLUMNS * LANES_, steps = p->group / 4, apart = p->words;                              \
    const uint32_t* panel = p->packed + token * p->words;                                                        \
    const float* scales = p->scales + token * p->groups;                                                         \
    const int32_t* sums = p->sums + token * p->groups;                                                           \
    FLOATS_##LANES_ sum[HEIGHT][COLUMNS];                                                                        \
    UNROLL for (int r = 0; r < HEIGHT; r++)                                                                      \
      UNROLL for (int v = 0; v < COLUMNS; v++) sum[r][v] = ALL_##LANES_(setzero_ps)();                           \
    for (int64_t index = 0; index < p->groups; index++) {                                                        \
      WORDS_##LANES_ whole[HEIGHT][COLUMNS];                                                                     \
      UNROLL for (int v = 0; v < COLUMNS; v++) {                                                                 \
        WORDS_##LANES_ start = ALL_##LANES_(mullo_epi32)(LOAD_##LANES_(sums + index * width + v * LANES_),       \
                                                         ALL_##LANES_(set1_epi32)(-added));                      \
        UNROLL for (int r = 0; r < HEIGHT; r++) whole[r][v] = start;                                             \
      }                                                                                                          \
      const uint32_t *words = (const uint32_t*)w + index * steps, *quad[(HEIGHT + 3) / 4];                       \
      UNROLL for (int r = 0; r < HEIGHT; r += 4) {                                                               \
        quad[r / 4] = words + r * apart;                                                                         \
        __asm__("" : "+r"(quad[r / 4]));                                                                         \
      }                                                                                                          \
      for (int64_t k = 0; k < steps; k++) {                                                                      \
        WORDS_##LANES_ x[COLUMNS];                                                                               \
        UNROLL for (int v = 0; v < COLUMNS; v++)                                                                 \
          x[v] = LOAD_##LANES_(panel + ((index * steps + k) * COLUMNS + v) * LANES_);                            \
        UNROLL for (int r = 0; r < HEIGHT; r++) {                                                                \
          WORDS_##LANES_ weight = ALL_##LANES_(set1_epi32)((int32_t)quad[r / 4][r % 4 * apart + k]);             \
          IN_REGISTER(weight);                                                                                   \
          UNROLL for (int v = 0; v < COLUMNS; v++) {                                                             \
            whole[r][v] = ALL_##LANES_(dpbusd_epi32)(whole[r][v], weight, x[v]);                                 \
            IN_REGISTER(whole[r][v]);                                                                            \
          }                                                                                                      \
        }                                                                                                        \
      }                                                                                                          \
      int64_t place = index * p->group / p->w.group;                                                             \
      UNROLL for (int v = 0; v < COLUMNS; v++) {                                                                 \
        FLOATS_##LANES_ scale = ALL_##LANES_(loadu_ps)(scales + index * width + v * LANES_);                     \
        FLOATS_##LANES_ total = ALL_##LANES_(cvtepi32_ps)(LOAD_##LANES_(sums + index * width + v * LANES_));     \
        UNROLL for (int r = 0; r < HEIGHT; r++) {                                                                \
          int64_t at = (row + r) * p->w.groups + place;                                                          \
          FLOATS_##LANES_ number = ALL_##LANES_(cvtepi32_ps)(whole[r][v]);                                       \
          if (p->w.zeros) number = ALL_##LANES_(fnmadd_ps)(ALL_##LANES_(set1_ps)(p->w.zeros[at]), total, number);\
          FLOATS_##LANES_ both = ALL_##LANES_(mul_ps)(ALL_##LANES_(set1_ps)(p->w.scales[at]), scale);            \
          sum[r][v] = ALL_##LANES_(fmadd_ps)(number, both, sum[r][v]);                                           \
        }                                                                                                        \
      }                                                                                                          \
    }                                                                                                            \
    memcpy(tile, sum, sizeof sum);                                                                               \
  }

PAIR_TILE(12, 2, 16)
PAIR_TILE(4, 2, 16)
PAIR_TILE(1, 2, 16)
PAIR_TILE(12, 1, 16)
PAIR_TILE(4, 1, 16)
PAIR_TILE(1, 1, 16)
PAIR_TILE(12, 1, 8)
PAIR_TILE(4, 1, 8)
PAIR_TILE(1, 1, 8)
BYTE_TILE(6, 2, 16)
BYTE_TILE(1, 2, 16)
BYTE_TILE(6, 1, 16)
BYTE_TILE(1, 1, 16)
BYTE_TILE(6, 1, 8)
BYTE_TILE(1, 1, 8)

// A tile of as many rows of w as one has, or fewer: how many they were.
INLINE int64_t make_pairs(const Product* p, int64_t token, int64_t width, int64_t row, int64_t rows, float* tile) {
  const uint32_t* panel = p->packed + token * p->words;
#define MAKE(COLUMNS, LANES_)                                                              \
  if (rows >= 12) return pairs_12_##COLUMNS##_##LANES_(p, panel, row, tile), 12;           \
  if (rows >= 4) return pairs_4_##COLUMNS##_##LANES_(p, panel, row, tile), 4;              \
  return pairs_1_##COLUMNS##_##LANES_(p, panel, row, tile), 1;
  if (width == WIDE) { MAKE(2, 16) } else if (width == 16) { MAKE(1, 16) } else { MAKE(1, 8) }
}
#undef MAKE

INLINE int64_t make_bytes(const Product* p, int64_t token, int64_t width, const uint8_t* w, int64_t row, int64_t rows,
                          int32_t added, float* tile) {
#define MAKE(COLUMNS, LANES_)                                                                  \
  if (rows >= BYTE_ROWS) return bytes_6_##COLUMNS##_##LANES_(p, token, w, row, added, tile), 6; \
  return bytes_1_##COLUMNS##_##LANES_(p, token, w, row, added, tile), 1;
  if (width == WIDE) { MAKE(2, 16) } else if (width == 16) { MAKE(1, 16) } else { MAKE(1, 8) }
#undef MAKE
}

INLINE int64_t make_tile(const Product* p, int64_t token, int64_t width, const uint8_t* unpacked, int64_t row,
                         int64_t rows, float* tile) {
  int32_t added = p->w.form == INT8 ? 128 : p->w.zeros ? 0 : 8;
  if (unpacked == NULL) return make_pairs(p, token, width, row, rows, tile);
  return make_bytes(p, token, width, unpacked, row, rows, added, tile);
}

// The bytes of rows [row, end) of w without sign.
static void unpack_rows(const Product* p, int64_t row, int64_t end, uint8_t* out) {
  const Weight* w = &p->w;
  const char* at = place(w, w->form, row, 0);
  int64_t numbers = (end - row) * w->depth;
  for (int64_t k = 0; k < numbers; k += BLOCK) {
    __builtin_prefetch(at + bytes(w->form, k) + 4096, 0, 3);
    if (w->form == INT8) {
      __m256i bytes = _mm256_loadu_si256((const __m256i*)(at + k)), sign = _mm256_set1_epi8((char)128);
      _mm256_storeu_si256((__m256i*)(out + k), _mm256_xor_si256(bytes, sign));
    } else {
      __m128i bytes = _mm_loadu_si128((const __m128i*)(at + k / 2)), low = _mm_set1_epi8(15);
      _mm_storeu_si128((__m128i*)(out + k), _mm_and_si128(bytes, low));
      _mm_storeu_si128((__m128i*)(out + k + 16), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    }
  }
}
