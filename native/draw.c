// The most likely token of each row of logits.
#include <stdint.h>
#include <string.h>

#include "common.h"

// Return the bits of a float as an integer of the same order, with NaN at the ends and -0 as 0.
INLINE int32_t ordered_bits(float x) {
  int32_t bits;
  x += 0.0f;
  memcpy(&bits, &x, 4);
  return bits < 0 ? bits ^ INT32_MAX : bits;
}

// Return the lowest id with the largest logit.
static int64_t argmax(int64_t V, const float *logits) {
  enum { BLOCK = 256 };
  int32_t max = INT32_MIN;
  int64_t block = 0;
  for (int64_t start = 0; start < V; start += BLOCK) {
    int64_t n = V - start < BLOCK ? V - start : BLOCK;
    int32_t block_max = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
      int32_t value = ordered_bits(logits[start + i]);
      block_max = value > block_max ? value : block_max;
    }
    if (block_max > max) {
      max = block_max;
      block = start;
    }
  }
  while (ordered_bits(logits[block]) < max) block++;
  return block;
}

// Find the most likely token of each row and store it in chosen, (rows). logits: (rows, V).
void draw(int64_t rows, int64_t V, const float *logits, int64_t *chosen, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t row = 0; row < rows; row++) chosen[row] = argmax(V, logits + row * V);
}
