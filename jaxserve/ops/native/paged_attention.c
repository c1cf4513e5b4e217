// Attention of rows with one token each to their pages: scores, softmax and sums in float32, each page read once.
//
// A row's context is cut into pieces of PIECE tokens at fixed places. A piece is the unit of work: a softmax of its own
// for each query head. The pieces of a row are then merged by log-sum-exp, in order. So a row's bits depend on nothing
// but the row, and one long row keeps every core at work as many short ones do.
//
// Online softmax: Milakov and Gimelshein, arXiv 1805.02867.
#include "vectors.h"

#include <math.h>
#include <string.h>

enum {
  PIECE = 128,  // tokens of context; from 64 to 256 the time is the same
  HEADS = 4,    // query heads that meet a token of K or V while it is in registers
  AHEAD = 8,    // tokens that are asked for in time; with 16 their page and this one fill the first cache
};

typedef struct {
  int32_t row, first;  // the row, and the piece's first token
} Piece;

// q, out [R, N, D]; cache [P, halves, page_size, KH * D]; page_table [R, max_pages]; kv_lens [R]; sinks [N].
// Each piece's softmax: top and total [pieces, N], values [pieces, N, D]. Pieces of row r: [ends[r - 1], ends[r]), from
// 0 for row `from`.
typedef struct {
  const float *q, *sinks;
  const char* cache;
  const float* scales;  // of 8-bit pages [P, halves, page_size, KH], else NULL
  const int32_t *page_table, *kv_lens;
  float* out;
  int64_t rows, heads, depth, kv_heads, num_pages, halves, page_size, max_pages, window;
  float soft_cap;
  int64_t from, until;  // the rows whose pieces are at hand
  Piece* pieces;
  int64_t* ends;
  float *top, *total, *values;
} Attention;

// A row sees the positions [first_seen, length).
INLINE int64_t length(const Attention* a, int64_t row) {
  return max(0, min(a->kv_lens[row], a->max_pages * a->page_size));
}
INLINE int64_t first_seen(const Attention* a, int64_t row) {
  if (a->window < 0) return max(0, length(a, row) - 1) / -a->window * -a->window;
  return a->window > 0 ? max(0, length(a, row) - a->window) : 0;
}

// Places in the cache, counted in numbers, of K and V of a row's tokens [first, first + count): [KH, D] each. Up to `room`
// the last is repeated. A page is looked up once: two divisions for each token were a tenth of the time.
INLINE void find_places(const Attention* a, int64_t row, int64_t first, int64_t count, int64_t room, int64_t* k,
                        int64_t* v) {
  const int64_t step = a->kv_heads * a->depth, to_v = (a->halves - 1) * a->page_size * step;
  for (int64_t token = 0, end; token < count; token = end) {
    int64_t offset = (first + token) % a->page_size;
    int64_t page = a->page_table[row * a->max_pages + (first + token) / a->page_size];
    int64_t at = (max(0, min(page, a->num_pages - 1)) * a->halves * a->page_size + offset) * step;
    end = min(count, token + a->page_size - offset);
    for (int64_t t = token; t < end; t++, at += step) {
      k[t] = at;
      v[t] = at + to_v;
    }
  }
  for (int64_t t = count; t < room; t++) {
    k[t] = k[count - 1];
    v[t] = v[count - 1];
  }
}

// Scores of `heads` queries [heads, D] with the keys at k[0 .. SUMS / heads], to scores [heads, PIECE].
INLINE void score(const Attention* a, const float* q, int heads, const int64_t* k, int64_t at, float* scores,
                  Form form) {
  const int tokens = SUMS / heads;
  vector sums[SUMS] = {0};
  for (int64_t d = 0; d < a->depth; d += LANES) {
    vector query[HEADS];
    UNROLL for (int h = 0; h < heads; h++) query[h] = *(const vector*)(q + h * a->depth + d);
    UNROLL for (int t = 0; t < tokens; t++) {
      vector key = load(a->cache, k[t] + at + d, form);
      prefetch(a->cache, k[t + AHEAD] + at + d, form);
      UNROLL for (int h = 0; h < heads; h++) sums[h * tokens + t] += query[h] * key;
    }
  }
  float all[SUMS];
  sums_of(sums, all);
  UNROLL for (int h = 0; h < heads; h++) memcpy(scores + h * PIECE, all + h * tokens, tokens * sizeof(float));
}

// Adds the values at v[0 .. SUMS / heads] to `heads` sums [heads, D], by weights [heads, PIECE].
INLINE void weigh(const Attention* a, const float* weights, int heads, const int64_t* v, int64_t at, float* values,
                  Form form) {
  const int tokens = SUMS / heads;
  for (int64_t d = 0; d < a->depth; d += LANES) {
    vector sums[HEADS];
    UNROLL for (int h = 0; h < heads; h++) sums[h] = *(vector*)(values + h * a->depth + d);
    UNROLL for (int t = 0; t < tokens; t++) {
      vector value = load(a->cache, v[t] + at + d, form);
      prefetch(a->cache, v[t + AHEAD] + at + d, form);
      UNROLL for (int h = 0; h < heads; h++) sums[h] += weights[h * PIECE + t] * value;
    }
    UNROLL for (int h = 0; h < heads; h++) *(vector*)(values + h * a->depth + d) = sums[h];
  }
}

