// y [T, N] = x [T, K] times w [N, K] transposed, with x rounded as in matmul_rounded.c, for at most FEW tokens: bound by
// reading w, which is read as in matmul_few.c.
//
// A vector of w has numbers of one row side by side, which meet the same numbers of each token. Of weights in 4 bits a
// chunk is 128 numbers of a row, one vector, and in 8 bits 64 numbers, or 128 if they share a scale. Its products are of w
// without its sign: the integers start from x times what was added. Sums are in an order of their own, which with 8 and 4 bits is the same for any number of tokens.
#include "rounded.h"

#include <string.h>

#if ROUNDS == 2

enum {
  LINE = 16,      // words in a cache line
  LINES = 3,      // rows of w that meet the tokens at a time, at most
  PIECES = 4,     // of all rows of w for each thread
  AHEAD = 16384,  // bytes: as in matmul_few.c
  VECTOR = 64,    // bytes
};

typedef struct {
  Weight w;
  const uint32_t* pairs;  // x in bfloat16 [T, words]
  int8_t* bytes;          // x [T, chunks, numbers], in the order of a chunk of w
  float* scales;          // of x for the 16 words of each chunk [T, chunks, 16]
  int32_t* starts;        // of the 16 sums of a chunk, likewise
  float* totals;          // the sum of x in each group of w [T, w.groups rounded up to 16]
  int32_t* lanes;         // for each chunk which of w's scales its 16 words have, from `first` on [chunks, 16]
  int32_t* first;
  int32_t* live;          // a bit for each scale from `first` on that the row has, at most 4 [chunks]
  float* y;
  int64_t tokens, words, chunks, room;  // words of a row of w; numbers of a row of `totals`
} Product;

// The numbers of a chunk. whole: whether those of 128 share a scale.
INLINE int64_t chunk_numbers(Form form, bool whole) { return form == INT4 || whole ? 2 * VECTOR : VECTOR; }
INLINE bool is_whole(const Weight* w) { return w->group % (2 * VECTOR) == 0; }

// A vector with a bit for each of `count` things, at most `most`.
INLINE uint64_t bits(int64_t count, int64_t most) { return ~(uint64_t)0 >> (64 - min(count, most)); }

// The products of `tokens` rows of x, rounded to pairs of bfloat16, with `lines` rows of w, `apart` from one another.
INLINE void few_pairs(const Product* p, int64_t row, int64_t last, int64_t apart, int tokens, int lines) {
  __m512 sums[LINES][FEW];
  const char* rows[LINES];
  const uint32_t* x[FEW];
  int64_t numbers[LINES], words = p->words;
  UNROLL for (int t = 0; t < tokens; t++) x[t] = p->pairs + min(t, p->tokens - 1) * words;
  UNROLL for (int l = 0; l < lines; l++) {
    numbers[l] = min(row + l * apart, last - 1);
    rows[l] = place(&p->w, BFLOAT16, numbers[l], 0);
    UNROLL for (int t = 0; t < tokens; t++) sums[l][t] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < words; k += LINE) {
    __mmask16 there = (__mmask16)bits(words - k, LINE);
    __m512i w[LINES];
    UNROLL for (int l = 0; l < lines; l++) {
      if (tokens > 1) __builtin_prefetch(rows[l] + 4 * k + AHEAD, 0, 2);
      w[l] = _mm512_maskz_loadu_epi32(there, rows[l] + 4 * k);
    }
    UNROLL for (int t = 0; t < tokens; t++) {
      __m512i some = _mm512_maskz_loadu_epi32(there, x[t] + k);
      UNROLL for (int l = 0; l < lines; l++) {
        sums[l][t] = _mm512_dpbf16_ps(sums[l][t], (__m512bh)some, (__m512bh)w[l]);
        IN_REGISTER(sums[l][t]);
      }
    }
  }
  UNROLL for (int l = 0; l < lines; l++)
    UNROLL for (int t = 0; t < tokens; t++)  // an index that is not known here would put the sums into memory
      if (t < p->tokens) p->y[t * p->w.rows + numbers[l]] = _mm512_reduce_add_ps(sums[l][t]);
}

