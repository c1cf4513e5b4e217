// The forms in which a weight [N, K] lies in memory, row-major, and how its numbers become float32.
//
// In INT8, INT4 and FP8 (E4M3) a number is (value - zero) * scale, both float32 [N, K / group] and the same for `group`
// numbers of a row; the group is a multiple of BLOCK. INT8_16 is INT8 with groups of 16: a BLOCK has two scales and two
// zeros. Without zeros they are 0, and 8 in INT4. INT4 has 16 bytes a BLOCK: the low halves are its first 16 numbers.
// E4M3 has 4 bits of exponent, biased by 7, and 3 of mantissa; NaN is not expected.
// MXFP4 is packed as INT4; its values are E2M1, 2 bits of exponent biased by 1, and its scales bytes, 2^(byte - 127).
// MXFP8 is FP8 with such scales. NVFP4 is MXFP4 with scales of E4M3 for groups of 16, and a BLOCK of it has two times 8
// bytes: the low halves of 8 bytes are the first 8 numbers of a group.
#pragma once
#include "call.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>  // compilers turn generic conversions of bytes into scalar code there
#elif defined(__aarch64__)
#include <arm_neon.h>  // and there
#endif

typedef enum { FLOAT32, BFLOAT16, INT8, INT4, FP8, MXFP4, INT8_16, MXFP8, NVFP4, FORMS } Form;

// The processor's widest vector. A BLOCK of numbers becomes float32 at a time.
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { BLOCK = 32, VECTORS = BLOCK / LANES };
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// Empty assembly, for what the compiler would do otherwise: read a broadcast from memory once for each of two vectors;
// and in some loops, not in others, take a sum's multiplication and addition apart, which rounds twice.
// IN_VECTOR is for a broadcast; AArch64 multiplies by one number of a register, and needs none.
#if defined(__x86_64__)
#define IN_REGISTER(value) __asm__("" : "+v"(value))
#define IN_VECTOR(value) IN_REGISTER(value)
#else
#define IN_REGISTER(value) __asm__("" : "+w"(value))
#define IN_VECTOR(value)
#endif

typedef struct {
  const char* values;
  const float *scales, *zeros;
  const uint8_t* powers;  // scales of a byte
  int64_t rows, depth, group, groups;  // numbers of a group, groups of a row
  int64_t per_row;                     // scales of a row
  Form form;
} Weight;

INLINE Form form_of(const XLA_FFI_Buffer* values) {
  switch (values->dtype) {
    case XLA_FFI_DataType_BF16: return BFLOAT16;
    case XLA_FFI_DataType_S8: return INT8;
    case XLA_FFI_DataType_U8: return INT4;
    case XLA_FFI_DataType_F8E4M3FN: return FP8;
    default: return FLOAT32;
  }
}

// The arguments behind x [T, K]: values, and for forms that have them scales and zeros. `behind`: arguments after those.
INLINE Weight weight(XLA_FFI_CallFrame* frame, int64_t behind) {
  XLA_FFI_Buffer* values = argument(frame, 1);
  int64_t last = frame->args.size - behind;
  int64_t depth = argument(frame, 0)->dims[1];
  Weight w = {.values = values->data, .rows = values->dims[0], .depth = depth, .group = depth, .groups = 1};
  w.form = form_of(values);
  if (last > 2) {
    XLA_FFI_Buffer* scales = argument(frame, 2);
    if (scales->dtype == XLA_FFI_DataType_U8) w.form = w.form == INT4 ? MXFP4 : MXFP8;
    if (scales->dtype == XLA_FFI_DataType_F8E4M3FN) w.form = NVFP4;
    if (scales->dtype == XLA_FFI_DataType_F32) w.scales = scales->data;
    else w.powers = scales->data;
    if (last > 3) w.zeros = argument(frame, 3)->data;
    w.groups = w.per_row = scales->dims[1];
    w.group = depth / w.groups;
    if (w.group == BLOCK / 2) {
      w.form = w.form == INT8 ? INT8_16 : w.form;
      w.group = BLOCK;
      w.groups = w.per_row / 2;
    }
  }
  return w;
}

// y [T, N] = x [T, K] times w [N, K] transposed. `multiply_all` takes any number of tokens and needs scratch for
// scratch_for(w, tokens) numbers; `multiply_few` takes at most FEW.
enum { FEW = 8 };
int64_t scratch_for(const Weight* w, int64_t tokens);
void multiply_all(XLA_FFI_CallFrame* frame, Weight w, const float* x, float* y, int64_t tokens, float* packed);
void multiply_few(XLA_FFI_CallFrame* frame, Weight w, const float* x, float* y, int64_t tokens);

