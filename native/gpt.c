// The forward pass of GPT-2, Llama and related models on a CPU, with 32-, 16-, 8- or 4-bit weights.
//
// All threads execute each parallel region. `#pragma omp for` divides a loop among them and ends
// with a barrier, unless it says `nowait`. Every thread executes the remaining code, for all tokens
// or for its `thread_range` of them.
// Sizes: T tokens, C channels (n_embd), H query heads, K KV heads, D channels per head (head_dim).
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common.h"

#ifdef _OPENMP
#define THREADS ""
#else
#define THREADS ", one thread"
#endif

// instruction sets --------------------------------------------------------------------------------
//
// Vectors hold WIDTH floats or int32 sums. MULADD is a * b + c in float32. FLOAT_TILE tokens keep
// two vectors of sums each in registers, of which AVX-512 has 32 and AVX2 16. dot_add_int8 adds to
// each int32 sum the dot product of GROUP Quants, packed into the 4 bytes of `values`, and GROUP
// int8 weights. A Quant is an activation rounded to an integer, plus ZERO_POINT, because VNNI takes
// unsigned bytes. FROM_FLOAT16 converts WIDTH float16 values to float32. It is defined where the
// CPU has an instruction for it.

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
enum { WIDTH = 16, FLOAT_TILE = 12 };
#define LANES LANES_16
typedef __m512i Sums;
#define SPLAT(x) _mm512_set1_epi32(x)
#define MULADD(a, b, c) (Vector)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c))
#define FROM_FLOAT16(h) (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)(h)))
#ifdef __AVX512VNNI__
const char kernel[64] = "AVX-512 VNNI" THREADS;
enum { GROUP = 4, ZERO_POINT = 128 };
typedef uint8_t Quant;
#define DPBUSD(sums, bytes, weights) _mm512_dpbusd_epi32(sums, bytes, weights)
INLINE Sums dot_add_int8(Sums sums, int32_t values, const int8_t *w) {
  return DPBUSD(sums, SPLAT(values), _mm512_loadu_si512(w));
}
#else
const char kernel[64] = "AVX-512" THREADS;
enum { GROUP = 4, ZERO_POINT = 0 };
typedef int8_t Quant;
// maddubs sums two products |w| * (x with w's sign), at most 2 * 128 * 127, which fits in 16 bits.
INLINE Sums dot_add_int8(Sums sums, int32_t values, const int8_t *w) {
  __m512i x4 = SPLAT(values), w4 = _mm512_loadu_si512(w);
  __m512i signs = _mm512_mask_sub_epi8(x4, _mm512_movepi8_mask(w4), _mm512_setzero_si512(), x4);
  __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w4), signs);
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { WIDTH = 8, FLOAT_TILE = 6 };
#define LANES LANES_8
typedef __m256i Sums;
#define SPLAT(x) _mm256_set1_epi32(x)
#define MULADD(a, b, c) (Vector)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c))
#ifdef __F16C__
#define FROM_FLOAT16(h) (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const void *)(h)))
#endif
#ifdef __AVXVNNI__
const char kernel[64] = "AVX-VNNI" THREADS;
enum { GROUP = 4, ZERO_POINT = 128 };
typedef uint8_t Quant;
#define DPBUSD(sums, bytes, weights) _mm256_dpbusd_avx_epi32(sums, bytes, weights)
INLINE Sums dot_add_int8(Sums sums, int32_t values, const int8_t *w) {
  return DPBUSD(sums, SPLAT(values), _mm256_loadu_si256((const void *)w));
}
#else
const char kernel[64] = "AVX2" THREADS;
enum { GROUP = 4, ZERO_POINT = 0 };
typedef int8_t Quant;
// As with AVX-512.
INLINE Sums dot_add_int8(Sums sums, int32_t values, const int8_t *w) {
  __m256i w4 = _mm256_loadu_si256((const void *)w);
  __m256i signs = _mm256_sign_epi8(SPLAT(values), w4);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w4), signs);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
const char kernel[64] = "NEON" THREADS;
enum { WIDTH = 4, FLOAT_TILE = 6, GROUP = 4, ZERO_POINT = 0 };
#define LANES LANES_4
typedef int32x4_t Sums;
typedef int8_t Quant;
#define MULADD(a, b, c) (Vector)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b))
#define FROM_FLOAT16(h) (Vector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h)))
INLINE Sums dot_add_int8(Sums sums, int32_t values, const int8_t *w) {
  return vdotq_s32(sums, vreinterpretq_s8_s32(vdupq_n_s32(values)), vld1q_s8(w));
}
#elif defined(__wasm_simd128__)
#include <wasm_simd128.h>
const char kernel[64] = "WebAssembly" THREADS;
enum { WIDTH = 4, FLOAT_TILE = 6, GROUP = 2, ZERO_POINT = 0 };
#define LANES LANES_4
typedef v128_t Sums;
typedef int16_t Quant;
#define MULADD(a, b, c) ((a) * (b) + (c))  // not fused: it rounds twice
INLINE Sums dot_add_int8(Sums sums, int32_t values, const int8_t *w) {
  v128_t wide = wasm_i16x8_load8x8(w);
  return wasm_i32x4_add(sums, wasm_i32x4_dot_i16x8(wasm_i32x4_splat(values), wide));
}
#else
const char kernel[64] = "plain C" THREADS;
enum { WIDTH = 4, FLOAT_TILE = 6, GROUP = 2, ZERO_POINT = 0 };
#define LANES LANES_4
typedef int32_t Sums __attribute__((vector_size(16)));
typedef int16_t Quant;
#define MULADD(a, b, c) ((a) * (b) + (c))  // not fused: it rounds twice
INLINE Sums dot_add_int8(Sums sums, int32_t values, const int8_t *w) {
  for (int lane = 0; lane < WIDTH; lane++)
    sums[lane] += (int16_t)values * w[2 * lane] + (values >> 16) * w[2 * lane + 1];
  return sums;
}
#endif

typedef float Vector __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef float Float4 __attribute__((vector_size(16)));
typedef uint32_t UintVector __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t HalfVector __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
#define LOAD(p) (*(const Vector *)(p))
#define WIDEN(h) __builtin_convertvector(*(const HalfVector *)(h), UintVector)

enum { FLOAT32, FLOAT16, BFLOAT16, INT8, Q8, Q4 };  // quantisation types of weights and caches

// Load WIDTH weights as floats, starting at index i. Both 16-bit types convert to float32 exactly.
INLINE Vector load_weights(const int quant_type, const void *w, int64_t i) {
  const uint16_t *h = (const uint16_t *)w + i;
  if (quant_type == FLOAT32) return LOAD((const float *)w + i);
  if (quant_type == BFLOAT16) return (Vector)(WIDEN(h) << 16);  // a float's upper half
#ifdef FROM_FLOAT16
  return FROM_FLOAT16(h);
#else
  // The multiplication adds 112 to the exponent, the difference of the two biases. It handles
  // subnormals too. `special` sets all exponent bits for infinity and NaN.
  UintVector bits = WIDEN(h), magnitude = (bits & 0x7fff) << 13;
  UintVector special = (UintVector)(magnitude >= 0x7c00 << 13) & 0x7f800000;
  return (Vector)((UintVector)((Vector)magnitude * 0x1p112f) | special | (bits & 0x8000) << 16);
#endif
}

// Take every second lane of a and b, starting at lane i, 0 or 1.
#define LANES_4(i) i, i + 2, i + 4, i + 6
#define LANES_8(i) LANES_4(i), LANES_4(i + 8)
#define LANES_16(i) LANES_8(i), LANES_8(i + 16)
#ifdef __clang__
#define DEINTERLEAVE(a, b, i) __builtin_shufflevector(a, b, LANES(i))
#define SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Lanes __attribute__((vector_size(4 * WIDTH)));
#define DEINTERLEAVE(a, b, i) __builtin_shuffle(a, b, (Lanes){LANES(i)})
typedef int32_t Lanes4 __attribute__((vector_size(16)));
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (Lanes4){__VA_ARGS__})
#endif

#include "blocks.h"

// products ----------------------------------------------------------------------------------------
//
// A weight (out, in) is packed into panels of PANEL outputs. A panel holds the weights of its
// outputs for the first input (or GROUP inputs), then for the next, so one vector load reads the
// weights of adjacent outputs. Each tile of tokens reads the panel once and keeps its sums in
// registers. Products are added in the order of the inputs, whatever the number of tokens, so a
// token's outputs do not depend on its batch.

enum { VECTORS = 2, PANEL = VECTORS * WIDTH, INT_TILE = 6, BLOCK = 32 };
enum { CACHE_LINE = 64, PREFETCH_DISTANCE = 8192 };  // bytes
const int panel_width = PANEL, int8_group = GROUP, activation_zero_point = ZERO_POINT;

// A LoRA adapter's weights for one layer: b^T (a x) is added to its outputs.
typedef struct {
  const float *a, *b;  // (rank, in), (rank, out)
  int64_t rank;        // 0 if the adapter does not change this layer
} Adapter;

typedef struct {
  const void *weight;            // the full panels
  const void *tail_panel;        // a panel for the remaining outputs, padded with zeros
  const void *scale;             // (out) with INT8, (panels, blocks, PANEL) with blocks, or NULL
  const void *minimum;           // (panels, blocks, PANEL), or NULL
  const uint32_t *compensation;  // (out), added to int8 sums modulo 2**32 to undo ZERO_POINT
  const float *bias;             // (out), or NULL
  int64_t out, in;
  int64_t row_stride;  // of y, larger than `out` if several layers write side by side
  int64_t quant_type;
  int64_t scale_type;       // quant_type of `scale` and `minimum` with blocks
  const Adapter *adapters;  // all adapters of the model, or NULL
} Linear;