// Adds chunk k of `lines` rows. whole: whether its numbers share a scale. end: whether it is the last, perhaps short.
INLINE void add_chunk(const Product* p, int64_t k, const char** rows, const float** scales, int tokens, int lines,
                      Form form, bool whole, bool end, __m512 sums[LINES][FEW]) {
  const int64_t numbers = chunk_numbers(form, whole);
  const int parts = (int)(numbers / VECTOR);
  const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8((char)128);
  __m512i w[LINES][2];
  __m512 scale[LINES];
  UNROLL for (int l = 0; l < lines; l++) {
    const char* at = rows[l] + bytes(form, k * numbers);
    if (tokens > 1) UNROLL for (int i = 0; i < bytes(form, numbers); i += VECTOR) __builtin_prefetch(at + AHEAD + i, 0, 2);
    __mmask64 there = end && !whole ? bits(bytes(form, p->w.depth - k * numbers), VECTOR) : 0;
    __m512i some = end && !whole ? _mm512_maskz_loadu_epi8(there, at) : _mm512_loadu_si512(at);
    w[l][0] = form == INT4 ? _mm512_and_si512(some, low) : _mm512_xor_si512(some, sign);
    if (form == INT4) w[l][1] = _mm512_and_si512(_mm512_srli_epi16(some, 4), low);
    else if (whole) w[l][1] = _mm512_xor_si512(_mm512_loadu_si512(at + VECTOR), sign);
    const float* from = scales[l] + p->first[k];
    if (whole) scale[l] = _mm512_set1_ps(*from);
    else
      scale[l] = _mm512_permutexvar_ps(_mm512_loadu_si512(p->lanes + k * LINE),
                                       _mm512_castps128_ps512(_mm_maskz_loadu_ps((__mmask8)p->live[k], from)));
  }
  UNROLL for (int t = 0; t < tokens; t++) {
    int64_t place = min(t, p->tokens - 1) * p->chunks + k;
    __m512i x[2];
    UNROLL for (int i = 0; i < parts; i++) x[i] = _mm512_loadu_si512(p->bytes + place * numbers + i * VECTOR);
    __m512 of_x = _mm512_loadu_ps(p->scales + place * LINE);
    __m512i start = _mm512_loadu_si512(p->starts + place * LINE);
    UNROLL for (int l = 0; l < lines; l++) {
      __m512i sum = _mm512_dpbusd_epi32(start, w[l][0], x[0]);
      if (parts == 2) sum = _mm512_dpbusd_epi32(sum, w[l][1], x[1]);
      sums[l][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale[l], of_x), sums[l][t]);
      IN_REGISTER(sums[l][t]);
    }
  }
}

// Subtracts the products of x with the zeros of row `row`.
INLINE __m512 without_zeros(const Product* p, int64_t row, const float* totals, __m512 sum) {
  for (int64_t index = 0; index < p->w.groups; index += LINE) {
    __mmask16 live = (__mmask16)bits(p->w.groups - index, LINE);
    int64_t at = row * p->w.groups + index;
    __m512 zero = _mm512_maskz_loadu_ps(live, p->w.zeros + at);
    zero = _mm512_mul_ps(_mm512_maskz_loadu_ps(live, p->w.scales + at), zero);
    sum = _mm512_fnmadd_ps(zero, _mm512_maskz_loadu_ps(live, totals + index), sum);
  }
  return sum;
}

// The products of `tokens` rows of x, rounded to bytes, with `lines` rows of w, `apart` from one another.
INLINE void few_bytes(const Product* p, int64_t row, int64_t last, int64_t apart, int tokens, int lines, Form form,
                      bool whole) {
  __m512 sums[LINES][FEW];
  const char* rows[LINES];
  const float* scales[LINES];
  int64_t numbers[LINES];
  UNROLL for (int l = 0; l < lines; l++) {
    numbers[l] = min(row + l * apart, last - 1);
    rows[l] = place(&p->w, form, numbers[l], 0);
    scales[l] = p->w.scales + numbers[l] * p->w.groups;
    UNROLL for (int t = 0; t < tokens; t++) sums[l][t] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k + 1 < p->chunks; k++) add_chunk(p, k, rows, scales, tokens, lines, form, whole, false, sums);
  add_chunk(p, p->chunks - 1, rows, scales, tokens, lines, form, whole, true, sums);
  UNROLL for (int l = 0; l < lines; l++)
    UNROLL for (int t = 0; t < tokens; t++) {
      if (t >= p->tokens) continue;
      __m512 sum = sums[l][t];
      if (p->w.zeros) sum = without_zeros(p, numbers[l], p->totals + t * p->room, sum);
      p->y[t * p->w.rows + numbers[l]] = _mm512_reduce_add_ps(sum);
    }
}

