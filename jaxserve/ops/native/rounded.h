// How x is rounded to 8 bits, for the products of rounded x.
#pragma once
#include "weights.h"

#include <math.h>

// What the processor can round for: 1: weights in INT8 and INT4; 2: in bfloat16 too.
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define ROUNDS 2
#elif (defined(__AVX2__) && defined(__FMA__)) || (defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD))
#define ROUNDS 1
#else
#define ROUNDS 0
#endif

enum { ROUNDED_GROUP = 128 };  // numbers of a row of x that share a scale, at most

// The numbers of x that share a scale: a divisor of w's group.
INLINE int64_t group_of(const Weight* w) {
  int64_t group = ROUNDED_GROUP;
  while (w->group % group != 0) group -= BLOCK;
  return group;
}

#if ROUNDS == 2
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
#elif ROUNDS == 1 && defined(__aarch64__)
// Rounds a group of x to bytes `out`. Its sum is that of the bytes. The scale is NaN if x has a number that is none.
INLINE void round_group(const float* x, int64_t group, int8_t* out, float* scale, int32_t* sum) {
  float32x4_t most = vdupq_n_f32(0);
  uint32x4_t sound = vdupq_n_u32(UINT32_MAX);
  for (int64_t k = 0; k < group; k += 4) {
    float32x4_t some = vabsq_f32(vld1q_f32(x + k));
    most = vmaxq_f32(most, some);
    sound = vandq_u32(sound, vcltq_f32(some, vdupq_n_f32(INFINITY)));
  }
  const float largest = vmaxvq_f32(most), inverse = largest > 1e-30f ? 127 / largest : 0;
  int32x4_t total = vdupq_n_s32(0);
  for (int64_t k = 0; k < group; k += 8) {
    int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k), inverse));
    int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k + 4), inverse));
    total = vaddq_s32(total, vaddq_s32(low, high));
    vst1_s8(out + k, vqmovn_s16(vcombine_s16(vqmovn_s32(low), vqmovn_s32(high))));
  }
  *sum = vaddvq_s32(total);
  *scale = vminvq_u32(sound) == UINT32_MAX ? largest / 127 : NAN;
}

// A BLOCK of w from `at` on, less 8 for INT4 without zeros.
INLINE void block_of(const Weight* w, Form form, const char* at, int8x16_t* out) {
  const int8x16_t some = vld1q_s8((const int8_t*)at), less = vdupq_n_s8(w->zeros ? 0 : 8);
  if (form == INT8) {
    out[0] = some;
    out[1] = vld1q_s8((const int8_t*)at + 16);
  } else {
    out[0] = vsubq_s8(vandq_s8(some, vdupq_n_s8(15)), less);
    out[1] = vsubq_s8(vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(some), 4)), less);
  }
}
#elif ROUNDS == 1
XLA_FFI_Error* jaxserve_matmul_rounded(XLA_FFI_CallFrame* frame);

// Rounds a group of x to bytes `out`. The scale is NaN if x has a number that is none.
INLINE void round_group(const float* x, int64_t group, int8_t* out, float* scale) {
  const __m256 sign = _mm256_set1_ps(-0.0f), infinite = _mm256_set1_ps(INFINITY);
  __m256 most = _mm256_setzero_ps(), sound = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  for (int64_t k = 0; k < group; k += 8) {
    __m256 some = _mm256_andnot_ps(sign, _mm256_loadu_ps(x + k));
    most = _mm256_max_ps(most, some);
    sound = _mm256_and_ps(sound, _mm256_cmp_ps(some, infinite, _CMP_LT_OQ));
  }
  float numbers[8], largest = 0;
  _mm256_storeu_ps(numbers, most);
  for (int i = 0; i < 8; i++) largest = numbers[i] > largest ? numbers[i] : largest;
  __m256 inverse = _mm256_set1_ps(largest > 1e-30f ? 127 / largest : 0);
  for (int64_t k = 0; k < group; k += 8) {
    __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k), inverse));
    __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)(out + k), _mm_packs_epi16(narrow, narrow));
  }
  *scale = _mm256_movemask_ps(sound) == 0xff ? largest / 127 : NAN;
}

// The sum of a BLOCK of bytes.
INLINE int32_t sum_of(const int8_t* bytes) {
  int32_t sum = 0;
  for (int i = 0; i < BLOCK; i++) sum += bytes[i];
  return sum;
}

// Adds the products of pairs: of bytes to 16 sums for INT4, and of 16 bits to 8 otherwise. In assembly, because
// compilers copy each sum once more.
INLINE void add_products(Form form, __m256i* sum, __m256i w, __m256i x) {
  __m256i products = form == INT4 ? _mm256_maddubs_epi16(w, x) : _mm256_madd_epi16(w, x);
  if (form == INT4) __asm__("vpaddw %1, %0, %0" : "+x"(*sum) : "x"(products));
  else __asm__("vpaddd %1, %0, %0" : "+x"(*sum) : "x"(products));
}
#endif
