// Attention of rows with several tokens each to their pages, in float32: prompts, and parts of them.
//
// A unit of work is LANE_COUNT queries of one kv head, which lie side by side in vectors: query heads of consecutive
// tokens. They meet the context in tiles of TILE tokens at fixed places. A tile's scores are a product of its keys with
// the queries, the sums of values one of its values with the weights: both broadcast a number of the cache and multiply it
// by vectors of queries. Maxima and sums of the softmax are then between vectors, and no lane depends on another: a
// query's bits are the same however its row is cut into steps.
//
// Online softmax: Milakov and Gimelshein, arXiv 1805.02867.
#include "vectors.h"

#include <math.h>
#include <string.h>

enum {
  LANE_COUNT = 32,               // queries of a unit
  VECTORS = LANE_COUNT / LANES,  // that hold them
  TILE = 64,                     // tokens of context
#if defined(__AVX512F__)
  ROWS = 8, COLUMNS = 2,  // numbers of the cache and vectors of queries that meet in registers
#elif defined(__aarch64__)
  ROWS = 4, COLUMNS = 4,
#elif defined(__AVX2__)
  ROWS = 4, COLUMNS = 2,
#else
  ROWS = 4, COLUMNS = 1,
#endif
};
static const float NOTHING = -1e30f;  // a score that is none

// Queries of row `row` from its token `first` on.
typedef struct {
  int32_t row, first;
} Block;

// q, out [T, N, D]; cache [P, halves, page_size, KH * D]; page_table [R, max_pages]; starts, q_lens, kv_lens [R]; sinks [N].
typedef struct {
  const float *q, *sinks;
  const char* cache;
  const float* scales;  // of 8-bit pages [P, halves, page_size, KH], else NULL
  const int32_t *page_table, *starts, *q_lens, *kv_lens;
  float* out;
  int64_t rows, heads, depth, kv_heads, num_pages, halves, page_size, max_pages, window;
  float soft_cap;
  Form form;
  int64_t together, tokens, parts;  // query heads and tokens of a unit, and units of a kv head's query heads
  Block* blocks;
  _Atomic bool failed;  // for want of memory
} Attention;

// A unit's arrays. Lanes of no query have position -1, and see nothing.
typedef struct {
  float *queries, *values;  // [D, LANE_COUNT]: q, and the weighted sums
  float *keys, *tile;       // [TILE, D]: K or V of a tile; [TILE, LANE_COUNT]: scores, then weights
  float scales[TILE];
  vector top[VECTORS], total[VECTORS];
  integers position[VECTORS], oldest[VECTORS];  // the query sees [oldest, position]
} Unit;

// K (half 0) or V of tokens [first, first + count) of a row, widened to out [TILE, D]; zeros behind them up to ROWS.
INLINE void read_tile(const Attention* a, int64_t row, int64_t kv_head, int64_t first, int64_t count, int64_t half,
                      Form form, Unit* u) {
  for (int64_t t = 0, in_page; t < count; t += in_page) {
    int64_t offset = (first + t) % a->page_size, page = a->page_table[row * a->max_pages + (first + t) / a->page_size];
    int64_t token = (max(0, min(page, a->num_pages - 1)) * a->halves + half) * a->page_size + offset;
    in_page = min(a->page_size - offset, count - t);
    for (int64_t i = 0; i < in_page; i++) {
      int64_t index = (token + i) * a->kv_heads + kv_head;
      if (has_scales(form)) u->scales[t + i] = a->scales[index];
      for (int64_t d = 0; d < a->depth; d += LANES)
        *(vector*)(u->keys + (t + i) * a->depth + d) = load(a->cache, index * a->depth + d, form);
    }
  }
  for (int64_t t = count; t % ROWS != 0; t++) memset(u->keys + t * a->depth, 0, a->depth * sizeof(float));
}

// out[r] (+)= the sum over k < count of numbers[r * row + k * step] times vectors[k], for ROWS rows r.
INLINE void multiply(const float* numbers, int64_t row, int64_t step, const float* vectors, int64_t count, float* out,
                     bool add) {
  for (int v = 0; v < VECTORS; v += COLUMNS) {
    vector sums[ROWS][COLUMNS];
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int c = 0; c < COLUMNS; c++)
        sums[r][c] = add ? ((vector*)(out + r * LANE_COUNT))[v + c] : (vector){0};
    for (int64_t k = 0; k < count; k++) {
      vector some[COLUMNS];
      UNROLL for (int c = 0; c < COLUMNS; c++) some[c] = ((const vector*)(vectors + k * LANE_COUNT))[v + c];
      UNROLL for (int r = 0; r < ROWS; r++) {
        vector number = numbers[r * row + k * step] - (vector){0};
        UNROLL for (int c = 0; c < COLUMNS; c++) sums[r][c] += number * some[c];
      }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int c = 0; c < COLUMNS; c++) ((vector*)(out + r * LANE_COUNT))[v + c] = sums[r][c];
  }
}

