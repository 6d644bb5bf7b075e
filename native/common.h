// Definitions shared by gpt.c and draw.c.
#ifndef COMMON_H
#define COMMON_H
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef _OPENMP
#include <omp.h>
#else
INLINE int omp_get_thread_num(void) { return 0; }
INLINE int omp_get_num_threads(void) { return 1; }
#endif

// Return exp(x), with x clamped to -87..88. NaN stays NaN. As in Cephes' expf, the result is 2**n
// times a polynomial in r = x - n ln 2, where n is x / ln 2 rounded to an integer. No branches, so
// the compiler can vectorise it.
INLINE float exponential(float x) {
  x = x < -87 ? -87 : x;
  x = x > 88 ? 88 : x;
  float rounded = x * 1.44269504f + 12582912;  // plus 1.5 * 2**23: the low bits hold n
  float n = rounded - 12582912;
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1;
  uint32_t bits;
  memcpy(&bits, &rounded, 4);
  bits = (bits + 127) << 23;  // n as the exponent of a float
  float power;
  memcpy(&power, &bits, 4);
  return p * power;
}

#endif