// The bytes of `count` numbers.
INLINE int64_t bytes(Form form, int64_t count) {
  const bool halved = form == INT4 || form == MXFP4 || form == NVFP4;
  return form == FLOAT32 ? 4 * count : form == BFLOAT16 ? 2 * count : halved ? count / 2 : count;
}

// Where the number at place k of row `row` lies.
INLINE const char* place(const Weight* w, Form form, int64_t row, int64_t k) {
  return w->values + bytes(form, row * w->depth + k);
}

// LANES numbers of 16 bits, of 8 bits, of 8 bits with a sign, and of E4M3 divided by 256: with the bits of a half, whose
// exponent is biased by 8 more. For AArch64: vector `v` of those from `at` on, cut from the 16 bytes that it lies in.
#if defined(__aarch64__)
INLINE integers widened(int8x16_t all, int v) {
  int16x8_t wide = v % 4 < 2 ? vmovl_s8(vget_low_s8(all)) : vmovl_high_s8(all);
  return (integers)(v % 2 == 0 ? vmovl_s16(vget_low_s16(wide)) : vmovl_high_s16(wide));
}
INLINE int8x16_t bytes_around(const char* at, int v) { return vld1q_s8((const int8_t*)at + v / 4 * 16); }
INLINE vector bfloat16_at(const char* at, int v) {
  uint16x8_t all = vld1q_u16((const uint16_t*)at + v / 2 * 8);
  return (vector)(v % 2 == 0 ? vshll_n_u16(vget_low_u16(all), 16) : vshll_high_n_u16(all, 16));
}
INLINE integers signed_at(const char* at, int v) { return widened(bytes_around(at, v), v); }
INLINE vector e4m3_at(const char* at, int v) {
  int8x16_t all = bytes_around(at, v);
  int16x8_t moved = v % 4 < 2 ? vshll_n_s8(vget_low_s8(all), 7) : vshll_high_n_s8(all, 7);
  float16x8_t halves = vreinterpretq_f16_s16(vandq_s16(moved, vdupq_n_s16((int16_t)0xbf80)));
  return (vector)(v % 2 == 0 ? vcvt_f32_f16(vget_low_f16(halves)) : vcvt_high_f32_f16(halves));
}
#elif defined(__AVX512F__)
INLINE words from_halfwords(const char* at) {
  return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
}
INLINE words from_bytes(const char* at) { return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
INLINE integers from_signed(const char* at) {
  return (integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at));
}
INLINE vector from_e4m3(const char* at) {
  __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at));
  __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(bits, 7), _mm256_set1_epi16(0x3f80));
  __m256i sign = _mm256_and_si256(_mm256_slli_epi16(bits, 8), _mm256_set1_epi16((int16_t)0x8000));
  return (vector)_mm512_cvtph_ps(_mm256_or_si256(magnitude, sign));
}
#elif defined(__AVX2__) && defined(__F16C__)
INLINE words from_halfwords(const char* at) {
  return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
}
INLINE words from_bytes(const char* at) { return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)); }
INLINE integers from_signed(const char* at) {
  return (integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at));
}
INLINE vector from_e4m3(const char* at) {
  __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)at));
  __m128i magnitude = _mm_and_si128(_mm_slli_epi16(bits, 7), _mm_set1_epi16(0x3f80));
  __m128i sign = _mm_and_si128(_mm_slli_epi16(bits, 8), _mm_set1_epi16((int16_t)0x8000));
  return (vector)_mm256_cvtph_ps(_mm_or_si128(magnitude, sign));
}
#else
#define FROM(NAME, VECTOR, TYPE)                                               \
  INLINE VECTOR NAME(const char* at) {                                         \
    VECTOR all;                                                                \
    UNROLL for (int i = 0; i < LANES; i++) all[i] = ((const TYPE*)at)[i];      \
    return all;                                                                \
  }
FROM(from_halfwords, words, uint16_t)
FROM(from_bytes, words, uint8_t)
FROM(from_signed, integers, int8_t)
// Exponent 0 is read as if its numbers had the leading 1 of exponent 1, 2^-14, which is subtracted again.
INLINE vector from_e4m3(const char* at) {
  words bits = from_bytes(at), magnitude = bits & 0x7f, small = (words)(magnitude < 8);
  vector wide = (vector)((magnitude << 20) + (((112 << 23) & ~small) | ((113 << 23) & small)));
  wide -= (vector)((words)((vector){0} + 0x1p-14f) & small);
  return (vector)((words)wide | (bits & 0x80) << 24);
}
#endif
#if !defined(__aarch64__)
INLINE vector bfloat16_at(const char* at, int v) { return (vector)(from_halfwords(at + v * LANES * 2) << 16); }
INLINE integers signed_at(const char* at, int v) { return from_signed(at + v * LANES); }
INLINE vector e4m3_at(const char* at, int v) { return from_e4m3(at + v * LANES); }
#endif