// A quantised block of BLOCK inputs.
typedef struct {
  float scale;
  int32_t sum;  // of the values
  int8_t values[BLOCK];
} Q8Block;

// The input of a layer, (T, in). INT8 weights use `values` and a scale per token. Q8 and Q4 weights
// use `blocks`. Float weights use x.
typedef struct {
  const float *x;
  union {
    Quant *values;    // (T, groups, GROUP)
    Q8Block *blocks;  // (T, blocks)
  };
  float *scale;    // (T)
  float *rotated;  // (in), each thread's scratch for one token's rotated input
} Input;

static int64_t num_blocks(const Linear *l) { return (l->in + BLOCK - 1) / BLOCK; }

static int64_t num_groups(const Linear *l) {
  if (l->quant_type == Q4) return num_blocks(l) * (BLOCK / 8);
  if (l->quant_type == Q8) return num_blocks(l) * (BLOCK / 4);
  return l->quant_type == INT8 ? (l->in + GROUP - 1) / GROUP : l->in;
}

INLINE Input input_at(const Linear *l, Input in, int64_t t) {
  Input token = {in.x + t * l->in, {in.values}, in.scale + t, in.rotated};
  if (l->quant_type == INT8)
    token.values += t * num_groups(l) * GROUP;
  else
    token.blocks += t * num_blocks(l);
  return token;
}

// Return the panel of output o.
static const void *panel_at(const Linear *l, int64_t o) {
  int64_t full = l->out - l->out % PANEL;
  const int bytes[] = {4, 2, 2, GROUP, 4, 4};  // by quant_type
  int64_t size = PANEL * num_groups(l) * bytes[l->quant_type];
  return o < full ? (const char *)l->weight + o / PANEL * size : l->tail_panel;
}

// Fetch weights that are read PREFETCH_DISTANCE bytes after w. The processor's own prefetcher stops
// at the end of a page of 4 kB.
INLINE void prefetch(const void *w, const int bytes) {
  for (int at = 0; at < bytes; at += CACHE_LINE)
    __builtin_prefetch((const char *)w + PREFETCH_DISTANCE + at);
}

// Multiply T tokens by a panel of float weights. x: (T, in). Each block of BLOCK inputs has its own
// sum, because short sums have smaller rounding errors. fetch: whether to prefetch weights.
INLINE void gemm_float(const int T, const int quant_type, const int fetch, int64_t in,
                       const void *w, const float *x, float y[T][PANEL]) {
  const int row_bytes = PANEL * (quant_type == FLOAT32 ? 4 : 2);
  memset(y, 0, T * sizeof *y);
  for (int64_t start = 0; start < in; start += BLOCK) {
    int64_t end = start + BLOCK < in ? start + BLOCK : in;
    Vector sums[T][VECTORS];
    memset(sums, 0, sizeof sums);
    for (int64_t i = start; i < end; i++) {
      Vector wv[VECTORS];
      if (fetch) prefetch((const char *)w + i * row_bytes, row_bytes);
      for (int v = 0; v < VECTORS; v++) wv[v] = load_weights(quant_type, w, i * PANEL + v * WIDTH);
      for (int t = 0; t < T; t++)
        for (int v = 0; v < VECTORS; v++)
          sums[t][v] = MULADD(x[t * in + i] - (Vector){0}, wv[v], sums[t][v]);  // - {0}: broadcast
    }
    for (int t = 0; t < T; t++)
      for (int v = 0; v < VECTORS; v++) *(Vector *)(y[t] + v * WIDTH) += sums[t][v];
  }
}

// Multiply T tokens by a panel of int8 weights. The sums are exact. x: (T, groups, GROUP).
INLINE void gemm_int8(const int T, const int fetch, int64_t groups, const int8_t *w, const Quant *x,
                      Sums sums[T][VECTORS]) {
  for (int64_t i = 0; i < groups; i++, w += PANEL * GROUP) {
    if (fetch) prefetch(w, PANEL * GROUP);
    for (int t = 0; t < T; t++) {
      int32_t x4;
      memcpy(&x4, x + (t * groups + i) * GROUP, 4);
      for (int v = 0; v < VECTORS; v++)
        sums[t][v] = dot_add_int8(sums[t][v], x4, w + v * WIDTH * GROUP);
    }
  }
}

// Multiply T tokens by a panel of Q8 or Q4 weights. Sums within a block are exact. x: (T, blocks).
INLINE void gemm_q(const int T, const int quant_type, const int fetch, const Linear *l, int64_t o,
                   const Q8Block *x, float y[T][PANEL]) {
  int64_t count = num_blocks(l);
  int64_t scale_at = o / PANEL * count * PANEL;  // index into scales and minima
  const ByteVector *w = panel_at(l, o);
  const int zero_point = quant_type == Q8 ? WEIGHT_ZERO_POINT : l->minimum ? 0 : 8;  // of weights
  Vector totals[T][VECTORS];
  memset(totals, 0, sizeof totals);
  for (int64_t b = 0; b < count; b++, scale_at += PANEL) {
    Sums sums[T][VECTORS];
    memset(sums, 0, sizeof sums);
    for (int i = 0; i < (quant_type == Q8 ? BLOCK : BLOCK / 2); i += 4, w += VECTORS) {
      if (fetch) prefetch(w, VECTORS * sizeof *w);
      for (int t = 0; t < T; t++) {
        const int8_t *values = x[t * count + b].values + i;
        int32_t low, high;  // half a block apart
        memcpy(&low, values, 4);
        if (quant_type == Q4) memcpy(&high, values + BLOCK / 2, 4);
        for (int v = 0; v < VECTORS; v++)
          if (quant_type == Q8) {
            sums[t][v] = dot_add_q8(sums[t][v], low, w[v]);
          } else {
            sums[t][v] = dot_add_q4(sums[t][v], low, w[v] & 15);
            sums[t][v] = dot_add_q4(sums[t][v], high, w[v] >> 4);
          }
      }
    }
    for (int v = 0; v < VECTORS; v++) {
      Vector scale = load_weights(l->scale_type, l->scale, scale_at + v * WIDTH);
      for (int t = 0; t < T; t++) {
        const Q8Block *block = x + t * count + b;
        Sums products = quant_type == Q8 ? sums[t][v] : widen_q4_sums(sums[t][v]);
        IntVector dots = (IntVector)products - zero_point * block->sum;
        totals[t][v] += __builtin_convertvector(dots, Vector) * (scale * block->scale);
      }
      if (l->minimum) {
        Vector minimum = load_weights(l->scale_type, l->minimum, scale_at + v * WIDTH);
        for (int t = 0; t < T; t++) {
          const Q8Block *block = x + t * count + b;
          totals[t][v] += minimum * (block->scale * block->sum);
        }
      }
    }
  }
  memcpy(y, totals, sizeof totals);
}

// Write outputs o to o + PANEL - 1 of T tokens to y, (T, row_stride), or add them to y with `add`.
INLINE void panel_gemm(const int T, const int fetch, const Linear *l, int64_t o, Input in, float *y,
                       int add) {
  int64_t count = l->out - o < PANEL ? l->out - o : PANEL;
  float dots[T][PANEL];
  if (l->quant_type == INT8) {
    Sums sums[T][VECTORS];
    uint32_t acc[T][PANEL];
    const float *scale = l->scale;
    memset(sums, 0, sizeof sums);
    gemm_int8(T, fetch, num_groups(l), panel_at(l, o), in.values, sums);
    memcpy(acc, sums, sizeof acc);
    for (int t = 0; t < T; t++)
      for (int64_t i = 0; i < count; i++)
        dots[t][i] = (int32_t)(acc[t][i] + l->compensation[o + i]) * (in.scale[t] * scale[o + i]);
  } else if (l->quant_type == Q8) {
    gemm_q(T, Q8, fetch, l, o, in.blocks, dots);
  } else if (l->quant_type == Q4) {
    gemm_q(T, Q4, fetch, l, o, in.blocks, dots);
  } else if (l->quant_type == FLOAT16) {
    gemm_float(T, FLOAT16, fetch, l->in, panel_at(l, o), in.x, dots);
  } else if (l->quant_type == BFLOAT16) {
    gemm_float(T, BFLOAT16, fetch, l->in, panel_at(l, o), in.x, dots);
  } else {
    gemm_float(T, FLOAT32, fetch, l->in, panel_at(l, o), in.x, dots);
  }
  for (int t = 0; t < T; t++)
    for (int64_t i = 0; i < count; i++) {
      float *out = y + t * l->row_stride + o + i;
      float output = l->bias ? dots[t][i] + l->bias[o + i] : dots[t][i];
      *out = add ? *out + output : output;
    }
}

