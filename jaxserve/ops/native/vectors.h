// Vectors of float32 numbers, for attention: read from a cache in each of its forms, summed, exponentiated.
#pragma once
#include "call.h"

#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>  // compilers turn generic conversions of bytes into scalar code there
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Numbers of a vector, and vectors of which `sums_of` makes sums at a time, which are in registers. Vectors are as wide as
// registers: compilers split wider ones into code that keeps the parts in memory. For x86-64 without AVX2 nothing else
// was measured.
#if defined(__aarch64__)
enum { LANES = 4, SUMS = 16 };
#elif defined(__AVX2__) && !defined(__AVX512F__)
enum { LANES = 8, SUMS = 8 };
#else
enum { LANES = 16, SUMS = 16 };
#endif

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// What a cache's numbers are; unsigned integers hold bits. E4M3 has 4 bits of exponent, biased by 7, and 3 of mantissa;
// NaN is not expected in it.
typedef enum { FLOAT32, BFLOAT16, INT8, FP8 } Form;

INLINE Form form_of(const XLA_FFI_Buffer* cache) {
  switch (cache->dtype) {
    case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_U16: return BFLOAT16;
    case XLA_FFI_DataType_S8: return INT8;
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_U8: return FP8;
    default: return FLOAT32;
  }
}

INLINE int64_t bytes_of(Form form) { return form == FLOAT32 ? 4 : form == BFLOAT16 ? 2 : 1; }

INLINE bool has_scales(Form form) { return form == INT8 || form == FP8; }

// LANES numbers of 16 bits, and bytes, widened without and with their sign.
#if defined(__AVX512F__)
INLINE words from_halfwords(const char* at) {
  return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
}
INLINE words from_bytes(const char* at) { return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
INLINE integers from_signed(const char* at) {
  return (integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
}
#elif defined(__AVX2__)
INLINE words from_halfwords(const char* at) {
  return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
}
INLINE words from_bytes(const char* at) { return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)); }
INLINE integers from_signed(const char* at) {
  return (integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at));
}
#elif defined(__aarch64__)
INLINE words from_halfwords(const char* at) { return (words)vmovl_u16(vld1_u16((const uint16_t*)at)); }
INLINE integers from_signed(const char* at) {
  int32_t four;
  memcpy(&four, at, sizeof four);
  return (integers)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}
#else
typedef uint16_t halfwords __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
INLINE words from_halfwords(const char* at) { return __builtin_convertvector(*(const halfwords*)at, words); }
typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t signed_bytes __attribute__((vector_size(16), aligned(1), may_alias));
INLINE words from_bytes(const char* at) { return __builtin_convertvector(*(const bytes*)at, words); }
INLINE integers from_signed(const char* at) { return __builtin_convertvector(*(const signed_bytes*)at, integers); }
#endif

#if defined(__aarch64__)
// A number divided by 256 has the bits of a half, whose exponent is biased by 8 more.
INLINE vector from_e4m3(const char* at) {
  int32_t four;
  memcpy(&four, at, sizeof four);
  int16x8_t moved = vshll_n_s8(vreinterpret_s8_s32(vdup_n_s32(four)), 7);
  int16x4_t half = vand_s16(vget_low_s16(moved), vdup_n_s16((int16_t)0xbf80));
  return (vector)vcvt_f32_f16(vreinterpret_f16_s16(half)) * 256;
}
#else
// Exponent 0 is read as if its numbers had the leading 1 of exponent 1, 2^-6, which is subtracted again.
INLINE vector from_e4m3(const char* at) {
  words bits = from_bytes(at), magnitude = bits & 0x7f, small = (words)(magnitude < 8);
  vector wide = (vector)((magnitude << 20) + (120 << 23) + ((1 << 23) & small));
  wide -= (vector)((words)((vector){0} + 0x1p-6f) & small);
  return (vector)((words)wide | (bits & 0x80) << 24);
}
#endif

// LANES numbers of the cache from place `index` on, 8-bit ones without their scale.
INLINE vector load(const char* cache, int64_t index, Form form) {
  const char* at = cache + index * bytes_of(form);
  if (form == FLOAT32) return *(const vector*)at;
  if (form == BFLOAT16) return (vector)(from_halfwords(at) << 16);
  return form == INT8 ? __builtin_convertvector(from_signed(at), vector) : from_e4m3(at);
}

INLINE void prefetch(const char* cache, int64_t index, Form form) {
  __builtin_prefetch(cache + index * bytes_of(form), 0, 3);
}

// The sum of each of SUMS vectors, in their order.
#if defined(__aarch64__)
INLINE void sums_of(const vector* v, float* out) {
  UNROLL for (int i = 0; i < SUMS; i += 4) {
    float32x4_t low = vpaddq_f32((float32x4_t)v[i], (float32x4_t)v[i + 1]);
    float32x4_t high = vpaddq_f32((float32x4_t)v[i + 2], (float32x4_t)v[i + 3]);
    *(vector*)(out + i) = (vector)vpaddq_f32(low, high);
  }
}
#else
// Halves are added crosswise, 16 by 16 numbers in four steps, or 8 by 8 in three.
#if defined(__clang__) || __GNUC__ >= 12
#define JOIN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JOIN(a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
INLINE void sums_of(const vector* v, float* out) {
  vector a[4], b[2];
  UNROLL for (int i = 0; i < 4; i++)
    a[i] = JOIN(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + JOIN(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  UNROLL for (int i = 0; i < 2; i++)
    b[i] = JOIN(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + JOIN(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  *(vector*)out = JOIN(b[0], b[1], 0, 8, 2, 10, 4, 12, 6, 14) + JOIN(b[0], b[1], 1, 9, 3, 11, 5, 13, 7, 15);
}
#else
INLINE void sums_of(const vector* v, float* out) {
  vector a[8], b[4], c[2];
  UNROLL for (int i = 0; i < 8; i++)
    a[i] = JOIN(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           JOIN(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  UNROLL for (int i = 0; i < 4; i++)
    b[i] = JOIN(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           JOIN(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  UNROLL for (int i = 0; i < 2; i++)
    c[i] = JOIN(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           JOIN(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  *(vector*)out = JOIN(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                  JOIN(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
#endif
#endif

INLINE vector choose(integers mask, vector yes, vector no) {
  return (vector)(((integers)yes & mask) | ((integers)no & ~mask));
}
// The larger of each pair; b's if a's is NaN.
INLINE vector larger(vector a, vector b) { return choose(a > b, a, b); }

// e to the power of x <= 0 within two units in the last place; 0 below -87, NaN of NaN. The whole quotient by ln 2 goes
// into the exponent's bits, the rest into a polynomial: Cephes' expf.
INLINE vector exponential(vector x) {
  integers gone = x <= -87.0f;
  x = (vector)((integers)x & ~gone);
  integers quotient = __builtin_convertvector(x * 1.44269504f - 0.5f, integers);
  vector n = __builtin_convertvector(quotient, vector);
  vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  vector power = (vector)(((words)quotient + 127) << 23);
  return (vector)((integers)(p * power) & ~gone);
}
