// What every kernel here shares: the shape of an XLA custom call, and a loop over XLA's own threads.
// The interface is XLA's C API for foreign functions, xla/ffi/api/c_api.h of the jaxlib that is installed.
#pragma once

#if defined(__aarch64__) && !defined(__clang__)
#pragma GCC optimize("no-schedule-insns")  // GCC would move a tile's loads so far ahead that sums leave their registers
#endif

#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define EXPORT __attribute__((visibility("default")))

// XLA asks a handler first which version it was built for: true when this call was that question. The type of the
// extension has one name up to jaxlib 0.10 and another from 0.11 on.
INLINE bool answered_metadata(XLA_FFI_CallFrame* frame) {
  __typeof__(frame->extension_start) extension = frame->extension_start;
  if (extension == NULL || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* metadata = ((XLA_FFI_Metadata_Extension*)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return true;
}

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE XLA_FFI_Buffer* argument(XLA_FFI_CallFrame* frame, int index) { return frame->args.args[index]; }
INLINE XLA_FFI_Buffer* result(XLA_FFI_CallFrame* frame, int index) { return frame->rets.rets[index]; }

static inline XLA_FFI_Error* out_of_memory(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, "no memory for a kernel's scratch",
                                    XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Whether a call of the API succeeded.
static inline bool succeeded(XLA_FFI_CallFrame* frame, XLA_FFI_Error* error) {
  if (error == NULL) return true;
  XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&args);
  return false;
}

// Rounded up to whole cache lines, so that the rows of a scratch array stay aligned. NULL without memory.
INLINE float* scratch(int64_t floats) { return aligned_alloc(64, (size_t)((floats * 4 + 63) / 64 * 64)); }

typedef void Work(void* job, int64_t first, int64_t last);

// One loop, shared by the calling thread and its helpers. The last to leave frees it: a helper may start late, when
// the loop has long been finished by the others.
typedef struct {
  _Atomic int64_t next, done;
  _Atomic int64_t users;
  int64_t total, grain;
  Work* work;
  void* job;
} Loop;

static inline void run(Loop* loop) {
  for (;;) {
    int64_t first = atomic_fetch_add(&loop->next, loop->grain);
    if (first >= loop->total) return;
    int64_t last = first + loop->grain < loop->total ? first + loop->grain : loop->total;
    loop->work(loop->job, first, last);
    atomic_fetch_add(&loop->done, last - first);
  }
}

static inline void leave(Loop* loop) {
  if (atomic_fetch_sub(&loop->users, 1) == 1) free(loop);
}

static inline void help(void* data) {
  run(data);
  leave(data);
}

INLINE int64_t num_threads(XLA_FFI_CallFrame* frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &threads};
  return succeeded(frame, frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) ? threads : 1;
}

// How many of `rows` make a piece: `pieces` for each thread, but none so small that handing it over would cost more than
// it does, 3 us or about 16,384 numbers read. `numbers`: what a row reads.
INLINE int64_t rows_in_piece(XLA_FFI_CallFrame* frame, int64_t rows, int64_t pieces, int64_t numbers) {
  int64_t share = rows / (num_threads(frame) * pieces), least = 16384 / (numbers > 0 ? numbers : 1);
  return 1 + (share > least ? share : least);
}

// work(job, first, last) for pieces of `grain` of [0, total), on all of XLA's threads. The calling thread takes pieces
// too, and would take them all if no other came.
static inline void parallel_for(XLA_FFI_CallFrame* frame, int64_t total, int64_t grain, Work* work, void* job) {
  int64_t pieces = (total + grain - 1) / grain, threads = num_threads(frame);
  if (threads > pieces) threads = pieces;
  Loop* loop = threads > 1 ? malloc(sizeof *loop) : NULL;
  if (loop == NULL) {
    work(job, 0, total);
    return;
  }
  *loop = (Loop){.users = threads, .total = total, .grain = grain, .work = work, .job = job};
  for (int64_t helper = 1; helper < threads; helper++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help, loop};
    if (!succeeded(frame, frame->api->XLA_FFI_ThreadPool_Schedule(&args))) leave(loop);
  }
  run(loop);
  // The others are within their last piece: some microseconds, unless the system took their core away.
  for (int turns = 0; atomic_load(&loop->done) < total; turns++)
    if (turns > 4096) sched_yield();
  leave(loop);
}