// Scores of the tile's `count` tokens, the first at position `first`, to weights. The sums before it fade.
INLINE void soften(const Attention* a, Unit* u, int64_t first, int64_t count, bool scaled) {
  UNROLL for (int v = 0; v < VECTORS; v++) {
    vector top = u->top[v], total = {0};
    for (int64_t t = 0; t < count; t++) {
      vector* score = (vector*)(u->tile + t * LANE_COUNT) + v;
      if (scaled) *score *= u->scales[t];
      if (a->soft_cap > 0)
        for (int i = 0; i < LANES; i++) (*score)[i] = tanhf((*score)[i] / a->soft_cap) * a->soft_cap;
      integers place = (int32_t)(first + t) - (integers){0}, seen = place <= u->position[v];
      if (a->window != 0) seen &= place >= u->oldest[v];
      *score = choose(seen, *score, NOTHING - (vector){0});
      top = larger(*score, top);
    }
    for (int64_t t = 0; t < count; t++) {
      vector* score = (vector*)(u->tile + t * LANE_COUNT) + v;
      integers seen = *score != NOTHING - (vector){0};
      *score = (vector)((integers)exponential(*score - top) & seen);
      total += *score;
    }
    vector fade = exponential(u->top[v] - top);
    u->total[v] = u->total[v] * fade + total;
    u->top[v] = top;
    for (int64_t d = 0; d < a->depth; d++) ((vector*)(u->values + d * LANE_COUNT))[v] *= fade;
  }
}

// The first position that a query at `position` sees.
INLINE int64_t oldest(const Attention* a, int64_t position) {
  if (a->window < 0) return position / -a->window * -a->window;
  return a->window > 0 ? max(0, position + 1 - a->window) : 0;
}

// The queries of a unit into lanes. A sink is a score without a value.
static void begin(const Attention* a, Unit* u, Block block, int64_t head, int64_t heads) {
  float top[LANE_COUNT], total[LANE_COUNT];
  int32_t position[LANE_COUNT], first[LANE_COUNT];
  memset(u->queries, 0, a->depth * LANE_COUNT * sizeof(float));
  memset(u->values, 0, a->depth * LANE_COUNT * sizeof(float));
  int64_t kv_len = a->kv_lens[block.row], q_len = a->q_lens[block.row];
  for (int64_t lane = 0; lane < LANE_COUNT; lane++) {
    int64_t token = block.first + lane / a->together, place = lane % a->together;
    bool live = lane < a->together * a->tokens && place < heads && token < q_len;
    float sink = live ? a->sinks[head + place] : -INFINITY;
    position[lane] = live ? (int32_t)(kv_len - q_len + token) : -1;
    first[lane] = live ? (int32_t)oldest(a, position[lane]) : 0;
    top[lane] = sink > NOTHING ? sink : NOTHING;
    total[lane] = sink > NOTHING ? 1 : 0;
    const float* q = a->q + ((a->starts[block.row] + token) * a->heads + head + place) * a->depth;
    for (int64_t d = 0; live && d < a->depth; d++) u->queries[d * LANE_COUNT + lane] = q[d];
  }
  memcpy(u->top, top, sizeof top);
  memcpy(u->total, total, sizeof total);
  memcpy(u->position, position, sizeof position);
  memcpy(u->oldest, first, sizeof first);
}

static void end(const Attention* a, const Unit* u, Block block, int64_t head) {
  const float* total = (const float*)u->total;
  const int32_t* position = (const int32_t*)u->position;
  for (int64_t lane = 0; lane < LANE_COUNT; lane++) {
    if (position[lane] < 0) continue;
    int64_t token = a->starts[block.row] + block.first + lane / a->together;
    float* out = a->out + (token * a->heads + head + lane % a->together) * a->depth;
    float share = total[lane] > 0 ? 1 / total[lane] : total[lane] == 0 ? 0 : NAN;
    for (int64_t d = 0; d < a->depth; d++) out[d] = u->values[d * LANE_COUNT + lane] * share;
  }
}

