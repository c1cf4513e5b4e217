// How x is rounded to 8 bits, for the products of rounded x.
#pragma once
#include "weights.h"

#include <math.h>

enum { ROUNDED_GROUP = 128 };  // numbers of a row of x that share a scale, at most

// The numbers of x that share a scale: a divisor of w's group.
INLINE int64_t group_of(const Weight* w) {
  int64_t group = ROUNDED_GROUP;
  while (w->group % group != 0) group -= BLOCK;
  return group;
}

#if defined(__AVX512F__)
// 16 numbers of x, or as many as there are, zeros behind them.
INLINE __m512 numbers_at(const float* x, int64_t count) {
  return _mm512_maskz_loadu_ps((__mmask16)(count >= 16 ? 0xffff : (1 << count) - 1), x);
}

// Rounds a group of x to bytes `out`. Its sum is that of the bytes. The scale is NaN if x has a number that is none.
INLINE void round_group(const float* x, int64_t group, int8_t* out, float* scale, int32_t* sum) {
  __m512 most = _mm512_setzero_ps();
  __mmask16 sound = 0xffff;
  for (int64_t k = 0; k < group; k += 16) {
    __m512 some = _mm512_abs_ps(_mm512_loadu_ps(x + k));
    most = _mm512_max_ps(most, some);
    sound &= _mm512_cmp_ps_mask(some, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
  }
  float largest = _mm512_reduce_max_ps(most);
  __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? 127 / largest : 0);
  __m512i total = _mm512_setzero_si512();
  for (int64_t k = 0; k < group; k += 16) {
    __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), inverse));
    total = _mm512_add_epi32(total, whole);
    _mm_storeu_si128((__m128i*)(out + k), _mm512_cvtsepi32_epi8(whole));
  }
  *sum = _mm512_reduce_add_epi32(total);
  *scale = sound == 0xffff ? largest / 127 : NAN;
}
#endif
