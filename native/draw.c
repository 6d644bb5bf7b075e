// Sampling of the next token from each row of logits.
//
// Weights are summed as integers, so that neither the vector width nor the number of threads
// changes a draw.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common.h"

typedef struct {
  const float *logits;     // (V)
  const uint8_t *token_mask;  // (V), 0: banned token; NULL: all allowed
  uint64_t seed, position;
  int64_t top_k;              // 0: off
  float temperature, top_p;  // temperature 0: greedy
  float min_p_threshold;     // lowest x that min-p keeps; -infinity: off
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

// Convert a weight to an integer, because integer sums do not depend on their order.
INLINE int32_t fixed_point(float weight) { return (int32_t)(weight * 0x1p30f + 0.5f); }

// Return the bits of |x|, which sort like |x|.
INLINE uint32_t magnitude_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits & INT32_MAX;
}

// Keep the weights of the k largest x and of ties with the k-th, and zero all others (top-k). A
// binary search finds the magnitude that separates them. x: 0 or below.
static void keep_top_k(int64_t V, int64_t k, const float *x, float *weights) {
  // low..high contains the smallest magnitude that at least k numbers do not exceed.
  uint32_t low = 0, high = 0x7f800000;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    int32_t count = 0;
    for (int64_t i = 0; i < V; i++) count += magnitude_bits(x[i]) <= middle;
    if (count < k)
      low = middle + 1;
    else
      high = middle;
    if (count == k) break;  // no tie: `middle` separates them
  }
  for (int64_t i = 0; i < V; i++) weights[i] = magnitude_bits(x[i]) <= high ? weights[i] : 0;
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

// Zero the weights of a token and all after it in the order of top-p: larger x first, ties by lower
// id. Returns the sum of the remaining weights.
static int64_t zero_tail(int64_t V, int64_t token, const float *x, float *weights) {
  int64_t sum = 0;
  float value = x[token];
  for (int64_t i = 0; i < token; i++) {
    weights[i] = x[i] >= value ? weights[i] : 0;
    sum += fixed_point(weights[i]);
  }
  for (int64_t i = token; i < V; i++) {
    weights[i] = x[i] > value ? weights[i] : 0;
    sum += fixed_point(weights[i]);
  }
  return sum;
}

// Sample the next token of one row. scratch: (2, V).
static int64_t sample_row(int64_t V, const Draw *d, float *scratch) {
  const float *logits = d->logits;
  if (d->token_mask) {
    for (int64_t i = 0; i < V; i++) scratch[i] = d->token_mask[i] ? logits[i] : -INFINITY;
    logits = scratch;
  }
  int64_t top_id = argmax(V, logits);
  if (d->temperature == 0) return top_id;
  float max = logits[top_id];
  float temperature = d->temperature;
  float *x = scratch;
  float *weights = scratch + V;
  // Min-p: a token with x below `min_x` cannot win, but top-p's total includes its weight.
  float min_x = d->min_p_threshold > -87 ? d->min_p_threshold : -87;
  float cutoff = d->top_p < 1 ? -87 : min_x;
  for (int64_t i = 0; i < V; i++) {
    x[i] = (logits[i] - max) / temperature;
    weights[i] = x[i] >= cutoff ? exponential(x[i]) : 0;  // 0 for NaN
  }
  if (d->top_k && d->top_k < V) keep_top_k(V, d->top_k, x, weights);
  int64_t total = 0;
  if (d->top_p < 1) {
    for (int64_t i = 0; i < V; i++) total += fixed_point(weights[i]);
    for (int64_t i = 0; min_x > -87 && i < V; i++) weights[i] = x[i] >= min_x ? weights[i] : 0;
  }
  uint64_t state = splitmix64(d->seed, d->position);
  // Top-p without sorting: a winner is in the nucleus if the mass before it is below p. Otherwise
  // neither it nor any token after it is, and the race is run again without them, on average
  // 1 + ln(1 / p) times in total.
  for (;;) {
    int64_t winner = exponential_race(V, weights, state, top_id);
    if (d->top_p >= 1) return winner;
    int64_t before = zero_tail(V, winner, x, weights);
    if (before == 0 || (float)((double)before / total) < d->top_p) return winner;
  }
}

// Sample the next token of each row into chosen, (rows). scratch: (threads, 2, V).
void draw(int64_t rows, int64_t V, const Draw *jobs, int64_t *chosen, float *scratch, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t row = 0; row < rows; row++)
    chosen[row] = sample_row(V, jobs + row, scratch + omp_get_thread_num() * 2 * V);
}