// Scores of `count` tokens to weights, in place, with zeros up to SUMS: their maximum and their sum.
INLINE void soften(const Attention* a, float* scores, int64_t count, float* top, float* total) {
  if (a->soft_cap > 0)
    for (int64_t i = 0; i < count; i++) scores[i] = tanhf(scores[i] / a->soft_cap) * a->soft_cap;
  for (int64_t i = count; i % LANES != 0; i++) scores[i] = -INFINITY;
  vector tops = *(vector*)scores, sums = {0};
  for (int64_t i = LANES; i < count; i += LANES) tops = larger(*(vector*)(scores + i), tops);
  *top = tops[0];
  for (int i = 1; i < LANES; i++) *top = tops[i] > *top ? tops[i] : *top;
  for (int64_t i = 0; i < count; i += LANES) {
    vector weights = exponential(*(vector*)(scores + i) - *top);
    *(vector*)(scores + i) = weights;
    sums += weights;
  }
  for (int64_t i = (count + LANES - 1) / LANES * LANES; i % SUMS != 0; i++) scores[i] = 0;
  *total = 0;
  for (int i = 0; i < LANES / 2; i++) *total += sums[i] + sums[LANES / 2 + i];
}

// Multiplies the scores or weights [N, PIECE] of `count` tokens, which lie at `places`, by the scales of their kv heads.
INLINE void apply_scales(const Attention* a, const int64_t* places, int64_t count, float* numbers) {
  int64_t group = a->heads / a->kv_heads;
  for (int64_t head = 0; head < a->heads; head++)
    for (int64_t token = 0; token < count; token++)
      numbers[head * PIECE + token] *= a->scales[places[token] / a->depth + head / group];
}

// The heads of one group for `block` tokens from `token` on: WORK(query head, how many, first token) until all have met.
#define MEET(WORK, HEADS_NOW)                                                                          \
  for (; head + HEADS_NOW <= last; head += HEADS_NOW)                                                  \
    for (int64_t t = token; t < min(token + block, count); t += SUMS / HEADS_NOW) WORK(HEADS_NOW);
#define FOR_EACH(WORK)                                                                                 \
  for (int64_t token = 0; token < count; token += block)                                               \
    for (int64_t kv_head = 0, group = a->heads / a->kv_heads; kv_head < a->kv_heads; kv_head++) {      \
      int64_t head = kv_head * group, last = head + group, at = kv_head * a->depth;                    \
      MEET(WORK, 4) MEET(WORK, 2) MEET(WORK, 1)                                                        \
    }

// A piece, in the order in which it lies in memory: all of K, then all of V. Tokens behind the last are the last again,
// and weigh nothing.
INLINE void attend(const Attention* a, int64_t piece, Form form) {
  int64_t row = a->pieces[piece].row, first = max(a->pieces[piece].first, first_seen(a, row));
  int64_t count = min(a->pieces[piece].first + PIECE, length(a, row)) - first, state = piece * a->heads;
  const float* q = a->q + row * a->heads * a->depth;
  int64_t block = a->heads / a->kv_heads % HEADS == 0 ? SUMS / HEADS : SUMS;  // few: in the order of the addresses
  float *values = a->values + state * a->depth, scores[a->heads * PIECE];
  int64_t k[PIECE + SUMS], v[PIECE + SUMS];
  find_places(a, row, first, count, (count + 2 * SUMS - 1) / SUMS * SUMS, k, v);
#define SCORE(heads) score(a, q + head * a->depth, heads, k + t, at, scores + head * PIECE + t, form)
  FOR_EACH(SCORE)
  if (has_scales(form)) apply_scales(a, k, count, scores);
  for (int64_t head = 0; head < a->heads; head++)
    soften(a, scores + head * PIECE, count, a->top + state + head, a->total + state + head);
  if (has_scales(form)) apply_scales(a, v, count, scores);
  memset(values, 0, a->heads * a->depth * sizeof(float));
#define WEIGH(heads) weigh(a, scores + head * PIECE + t, heads, v + t, at, values + head * a->depth, form)
  FOR_EACH(WEIGH)
}

#define ATTEND(NAME, FORM)                                                  \
  static void NAME(void* job, int64_t first, int64_t last) {                \
    for (int64_t piece = first; piece < last; piece++) attend(job, piece, FORM); \
  }
