// AVX-VNNI's product for processors without it, and a count of its calls.
#include <immintrin.h>
#include <stdint.h>

__attribute__((weak)) int64_t dot_products;

// A macro, because the hash of a build has macros and not the text of this file.
#define DPBUSD                                                 \
  {                                                            \
    int32_t totals[8];                                         \
    uint8_t a[32];                                             \
    int8_t b[32];                                              \
    _mm256_storeu_si256((void *)totals, sums);                 \
    _mm256_storeu_si256((void *)a, bytes);                     \
    _mm256_storeu_si256((void *)b, weights);                   \
    for (int i = 0; i < 32; i++) totals[i / 4] += a[i] * b[i]; \
    dot_products++;                                            \
    return _mm256_loadu_si256((void *)totals);                 \
  }
static __attribute__((noinline, unused)) __m256i dpbusd(__m256i sums, __m256i bytes,
                                                        __m256i weights) DPBUSD
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 dpbusd
