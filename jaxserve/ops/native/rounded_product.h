// What matmul_rounded.c shares with the headers of its tiles, of which there is one for each instruction set.
#pragma once
#include "rounded.h"

typedef struct {
  Weight w;
  const float* x;
  uint32_t* packed;      // panels [words of K, tokens of the panel]
  float* scales;         // of x: panels [groups, tokens of the panel]
  int32_t* sums;         // of x's bytes in a group, likewise
  float* y;
  int64_t tokens, words, group, groups;  // words of a row; numbers of x in a group and groups of a row
  _Atomic bool failed;   // for want of memory
} Product;
