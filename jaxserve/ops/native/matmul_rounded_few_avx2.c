// The products of matmul_rounded_few.c with AVX2, for INT8 and INT4. For up to MOST tokens w is read as in matmul_few.c;
// more are quicker by the tiles of matmul_rounded.c.
//
// A vector has numbers of one row of w side by side, which meet the same numbers of each token: of INT8 16 at a time,
// widened to 16 bits, and of INT4 a BLOCK of bytes without sign. Products of bytes are summed in 16 bits over a chunk of
// numbers with the same scales, at most 8 of 15 * 127. For w without zeros they start from -8 times x. Sums are in an
// order of their own, which is the same for 1 to MOST tokens.
#include "rounded.h"

#include <string.h>

#if ROUNDS == 1 && defined(__AVX2__)

enum {
  MOST = 4,       // tokens
  LINES = 2,      // rows of w that meet the tokens at a time, at most
  PIECES = 4,     // of all rows of w for each thread
  AHEAD = 16384,  // bytes: as in matmul_few.c
  CACHE_LINE = 64,
};

typedef struct {
  Weight w;
  char* x;            // [blocks of K, room, BLOCK], in 16 bits for INT8 and in 8 for INT4
  float* scales;      // of x [chunks, room]
  int16_t* starts;    // of the sums of INT4 [chunks, room, 16]
  float* totals;      // the sum of x in each group of w [tokens, w.groups]
  float* y;
  int64_t tokens, room, chunks;  // `room` rows of x; those behind `tokens` are zeros
} Product;

INLINE int64_t bytes_of_x(Form form) { return form == INT4 ? 1 : 2; }

// The blocks of a chunk, whose products are summed in integers.
INLINE int blocks_in_chunk(const Weight* w) { return w->group % ROUNDED_GROUP == 0 ? ROUNDED_GROUP / BLOCK : 1; }

// A BLOCK of w.
INLINE void unpack(Form form, const char* at, __m256i* out) {
  __m128i some = _mm_loadu_si128((const __m128i*)at);
  if (form == INT4) {
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(some), _mm_srli_epi16(some, 4), 1);
    out[0] = _mm256_and_si256(both, _mm256_set1_epi8(15));
  } else {
    out[0] = _mm256_cvtepi8_epi16(some);
    out[1] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(at + 16)));
  }
}

// Subtracts the products of token t with the zeros of row `row`.
INLINE __m256 without_zeros(const Product* p, int64_t row, int64_t t, __m256 sum) {
  const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int64_t index = 0; index < p->w.groups; index += 8) {
    __m256i live = _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)min(8, p->w.groups - index)), places);
    int64_t at = row * p->w.groups + index;
    __m256 zero = _mm256_mul_ps(_mm256_maskload_ps(p->w.scales + at, live), _mm256_maskload_ps(p->w.zeros + at, live));
    sum = _mm256_fnmadd_ps(zero, _mm256_maskload_ps(p->totals + t * p->w.groups + index, live), sum);
  }
  return sum;
}

INLINE float sum_of_8(__m256 sum) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// The products of `tokens` rows of x with `lines` rows of w, `apart` from one another. blocks: of a chunk.
INLINE void multiply_rows(const Product* p, int64_t row, int64_t last, int64_t apart, int tokens, int lines, Form form,
                          int blocks) {
  const int64_t step = bytes(form, BLOCK), vectors = bytes_of_x(form);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 sums[LINES][MOST];
  const char* at[LINES];
  const float* of_w[LINES];
  int64_t numbers[LINES];
  UNROLL for (int l = 0; l < lines; l++) {
    numbers[l] = min(row + l * apart, last - 1);
    at[l] = place(&p->w, form, numbers[l], 0);
    of_w[l] = p->w.scales + numbers[l] * p->w.groups;
    UNROLL for (int t = 0; t < tokens; t++) sums[l][t] = _mm256_setzero_ps();
  }
  const __m256i *x = (const __m256i*)p->x, *starts = (const __m256i*)p->starts;
  const float* scales = p->scales;
  const int64_t in_group = p->w.group / (blocks * BLOCK);
  for (int64_t chunk = 0, group = 0, left = in_group; chunk < p->chunks; chunk++) {
    __m256i w[LINES][ROUNDED_GROUP / BLOCK][2];
    __m256 scale[LINES];
    UNROLL for (int l = 0; l < lines; l++) {
      scale[l] = _mm256_set1_ps(of_w[l][group]);
      IN_REGISTER(scale[l]);
      if (tokens > 1)
        UNROLL for (int i = 0; i < blocks * step; i += CACHE_LINE)
          if (blocks > 1 || (uintptr_t)at[l] % CACHE_LINE < (uintptr_t)step) __builtin_prefetch(at[l] + AHEAD + i, 0, 2);
      UNROLL for (int b = 0; b < blocks; b++) unpack(form, at[l] + b * step, w[l][b]);
      at[l] += blocks * step;
    }
    UNROLL for (int t = 0; t < tokens; t++) {
      __m256 of_x = _mm256_set1_ps(scales[t]);
      IN_REGISTER(of_x);
      UNROLL for (int l = 0; l < lines; l++) {
        __m256i whole = form == INT4 ? _mm256_loadu_si256(starts + t) : _mm256_setzero_si256();
        UNROLL for (int b = 0; b < blocks; b++)
          UNROLL for (int i = 0; i < vectors; i++)
            add_products(form, &whole, w[l][b][i], _mm256_loadu_si256(x + (b * tokens + t) * vectors + i));
        __m256 number = _mm256_cvtepi32_ps(form == INT4 ? _mm256_madd_epi16(whole, ones) : whole);
        sums[l][t] = _mm256_fmadd_ps(number, _mm256_mul_ps(scale[l], of_x), sums[l][t]);
        IN_REGISTER(sums[l][t]);
      }
    }
    x += blocks * tokens * vectors;
    starts += tokens;
    scales += tokens;
    if (--left == 0) left = in_group, group++;
  }
  UNROLL for (int l = 0; l < lines; l++)
    UNROLL for (int t = 0; t < tokens; t++) {
      if (t >= p->tokens) continue;
      __m256 sum = p->w.zeros ? without_zeros(p, numbers[l], t, sums[l][t]) : sums[l][t];
      p->y[t * p->w.rows + numbers[l]] = sum_of_8(sum);
    }
}

