// Layers with a recurrent state, token by token: convolution, gates, the state of each head, and the ring of inputs.
// `ops/state/base.py` has the contract and the formulas.
//
// A unit is one value head of one row. A token costs one pass over its state S [K, V]: the pass stores the update by the
// token before it, and meets the sums S^T k and S^T q of its own. So a step that folds one token and answers for the next
// reads the state from memory once and writes it once. All passes have the same operations in the same order, whatever
// the cut of a row's tokens into steps: products that could be contracted in two ways are contracted by name (`fused`).
#include "vectors.h"

#include <math.h>
#include <string.h>

// Vectors of a state's row that are met at a time. Each has two sums and a change in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
enum { PARTS = 8 };
#else
enum { PARTS = 4 };
#endif

typedef enum { DELTA, CHANNEL_DELTA, MAMBA2 } Kind;

typedef struct {
  const char *raw, *conv, *conv_bias;         // [T, Hk, C], [W, Hk, channels], [Hk, channels] or empty
  const float *log_a, *dt_bias, *skip;        // [H], [H] or [H, K], [H] or empty
  const int32_t *cu_q_lens, *starts, *read, *write, *folded, *sure, *emits;
  float* state;                               // [N, H, K, V]
  char *ring, *out;                           // [N, L, Hk, C], [T, H, V]
  int64_t tokens, rows, pages, length, key_heads, heads, width, channels, k_dim, v_dim, taps, num_emits;
  Kind kind;
  Form form, weights;
  float decay_floor, least_dt, most_dt;
  bool has_floor;
  _Atomic bool failed;
} Layer;

// Scratch of a unit. The arrays of a token are float32: keys k and queries q, the decay of each key channel, and k and q
// times that. zeros [V] is a row of an empty state.
typedef struct {
  float *taken, *k, *decay, *decayed_k, *decayed_q, *before_k, *before_decay, *update, *sum_k, *sum_q, *zeros, *state;
} Unit;

INLINE vector fused(vector a, vector b, vector c) {  // a b + c, rounded once where the processor can
#if defined(__AVX512F__)
  return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
  return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE vector all(float x) { return x - (vector){0}; }

INLINE float sum_of(vector v) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}

INLINE float number(const char* at, int64_t index, Form form) {
  if (form == FLOAT32) return ((const float*)at)[index];
  uint32_t bits = (uint32_t)((const uint16_t*)at)[index] << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE int64_t count_of(const Layer* a, int64_t row) { return a->cu_q_lens[row + 1] - a->cu_q_lens[row]; }
INLINE bool is_page(const Layer* a, int64_t page) { return page >= 0 && page < a->pages; }

// The inputs [C] of a row's key head at a position: of this step or of the ring; NULL for zeros.
INLINE const char* input(const Layer* a, int64_t row, int64_t head, int64_t position) {
  int64_t size = a->width * bytes_of(a->form);
  if (position < 0) return NULL;
  if (position >= a->starts[row])
    return a->raw + ((a->cu_q_lens[row] + position - a->starts[row]) * a->key_heads + head) * size;
  if (!is_page(a, a->read[row])) return NULL;
  return a->ring + ((a->read[row] * a->length + position % a->length) * a->key_heads + head) * size;
}

INLINE float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }
INLINE float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// Convolved channels [from, from + count) of a key head at a position, to y [count].
INLINE void convolve_as(const Layer* a, const char* const* taps, int64_t head, int64_t from, int64_t count, float* y,
                        Form form, Form weights) {
  for (int64_t c = 0; c < count; c += LANES) {
    vector total = {0};
    if (a->conv_bias != NULL) total = load(a->conv_bias, head * a->channels + from + c, weights);
    for (int64_t j = 0; j < a->taps; j++) {
      if (taps[j] == NULL) continue;
      vector weight = load(a->conv, (j * a->key_heads + head) * a->channels + from + c, weights);
      total = fused(load(taps[j], from + c, form), weight, total);
    }
    integers below = total < 0;
    vector power = exponential(choose(below, total, -total));  // of -|x|
    *(vector*)(y + c) = total * choose(below, power, all(1)) / (1 + power);
  }
}

static void convolve(const Layer* a, const char* const* taps, int64_t head, int64_t from, int64_t count, float* y) {
  if (a->form == FLOAT32 && a->weights == FLOAT32)
    convolve_as(a, taps, head, from, count, y, FLOAT32, FLOAT32);
  else if (a->form == FLOAT32)
    convolve_as(a, taps, head, from, count, y, FLOAT32, BFLOAT16);
  else if (a->weights == FLOAT32)
    convolve_as(a, taps, head, from, count, y, BFLOAT16, FLOAT32);
  else
    convolve_as(a, taps, head, from, count, y, BFLOAT16, BFLOAT16);
}