#define EACH_ROW(LINES_, CALL)                               \
  {                                                          \
    int64_t apart = (last - first + LINES_ - 1) / LINES_;    \
    for (int64_t row = first; row < first + apart; row++) CALL; \
  }
static void multiply_pairs(void* job, int64_t first, int64_t last) {
  const Product* p = job;
  if (p->tokens > 4) EACH_ROW(LINES, few_pairs(p, row, last, apart, FEW, LINES))
  else if (p->tokens > 2) EACH_ROW(2, few_pairs(p, row, last, apart, 4, 2))
  else if (p->tokens > 1) EACH_ROW(2, few_pairs(p, row, last, apart, 2, 2))
  else EACH_ROW(2, few_pairs(p, row, last, apart, 1, 2))
}

#define MULTIPLY(FORM, NAME, WHOLE)                                                                 \
  static void multiply_##NAME(void* job, int64_t first, int64_t last) {                             \
    const Product* p = job;                                                                         \
    if (p->tokens > 4) EACH_ROW(2, few_bytes(p, row, last, apart, FEW, 2, FORM, WHOLE))             \
    else if (p->tokens > 2) EACH_ROW(2, few_bytes(p, row, last, apart, 4, 2, FORM, WHOLE))          \
    else if (p->tokens > 1) EACH_ROW(2, few_bytes(p, row, last, apart, 2, 2, FORM, WHOLE))          \
    else EACH_ROW(2, few_bytes(p, row, last, apart, 1, 2, FORM, WHOLE))                             \
  }
MULTIPLY(INT8, bytes_whole, true)
MULTIPLY(INT8, bytes, false)
MULTIPLY(INT4, halves_whole, true)
MULTIPLY(INT4, halves, false)

static void round_to_pairs(const float* x, int64_t numbers, uint16_t* out) {
  for (int64_t k = 0; k < numbers; k += 16) {
    int64_t count = min(16, numbers - k);
    __m256i halves = (__m256i)_mm512_cvtneps_pbh(numbers_at(x + k, count));
    _mm256_mask_storeu_epi32(out + k, (__mmask8)bits(count / 2, 8), halves);
  }
}

// Rounds x [T, K] to p's bytes, scales, starts and totals, which are 0.
static void round_to_bytes(Product* p, const float* x) {
  const Form form = p->w.form;
  const int64_t group = group_of(&p->w), numbers = chunk_numbers(form, is_whole(&p->w)), lanes = LINE * BLOCK / numbers;
  const int32_t added = form == INT8 ? 128 : p->w.zeros ? 0 : 8;
  int8_t rounded[ROUNDED_GROUP];
  for (int64_t t = 0; t < p->tokens; t++)
    for (int64_t k = 0; k < p->w.depth; k += group) {
      float scale;
      int32_t sum;
      round_group(x + t * p->w.depth + k, group, rounded, &scale, &sum);
      p->totals[t * p->room + k / p->w.group] += scale * sum;
      for (int64_t i = 0; i < group; i += BLOCK) {
        int64_t chunk = t * p->chunks + (k + i) / numbers, block = (k + i) % numbers / BLOCK;
        int8_t* out = p->bytes + chunk * numbers;
        if (form == INT8) memcpy(out + block * BLOCK, rounded + i, BLOCK);
        else {
          memcpy(out + block * BLOCK / 2, rounded + i, BLOCK / 2);
          memcpy(out + VECTOR + block * BLOCK / 2, rounded + i + BLOCK / 2, BLOCK / 2);
        }
        for (int64_t l = 0; l < lanes; l++) p->scales[chunk * LINE + block * lanes + l] = scale;
      }
    }
  for (int64_t place = 0; place < p->tokens * p->chunks; place++) {
    __m512i one = _mm512_set1_epi8(1), start = _mm512_setzero_si512();
    for (int64_t i = 0; i < numbers; i += VECTOR)
      start = _mm512_dpbusd_epi32(start, one, _mm512_loadu_si512(p->bytes + place * numbers + i));
    _mm512_storeu_si512(p->starts + place * LINE, _mm512_mullo_epi32(start, _mm512_set1_epi32(-added)));
  }
}

