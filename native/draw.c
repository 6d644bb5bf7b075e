// Sampling of the next token from each row of logits.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common.h"

typedef struct {
  const float *logits;  // (V)
  uint64_t seed, position;
  float temperature;  // 0: greedy
} Draw;

// Return output `index` of the generator SplitMix64, like sampling.py's `splitmix64`.
INLINE uint64_t splitmix64(uint64_t state, uint64_t index) {
  uint64_t bits = state + (index + 1) * 0x9E3779B97F4A7C15;
  bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
  return bits ^ bits >> 31;
}

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

// Divide a weight by the exponential random number made from these bits.
INLINE double race_score(float weight, uint64_t bits) {
  return weight / -log(((bits >> 12) + 0.5) * 0x1p-52);
}

// Draw an id by weight in an exponential race: each id gets the score weight / -ln(u) with its own
// random number u, and the largest score wins. top_id: an id of the largest weight.
static int64_t exponential_race(int64_t V, const float *weights, uint64_t state, int64_t top_id) {
  enum { BLOCK = 256 };
  int64_t winner = top_id;
  double best = race_score(weights[top_id], splitmix64(state, top_id));
  for (int64_t start = 0; start < V; start += BLOCK) {
    int64_t n = V - start < BLOCK ? V - start : BLOCK;
    uint64_t bits[BLOCK];
    int32_t bound[BLOCK];  // a lower bound of 2**24 * (1 - u)
    for (int64_t i = 0; i < n; i++) bits[i] = splitmix64(state, start + i);
    for (int64_t i = 0; i < n; i++) bound[i] = 0xFFFFFF - (int32_t)(bits[i] >> 40);
    // -ln(u) >= 1 - u, so a token with best * (1 - u) > weight cannot win and needs no logarithm.
    // The factor is a margin for rounding.
    float factor = (float)best * 0x1p-24f * (1 - 1e-6f);
    int32_t any = 0;
    for (int64_t i = 0; i < n; i++) any |= bound[i] * factor < weights[start + i];
    for (int64_t i = 0; any && i < n; i++)
      if (bound[i] * factor < weights[start + i]) {
        double score = race_score(weights[start + i], bits[i]);
        if (score > best) {
          best = score;
          winner = start + i;
        }
      }
  }
  return winner;
}

// Sample the next token of one row. weights: scratch, (V).
static int64_t sample_row(int64_t V, const Draw *d, float *weights) {
  const float *logits = d->logits;
  int64_t top_id = argmax(V, logits);
  if (d->temperature == 0) return top_id;
  float max = logits[top_id];
  float temperature = d->temperature;
  for (int64_t i = 0; i < V; i++) {
    float x = (logits[i] - max) / temperature;
    weights[i] = x >= -87 ? exponential(x) : 0;  // 0 for NaN
  }
  return exponential_race(V, weights, splitmix64(d->seed, d->position), top_id);
}

// Sample the next token of each row into chosen, (rows). scratch: (threads, V).
void draw(int64_t rows, int64_t V, const Draw *jobs, int64_t *chosen, float *scratch, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t row = 0; row < rows; row++)
    chosen[row] = sample_row(V, jobs + row, scratch + omp_get_thread_num() * V);
}