// Compute all outputs of T tokens, without a barrier at the end. y: (T, row_stride). The first tile
// of a panel reads its weights from memory. Later full tiles read them from the cache and do not
// prefetch, because that takes time.
static void gemm(const Linear *l, int64_t T, Input in, float *y, int add) {
#define TILE(n, fetch) panel_gemm(n, fetch, l, o, input_at(l, in, t), y + t * l->row_stride, add)
#define CASE(n) \
  case n:       \
    TILE(n, 1); \
    break;
#define FULL_CASE(n)        \
  case n:                   \
    if (t == 0 || n < size) \
      TILE(n, 1);           \
    else                    \
      TILE(n, 0);           \
    break;
  const int64_t size = l->quant_type < INT8 ? FLOAT_TILE : INT_TILE;
#pragma omp for schedule(static) collapse(2) nowait
  for (int64_t o = 0; o < l->out; o += PANEL)
    for (int64_t tile = 0; tile < T; tile += size)
      for (int64_t t = tile, n; t < T && t < tile + size; t += n) {
        n = T - t < size ? T - t : size;
        n = n == 12 ? 12 : n >= 8 ? 8 : n >= 6 ? 6 : n;
        switch (n) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) FULL_CASE(6) CASE(8) FULL_CASE(12) }
      }
}

// Return the scale that maps n floats to integers from -127 to 127, bit-identical to
// quantize in quantisation/int8.py.
INLINE float quant_step(int64_t n, const float *x) {
  int32_t largest = 0;  // bits of |x|, which order as the floats do, with NaN above infinity
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= INT32_MAX;
    largest = bits > largest ? bits : largest;
  }
  float max;
  memcpy(&max, &largest, 4);
  return max / 127 < FLT_MIN ? FLT_MIN : max / 127;
}

// Quantise n floats to integers, plus ZERO_POINT, and a scale.
static void quantize(int64_t n, const float *x, Quant *values, float *scale) {
  float step = quant_step(n, x);  // not *scale, which may alias `values`
  *scale = step;
  if (step <= FLT_MAX)
    for (int64_t i = 0; i < n; i++) values[i] = (int32_t)rintf(x[i] / step) + ZERO_POINT;
  else
    for (int64_t i = 0; i < n; i++) values[i] = ZERO_POINT;  // 0 times an infinite scale is NaN
}

// Load N floats, at most WIDTH, into a vector. A full vector takes no memcpy, because gcc 12 would
// zero the destination in memory first.
INLINE Vector load(const int N, const float *x) {
  if (N == WIDTH) return LOAD(x);
  Vector numbers = {0};
  memcpy(&numbers, x, N * sizeof(float));
  return numbers;
}

INLINE void store(const int N, Vector numbers, float *x) { memcpy(x, &numbers, N * sizeof(float)); }

// Mix p values that are `stride` apart: sum and difference for p = 2, otherwise a reflection about
// their mean. Handles N adjacent sets in one call.
INLINE void butterfly(const int N, int64_t p, int64_t stride, float *x) {
  if (p == 2) {
    Vector a = load(N, x), b = load(N, x + stride);
    store(N, a + b, x);
    store(N, a - b, x + stride);
    return;
  }
  Vector twice_mean = {0};
  for (int64_t i = 0; i < p; i++) twice_mean += load(N, x + i * stride);
  twice_mean *= (float)(2. / p);
  for (int64_t i = 0; i < p; i++) store(N, load(N, x + i * stride) - twice_mean, x + i * stride);
}

// Do the first stages of a rotation on 2 * WIDTH values in registers. Each stage mixes neighbours
// and moves the sums before the differences, which shifts the bits of each index cyclically. After
// one stage per index bit the values are in order again.
INLINE void rotate_vectors(const float *x, float *y) {
  Vector a = LOAD(x), b = LOAD(x + WIDTH);
  for (int stage = 1; stage < 2 * WIDTH; stage *= 2) {
    Vector even = DEINTERLEAVE(a, b, 0), odd = DEINTERLEAVE(a, b, 1);
    a = even + odd;
    b = even - odd;
  }
  store(WIDTH, a, y);
  store(WIDTH, b, y + WIDTH);
}

// Rotate n channels, bit-identical to rotate_channels in quantisation/int8.py. x and y may be the
// same. Exported for tests.
void rotate_channels(int64_t n, const float *x, float *y) {
  int64_t stride = n % (2 * WIDTH) ? 1 : 2 * WIDTH;
  if (stride > 1)
    for (int64_t i = 0; i < n; i += stride) rotate_vectors(x + i, y + i);
  else
    memmove(y, x, n * sizeof(float));
  for (int64_t p = 2; stride < n; p++)
    for (; n / stride % p == 0; stride *= p)
      for (int64_t base = 0; base < n; base += p * stride)
        if (stride % WIDTH)
          for (int64_t i = base; i < base + stride; i++) butterfly(1, p, stride, y + i);
        else
          for (int64_t i = base; i < base + stride; i += WIDTH) butterfly(WIDTH, p, stride, y + i);
}

// Quantise n floats, at most BLOCK. The block is padded with zeros.
INLINE void quantize_block(int64_t n, const float *x, Q8Block *block) {
  float step = quant_step(n, x);
  int32_t sum = 0;
  memset(block->values, 0, BLOCK);
  for (int64_t i = 0; i < n; i++) {
    int32_t value = step <= FLT_MAX ? (int32_t)rintf(x[i] / step) : 0;
    block->values[i] = value;
    sum += value;
  }
  block->scale = step;
  block->sum = sum;
}

static void quantize_token(const Linear *l, Input in, int64_t t) {
  Input token = input_at(l, in, t);
  if (l->quant_type == INT8) {
    rotate_channels(l->in, token.x, in.rotated);
    quantize(l->in, in.rotated, token.values, token.scale);
    return;
  }
  int64_t full = l->in / BLOCK, tail = l->in % BLOCK;
  for (int64_t b = 0; b < full; b++) quantize_block(BLOCK, token.x + b * BLOCK, token.blocks + b);
  if (tail) quantize_block(tail, token.x + full * BLOCK, token.blocks + full);
}

// Compute the outputs y of a layer, (T, out). x: (T, in). values, scale: scratch for an Input.
// rotated: (threads, in), scratch for int8 weights.
void linear(const Linear *l, int64_t T, const float *x, Quant *values, float *scale, float *rotated,
            float *y, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Input in = {x, {values}, scale, rotated + omp_get_thread_num() * l->in};
    if (l->quant_type >= INT8) {
#pragma omp for
      for (int64_t t = 0; t < T; t++) quantize_token(l, in, t);
    }
    gemm(l, T, in, y, 0);
  }
}

// Return element i of a packed array, whose length is a multiple of WIDTH.
INLINE float load_weight(const int quant_type, const void *numbers, int64_t i) {
  return load_weights(quant_type, numbers, i - i % WIDTH)[i % WIDTH];
}

// Dequantise row o of a Q8 or Q4 weight. y: (C).
static void dequantize_row(const Linear *l, int64_t o, float *y) {
  const uint8_t *panel = panel_at(l, o);
  int64_t scales = o / PANEL * num_blocks(l) * PANEL + o % PANEL;
  for (int64_t i = 0; i < l->in; i++) {
    int64_t b = i / BLOCK, at = i % BLOCK;
    int64_t group = b * (BLOCK / 4) + at / 4;
    if (l->quant_type == Q4) group = b * (BLOCK / 8) + at % (BLOCK / 2) / 4;
    int value = panel[(group * PANEL + o % PANEL) * 4 + at % 4];
    if (l->quant_type == Q8)
      value = (int8_t)value;
    else
      value = (at < BLOCK / 2 ? value & 15 : value >> 4) - (l->minimum ? 0 : 8);
    y[i] = value * load_weight(l->scale_type, l->scale, scales + b * PANEL);
    if (l->minimum) y[i] += load_weight(l->scale_type, l->minimum, scales + b * PANEL);
  }
}

// Look up the embeddings of T tokens in a weight (vocab_size, C). y: (T, C).
void get_rows(const Linear *l, int64_t T, const int64_t *tokens, float *y) {
  for (int64_t t = 0; t < T; t++, y += l->in) {
    int64_t token = tokens[t];
    int64_t o = token % PANEL;
    const void *row = panel_at(l, token);
    const int8_t *row8 = row;
    const float *scale = l->scale;
    if (l->quant_type == Q8 || l->quant_type == Q4) {
      dequantize_row(l, token, y);
    } else if (l->quant_type == INT8) {
      for (int64_t i = 0; i < l->in; i++)
        y[i] = row8[(i / GROUP * PANEL + o) * GROUP + i % GROUP] * scale[token];
      rotate_channels(l->in, y, y);  // undoes the rotation of the weight
    } else {
      for (int64_t i = 0; i < l->in; i++)
        y[i] = load_weight(l->quant_type, row, i * PANEL + o);
    }
  }
}

// parts of a pass ---------------------------------------------------------------------------------
//
// No multiply-add here is contracted to an FMA, and every sum has a fixed order, so each part is
// bit-identical on every processor. With int8 weights the logits are too, because their dot
// products are exact.

// NUM_PARTIALS: partial sums of a dot product, whatever WIDTH is. ROWS: rows multiplied together.
enum { NUM_PARTIALS = 16, ROWS = 4 };

typedef struct {
  const float *weight, *bias;         // (C), or (D) per head; bias is NULL in an RMSNorm
  float weight_offset, output_scale;  // of an RMSNorm: added to the weights, factor of the output
} Norm;

typedef struct {
  Linear in[2], out;  // in: gate and up in Llama, one layer in GPT-2
} MLP;

typedef struct {
  Norm attn_norm, query_norm, key_norm, attn_out_norm, mlp_norm, down_norm;  // weight may be NULL
  Linear attn_in[3], attn_out;  // query, key and value, or one fused layer; unused ones have out 0
  MLP mlp;                      // in layers without experts
  Linear router;
  const MLP *experts;      // (n_expert), or NULL
  int64_t sliding_window;  // the number of latest positions that a query attends to
  int64_t local;           // whether RoPE uses local_cos and local_sin
  int64_t nope;            // whether there is no RoPE, though the model has it
} Layer;

