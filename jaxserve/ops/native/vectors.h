// Vectors of 16 float32 numbers, for attention: read from a cache in each of its forms, summed, exponentiated.
#pragma once
#include "call.h"

#if defined(__AVX2__)
#include <immintrin.h>  // compilers turn generic conversions of bytes into scalar code there
#endif

enum { LANES = 16 };

typedef float vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t halfwords __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));

// What a cache's numbers are. E4M3 has 4 bits of exponent, biased by 7, and 3 of mantissa; NaN is not expected in it.
typedef enum { FLOAT32, BFLOAT16, INT8, FP8 } Form;

INLINE Form form_of(const XLA_FFI_Buffer* cache) {
  switch (cache->dtype) {
    case XLA_FFI_DataType_BF16: return BFLOAT16;
    case XLA_FFI_DataType_S8: return INT8;
    case XLA_FFI_DataType_F8E4M3FN: return FP8;
    default: return FLOAT32;
  }
}

INLINE int64_t bytes_of(Form form) { return form == FLOAT32 ? 4 : form == BFLOAT16 ? 2 : 1; }

INLINE bool has_scales(Form form) { return form == INT8 || form == FP8; }

// 16 bytes, widened without and with their sign.
#if defined(__AVX512F__)
INLINE words from_bytes(const char* at) { return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
INLINE integers from_signed(const char* at) {
  return (integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
}
#elif defined(__AVX2__)
typedef union {
  __m256i half[2];
  words all;
} Halves;
INLINE words from_bytes(const char* at) {
  return (Halves){{_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)),
                   _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(at + 8)))}}
      .all;
}
INLINE integers from_signed(const char* at) {
  return (integers)(Halves){{_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)),
                             _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(at + 8)))}}
      .all;
}
#else
typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t signed_bytes __attribute__((vector_size(16), aligned(1), may_alias));
INLINE words from_bytes(const char* at) { return __builtin_convertvector(*(const bytes*)at, words); }
INLINE integers from_signed(const char* at) { return __builtin_convertvector(*(const signed_bytes*)at, integers); }
#endif

// Exponent 0 is read as if its numbers had the leading 1 of exponent 1, 2^-6, which is subtracted again.
INLINE vector from_e4m3(const char* at) {
  words bits = from_bytes(at), magnitude = bits & 0x7f, small = (words)(magnitude < 8);
  vector wide = (vector)((magnitude << 20) + (120 << 23) + ((1 << 23) & small));
  wide -= (vector)((words)((vector){0} + 0x1p-6f) & small);
  return (vector)((words)wide | (bits & 0x80) << 24);
}

// 16 numbers of the cache from place `index` on, 8-bit ones without their scale.
INLINE vector load(const char* cache, int64_t index, Form form) {
  const char* at = cache + index * bytes_of(form);
  if (form == FLOAT32) return *(const vector*)at;
  if (form == BFLOAT16) return (vector)(__builtin_convertvector(*(const halfwords*)at, words) << 16);
  return form == INT8 ? __builtin_convertvector(from_signed(at), vector) : from_e4m3(at);
}

INLINE void prefetch(const char* cache, int64_t index, Form form) {
  __builtin_prefetch(cache + index * bytes_of(form), 0, 3);
}

// The sum of each of 16 vectors, in their order: halves are added crosswise, 16 by 16 numbers in four steps.
#if defined(__clang__) || __GNUC__ >= 12
#define JOIN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JOIN(a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
#endif
INLINE vector sums_of(const vector* v) {
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
  return JOIN(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         JOIN(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

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