// What the numbers of one group share. For 4 bits `table` has the 16 numbers, where one vector holds them. The last 16
// numbers of a BLOCK of INT8_16 and NVFP4 share what is called second.
typedef struct {
  float scale, zero, second_scale, second_zero;
#if defined(__AVX512F__)
  vector table, second_table;
#endif
} Group;

INLINE bool has_groups(Form form) { return form != FLOAT32 && form != BFLOAT16; }

// 2^(exponent - 127). 0 is a number below the normal ones.
INLINE float power(uint8_t exponent) {
  union { uint32_t bits; float number; } wide = {exponent > 0 ? (uint32_t)exponent << 23 : 1 << 22};
  return wide.number;
}

// The numbers of E4M3 without a sign. Reading one takes less time than making it: NVFP4 has a scale for 8 bytes.
#define OCTAVE(unit) 8 * unit, 9 * unit, 10 * unit, 11 * unit, 12 * unit, 13 * unit, 14 * unit, 15 * unit
static const float E4M3[128] = {
    0,              0x1p-9f,        2 * 0x1p-9f,    3 * 0x1p-9f,    4 * 0x1p-9f,    5 * 0x1p-9f,    6 * 0x1p-9f,
    7 * 0x1p-9f,    OCTAVE(0x1p-9f), OCTAVE(0x1p-8f), OCTAVE(0x1p-7f), OCTAVE(0x1p-6f), OCTAVE(0x1p-5f), OCTAVE(0x1p-4f),
    OCTAVE(0x1p-3f), OCTAVE(0x1p-2f), OCTAVE(0x1p-1f), OCTAVE(1.0f),   OCTAVE(2.0f),   OCTAVE(4.0f),   OCTAVE(8.0f),
    OCTAVE(16.0f),  OCTAVE(32.0f)};

// Vector `v` of a BLOCK of 4 bits from `at` on, as numbers from 0 to 15 and as those of E2M1.
#if defined(__aarch64__)
INLINE int8x16_t halves_around(const char* at, int v) {
  uint8x16_t all = vld1q_u8((const uint8_t*)at);
  return vreinterpretq_s8_u8(v < 4 ? vandq_u8(all, vdupq_n_u8(15)) : vshrq_n_u8(all, 4));
}
INLINE integers int4_at(const char* at, int v) { return widened(halves_around(at, v), v); }
// Of NVFP4 two vectors of each 8 bytes' low halves come before two of their high halves.
INLINE vector e2m1_at(Form form, const char* at, int v) {
  const int8x16_t doubled = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const int half = form == NVFP4 ? v % 4 / 2 * 4 : v, lane = form == NVFP4 ? v / 4 * 2 + v % 2 : v;
  int8x16_t all = vqtbl1q_s8(doubled, vreinterpretq_u8_s8(halves_around(at, half)));
  return (vector)vcvtq_n_f32_s32((int32x4_t)widened(all, lane), 1);
}
#elif !defined(__AVX512F__)
INLINE integers int4_at(const char* at, int v) {
  return (integers)(from_bytes(at + v * LANES % 16) >> (v * LANES < 16 ? 0 : 4) & 15);
}
#if defined(__AVX2__) && defined(__F16C__)
// Twice the numbers. The scales of the group are half as large.
INLINE vector e2m1_at(Form form, const char* at, int v) {
  const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const int high = form == NVFP4 ? v % 2 : v / 2, second = form == NVFP4 ? v / 2 : v % 2;
  __m128i codes = _mm_loadu_si128((const __m128i*)at);
  if (high) codes = _mm_srli_epi16(codes, 4);
  __m128i bytes = _mm_shuffle_epi8(doubled, _mm_and_si128(codes, _mm_set1_epi8(15)));
  if (second) bytes = _mm_unpackhi_epi64(bytes, bytes);
  return __builtin_convertvector((integers)_mm256_cvtepi8_epi32(bytes), vector);
}
#else
INLINE words nvfp4_at(const char* at, int v) {
  const int place = v * LANES;  // of its first number
  return from_bytes(at + place / 16 * 8 + place % 8) >> (place % 16 < 8 ? 0 : 4) & 15;
}
// Numbers with exponent 0 are 0 and a half.
INLINE vector e2m1_at(Form form, const char* at, int v) {
  words codes = form == NVFP4 ? nvfp4_at(at, v) : (words)int4_at(at, v), magnitude = codes & 7, small = (words)(magnitude < 2);
  vector wide = (vector)(((magnitude << 22) + (126u << 23)) & ~small);
  vector half = __builtin_convertvector((integers)(magnitude & small), vector) * 0.5f;
  return (vector)((words)(wide + half) | (codes & 8) << 28);
}
#endif
#endif