INLINE float dot(const float* x, const float* y, int64_t count) {
  vector total = {0};
  for (int64_t i = 0; i < count; i += LANES) total = fused(*(const vector*)(x + i), *(const vector*)(y + i), total);
  return sum_of(total);
}

INLINE void scale(float* x, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += LANES) *(vector*)(x + i) *= factor;
}

// A token's operands for value head `head`: v to u->taken behind q and k, the decays, and beta or dt.
INLINE float prepare(const Layer* a, Unit* u, int64_t row, int64_t head, int64_t position) {
  int64_t group = a->heads / a->key_heads, key_head = head / group, place = head % group, k_dim = a->k_dim;
  const char* taps[a->taps];
  for (int64_t j = 0; j < a->taps; j++) taps[j] = input(a, row, key_head, position - a->taps + 1 + j);
  float *q = u->taken, *k = u->taken + k_dim;
  convolve(a, taps, key_head, 0, 2 * k_dim, q);
  convolve(a, taps, key_head, 2 * k_dim + place * a->v_dim, a->v_dim, k + k_dim);
  const char* gates = taps[a->taps - 1];
  float rate, slope = expf(a->log_a[head]);
  if (a->kind == MAMBA2) {
    rate = softplus(number(gates, a->channels + place, a->form) + a->dt_bias[head]);
    rate = rate < a->least_dt ? a->least_dt : rate > a->most_dt ? a->most_dt : rate;
    float decay = expf(-slope * rate);
    for (int64_t i = 0; i < k_dim; i++) u->decay[i] = decay;
  } else {
    scale(q, k_dim, 1 / sqrtf(dot(q, q, k_dim) + 1e-6f) / sqrtf((float)k_dim));
    scale(k, k_dim, 1 / sqrtf(dot(k, k, k_dim) + 1e-6f));
    rate = sigmoid(number(gates, a->channels + place, a->form));
    if (a->kind == DELTA) {
      float decay = expf(-slope * softplus(number(gates, a->channels + group + place, a->form) + a->dt_bias[head]));
      for (int64_t i = 0; i < k_dim; i++) u->decay[i] = decay;
    } else {
      for (int64_t i = 0; i < k_dim; i++) {
        float x = number(gates, a->channels + group + place * k_dim + i, a->form) + a->dt_bias[head * k_dim + i];
        u->decay[i] = expf(a->has_floor ? a->decay_floor * sigmoid(slope * x) : -slope * softplus(x));
      }
    }
  }
  for (int64_t i = 0; i < k_dim; i += LANES) {
    vector decay = *(vector*)(u->decay + i);
    *(vector*)(u->k + i) = *(vector*)(k + i);
    *(vector*)(u->decayed_k + i) = *(vector*)(k + i) * decay;
    *(vector*)(u->decayed_q + i) = *(vector*)(q + i) * decay;
  }
  return rate;
}

// A pass over `parts` vectors of each row of the state at `from`, from column v on; the next row is `step` numbers further.
// update: first by the token before, stored to `to`. sum: S^T k and S^T q of this token.
INLINE void pass_columns(Unit* u, const float* from, int64_t step, float* to, int64_t k_dim, int64_t v_dim, int64_t v,
                         int parts, bool update, bool sum) {
  const float *before_k = u->before_k, *before_decay = u->before_decay, *k = u->decayed_k, *q = u->decayed_q;
  vector changes[PARTS] = {0}, sum_k[PARTS] = {0}, sum_q[PARTS] = {0};
  UNROLL for (int p = 0; update && p < parts; p++) changes[p] = *(vector*)(u->update + v + p * LANES);
  from += v;
  if (update) to += v;
  for (int64_t i = 0; i < k_dim; i++, from += step) {
    UNROLL for (int p = 0; p < parts; p++) {
      vector s = *(const vector*)(from + p * LANES);
      if (update) {
        s = fused(all(before_k[i]), changes[p], s * before_decay[i]);
        *(vector*)(to + i * v_dim + p * LANES) = s;
      }
      if (sum) {
        sum_k[p] = fused(all(k[i]), s, sum_k[p]);
        sum_q[p] = fused(all(q[i]), s, sum_q[p]);
      }
    }
  }
  UNROLL for (int p = 0; sum && p < parts; p++) {
    *(vector*)(u->sum_k + v + p * LANES) = sum_k[p];
    *(vector*)(u->sum_q + v + p * LANES) = sum_q[p];
  }
}