typedef struct {
  int64_t n_layer, n_head, n_kv_head, head_dim;
  int64_t rotary_dim;  // leading elements of a head that RoPE rotates
  int64_t n_embd;
  int64_t max_width;        // the most floats per token in a buffer
  int64_t n_expert, top_k;  // 0 and 1 without experts
  int64_t norm_topk_prob;   // whether the weights of a token's top_k experts sum to 1
  float eps, embedding_scale;
  // Soft caps of attention scores and of logits; 0: none.
  float attn_softcap, final_softcap;
  int64_t gelu_gate;       // whether the gate's activation is GELU, not SiLU
  Linear embedding, head;  // (vocab_size, C); they may share their weight
  const float *wpe;        // (block_size, C), the position embeddings, or NULL
  Norm norm;
  const Layer *layers;
  // Of a draft head: fc maps the normed embedding and state to x. Otherwise fc.out is 0.
  Linear fc;  // (C, 2 C)
  Norm embed_norm;
} Model;

typedef struct {
  // For each KV cache group: keys and values, (its layers, 2, num_pages, K, page_size, D), and the
  // concatenated page tables of all sequences.
  char *cache[2];
  const int64_t *page_tables[2];
  int64_t num_pages[2];
  int64_t page_size;
  int64_t T, num_logits;
  const int64_t *group_ids, *group_indices;  // (n_layer): each layer's group, its index within it
  const int64_t *tokens, *positions;         // (T): token ids, positions in their sequences
  const int64_t *table_starts;    // (T): where the page table of the token's sequence begins
  const int64_t *logits_indices;  // (num_logits): the tokens that need logits
  const float *cos, *sin;         // (positions, D), for `apply_rotary_emb`, or NULL
  const float *local_cos, *local_sin;
  int64_t cache_dtype;      // FLOAT32, FLOAT16 or INT8
  const int64_t *lora_ids;  // (T): each token's adapter, -1 for none, or NULL
  float *hidden;            // (num_logits, C): the last block's outputs, an output, or NULL
  const float *states;      // (T, C): with a draft head, the hidden states that chose the tokens
} Pass;

// Return four sums whose sum is the dot product of a and b, or the sum of a if b is NULL. The
// NUM_PARTIALS partial sums are reduced as a tree, the upper half added to the lower, unrolled so
// that they stay in registers.
INLINE Float4 partial_dot(int64_t n, const float *a, const float *b) {
  Vector sums[NUM_PARTIALS / WIDTH] = {0};
  int64_t i = 0;
  for (; i + NUM_PARTIALS <= n; i += NUM_PARTIALS)
    for (int s = 0; s < NUM_PARTIALS / WIDTH; s++) {
      Vector x = LOAD(a + i + s * WIDTH);
      if (b) x *= LOAD(b + i + s * WIDTH);
      sums[s] += x;
    }
  if (i < n) {
    float partial[NUM_PARTIALS];
    memcpy(partial, sums, sizeof partial);
    for (int l = 0; i < n; l++, i++) partial[l] += b ? a[i] * b[i] : a[i];
    memcpy(sums, partial, sizeof partial);
  }
  Float4 quads[NUM_PARTIALS / 4];
  memcpy(quads, sums, sizeof quads);
  return (quads[0] + quads[2]) + (quads[1] + quads[3]);
}

INLINE float dot(int64_t n, const float *a, const float *b) {
  Float4 quad = partial_dot(n, a, b);
  return (quad[0] + quad[2]) + (quad[1] + quad[3]);
}

// Multiply x, (n), by ROWS rows, (ROWS, n). Each dot product adds in the order of `dot`.
INLINE void row_dots(int64_t n, const float *x, const float *rows, float *dots) {
  Float4 quads[ROWS];
  for (int k = 0; k < ROWS; k++) quads[k] = partial_dot(n, x, rows + k * n);
  Float4 low = SHUFFLE4(quads[0], quads[1], 0, 1, 4, 5) + SHUFFLE4(quads[0], quads[1], 2, 3, 6, 7);
  Float4 high = SHUFFLE4(quads[2], quads[3], 0, 1, 4, 5) + SHUFFLE4(quads[2], quads[3], 2, 3, 6, 7);
  Float4 sums = SHUFFLE4(low, high, 0, 2, 4, 6) + SHUFFLE4(low, high, 1, 3, 5, 7);
  memcpy(dots, &sums, sizeof sums);
}

INLINE float sum(int64_t n, const float *a) { return dot(n, a, NULL); }

// Multiply a, (N, n), by WIDTH columns b, (n, WIDTH). Each dot product adds in the order of `dot`.
INLINE void column_dots(const int N, int64_t n, const float *a, const float *b, float *dots) {
  Vector sums[ROWS][NUM_PARTIALS / 2];
  for (int l = 0; l < NUM_PARTIALS / 2; l++) {
    Vector low[ROWS] = {0}, high[ROWS] = {0};
    int64_t i = l;
    for (; i + NUM_PARTIALS / 2 < n; i += NUM_PARTIALS) {
      Vector column = LOAD(b + i * WIDTH), other = LOAD(b + (i + NUM_PARTIALS / 2) * WIDTH);
      for (int k = 0; k < N; k++) {
        low[k] += a[k * n + i] * column;
        high[k] += a[k * n + i + NUM_PARTIALS / 2] * other;
      }
    }
    if (i < n)
      for (int k = 0; k < N; k++) low[k] += a[k * n + i] * LOAD(b + i * WIDTH);
    for (int k = 0; k < N; k++) sums[k][l] = low[k] + high[k];
  }
  for (int half = NUM_PARTIALS / 4; half; half /= 2)
    for (int l = 0; l < half; l++)
      for (int k = 0; k < N; k++) sums[k][l] += sums[k][l + half];
  for (int k = 0; k < N; k++) store(WIDTH, sums[k][0], dots + k * WIDTH);
}

// x and y: (T, C).
void layer_norm(const Norm *norm, float eps, int64_t T, int64_t C, const float *x, float *y) {
  for (int64_t t = 0; t < T; t++, x += C, y += C) {
    float mean = sum(C, x) / C;
    for (int64_t i = 0; i < C; i++) y[i] = x[i] - mean;
    float factor = 1 / sqrtf(dot(C, y, y) / C + eps);
    for (int64_t i = 0; i < C; i++) y[i] = y[i] * factor * norm->weight[i] + norm->bias[i];
  }
}

void rms_norm(const Norm *norm, float eps, int64_t T, int64_t C, const float *x, float *y) {
  for (int64_t t = 0; t < T; t++, x += C, y += C) {
    float factor = norm->output_scale / sqrtf(dot(C, x, x) / C + eps);
    for (int64_t i = 0; i < C; i++) y[i] = x[i] * factor * (norm->weight_offset + norm->weight[i]);
  }
}

static void normalize(const Norm *norm, float eps, int64_t T, int64_t C, const float *x, float *y) {
  (norm->bias ? layer_norm : rms_norm)(norm, eps, T, C, x, y);
}

// 0.5 x (1 + tanh u) = x / (1 + exp(-2 u)). y must not overlap x. The division has its own loop. In
// one loop, GCC divides by the exponential's upper limit too. Such quotients are denormal, which is
// slow.
void gelu(int64_t n, const float *x, float *y) {
  for (int64_t i = 0; i < n; i++)
    y[i] = exponential(-2 * 0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
  for (int64_t i = 0; i < n; i++) y[i] = x[i] / (1 + y[i]);
}

// Return tanh(x) as Cephes' tanhf does. Near 0 the exponential would lose all digits.
INLINE float hyperbolic_tangent(float x) {
  float square = x * x, size = fabsf(x);
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  float large = 1 - 2 / (exponential(2 * size) + 1);
  return size < 0.625f ? p * square * x + x : copysignf(large, x);
}

// Replace n numbers x by cap tanh(factor x / cap).
static void soft_cap(int64_t n, float factor, float cap, float *x) {
  for (int64_t i = 0; i < n; i++) x[i] = cap * hyperbolic_tangent(x[i] * (factor / cap));
}

// x: (T, 2, n), gate and up; y: (T, n). SiLU of the gate is x / (1 + exp(-x)). In two loops, as in
// `gelu`.
static void swiglu(int64_t T, int64_t n, const float *x, float *y) {
  for (int64_t t = 0; t < T; t++, x += 2 * n, y += n) {
    for (int64_t i = 0; i < n; i++) y[i] = exponential(-x[i]);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] / (1 + y[i]) * x[n + i];
  }
}

// As `swiglu`, with GELU on the gate.
static void geglu(int64_t T, int64_t n, const float *x, float *y) {
  for (int64_t t = 0; t < T; t++, x += 2 * n, y += n) {
    gelu(n, x, y);
    for (int64_t i = 0; i < n; i++) y[i] *= x[n + i];
  }
}

// Apply RoPE: rotate the first D channels of a query or key by the angles of its position. Channels
// d and d + D / 2 are the coordinates of a point.
static void apply_rotary_emb(const float *cos, const float *sin, int64_t D, float *x) {
  int64_t half = D / 2;
  for (int64_t d = 0; d < half; d++) {
    float a = x[d];
    float b = x[d + half];
    x[d] = a * cos[d] + b * sin[d];
    x[d + half] = b * cos[d + half] + a * sin[d + half];
  }
}

