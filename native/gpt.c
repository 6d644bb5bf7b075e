// Products with int8 weights on a CPU.
//
// A parallel region runs on all threads. Loops with `#pragma omp for` are shared out, and end where all threads have
// arrived. In comments T is the number of tokens.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {       // y = x W^T + bias
  const void *weight;  // (out, in), int8
  const float *scale;  // (out)
  const float *bias;   // (out) or NULL
  int64_t out, in;
} Linear;

// int8 ----------------------------------------------------------------------------------------------------------------

#ifdef _OPENMP
#define THREADS ""
#else
#define THREADS ", one thread"
#endif

// Each instruction set has its product of STEP int16 and int8 numbers, added to int32 sums that never overflow.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
const char kernel[64] = "AVX-512 VNNI" THREADS;
enum { STEP = 32 };
typedef __m512i Sums;
INLINE Sums add_products(Sums sums, const int16_t *x, const int8_t *w) {
  return _mm512_dpwssd_epi32(sums, _mm512_loadu_si512(x), _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)w)));
}
#elif defined(__AVX2__)
const char kernel[64] = "AVX2" THREADS;
enum { STEP = 16 };
typedef __m256i Sums;
INLINE Sums add_products(Sums sums, const int16_t *x, const int8_t *w) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)w));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_loadu_si256((const void *)x), wide));
}
#elif defined(__ARM_NEON)
const char kernel[64] = "NEON" THREADS;
enum { STEP = 8 };
typedef int32x4_t Sums;
INLINE Sums add_products(Sums sums, const int16_t *x, const int8_t *w) {
  int16x8_t a = vld1q_s16(x), b = vmovl_s8(vld1_s8(w));
  return vmlal_s16(vmlal_s16(sums, vget_low_s16(a), vget_low_s16(b)), vget_high_s16(a), vget_high_s16(b));
}
#else
const char kernel[64] = "plain C" THREADS;
enum { STEP = 1 };
typedef struct { int32_t sum; } Sums;
INLINE Sums add_products(Sums sums, const int16_t *x, const int8_t *w) {
  sums.sum += *x * *w;
  return sums;
}
#endif

// Output o of T tokens, from their int8 values (T, in) and scales (T).
INLINE void int8_output(const int T, const Linear *l, int64_t o, const int16_t *x, const float *x_scale, float y[T]) {
  enum { MOST = 4, LANES = MOST * sizeof(Sums) / 4 };
  const int sums_each = T == 1 ? MOST : T < 4 ? 2 : 1;
  const int8_t *w = (const int8_t *)l->weight + o * l->in;
  int64_t n = l->in, whole = n - n % (sums_each * STEP);
  Sums sums[T][MOST];
  memset(sums, 0, sizeof sums);
  for (int64_t i = 0; i < whole; i += sums_each * STEP)
    for (int s = 0; s < sums_each; s++)
      for (int t = 0; t < T; t++)
        sums[t][s] = add_products(sums[t][s], x + t * n + i + s * STEP, w + i + s * STEP);
  for (int t = 0; t < T; t++) {
    int32_t lanes[LANES], sum = 0;
    memcpy(lanes, sums[t], sizeof lanes);
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    for (int64_t i = whole; i < n; i++) sum += x[t * n + i] * w[i];
    y[t] = (float)sum * (x_scale[t] * l->scale[o]);
  }
}

// A row of n floats to whole numbers from -127 to 127 and a scale, with the roundings of int8.py's quantize.
static void quantize(int64_t n, const float *x, int16_t *values, float *scale) {
  int32_t largest = 0;  // of the bits of |x|, whose order is that of the numbers, with NaN above infinity
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= INT32_MAX;
    largest = bits > largest ? bits : largest;
  }
  float max;
  memcpy(&max, &largest, 4);
  *scale = max / 127 < FLT_MIN ? FLT_MIN : max / 127;
  if (*scale <= FLT_MAX)
    for (int64_t i = 0; i < n; i++) values[i] = (int16_t)rintf(x[i] / *scale);
  else
    memset(values, 0, n * sizeof *values);  // 0 times infinity or NaN is NaN, so the outputs show it
}

INLINE void output(const int T, const Linear *l, int64_t o, const int16_t *values, const float *scale, float *y) {
  float sums[T];
  int8_output(T, l, o, values, scale, sums);
  for (int t = 0; t < T; t++) y[t * l->out + o] = l->bias ? sums[t] + l->bias[o] : sums[t];
}

// y: (T, out), the outputs for x: (T, in), which is rounded into values and scale.
void int8_linear(const Linear *l, int64_t T, const float *x, int16_t *values, float *scale, float *y, int threads) {
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int64_t t = 0; t < T; t++) quantize(l->in, x + t * l->in, values + t * l->in, scale + t);
#pragma omp for schedule(static)
    for (int64_t o = 0; o < l->out; o++)
      for (int64_t t = 0; t < T; t += 8) {
#define CASE(n) case n: output(n, l, o, values + t * l->in, scale + t, y + t * l->out); break;
        switch (T - t < 8 ? T - t : 8) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
      }
  }
}