INLINE void pass(const Layer* a, Unit* u, const float* from, float* to, bool update, bool sum) {
  int64_t k_dim = a->k_dim, v_dim = a->v_dim, v = 0, step = from == NULL ? 0 : v_dim;
  if (from == NULL) from = u->zeros;
  for (; v + PARTS * LANES <= v_dim; v += PARTS * LANES)
    pass_columns(u, from, step, to, k_dim, v_dim, v, PARTS, update, sum);
  for (; v < v_dim; v += LANES) pass_columns(u, from, step, to, k_dim, v_dim, v, 1, update, sum);
}

static void pass_sum(const Layer* a, Unit* u, const float* from) { pass(a, u, from, NULL, false, true); }
static void pass_both(const Layer* a, Unit* u, const float* from, float* to) { pass(a, u, from, to, true, true); }
static void pass_update(const Layer* a, Unit* u, const float* from, float* to) { pass(a, u, from, to, true, false); }

static void store(const Layer* a, int64_t token, int64_t head, const float* y) {
  int64_t at = (token * a->heads + head) * a->v_dim;
  for (int64_t i = 0; i < a->v_dim; i++) {
    if (a->form == FLOAT32) {
      ((float*)a->out)[at + i] = y[i];
      continue;
    }
    uint32_t bits;  // to the nearest bfloat16, ties to even; NaN stays NaN
    memcpy(&bits, y + i, sizeof bits);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    ((uint16_t*)a->out)[at + i] = (uint16_t)(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

// The change u of a token, to u->update, and its answer.
INLINE void answer(const Layer* a, Unit* u, float rate, int64_t row, int64_t head, int64_t position) {
  const float* v = u->taken + 2 * a->k_dim;
  float share = dot(u->taken, u->taken + a->k_dim, a->k_dim), skip = a->skip == NULL ? 0 : a->skip[head];
  for (int64_t i = 0; i < a->v_dim; i += LANES) {
    vector value = *(const vector*)(v + i), change = value;
    if (a->kind != MAMBA2) change = value - *(vector*)(u->sum_k + i);
    change = change * rate;
    *(vector*)(u->update + i) = change;
    vector y = fused(all(share), change, *(vector*)(u->sum_q + i));
    *(vector*)(u->sum_q + i) = fused(all(skip), value, y);
  }
  if (position >= a->starts[row]) store(a, a->cu_q_lens[row] + position - a->starts[row], head, u->sum_q);
}

INLINE float* state_at(const Layer* a, int64_t page, int64_t head) {
  return is_page(a, page) ? a->state + (page * a->heads + head) * a->k_dim * a->v_dim : NULL;
}

static void copy(float* to, const float* from, int64_t count) {
  if (to == NULL || to == from) return;
  if (from == NULL)
    memset(to, 0, count * sizeof *to);
  else
    memcpy(to, from, count * sizeof *to);
}

static void recur(const Layer* a, Unit* u, int64_t row, int64_t head) {
  int64_t size = a->k_dim * a->v_dim, end = a->starts[row] + count_of(a, row);
  if (count_of(a, row) == 0) return;
  const float* at = state_at(a, a->read[row], head);  // where the state is, NULL for zeros
  float* kept = state_at(a, a->write[row], head);
  if (a->sure[row] == a->folded[row]) copy(kept, at, size);
  bool update = false;
  for (int64_t position = a->folded[row]; position < end; position++) {
    // What is stored now is the state after `position` tokens.
    float* to = position <= a->sure[row] && kept != NULL ? kept : u->state;
    float rate = prepare(a, u, row, head, position);
    if (update)
      pass_both(a, u, at, to);
    else
      pass_sum(a, u, at);
    if (update) at = to;
    for (int64_t e = 0; e < a->num_emits; e++) {
      const int32_t* emit = a->emits + (row * a->num_emits + e) * 2;
      if (emit[0] == position && a->folded[row] < position && position <= a->sure[row])
        copy(state_at(a, emit[1], head), at, size);
    }
    answer(a, u, rate, row, head, position);
    float* other = u->before_k;
    u->before_k = u->k, u->k = other;
    other = u->before_decay;
    u->before_decay = u->decay, u->decay = other;
    update = true;
  }
  if (a->sure[row] < end) return;
  float* to = kept != NULL ? kept : u->state;
  pass_update(a, u, at, to);
  for (int64_t e = 0; e < a->num_emits; e++) {
    const int32_t* emit = a->emits + (row * a->num_emits + e) * 2;
    if (emit[0] == end && a->folded[row] < end) copy(state_at(a, emit[1], head), to, size);
  }
}

static void recur_units(void* job, int64_t first, int64_t last) {
  Layer* a = job;
  int64_t k_dim = a->k_dim, v_dim = a->v_dim;
  float* memory = scratch(8 * k_dim + 5 * v_dim + k_dim * v_dim + 16 * 12);
  if (memory == NULL) {
    a->failed = true;
    return;
  }
  float* at = memory;
  Unit u;
  float** const places[] = {&u.taken, &u.k, &u.decay, &u.decayed_k, &u.decayed_q, &u.before_k, &u.before_decay,
                            &u.update, &u.sum_k, &u.sum_q, &u.zeros, &u.state};
  const int64_t sizes[] = {2 * k_dim + v_dim, k_dim, k_dim, k_dim, k_dim, k_dim, k_dim, v_dim, v_dim, v_dim, v_dim, 0};
  for (int i = 0; i < 12; at += (sizes[i] + 15) / 16 * 16, i++) *places[i] = at;
  memset(u.zeros, 0, v_dim * sizeof *u.zeros);
  for (int64_t unit = first; unit < last; unit++) recur(a, &u, unit / a->heads, unit % a->heads);
  free(memory);
}

// The ring of page `page` for the last positions before `end`: those of this step, and if it is another page than the one
// that was read, those before.
static void keep_ring(const Layer* a, int64_t row, int64_t page, int64_t end) {
  int64_t size = a->key_heads * a->width * bytes_of(a->form);
  if (!is_page(a, page)) return;
  for (int64_t position = max(0, end - a->length); position < end; position++) {
    if (position < a->starts[row] && page == a->read[row]) continue;
    const char* from = input(a, row, 0, position);
    char* to = a->ring + (page * a->length + position % a->length) * size;
    if (from == NULL)
      memset(to, 0, size);
    else
      memcpy(to, from, size);
  }
}

static void keep_rings(void* job, int64_t first, int64_t last) {
  const Layer* a = job;
  for (int64_t row = first; row < last; row++) {
    if (count_of(a, row) == 0) continue;
    for (int64_t e = 0; e < a->num_emits; e++) {
      const int32_t* emit = a->emits + (row * a->num_emits + e) * 2;
      if (a->folded[row] < emit[0] && emit[0] <= a->sure[row]) keep_ring(a, row, emit[1], emit[0]);
    }
    keep_ring(a, row, a->write[row], a->starts[row] + count_of(a, row));
  }
}

// Arguments state, ring, raw, conv, conv_bias, log_a, dt_bias, skip, then the arrays of StateRows in their order, the kind
// [1] and limits [3]: the decay's floor (0: none), the least and the most dt. Results out, and state and ring in place.
EXPORT XLA_FFI_Error* jaxserve_recur(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer *state = argument(frame, 0), *ring = argument(frame, 1), *raw = argument(frame, 2);
  XLA_FFI_Buffer *conv = argument(frame, 3), *bias = argument(frame, 4), *skip = argument(frame, 7);
  const float* limits = argument(frame, 16)->data;
  Layer a = {
      .raw = raw->data,
      .conv = conv->data,
      .conv_bias = bias->dims[0] > 0 ? bias->data : NULL,
      .log_a = argument(frame, 5)->data,
      .dt_bias = argument(frame, 6)->data,
      .skip = skip->dims[0] > 0 ? skip->data : NULL,
      .cu_q_lens = argument(frame, 8)->data,
      .starts = argument(frame, 9)->data,
      .read = argument(frame, 10)->data,
      .write = argument(frame, 11)->data,
      .folded = argument(frame, 12)->data,
      .sure = argument(frame, 13)->data,
      .emits = argument(frame, 14)->data,
      .state = result(frame, 1)->data,
      .ring = result(frame, 2)->data,
      .out = result(frame, 0)->data,
      .tokens = raw->dims[0],
      .rows = argument(frame, 9)->dims[0],
      .pages = state->dims[0],
      .length = ring->dims[1],
      .key_heads = ring->dims[2],
      .heads = state->dims[1],
      .width = ring->dims[3],
      .channels = conv->dims[2],
      .k_dim = state->dims[2],
      .v_dim = state->dims[3],
      .taps = conv->dims[0],
      .num_emits = argument(frame, 14)->dims[1],
      .kind = (Kind)*(int32_t*)argument(frame, 15)->data,
      .form = form_of(raw),
      .weights = form_of(conv),
      .decay_floor = limits[0],
      .has_floor = limits[0] != 0,
      .least_dt = limits[1],
      .most_dt = limits[2],
  };
  int64_t size = a.heads * a.v_dim * bytes_of(a.form), used = a.cu_q_lens[a.rows];
  memset(a.out + used * size, 0, (a.tokens - used) * size);
  parallel_for(frame, a.rows * a.heads, 1, recur_units, &a);
  if (a.failed) return out_of_memory(frame);
  parallel_for(frame, a.rows, 16, keep_rings, &a);
  return NULL;
}