ATTEND(attend_float32, FLOAT32)
ATTEND(attend_bfloat16, BFLOAT16)
ATTEND(attend_int8, INT8)
ATTEND(attend_fp8, FP8)

// One head of a row: its pieces, and its sink, which is a score without a value. Zeros without a context.
static void merge_head(const Attention* a, int64_t row, int64_t head) {
  int64_t first = row > a->from ? a->ends[row - 1] : 0, last = a->ends[row];
  float* out = a->out + (row * a->heads + head) * a->depth;
  float top = a->sinks[head], total = 0;
  for (int64_t d = 0; d < a->depth; d++) out[d] = 0;
  if (first == last) return;
  for (int64_t p = first; p < last; p++) top = fmaxf(top, a->top[p * a->heads + head]);
  for (int64_t p = first; p < last; p++) {
    int64_t state = p * a->heads + head;
    float scale = expf(a->top[state] - top);
    total += scale * a->total[state];
    for (int64_t d = 0; d < a->depth; d++) out[d] += scale * a->values[state * a->depth + d];
  }
  total += expf(a->sinks[head] - top);
  for (int64_t d = 0; d < a->depth; d++) out[d] /= total;
}

static void merge(void* job, int64_t first, int64_t last) {
  Attention* a = job;
  for (int64_t row = a->from + first; row < a->from + last; row++)
    for (int64_t head = 0; head < a->heads; head++) merge_head(a, row, head);
}

INLINE int64_t num_pieces(const Attention* a, int64_t row) {
  return (length(a, row) + PIECE - 1) / PIECE - first_seen(a, row) / PIECE;
}

// Lists the pieces of the rows from `from` on, as many rows as fit into `most` pieces: their number. Sets `until`.
static int64_t cut(Attention* a, int64_t most) {
  int64_t count = 0;
  for (a->until = a->from; a->until < a->rows && count + num_pieces(a, a->until) <= most; a->until++) {
    for (int64_t first = first_seen(a, a->until) / PIECE * PIECE; first < length(a, a->until); first += PIECE)
      a->pieces[count++] = (Piece){a->until, first};
    a->ends[a->until] = count;
  }
  return count;
}

// Pieces to hold at a time: those of the longest row at least, and else what 16 MiB are enough for.
static int64_t pieces_at_once(const Attention* a) {
  int64_t most = (1 << 22) / (a->heads * (a->depth + 2) + 1), all = 0;
  for (int64_t row = 0; row < a->rows; row++) {
    most = max(most, num_pieces(a, row));
    all += max(0, num_pieces(a, row));
  }
  return min(most, all);
}

// Scratch for so many pieces, in one block; NULL without memory. The caller frees it.
static void* reserve(Attention* a, int64_t pieces) {
  int64_t states = pieces * a->heads;
  int64_t floats = states * (a->depth + 2), bytes = a->rows * sizeof(int64_t) + pieces * sizeof(Piece);
  float* block = scratch(floats + bytes / 4);
  if (block == NULL) return NULL;
  a->values = block;
  a->top = a->values + states * a->depth;
  a->total = a->top + states;
  a->ends = (int64_t*)(block + floats);
  a->pieces = (Piece*)(a->ends + a->rows);
  return block;
}

// Arguments q, cache, page_table, kv_lens, sinks (-inf: none), window [1] (0: none, -c: chunks of c tokens), soft_cap [1]
// (0: none), and the scales of 8-bit pages. D is a multiple of 16. A kv_len of 0 is a row without a token.
EXPORT XLA_FFI_Error* jaxserve_attend(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer *q = argument(frame, 0), *cache = argument(frame, 1), *table = argument(frame, 2);
  Attention a = {
      .q = q->data,
      .cache = cache->data,
      .scales = has_scales(form_of(cache)) ? argument(frame, 7)->data : NULL,
      .page_table = table->data,
      .kv_lens = argument(frame, 3)->data,
      .sinks = argument(frame, 4)->data,
      .window = *(int32_t*)argument(frame, 5)->data,
      .soft_cap = *(float*)argument(frame, 6)->data,
      .out = result(frame, 0)->data,
      .rows = q->dims[0],
      .heads = q->dims[1],
      .depth = q->dims[2],
      .num_pages = cache->dims[0],
      .halves = cache->dims[1],
      .page_size = cache->dims[2],
      .kv_heads = cache->dims[3] / q->dims[2],
      .max_pages = table->dims[1],
  };
  int64_t most = pieces_at_once(&a);
  void* block = reserve(&a, most);
  if (block == NULL) return out_of_memory(frame);
  Work* const works[] = {attend_float32, attend_bfloat16, attend_int8, attend_fp8};
  Work* work = works[form_of(cache)];
  for (a.from = 0; a.from < a.rows; a.from = a.until) {
    parallel_for(frame, cut(&a, most), 1, work, &a);
    parallel_for(frame, a.until - a.from, 16, merge, &a);
  }
  free(block);
  return NULL;
}
