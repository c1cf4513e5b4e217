// Transposes a few rows of numbers, which lie in memory anywhere.
#pragma once
#include "call.h"

#if defined(__AVX__)
#include <immintrin.h>

INLINE void transpose_8(const float* from, int64_t from_row, float* to, int64_t to_row) {
  __m256 a[8], b[8];
  UNROLL for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(from + i * from_row);
  UNROLL for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * to_row, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_row, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
#else
INLINE void transpose_8(const float* from, int64_t from_row, float* to, int64_t to_row) {
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) to[j * to_row + i] = from[i * from_row + j];
}
#endif

// to[j, i] = from[i, j] for `rows` rows of `columns` numbers, the rows `from_row` and `to_row` numbers apart.
INLINE void transpose(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to, int64_t to_row) {
  int64_t j = 0;
  for (; j + 8 <= columns; j += 8) {
    int64_t i = 0;
    for (; i + 8 <= rows; i += 8) transpose_8(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
    for (; i < rows; i++)
      for (int64_t c = j; c < j + 8; c++) to[c * to_row + i] = from[i * from_row + c];
  }
  for (; j < columns; j++)
    for (int64_t i = 0; i < rows; i++) to[j * to_row + i] = from[i * from_row + j];
}
