// The most likely token of each row of logits.
#include <stdint.h>
#include <string.h>

#include "common.h"

// The bits of a float as an integer that sorts like it, with NaN at the ends; -0 is 0.
INLINE int32_t ordered(float x) {
  int32_t bits;
  x += 0.0f;
  memcpy(&bits, &x, 4);
  return bits < 0 ? bits ^ INT32_MAX : bits;
}

// The argmax: the lowest id with the largest logit.
static int64_t largest(int64_t V, const float *logits) {
  enum { BLOCK = 256 };
  int32_t max = INT32_MIN;
  int64_t block = 0;
  for (int64_t start = 0; start < V; start += BLOCK) {
    int64_t n = V - start < BLOCK ? V - start : BLOCK;
    int32_t most = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
      int32_t value = ordered(logits[start + i]);
      most = value > most ? value : most;
    }
    if (most > max) {
      max = most;
      block = start;
    }
  }
  while (ordered(logits[block]) < max) block++;
  return block;
}

// The most likely token of each row: chosen, (rows). logits: (rows, V).
void draw(int64_t rows, int64_t V, const float *logits, int64_t *chosen, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t row = 0; row < rows; row++) chosen[row] = largest(V, logits + row * V);
}