// attention ---------------------------------------------------------------------------------------
//
// softmax(q k / sqrt(D)) v in blocks of KV_BLOCK positions: qk_dots, update_softmax,
// accumulate_values, then the next block. A block with a larger score scales down the sums of
// earlier blocks (online softmax, Milakov and Gimelshein 2018). Blocks begin at multiples of
// KV_BLOCK, wherever the pass or the sliding window begins, so the order of the sums depends only
// on the query's position. Adjacent tokens attend together, in all query heads that share a KV
// head, so each block of the cache is read once. A query is a token in one head. T of them, WIDTH
// or 1, are a batch, with a lane for each. T, N and D are compile-time constants where possible,
// so that loops over them unroll.

// QUERY_TILE: queries that share one load of a value.
enum { KV_BLOCK = 32, QUERY_TILE = 4 };

// The cache of one sequence for one layer and one KV head, in pages of page_size rows. A row is a
// key or a value: D float32 or float16 values, or D int8 values and a scale in the last 4 bytes.
typedef struct {
  char *keys, *values;  // of page 0
  int64_t page_stride;  // bytes
  int64_t dtype;        // FLOAT32, FLOAT16 or INT8
  int64_t row_size;     // bytes
  int64_t page_size;
  const int64_t *page_table;  // of the sequence
  int64_t length;             // positions that the first token sees; each later token sees one more
  int64_t sliding_window;     // the number of latest positions that a query attends to
  float softcap;              // of the scores; 0: none
} KVView;

// Positions or tokens from begin to end - 1.
typedef struct {
  int64_t begin, end;
} Range;

// Return the positions that a token attends to. token: counted from the first one.
INLINE Range visible(const KVView *kv, int64_t token) {
  int64_t end = kv->length + token;
  return (Range){end > kv->sliding_window ? end - kv->sliding_window : 0, end};
}

