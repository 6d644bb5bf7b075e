// Dot products of Q8 and Q4 weights with inputs quantised in blocks of 32. Part of gpt.c.
//
// A ByteVector holds the weights of four inputs for each of WIDTH outputs. dot_add_q8 adds to each
// sum the dot product of four int8 weights and four int8 inputs x. dot_add_q4 takes weights from 0
// to 15 and may accumulate in 16 bits. widen_q4_sums then converts the sums of a block to int32.
// dot_add_q8 adds WEIGHT_ZERO_POINT to each weight, because VNNI takes unsigned bytes.

typedef uint8_t ByteVector __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));
typedef int32_t IntVector __attribute__((vector_size(4 * WIDTH)));

#ifdef DPBUSD  // VNNI
enum { WEIGHT_ZERO_POINT = 128 };
INLINE Sums dot_add_q4(Sums sums, int32_t x, ByteVector w) {
  return DPBUSD(sums, (Sums)w, SPLAT(x));
}
INLINE Sums dot_add_q8(Sums sums, int32_t x, ByteVector w) { return dot_add_q4(sums, x, w ^ 128); }
INLINE Sums widen_q4_sums(Sums sums) { return sums; }
#elif defined(__AVX512F__) && defined(__AVX512BW__)
enum { WEIGHT_ZERO_POINT = 0 };
INLINE Sums widen_q4_sums(Sums sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
INLINE Sums dot_add_q8(Sums sums, int32_t x, ByteVector w) {
  return dot_add_int8(sums, x, (const int8_t *)&w);
}
INLINE Sums dot_add_q4(Sums sums, int32_t x, ByteVector w) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16((__m512i)w, SPLAT(x)));
}
#elif defined(__AVX2__) && defined(__FMA__)
enum { WEIGHT_ZERO_POINT = 0 };
INLINE Sums widen_q4_sums(Sums sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
INLINE Sums dot_add_q8(Sums sums, int32_t x, ByteVector w) {
  return dot_add_int8(sums, x, (const int8_t *)&w);
}
INLINE Sums dot_add_q4(Sums sums, int32_t x, ByteVector w) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16((__m256i)w, SPLAT(x)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
enum { WEIGHT_ZERO_POINT = 0 };
INLINE Sums widen_q4_sums(Sums sums) { return sums; }
INLINE Sums dot_add_q8(Sums sums, int32_t x, ByteVector w) {
  return vdotq_s32(sums, vreinterpretq_s8_s32(vdupq_n_s32(x)), (int8x16_t)w);
}
INLINE Sums dot_add_q4(Sums sums, int32_t x, ByteVector w) { return dot_add_q8(sums, x, w); }
#elif defined(__wasm_simd128__)
enum { WEIGHT_ZERO_POINT = 0 };
INLINE Sums widen_q4_sums(Sums sums) { return sums; }
INLINE Sums dot_add_q8(Sums sums, int32_t x, ByteVector w) {
  v128_t wide = wasm_i16x8_extend_low_i8x16(wasm_i32x4_splat(x));
  v128_t low = wasm_i32x4_dot_i16x8(wide, wasm_i16x8_extend_low_i8x16((v128_t)w));
  v128_t high = wasm_i32x4_dot_i16x8(wide, wasm_i16x8_extend_high_i8x16((v128_t)w));
  IntVector even = (IntVector)wasm_i32x4_shuffle(low, high, 0, 2, 4, 6);
  return (Sums)((IntVector)sums + even + (IntVector)wasm_i32x4_shuffle(low, high, 1, 3, 5, 7));
}
INLINE Sums dot_add_q4(Sums sums, int32_t x, ByteVector w) { return dot_add_q8(sums, x, w); }
#else
enum { WEIGHT_ZERO_POINT = 0 };
INLINE Sums widen_q4_sums(Sums sums) { return sums; }
INLINE Sums dot_add_q8(Sums sums, int32_t x, ByteVector w) {
  int8_t bytes[4];
  memcpy(bytes, &x, 4);
  for (int i = 0; i < 4 * WIDTH; i++) sums[i / 4] += bytes[i % 4] * (int8_t)w[i];
  return sums;
}
INLINE Sums dot_add_q4(Sums sums, int32_t x, ByteVector w) { return dot_add_q8(sums, x, w); }
#endif
