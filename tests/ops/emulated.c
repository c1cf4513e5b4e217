// One call of a kernel, as XLA makes it, on one thread: for a processor that this machine only emulates.
//
// Reads a number of arrays, and of each its type, rank, dimensions and bytes; the last is the result, without bytes.
// What is no array's bytes is int64. Writes the result's bytes.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

enum { MOST_ARRAYS = 12, MOST_DIMS = 4 };

#define KERNELS(EACH)                                                                                      \
  EACH(jaxserve_matmul) EACH(jaxserve_matmul_few) EACH(jaxserve_matmul_grouped) EACH(jaxserve_matmul_grouped_few) \
  EACH(jaxserve_matmul_rounded) EACH(jaxserve_matmul_rounded_few) EACH(jaxserve_attend) EACH(jaxserve_attend_prompts)
#define DECLARE(NAME) XLA_FFI_Error* NAME(XLA_FFI_CallFrame* frame);
KERNELS(DECLARE)
int32_t jaxserve_rounds(void);

static void receive(void* to, size_t size) {
  if (fread(to, 1, size, stdin) != size) exit(2);
}

static int64_t receive_number(void) {
  int64_t number;
  receive(&number, sizeof number);
  return number;
}

static XLA_FFI_Error* no_error(XLA_FFI_Error_Create_Args* args) {
  fprintf(stderr, "%s\n", args->message);
  exit(3);
}

static XLA_FFI_Error* one_thread(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 1;
  return NULL;
}

static size_t receive_array(XLA_FFI_Buffer* array, int64_t* dims) {
  *array = (XLA_FFI_Buffer){.dims = dims};
  array->dtype = (XLA_FFI_DataType)receive_number();
  array->rank = receive_number();
  size_t size = array->dtype == XLA_FFI_DataType_F32 || array->dtype == XLA_FFI_DataType_S32 ? 4
                : array->dtype == XLA_FFI_DataType_BF16                                      ? 2
                                                                                             : 1;
  for (int64_t d = 0; d < array->rank; d++) size *= (size_t)(dims[d] = receive_number());
  array->data = aligned_alloc(64, size / 64 * 64 + 64);
  return size;
}

int main(int count, char** names) {
  XLA_FFI_Buffer arrays[MOST_ARRAYS];
  void* pointers[MOST_ARRAYS];
  int64_t dims[MOST_ARRAYS][MOST_DIMS], last;
  if (count == 1) return jaxserve_rounds();
  last = receive_number() - 1;
  for (int64_t i = 0; i <= last; i++) {
    size_t size = receive_array(&arrays[i], dims[i]);
    pointers[i] = &arrays[i];
    if (i < last) receive(arrays[i].data, size);
  }
  XLA_FFI_Api api = {.XLA_FFI_Error_Create = no_error, .XLA_FFI_ThreadPool_NumThreads = one_thread};
  XLA_FFI_CallFrame frame = {.api = &api, .args = {.size = last, .args = pointers},
                             .rets = {.size = 1, .rets = pointers + last}};
#define RUN(NAME) if (strcmp(names[1], #NAME) == 0) NAME(&frame);
  KERNELS(RUN)
  size_t floats = 1;
  for (int64_t d = 0; d < arrays[last].rank; d++) floats *= (size_t)dims[last][d];
  return fwrite(arrays[last].data, sizeof(float), floats, stdout) == floats ? 0 : 4;
}