INLINE Range intersection(Range a, Range b) {
  return (Range){a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

// Return the key or value at a position. base: kv->keys or kv->values.
INLINE char *kv_row(const KVView *kv, char *base, int64_t position) {
  int64_t page = kv->page_table[position / kv->page_size];
  return base + page * kv->page_stride + position % kv->page_size * kv->row_size;
}

static int64_t kv_row_bytes(int64_t dtype, int64_t D) {
  return dtype == FLOAT32 ? 4 * D : dtype == FLOAT16 ? 2 * D : (D + 3) / 4 * 4 + 4;
}

// Convert n rows to floats, (n, D).
INLINE void load_kv_rows(int64_t dtype, int64_t D, int64_t n, const char *rows, float *x) {
  if (dtype == FLOAT32) memcpy(x, rows, n * D * sizeof(float));
  if (dtype == FLOAT16)
    for (; n; n--, x += D, rows += 2 * D) {
      int64_t d = 0;
      for (; d + WIDTH <= D; d += WIDTH) *(Vector *)(x + d) = load_weights(FLOAT16, rows, d);
      if (d < D) {
        uint16_t last[WIDTH] = {0};
        memcpy(last, rows + 2 * d, 2 * (D - d));
        store(D - d, load_weights(FLOAT16, last, 0), x + d);
      }
    }
  if (dtype == INT8)
    for (; n; n--, x += D, rows += kv_row_bytes(dtype, D)) {
      float scale;
      memcpy(&scale, rows + kv_row_bytes(dtype, D) - 4, 4);
      for (int64_t d = 0; d < D; d++) x[d] = (int8_t)rows[d] * scale;
    }
}

// Return the keys or values at a range of positions, contiguous: in place if they are float32 in a
// single page, otherwise copied to `scratch`.
INLINE const float *gather_rows(const KVView *kv, char *base, int64_t D, Range in, float *scratch) {
  int64_t size = kv->page_size;
  if (kv->dtype == FLOAT32 && in.begin / size == (in.end - 1) / size)
    return (float *)kv_row(kv, base, in.begin);
  for (int64_t i = in.begin, n; i < in.end; i += n) {
    n = size - i % size < in.end - i ? size - i % size : in.end - i;
    load_kv_rows(kv->dtype, D, n, kv_row(kv, base, i), scratch + (i - in.begin) * D);
  }
  return scratch;
}

// Fetch rows of keys and values that the next block reads.
INLINE void prefetch_rows(const KVView *kv, Range next) {
  int64_t size = kv->page_size;
  for (int64_t i = next.begin, n; i < next.end; i += n) {
    n = size - i % size < next.end - i ? size - i % size : next.end - i;
    const char *keys = kv_row(kv, kv->keys, i), *values = kv_row(kv, kv->values, i);
    for (int64_t at = 0; at < n * kv->row_size; at += CACHE_LINE) {
      __builtin_prefetch(keys + at);
      __builtin_prefetch(values + at);
    }
  }
}

// Step 1: compute the dot products of T queries and n keys. q: (D, T). scores: (n, T).
INLINE void qk_dots(const int T, const int64_t D, const float *q, int64_t n, const float *keys,
                    float *scores) {
  int64_t i = 0;
  if (T == 1) {
    for (; i + ROWS <= n; i += ROWS) row_dots(D, q, keys + i * D, scores + i);
    for (; i < n; i++) scores[i] = dot(D, q, keys + i * D);
  } else {
    for (; i + ROWS <= n; i += ROWS) column_dots(ROWS, D, keys + i * D, q, scores + i * T);
    for (; i < n; i++) column_dots(1, D, keys + i * D, q, scores + i * T);
  }
}

// A batch of T queries: their tokens, counted from the first one, and the running maximum and sum
// over the blocks so far.
typedef struct {
  int32_t token[WIDTH];
  float max[WIDTH];  // of the scores
  float sum[WIDTH];  // of their exponentials
} QueryBatch;

// Set the scores of masked positions to `value`, in the block that begins at `start`. scores:
// (KV_BLOCK, T).
INLINE void mask_scores(const int T, const KVView *kv, const QueryBatch *batch, int64_t start,
                        float *scores, float value) {
  for (int t = 0; t < T; t++) {
    Range seen = visible(kv, batch->token[t]);
    for (int64_t i = 0; i < KV_BLOCK; i++)
      if (start + i < seen.begin || start + i >= seen.end) scores[i * T + t] = value;
  }
}

// Return the larger value in each lane, or b's if one is NaN.
INLINE Vector lane_max(Vector a, Vector b) {
  UintVector mask = (UintVector)(a > b);
  return (Vector)(((UintVector)a & mask) | ((UintVector)b & ~mask));
}

// Sum n floats or Vectors pairwise, the upper half to the lower, into x[0].
#define TREE_SUM(n, x)                    \
  for (int half = n / 2; half; half /= 2) \
    for (int i = 0; i < half; i++) x[i] += x[half + i];

// Step 2: replace the scores of a block, (KV_BLOCK, T), with exponentials, at most 1 so that none
// overflows. unmasked: whether every query attends to the whole block. rescale: (T), returns the
// factors for the sums of earlier blocks. Soft-capped scores are already divided by sqrt(D).
INLINE void update_softmax(const int T, int64_t D, const KVView *kv, int64_t start, int unmasked,
                           float *scores, QueryBatch *batch, float *rescale) {
  float factor = kv->softcap ? 1 : 1 / sqrtf(D);
  float new_max[WIDTH];
  if (!unmasked) mask_scores(T, kv, batch, start, scores, -INFINITY);
  Vector maxima = LOAD(scores);
  for (int i = WIDTH; i < KV_BLOCK * T; i += WIDTH) maxima = lane_max(LOAD(scores + i), maxima);
  store(WIDTH, maxima, new_max);
  for (int t = T; t < WIDTH; t++) new_max[0] = new_max[t] > new_max[0] ? new_max[t] : new_max[0];
  for (int t = 0; t < T; t++) {
    new_max[t] = batch->max[t] > new_max[t] ? batch->max[t] : new_max[t];
    rescale[t] = exponential((batch->max[t] - new_max[t]) * factor);
    batch->max[t] = new_max[t];
  }
  for (int i = 0; i < KV_BLOCK * T; i += WIDTH)
    for (int t = 0; t < WIDTH; t++)
      scores[i + t] = exponential((scores[i + t] - new_max[t % T]) * factor);
  // `exponential` clamps masked scores to exp(-87).
  if (!unmasked) mask_scores(T, kv, batch, start, scores, 0);
  Vector sums[KV_BLOCK];
  memcpy(sums, scores, KV_BLOCK * T * sizeof(float));
  TREE_SUM(KV_BLOCK * T / WIDTH, sums)
  if (T == 1) TREE_SUM(WIDTH, sums[0])
  for (int t = 0; t < T; t++) batch->sum[t] = batch->sum[t] * rescale[t] + sums[0][t];
}

// A matrix whose rows begin `stride` floats apart.
typedef struct {
  float *data;
  int64_t stride;
} Matrix;

// Step 3 for columns d to d + N * WIDTH - 1 of the values.
INLINE void accumulate_columns(const int T, const int N, const int64_t D, int64_t d, int64_t n,
                               const float *values, Matrix scores, const float *rescale, Matrix y) {
  Vector sums[QUERY_TILE][4];
  for (int t = 0; t < T; t++)
    for (int j = 0; j < N; j++)
      sums[t][j] = LOAD(y.data + t * y.stride + d + j * WIDTH) * rescale[t];
  for (int64_t i = 0; i < n; i++) {
    Vector value[4];
    for (int j = 0; j < N; j++) value[j] = LOAD(values + i * D + d + j * WIDTH);
    for (int t = 0; t < T; t++)
      for (int j = 0; j < N; j++) sums[t][j] += scores.data[i * scores.stride + t] * value[j];
  }
  for (int t = 0; t < T; t++)
    for (int j = 0; j < N; j++) *(Vector *)(y.data + t * y.stride + d + j * WIDTH) = sums[t][j];
}

// Step 3 for T queries and n values: rescale y, (T, D), and add each value times its score, (n, T).
INLINE void accumulate_values(const int T, const int64_t D, int64_t n, const float *values,
                              Matrix scores, const float *rescale, Matrix y) {
  const int N = T == 1 || WIDTH == 16 ? 4 : 2;  // limited by the number of registers
  int64_t d = 0;
  for (; d + N * WIDTH <= D; d += N * WIDTH)
    accumulate_columns(T, N, D, d, n, values, scores, rescale, y);
  for (; d + WIDTH <= D; d += WIDTH) accumulate_columns(T, 1, D, d, n, values, scores, rescale, y);
  for (; d < D; d++)
    for (int t = 0; t < T; t++) {
      float acc = y.data[t * y.stride + d] * rescale[t];
      for (int64_t i = 0; i < n; i++) acc += scores.data[i * scores.stride + t] * values[i * D + d];
      y.data[t * y.stride + d] = acc;
    }
}

// Queries of `tokens` adjacent tokens in `heads` heads that share a KV head.
typedef struct {
  int64_t tokens, heads;
  Matrix q, y;  // a row per token, (heads, D): the queries, and the outputs
} Queries;

// Return the scratch size for a block of keys and values, and for the queries, sums and batches of
// at most WIDTH tokens in `heads` heads.
static int64_t attend_floats(int64_t D, int64_t heads) {
  return 2 * KV_BLOCK * D + heads * (2 * D + 3) * WIDTH;
}

// Attend with all queries, in batches of T. The last batch repeats its last query. scratch:
// (attend_floats).
INLINE void flash_attention(const int T, const int64_t D, const KVView *kv, Queries queries,
                            float *scratch) {
  int64_t rows = queries.heads * queries.tokens;
  int64_t num_batches = (rows + T - 1) / T;
  float *columns = scratch + 2 * KV_BLOCK * D;  // (num_batches, D, T)
  float *sums = columns + num_batches * D * T;  // (num_batches, T, D)
  QueryBatch *batches = (QueryBatch *)(sums + num_batches * T * D);
  for (int64_t g = 0; g < num_batches; g++)
    for (int t = 0; t < T; t++) {
      int64_t row = g * T + t < rows ? g * T + t : rows - 1;
      int64_t token = row % queries.tokens;
      const float *q = queries.q.data + token * queries.q.stride + row / queries.tokens * D;
      batches[g].token[t] = token;
      batches[g].max[t] = -FLT_MAX;
      batches[g].sum[t] = 0;
      for (int64_t d = 0; d < D; d++) columns[(g * D + d) * T + t] = q[d];
    }
  memset(sums, 0, num_batches * T * D * sizeof *sums);
  Range first = visible(kv, 0), last = visible(kv, queries.tokens - 1);
  Range needed = {first.begin, last.end}, common = {last.begin, first.end};
  for (int64_t start = needed.begin / KV_BLOCK * KV_BLOCK; start < needed.end; start += KV_BLOCK) {
    Range block = {start, start + KV_BLOCK};
    Range in = intersection(block, needed);
    int unmasked = start >= common.begin && block.end <= common.end;
    const float *keys = gather_rows(kv, kv->keys, D, in, scratch);
    const float *values = gather_rows(kv, kv->values, D, in, scratch + KV_BLOCK * D);
    prefetch_rows(kv, intersection((Range){block.end, block.end + KV_BLOCK}, needed));
    for (int64_t g = 0; g < num_batches; g++) {
      QueryBatch *batch = batches + g;
      float scores[KV_BLOCK * WIDTH], rescale[WIDTH];
      float *seen_scores = scores + (in.begin - start) * T;
      qk_dots(T, D, columns + g * D * T, in.end - in.begin, keys, seen_scores);
      if (kv->softcap) soft_cap((in.end - in.begin) * T, 1 / sqrtf(D), kv->softcap, seen_scores);
      update_softmax(T, D, kv, start, unmasked, scores, batch, rescale);
      const int N = unmasked && T > 1 ? QUERY_TILE : 1;
      for (int t = 0; t < T && g * T + t < rows; t += N) {
        Range seen = unmasked ? in : intersection(block, visible(kv, batch->token[t]));
        Matrix probs = {scores + (seen.begin - start) * T + t, T};
        Matrix out = {sums + (g * T + t) * D, D};
        int64_t n = seen.end - seen.begin;
        if (N > 1)
          accumulate_values(QUERY_TILE, D, n, values, probs, rescale + t, out);
        else
          accumulate_values(1, D, n, values + (seen.begin - in.begin) * D, probs, rescale + t, out);
      }
    }
  }
  for (int64_t row = 0; row < rows; row++) {
    float *y = queries.y.data + row % queries.tokens * queries.y.stride + row / queries.tokens * D;
    for (int64_t d = 0; d < D; d++) y[d] = sums[row * D + d] / batches[row / T].sum[row % T];
  }
}

// Attend with one query at a time.
static void attend_singly(int64_t D, const KVView *kv, Queries queries, float *scratch) {
  if (D == 64)  // as in GPT-2
    flash_attention(1, 64, kv, queries, scratch);
  else
    flash_attention(1, D, kv, queries, scratch);
}

// Attend with WIDTH queries at a time.
static void attend_together(int64_t D, const KVView *kv, Queries queries, float *scratch) {
  if (D == 64)
    flash_attention(WIDTH, 64, kv, queries, scratch);
  else
    flash_attention(WIDTH, D, kv, queries, scratch);
}

// Attend with one query of one head over a float32 cache. Exported for tests, which compare it with
// torch.
void attend(const int64_t *pages, int64_t size, int64_t stride, int64_t length, int64_t D, float *q,
            float *k, float *v, float *y) {
  KVView kv = {(char *)k, (char *)v, 4 * stride, FLOAT32, 4 * D, size, pages, length, length};
  float scratch[attend_floats(D, 1)];
  attend_singly(D, &kv, (Queries){1, 1, {q, D}, {y, D}}, scratch);
}

// Divide the queries of a pass. Each token belongs to a block of at most WIDTH adjacent tokens of
// its sequence. starts: (T), returns the first token of each token's block. Returns into how many
// parts the heads that share a KV head are split.
//
// A batch of WIDTH queries costs as much as WIDTH / 2 single ones. A block whose batches would cost
// more is split into tokens. All blocks are split if they would leave threads idle.
static int64_t split_queries(const Model *m, const Pass *p, int threads, int32_t *starts) {
  int64_t K = m->n_kv_head;
  int64_t heads = m->n_head / K;
  int64_t largest = 0;  // cost of a block
  int has_blocks = 0;
  for (int64_t t = 0, end; t < p->T; t = end) {
    for (end = t + 1; end < p->T && end - t < WIDTH; end++)
      if (p->table_starts[end] != p->table_starts[t]) break;
    int64_t rows = heads * (end - t);
    int64_t cost = (rows + WIDTH - 1) / WIDTH * (WIDTH / 2);
    int together = end - t > 1 && cost < rows;
    if (!together) cost = rows;
    for (int64_t i = t; i < end; i++) starts[i] = together ? t : i;
    if (cost > largest) largest = cost;
    has_blocks |= together;
  }
  int64_t busiest = (K + threads - 1) / threads * largest;  // a thread's cost for one block
  if (has_blocks && busiest * threads < K * heads * p->T)
    return 1;  // one head of a block would leave most lanes idle
  for (int64_t t = 0; t < p->T; t++) starts[t] = t;
  // Split the heads over threads where that is faster. Each thread then reads the keys separately,
  // which takes about 1.25 times as long.
  int64_t joint = (K * p->T + threads - 1) / threads * heads;  // heads for the busiest thread
  int64_t split = (K * heads * p->T + threads - 1) / threads;
  return 5 * split < 4 * joint ? heads : 1;
}

// Return a view of the cached sequence of token t, up to this token.
static KVView kv_view(const Model *m, const Pass *p, int64_t layer, int64_t kv_head, int64_t t) {
  int64_t row_size = kv_row_bytes(p->cache_dtype, m->head_dim);
  int64_t head_bytes = p->page_size * row_size;
  int64_t page_stride = m->n_kv_head * head_bytes;
  int64_t group = p->group_ids[layer];
  int64_t layer_bytes = p->num_pages[group] * page_stride;  // the keys or the values of a layer
  char *keys = p->cache[group] + 2 * p->group_indices[layer] * layer_bytes + kv_head * head_bytes;
  return (KVView){
      .keys = keys,
      .values = keys + layer_bytes,
      .page_stride = page_stride,
      .dtype = p->cache_dtype,
      .row_size = row_size,
      .page_size = p->page_size,
      .page_table = p->page_tables[group] + p->table_starts[t],
      .length = p->positions[t] + 1,
      .sliding_window = m->layers[layer].sliding_window,
      .softcap = m->attn_softcap,
  };
}

// Round to the nearest float16: adding a power of 2 rounds to 11 significant bits, or fewer for
// subnormals, below 2**-14.
INLINE uint16_t to_float16(float x) {
  float size = fabsf(x) > 65536 ? 65536 : fabsf(x), power;
  uint32_t sign, bits;
  memcpy(&sign, &x, 4);
  memcpy(&bits, &size, 4);
  bits = (bits > 0x38800000 ? bits & 0x7f800000 : 0x38800000) + (13 << 23);
  memcpy(&power, &bits, 4);
  size = (size + power - power) * 0x1p-112f;  // the inverse of load_weights
  memcpy(&bits, &size, 4);
  return (x != x ? 0x7e00 : bits >> 13) | (sign >> 16 & 0x8000);
}

// Apply the inverse rotation to a row: rotate and divide by 2**k. With an int8 cache, queries and
// attention outputs need it.
static void unrotate_channels(int64_t D, float *x) {
  rotate_channels(D, x, x);
  for (int64_t d = 0; d < D; d++) x[d] /= D & -D;
}

// Store a key or a value, (D), bit-identical to to_cache_dtype in cache.py. It may change x.
// Exported for tests.
void store_kv_row(int64_t dtype, int64_t D, float *x, char *row) {
  if (dtype == FLOAT32) memcpy(row, x, D * sizeof *x);
  if (dtype == FLOAT16)
    for (int64_t d = 0; d < D; d++) ((uint16_t *)row)[d] = to_float16(x[d]);
  if (dtype == INT8) {
    Quant values[D];
    float scale;
    rotate_channels(D, x, x);
    quantize(D, x, values, &scale);
    memset(row, 0, kv_row_bytes(dtype, D));
    for (int64_t d = 0; d < D; d++) row[d] = values[d] - ZERO_POINT;
    memcpy(row + kv_row_bytes(dtype, D) - 4, &scale, 4);
  }
}

// Store the key and the value of a token, (D) each, at its position, the last of the view.
static void append_kv(const KVView *kv, int64_t D, float *key, float *value) {
  int64_t last = kv->length - 1;
  store_kv_row(kv->dtype, D, key, kv_row(kv, kv->keys, last));
  store_kv_row(kv->dtype, D, value, kv_row(kv, kv->values, last));
}

// Apply the layer's norm and RoPE, if it has them, to a token's query or key, (D).
static void norm_and_rope(const Model *m, const Pass *p, const Layer *layer, const Norm *norm,
                          int64_t t, float *x) {
  const float *cos = layer->local ? p->local_cos : p->cos;
  const float *sin = layer->local ? p->local_sin : p->sin;
  int64_t row = p->positions[t] * m->rotary_dim;
  if (norm->weight)
    rms_norm(norm, m->eps, 1, m->head_dim, x, x);
  else if (norm->output_scale != 1)
    for (int64_t d = 0; d < m->head_dim; d++) x[d] *= norm->output_scale;
  if (cos && !layer->nope) apply_rotary_emb(cos + row, sin + row, m->rotary_dim, x);
}

// Prepare queries and keys, append keys and values to the cache, then attend. Each KV head serves
// H / K query heads. starts, splits: of `split_queries`. qkv: (T, H + 2 K, D). y: (T, H, D).
static void attention(const Model *m, const Pass *p, int64_t layer, const int32_t *starts,
                      int64_t splits, float *qkv, float *scratch, float *y) {
  const Layer *l = &m->layers[layer];
  int64_t H = m->n_head, K = m->n_kv_head, D = m->head_dim;
  int64_t group_size = H / K;
  int64_t row_stride = (H + 2 * K) * D;
  int is_rotated = p->cache_dtype == INT8;
#pragma omp for schedule(static) collapse(2)
  for (int64_t k = 0; k < K; k++)
    for (int64_t t = 0; t < p->T; t++) {
      KVView kv = kv_view(m, p, layer, k, t);
      float *token = qkv + t * row_stride;
      float *key = token + (H + k) * D;
      for (int64_t h = k * group_size; h < (k + 1) * group_size; h++) {
        norm_and_rope(m, p, l, &l->query_norm, t, token + h * D);
        if (is_rotated) unrotate_channels(D, token + h * D);
      }
      norm_and_rope(m, p, l, &l->key_norm, t, key);
      append_kv(&kv, D, key, key + K * D);
    }
  int64_t heads = group_size / splits;
#pragma omp for schedule(dynamic) collapse(3)
  for (int64_t k = 0; k < K; k++)
    for (int64_t t = 0; t < p->T; t++)
      for (int64_t part = 0; part < splits; part++) {
        int64_t h = k * group_size + part * heads;
        int64_t end = t;
        while (end < p->T && starts[end] == t) end++;
        if (end == t) continue;  // computed with the first token of its block
        KVView kv = kv_view(m, p, layer, k, t);
        Matrix q = {qkv + t * row_stride + h * D, row_stride};
        Matrix o = {y + (t * H + h) * D, H * D};
        Queries queries = {end - t, heads, q, o};
        (end - t > 1 ? attend_together : attend_singly)(D, &kv, queries, scratch);
        for (int64_t i = 0; is_rotated && i < end - t; i++)
          for (int64_t g = 0; g < heads; g++) unrotate_channels(D, o.data + i * o.stride + g * D);
      }
}

// a pass ------------------------------------------------------------------------------------------

static void embed(const Model *m, const Pass *p, float *x) {
  int64_t C = m->n_embd;
#pragma omp for
  for (int64_t t = 0; t < p->T; t++) {
    get_rows(&m->embedding, 1, p->tokens + t, x + t * C);
    for (int64_t i = 0; i < C; i++) x[t * C + i] *= m->embedding_scale;
    if (m->wpe)
      for (int64_t i = 0; i < C; i++) x[t * C + i] += m->wpe[p->positions[t] * C + i];
  }
}

// Return the tokens that this thread prepares for a product: its share of n, or all n if `private`.
// For few tokens each thread repeats the work in its own buffer, which is faster than a barrier.
static Range thread_range(int64_t n, int private) {
  int64_t thread = omp_get_thread_num();
  int64_t threads = omp_get_num_threads();
  return private ? (Range){0, n} : (Range){n * thread / threads, n * (thread + 1) / threads};
}

// Quantise the inputs of a layer if its weights are quantised, then wait for all threads.
static void quantize_inputs(const Linear *l, int64_t T, int private, Input in) {
  Range range = thread_range(T, private);
  if (l->quant_type >= INT8)
    for (int64_t t = range.begin; t < range.end; t++) quantize_token(l, in, t);
  if (!private) {
#pragma omp barrier
  }
}

// Add each token's LoRA adapter to the outputs of a layer, in float32 for every quant_type.
static void add_adapters(const Linear *l, int64_t T, const int64_t *lora_ids, const float *x,
                         float *y) {
#pragma omp for
  for (int64_t t = 0; t < T; t++) {
    if (lora_ids[t] < 0) continue;
    const Adapter *adapter = l->adapters + lora_ids[t];
    for (int64_t r = 0; r < adapter->rank; r++) {
      float part = dot(l->in, adapter->a + r * l->in, x + t * l->in);
      const float *b = adapter->b + r * l->out;
      for (int64_t o = 0; o < l->out; o++) y[t * l->row_stride + o] += part * b[o];
    }
  }
}

// Compute layers that share an input, with their outputs side by side in y. lora_ids: of a Pass, or
// NULL.
static void project(const Linear *l, int count, int64_t T, int private, Input in, float *y, int add,
                    const int64_t *lora_ids) {
  quantize_inputs(l, T, private, in);
  float *row = y;
  for (int i = 0; i < count; i++) {
    gemm(l + i, T, in, row, add);
    row += l[i].out;
  }
#pragma omp barrier
  for (int i = 0; lora_ids && i < count; i++) {
    if (l[i].adapters) add_adapters(l + i, T, lora_ids, in.x, y);
    y += l[i].out;
  }
}

// Compute the input x of a draft head's block. y: (T, C), the embeddings. in: of `input`.
static void add_states(const Model *m, const Pass *p, int private, const float *y, float *in,
                       Input input, float *x) {
  int64_t C = m->n_embd;
  Range range = thread_range(p->T, private);
  for (int64_t t = range.begin; t < range.end; t++) {
    rms_norm(&m->embed_norm, m->eps, 1, C, y + t * C, in + 2 * t * C);
    normalize(&m->norm, m->eps, 1, C, p->states + t * C, in + (2 * t + 1) * C);
  }
  project(&m->fc, 1, p->T, private, input, x, 0, NULL);
}

// Compute the layer that ends a residual branch and add its output to x, after its norm if it has
// one. y: scratch for the norm.
static void residual(const Model *m, const Linear *l, const Norm *norm, int64_t T, int private,
                     Input in, float *y, float *x, const int64_t *lora_ids) {
  project(l, 1, T, private, in, norm->weight ? y : x, !norm->weight, lora_ids);
  if (norm->weight) {
#pragma omp for
    for (int64_t t = 0; t < T; t++) {
      float *row = y + t * l->out;
      rms_norm(norm, m->eps, 1, l->out, row, row);
      for (int64_t i = 0; i < l->out; i++) x[t * l->out + i] += row[i];
    }
  }
}

// a mixture of experts ----------------------------------------------------------------------------
//
// A router assigns `top_k` experts to each token. Each pair of a token and an expert is a row. Rows
// are sorted by expert, so an expert's weights are read once, and only if it has rows.

typedef struct {
  float *weights;    // (T, top_k): factors of the experts' outputs
  int32_t *experts;  // (T, top_k), in increasing order
  int32_t *rows;     // (T, top_k)
  int32_t *tokens;   // (T * top_k): the token of each row
  int32_t *offsets;  // (n_expert + 2): expert e has rows offsets[e] to offsets[e + 1] - 1
} Routes;

static int64_t route_floats(const Model *m, int64_t T) {
  return 4 * T * m->top_k + m->n_expert + 2;
}

static Routes routes_in(const Model *m, int64_t T, float *work) {
  int64_t R = T * m->top_k;
  int32_t *at = (int32_t *)(work + R);
  return (Routes){work, at, at + R, at + 2 * R, at + 3 * R};
}

// Choose a token's top_k experts by a softmax over all. Ties go to the lower index. probs: (n), the
// router's logits on entry, probabilities on return.
static void route(const Model *m, float *probs, float *weights, int32_t *experts) {
  int64_t n = m->n_expert, top_k = m->top_k;
  float largest = -INFINITY, top_sum = 0;
  for (int64_t e = 0; e < n; e++) largest = probs[e] > largest ? probs[e] : largest;
  for (int64_t e = 0; e < n; e++) probs[e] = exponential(probs[e] - largest);
  float total = sum(n, probs);
  for (int64_t e = 0; e < n; e++) {
    int64_t j = e < top_k ? e : top_k;
    probs[e] /= total;
    for (; j > 0 && probs[e] > probs[experts[j - 1]]; j--)
      if (j < top_k) experts[j] = experts[j - 1];
    if (j < top_k) experts[j] = e;
  }
  for (int64_t i = 0; i < top_k; i++) top_sum += probs[experts[i]];
  for (int64_t i = 1; i < top_k; i++) {  // sort, so that the sum over experts has a fixed order
    int32_t expert = experts[i];
    int64_t j = i;
    for (; j > 0 && experts[j - 1] > expert; j--) experts[j] = experts[j - 1];
    experts[j] = expert;
  }
  for (int64_t i = 0; i < top_k; i++)
    weights[i] = m->norm_topk_prob ? probs[experts[i]] / top_sum : probs[experts[i]];
}

// Sort the rows of T tokens by expert, a counting sort. While rows are placed, offsets[e + 1] is
// the next free row of expert e, so afterwards it is the first row of expert e + 1.
static void sort_rows(const Model *m, int64_t T, Routes r) {
  memset(r.offsets, 0, (m->n_expert + 2) * sizeof *r.offsets);
  for (int64_t i = 0; i < T * m->top_k; i++) r.offsets[r.experts[i] + 2]++;
  for (int64_t e = 1; e <= m->n_expert; e++) r.offsets[e + 1] += r.offsets[e];
  for (int64_t i = 0; i < T * m->top_k; i++) {
    r.rows[i] = r.offsets[r.experts[i] + 1]++;
    r.tokens[r.rows[i]] = i / m->top_k;
  }
}

// Multiply each expert's rows by one of its layers, without a barrier. proj: 0 for gate, 1 for up,
// 2 for down.
static void expert_gemm(const Model *m, const Layer *layer, int proj, Routes r, Input in,
                        float *y) {
  for (int64_t e = 0; e < m->n_expert; e++) {
    const MLP *mlp = layer->experts + e;
    const Linear *l = proj < 2 ? mlp->in + proj : &mlp->out;
    int64_t first = r.offsets[e];
    gemm(l, r.offsets[e + 1] - first, input_at(l, in, first), y + first * l->row_stride, 0);
  }
}

// Add the weighted outputs of the experts for T tokens to x. in: (T, C), their inputs, then scratch
// for the rows' activations. input: an Input over the same inputs. y, wide: scratch for rows, shared
// by all threads.
static void moe(const Model *m, const Layer *layer, int64_t T, int private, float *in, Input input,
                Routes r, float *y, float *wide, float *x, const int64_t *lora_ids) {
  int64_t C = m->n_embd, R = T * m->top_k;
  const MLP *first = layer->experts;
  int64_t inner = first->out.in;
  project(&layer->router, 1, T, private, input, wide, 0, lora_ids);
#pragma omp for
  for (int64_t t = 0; t < T; t++)
    route(m, wide + t * m->n_expert, r.weights + t * m->top_k, r.experts + t * m->top_k);
#pragma omp single
  sort_rows(m, T, r);
#pragma omp for
  for (int64_t i = 0; i < R; i++) memcpy(y + i * C, in + r.tokens[i] * C, C * sizeof(float));
  Input gathered = {y, {input.values}, input.scale, input.rotated};
  quantize_inputs(first->in, R, private, gathered);
  expert_gemm(m, layer, 0, r, gathered, wide);
  expert_gemm(m, layer, 1, r, gathered, wide + inner);
#pragma omp barrier
  Range range = thread_range(R, private);
  swiglu(range.end - range.begin, inner, wide + range.begin * 2 * inner, in + range.begin * inner);
  quantize_inputs(&first->out, R, private, input);
  expert_gemm(m, layer, 2, r, input, y);
#pragma omp barrier
#pragma omp for
  for (int64_t t = 0; t < T; t++)
    for (int64_t i = 0; i < C; i++) {
      float total = 0;
      for (int64_t j = t * m->top_k; j < (t + 1) * m->top_k; j++)
        total += r.weights[j] * y[r.rows[j] * C + i];
      x[t * C + i] += total;
    }
}

// Return the scratch size for an Input of T tokens or of their T * top_k rows: x, scale, and values
// or blocks.
static int64_t input_floats(const Model *m, int64_t T) {
  return T * (2 * (m->max_width + m->top_k * BLOCK) + m->top_k);
}

// Return the scratch size of each thread, for attention and one token's rotated input.
static int64_t thread_floats(const Model *m) {
  return attend_floats(m->head_dim, m->n_head / m->n_kv_head) + m->max_width;
}

int64_t work_floats(const Model *m, int64_t T, int threads) {
  int64_t inputs = (T < threads ? threads : 1) * input_floats(m, T);
  return T * 3 * m->max_width + threads * thread_floats(m) + inputs + route_floats(m, T) + T;
}

// Run a forward pass. logits: (num_logits, vocab_size). work: scratch, (work_floats).
void gpt_pass(const Model *m, const Pass *p, float *logits, float *work, int threads) {
  int64_t C = m->n_embd;
  int64_t T = p->T;
  int64_t buffer_floats = T * m->max_width;
  float *x = work;  // the residual stream
  float *y = x + buffer_floats;
  float *wide = y + buffer_floats;
  float *all_scratch = wide + buffer_floats;
  float *all_inputs = all_scratch + threads * thread_floats(m);
  float *route_work = all_inputs + (T < threads ? threads : 1) * input_floats(m, T);
  Routes routes = routes_in(m, T, route_work);
  int32_t *starts = (int32_t *)(route_work + route_floats(m, T));
#ifndef _OPENMP
  threads = 1;  // whatever the caller asks for
#endif
  int64_t splits = split_queries(m, p, threads, starts);
#pragma omp parallel num_threads(threads)
  {
    int private = T < threads;
    int64_t thread = omp_get_thread_num();
    float *thread_scratch = all_scratch + thread * thread_floats(m);
    float *rotated = thread_scratch + attend_floats(m->head_dim, m->n_head / m->n_kv_head);
    float *in = all_inputs + private * thread * input_floats(m, T);
    float *scale = in + buffer_floats;
    Input input = {in, {(Quant *)(scale + T * m->top_k)}, scale, rotated};
    Input attn = {y, {input.values}, scale, rotated};
    embed(m, p, m->fc.out ? y : x);
    if (m->fc.out) add_states(m, p, private, y, in, input, x);
    Range range = thread_range(T, private);
    int64_t n = range.end - range.begin;
    float *thread_x = x + range.begin * C;
    float *thread_in = in + range.begin * C;
    for (int64_t i = 0; i < m->n_layer; i++) {
      const Layer *layer = m->layers + i;
      const MLP *mlp = &layer->mlp;
      int64_t inner = mlp->out.in;
      normalize(&layer->attn_norm, m->eps, n, C, thread_x, thread_in);
      project(layer->attn_in, 3, T, private, input, wide, 0, p->lora_ids);
      attention(m, p, i, starts, splits, wide, thread_scratch, y);
      residual(m, &layer->attn_out, &layer->attn_out_norm, T, private, attn, wide, x, p->lora_ids);
      normalize(&layer->mlp_norm, m->eps, n, C, thread_x, thread_in);
      if (layer->experts) {
        moe(m, layer, T, private, in, input, routes, y, wide, x, p->lora_ids);
        continue;
      }
      project(mlp->in, 2, T, private, input, wide, 0, p->lora_ids);
      if (mlp->in[1].out)
        (m->gelu_gate ? geglu : swiglu)(n, inner, wide + range.begin * 2 * inner,
                                        in + range.begin * inner);
      else
        gelu(n * inner, wide + range.begin * inner, in + range.begin * inner);
      residual(m, &mlp->out, &layer->down_norm, T, private, input, y, x, p->lora_ids);
    }
#pragma omp for nowait
    for (int64_t i = 0; i < p->num_logits; i++)
      if (p->hidden) memcpy(p->hidden + i * C, x + p->logits_indices[i] * C, C * sizeof(float));
    range = thread_range(p->num_logits, private);
    for (int64_t i = range.begin; i < range.end; i++)
      normalize(&m->norm, m->eps, 1, C, x + p->logits_indices[i] * C, in + i * C);
    project(&m->head, 1, p->num_logits, private, input, logits, 0, NULL);
    range = thread_range(p->num_logits * m->head.out, 0);
    if (m->final_softcap)
      soft_cap(range.end - range.begin, 1, m->final_softcap, logits + range.begin);
  }
}
