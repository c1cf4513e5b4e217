// y [T, N] = x [T, K] times the weight of each row's group transposed, in float32: the experts of a mixture.
//
// The weights of all groups are one w [E * N, K]. The rows of a group are contiguous, in the order of the groups, and
// sizes [E] says how many each has. A group without rows costs nothing, and the weights of the others are read in place.
#include "weights.h"

#include <string.h>

// The weight of one group, of `rows` rows.
static Weight weight_of(Weight all, int64_t group, int64_t rows) {
  Weight w = all;
  w.rows = rows;
  w.values = place(&all, all.form, group * rows, 0);
  if (w.scales) w.scales += group * rows * w.per_row;
  if (w.powers) w.powers += group * rows * w.per_row;
  if (w.zeros) w.zeros += group * rows * w.per_row;
  return w;
}

// few: whether groups of at most FEW rows take `multiply_few`, which rounds in another way.
static XLA_FFI_Error* multiply_groups(XLA_FFI_CallFrame* frame, bool few) {
  if (answered_metadata(frame)) return NULL;
  XLA_FFI_Buffer *x = argument(frame, 0), *sizes = argument(frame, frame->args.size - 1), *y = result(frame, 0);
  Weight all = weight(frame, 1);
  int64_t tokens = x->dims[0], rows = y->dims[1], first = 0;
  float* packed = scratch(scratch_for(&all, tokens));
  if (packed == NULL) return out_of_memory(frame);
  for (int64_t group = 0; group < sizes->dims[0] && first < tokens; group++) {
    int64_t count = max(0, min(((int32_t*)sizes->data)[group], tokens - first));
    float *from = (float*)x->data + first * all.depth, *to = (float*)y->data + first * rows;
    Weight w = weight_of(all, group, rows);
    if (few && count > 0 && count <= FEW) multiply_few(frame, w, from, to, count);
    else if (count > 0) multiply_all(frame, w, from, to, count, packed);
    first += count;
  }
  memset((float*)y->data + first * rows, 0, (tokens - first) * rows * sizeof(float));
  free(packed);
  return NULL;
}

EXPORT XLA_FFI_Error* jaxserve_matmul_grouped(XLA_FFI_CallFrame* frame) { return multiply_groups(frame, false); }
EXPORT XLA_FFI_Error* jaxserve_matmul_grouped_few(XLA_FFI_CallFrame* frame) { return multiply_groups(frame, true); }