// Group `index` of row `row`. zeros: whether w may have them, known when this is compiled. FP8 has none.
INLINE Group group_at(const Weight* w, Form form, bool zeros, int64_t row, int64_t index) {
  Group group = {0};
  if (!has_groups(form)) return group;
  if (form == INT8_16) {
    index = 2 * index + row * w->per_row;
    group.second_scale = w->scales[index + 1];
    group.second_zero = zeros && w->zeros ? w->zeros[index + 1] : 0;
  } else {
    index += row * w->groups;
  }
  if (form == MXFP4 || form == NVFP4) {
    group.scale = form == MXFP4 ? power(w->powers[index]) : E4M3[w->powers[2 * index] & 127];
    group.second_scale = form == MXFP4 ? 0 : E4M3[w->powers[2 * index + 1] & 127];
#if defined(__AVX512F__)
    const vector numbers = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
    group.table = numbers * group.scale;
    if (form == NVFP4) group.second_table = numbers * group.second_scale;
#elif defined(__AVX2__) && defined(__F16C__)
    group.scale *= 0.5f;
    group.second_scale *= 0.5f;
#endif
    return group;
  }
  if (form == MXFP8) {
    group.scale = power(w->powers[index]);
    return group;
  }
  group.scale = w->scales[index] * (form == FP8 ? 256 : 1);
  group.zero = zeros && w->zeros ? w->zeros[index] : form == INT4 ? 8 : 0;
#if defined(__AVX512F__)
  const vector steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  group.table = (steps - group.zero) * group.scale;
#endif
  return group;
}

// A BLOCK of numbers, from `at` on.
INLINE void widen(Form form, bool zeros, const char* at, const Group* group, vector* out) {
  UNROLL for (int v = 0; v < VECTORS; v++) {
    if (form == FLOAT32) {
      out[v] = ((const vector*)at)[v];
    } else if (form == BFLOAT16) {
      out[v] = bfloat16_at(at, v);
    } else if (form == FP8) {
      out[v] = e4m3_at(at, v) * group->scale;
    } else if (form == MXFP8) {
      out[v] = e4m3_at(at, v) * 256 * group->scale;  // 256 times the largest scale is infinite
    } else if (form == INT8_16) {
      const bool second = v * LANES >= BLOCK / 2;
      vector number = __builtin_convertvector(signed_at(at, v), vector);
      if (zeros) number -= second ? group->second_zero : group->zero;
      out[v] = number * (second ? group->second_scale : group->scale);
    } else if (form == INT8) {
      vector number = __builtin_convertvector(signed_at(at, v), vector);
      if (zeros) number -= group->zero;
      out[v] = number * group->scale;
    } else {
      const bool second = form == NVFP4 && v * LANES >= BLOCK / 2;
#if defined(__AVX512F__)
      if (form == NVFP4) {
        __m128i eight = _mm_loadl_epi64((const __m128i*)(at + v * 8));
        __m128i codes = _mm_unpacklo_epi64(eight, _mm_srli_epi16(eight, 4));
        __m512i bits = _mm512_cvtepu8_epi32(codes);  // the permutation takes the low four bits
        out[v] = (vector)_mm512_permutexvar_ps(bits, (__m512)(second ? group->second_table : group->table));
        continue;
      }
      words bits = from_bytes(at + v * LANES % 16) >> (v * LANES < 16 ? 0 : 4);
      out[v] = (vector)_mm512_permutexvar_ps((__m512i)bits, (__m512)group->table);
#else
      out[v] = form != INT4 ? e2m1_at(form, at, v) * (second ? group->second_scale : group->scale)
                            : (__builtin_convertvector(int4_at(at, v), vector) - group->zero) * group->scale;
#endif
    }
  }
}

// A number behind the last whole BLOCK of a row, which only these forms have.
INLINE float widen_one(Form form, const char* at) {
  if (form == FLOAT32) return *(const float*)at;
  union { uint32_t bits; float number; } wide = {(uint32_t)*(const uint16_t*)at << 16};
  return wide.number;
}