INLINE void attend(const Attention* a, Unit* u, int64_t index, Form form) {
  int64_t of_block = a->kv_heads * a->parts, kv_head = index % of_block / a->parts, part = index % a->parts;
  Block block = a->blocks[index / of_block];
  int64_t group = a->heads / a->kv_heads, heads = min(a->together, group - part * a->together);
  int64_t head = kv_head * group + part * a->together, before = a->kv_lens[block.row] - a->q_lens[block.row];
  int64_t last = min(min(a->kv_lens[block.row], a->max_pages * a->page_size), before + block.first + a->tokens);
  int64_t seen = oldest(a, before + block.first);
  begin(a, u, block, head, heads);
  for (int64_t first = seen, next; first < last; first = next) {  // pages before the window may be another row's
    next = min((first / TILE + 1) * TILE, last);
    int64_t count = next - first;
    read_tile(a, block.row, kv_head, first, count, 0, form, u);
    for (int64_t t = 0; t < count; t += ROWS)
      multiply(u->keys + t * a->depth, a->depth, 1, u->queries, a->depth, u->tile + t * LANE_COUNT, false);
    soften(a, u, first, count, has_scales(form));
    if (a->halves > 1) read_tile(a, block.row, kv_head, first, count, 1, form, u);
    for (int64_t t = 0; has_scales(form) && t < count; t++)
      UNROLL for (int v = 0; v < VECTORS; v++) ((vector*)(u->tile + t * LANE_COUNT))[v] *= u->scales[t];
    for (int64_t d = 0; d < a->depth; d += ROWS)
      multiply(u->keys + d, 1, a->depth, u->tile, count, u->values + d * LANE_COUNT, true);
  }
  end(a, u, block, head);
}

static void attend_units(void* job, int64_t first, int64_t last) {
  Attention* a = job;
  Unit unit;
  float* memory = scratch((2 * a->depth + TILE) * LANE_COUNT + TILE * a->depth);
  if (memory == NULL) {
    a->failed = true;
    return;
  }
  unit.queries = memory;
  unit.values = unit.queries + a->depth * LANE_COUNT;
  unit.tile = unit.values + a->depth * LANE_COUNT;
  unit.keys = unit.tile + TILE * LANE_COUNT;
  for (int64_t index = first; index < last; index++) switch (a->form) {
      case FLOAT32: attend(a, &unit, index, FLOAT32); break;
      case BFLOAT16: attend(a, &unit, index, BFLOAT16); break;
      case INT8: attend(a, &unit, index, INT8); break;
      case FP8: attend(a, &unit, index, FP8); break;
    }
  free(memory);
}

// Lists the blocks of the rows with at least two tokens: their number. blocks may be NULL.
static int64_t cut(const Attention* a, Block* blocks) {
  int64_t count = 0;
  for (int64_t row = 0; row < a->rows; row++)
    for (int64_t first = 0; a->q_lens[row] > 1 && first < a->q_lens[row]; first += a->tokens, count++)
      if (blocks != NULL) blocks[count] = (Block){(int32_t)row, (int32_t)first};
  return count;
}

// Arguments q, cache, page_table, starts, q_lens, kv_lens, sinks (-inf: none), window [1] (0: none, -c: chunks of c tokens), soft_cap
// [1] (0: none), and the scales of 8-bit pages. D is a multiple of 16. Tokens of no row, and of rows with one, get no result.
EXPORT XLA_FFI_Error* jaxserve_attend_prompts(XLA_FFI_CallFrame* frame) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer *q = argument(frame, 0), *cache = argument(frame, 1), *table = argument(frame, 2);
  Attention a = {
      .q = q->data,
      .cache = cache->data,
      .form = form_of(cache),
      .scales = has_scales(form_of(cache)) ? argument(frame, 9)->data : NULL,
      .page_table = table->data,
      .starts = argument(frame, 3)->data,
      .q_lens = argument(frame, 4)->data,
      .kv_lens = argument(frame, 5)->data,
      .sinks = argument(frame, 6)->data,
      .window = *(int32_t*)argument(frame, 7)->data,
      .soft_cap = *(float*)argument(frame, 8)->data,
      .out = result(frame, 0)->data,
      .rows = table->dims[0],
      .heads = q->dims[1],
      .depth = q->dims[2],
      .num_pages = cache->dims[0],
      .halves = cache->dims[1],
      .page_size = cache->dims[2],
      .kv_heads = cache->dims[3] / q->dims[2],
      .max_pages = table->dims[1],
  };
  int64_t group = a.heads / a.kv_heads;
  a.together = min(group, LANE_COUNT);
  a.parts = (group + a.together - 1) / a.together;
  a.tokens = LANE_COUNT / a.together;
  int64_t count = cut(&a, NULL);
  memset(a.out, 0, q->dims[0] * a.heads * a.depth * sizeof(float));
  if (count == 0) return NULL;
  if ((a.blocks = (Block*)scratch(count * (int64_t)sizeof(Block) / 4)) == NULL) return out_of_memory(frame);
  cut(&a, a.blocks);
  parallel_for(frame, count * a.kv_heads * a.parts, 1, attend_units, &a);
  free(a.blocks);
  return a.failed ? out_of_memory(frame) : NULL;
}