// As many rows of w at a time as there are registers for.
INLINE void multiply(const Product* p, int64_t first, int64_t last, int tokens, Form form, int blocks) {
  const int lines = tokens == 1 || (form == INT4 && (tokens == 2 || blocks == 1)) ? LINES : 1;
  int64_t apart = (last - first + lines - 1) / lines;
  for (int64_t row = first; row < first + apart; row++) multiply_rows(p, row, last, apart, tokens, lines, form, blocks);
}

#define MULTIPLY(NAME, FORM, BLOCKS)                                                                              \
  static void NAME(void* job, int64_t first, int64_t last) {                                                      \
    const Product* p = job;                                                                                       \
    if (p->room == MOST) multiply(p, first, last, MOST, FORM, BLOCKS);                                            \
    else if (p->room == 2) multiply(p, first, last, 2, FORM, BLOCKS);                                             \
    else multiply(p, first, last, 1, FORM, BLOCKS);                                                               \
  }
MULTIPLY(int8_chunks, INT8, 4)
MULTIPLY(int8_blocks, INT8, 1)
MULTIPLY(int4_chunks, INT4, 4)
MULTIPLY(int4_blocks, INT4, 1)

// Rounds the numbers of token t from k on that share a scale, into p.
static void round_numbers(const Product* p, const float* x, int64_t t, int64_t k, int64_t group) {
  const int64_t vectors = bytes_of_x(p->w.form), in_chunk = blocks_in_chunk(&p->w);
  const __m256i eights = _mm256_set1_epi8(p->w.zeros ? 0 : 8);
  int8_t rounded[ROUNDED_GROUP];
  float scale;
  round_group(x, group, rounded, &scale);
  for (int64_t i = 0; i < group; i += BLOCK) {
    int64_t block = (k + i) / BLOCK, place = block / in_chunk * p->room + t;
    __m256i bytes = _mm256_loadu_si256((const __m256i*)(rounded + i));
    __m256i* out = (__m256i*)p->x + (block * p->room + t) * vectors;
    if (p->w.form == INT4) {
      __m256i* start = (__m256i*)p->starts + place;
      *start = _mm256_sub_epi16(*start, _mm256_maddubs_epi16(eights, bytes));
      out[0] = bytes;
    } else {
      out[0] = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes));
      out[1] = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1));
    }
    p->scales[place] = scale;
    if (p->w.zeros) p->totals[t * p->w.groups + k / p->w.group] += scale * sum_of(rounded + i);
  }
}

EXPORT XLA_FFI_Error* jaxserve_matmul_rounded_few(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer* x = argument(frame, 0);
  Weight w = weight(frame, 0);
  int64_t tokens = x->dims[0], room = tokens > 2 ? MOST : tokens;
  if (tokens > MOST) return jaxserve_matmul_rounded(frame);
  int64_t chunks = w.depth / (blocks_in_chunk(&w) * BLOCK);
  int64_t of_x = room * w.depth * bytes_of_x(w.form) / 4, of_starts = w.form == INT4 ? room * chunks * 8 : 0;
  int64_t size = of_x + of_starts + room * chunks + tokens * w.groups;
  float* memory = scratch(size);
  if (memory == NULL) return out_of_memory(frame);
  memset(memory, 0, (size_t)size * sizeof(float));
  Product p = {.w = w, .x = (char*)memory, .starts = (int16_t*)(memory + of_x), .scales = memory + of_x + of_starts,
               .totals = memory + of_x + of_starts + room * chunks, .y = result(frame, 0)->data,
               .tokens = tokens, .room = room, .chunks = chunks};
  Work* work = w.form == INT4 ? blocks_in_chunk(&w) > 1 ? int4_chunks : int4_blocks
                              : blocks_in_chunk(&w) > 1 ? int8_chunks : int8_blocks;
  for (int64_t t = 0, rounded = group_of(&w); t < tokens; t++)
    for (int64_t k = 0; k < w.depth; k += rounded)
      round_numbers(&p, (const float*)x->data + t * w.depth + k, t, k, rounded);
  parallel_for(frame, w.rows, rows_in_piece(frame, w.rows, PIECES, bytes(w.form, w.depth) / 4), work, &p);
  free(memory);
  return NULL;
}
#endif