static void find_scales(Product* p) {
  const int64_t numbers = chunk_numbers(p->w.form, is_whole(&p->w)), lanes = LINE * BLOCK / numbers;
  for (int64_t k = 0; k < p->chunks; k++) {
    p->first[k] = (int32_t)(k * numbers / p->w.group);
    p->live[k] = (int32_t)bits(p->w.groups - p->first[k], 4);
    for (int64_t l = 0; l < LINE; l++)
      p->lanes[k * LINE + l] = (int32_t)((k * numbers + l / lanes * BLOCK) / p->w.group) - p->first[k];
  }
}

static XLA_FFI_Error* multiply_few_bytes(XLA_FFI_CallFrame* frame, Weight w, const float* x, float* y, int64_t tokens) {
  int64_t numbers = chunk_numbers(w.form, is_whole(&w)), chunks = (w.depth + numbers - 1) / numbers;
  int64_t room = (w.groups + LINE - 1) / LINE * LINE, of_bytes = tokens * chunks * numbers / 4;
  int64_t of_x = of_bytes + 2 * tokens * chunks * LINE + tokens * room;
  float* memory = scratch(of_x + chunks * (LINE + 2));
  if (memory == NULL) return out_of_memory(frame);
  memset(memory, 0, (size_t)of_x * sizeof(float));
  Product p = {.w = w, .bytes = (int8_t*)memory, .scales = memory + of_bytes, .y = y, .tokens = tokens,
               .words = bytes(w.form, w.depth) / 4, .chunks = chunks, .room = room};
  p.starts = (int32_t*)p.scales + tokens * chunks * LINE;
  p.totals = p.scales + 2 * tokens * chunks * LINE;
  p.lanes = (int32_t*)memory + of_x;
  p.first = p.lanes + chunks * LINE;
  p.live = p.first + chunks;
  round_to_bytes(&p, x);
  find_scales(&p);
  Work* work = w.form == INT8 ? is_whole(&w) ? multiply_bytes_whole : multiply_bytes
                              : is_whole(&w) ? multiply_halves_whole : multiply_halves;
  parallel_for(frame, w.rows, rows_in_piece(frame, w.rows, PIECES, p.words), work, &p);
  free(memory);
  return NULL;
}

static XLA_FFI_Error* multiply_few_pairs(XLA_FFI_CallFrame* frame, Weight w, const float* x, float* y, int64_t tokens) {
  float* memory = scratch(tokens * w.depth / 2);
  if (memory == NULL) return out_of_memory(frame);
  round_to_pairs(x, tokens * w.depth, (uint16_t*)memory);
  Product p = {.w = w, .pairs = (uint32_t*)memory, .y = y, .tokens = tokens, .words = w.depth / 2};
  parallel_for(frame, w.rows, rows_in_piece(frame, w.rows, PIECES, p.words / 2), multiply_pairs, &p);
  free(memory);
  return NULL;
}

EXPORT XLA_FFI_Error* jaxserve_matmul_rounded_few(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer* x = argument(frame, 0);
  Weight w = weight(frame, 0);
  float* y = result(frame, 0)->data;
  if (w.form == BFLOAT16) return multiply_few_pairs(frame, w, x->data, y, x->dims[0]);
  return multiply_few_bytes(frame, w, x->data, y, x->dims[0]);
}
#elif ROUNDS == 0

// Not called: the server refuses to start.
EXPORT XLA_FFI_Error* jaxserve_matmul_rounded_few(XLA_FFI_CallFrame* frame) {
  return answered_metadata(frame) ? NULL : out_of_memory(frame);
}
#endif
