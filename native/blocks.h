// Products of weights in blocks of 32, with inputs that are rounded in blocks. Part of gpt.c.
//
// A vector of weights, Bytes, has four inputs of each of WIDTH outputs. add_bytes adds to each sum
// the dot product of four int8 weights and four int8 inputs x. The products of add_nibbles, whose
// weights are from 0 to 15, may be summed in 16 bits, until nibble_sums makes int32 sums of those
// of a block. ZERO is what add_bytes adds to a weight: VNNI takes unsigned bytes.

typedef uint8_t Bytes __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
enum { ZERO = 128 };
INLINE Sums add_nibbles(Sums sums, int32_t x, Bytes w) {
  return _mm512_dpbusd_epi32(sums, (__m512i)w, _mm512_set1_epi32(x));
}
INLINE Sums add_bytes(Sums sums, int32_t x, Bytes w) { return add_nibbles(sums, x, w ^ 128); }
INLINE Sums nibble_sums(Sums sums) { return sums; }
#elif defined(__AVX512F__) && defined(__AVX512BW__)
// The product of two pairs, |w| * x: at most 2 * 128 * 127, which 16 bits hold. x has w's sign.
enum { ZERO = 0 };
INLINE Sums nibble_sums(Sums sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
INLINE Sums add_bytes(Sums sums, int32_t x, Bytes w) {
  __m512i all = _mm512_set1_epi32(x);
  __mmask64 negative = _mm512_movepi8_mask((__m512i)w);
  __m512i signs = _mm512_mask_sub_epi8(all, negative, _mm512_setzero_si512(), all);
  __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)w), signs);
  return _mm512_add_epi32(sums, nibble_sums(pairs));
}
INLINE Sums add_nibbles(Sums sums, int32_t x, Bytes w) {
  return _mm512_add_epi16(sums, _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x)));
}
#elif defined(__AVX2__) && defined(__FMA__)
enum { ZERO = 0 };
INLINE Sums nibble_sums(Sums sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
INLINE Sums add_bytes(Sums sums, int32_t x, Bytes w) {
  __m256i signs = _mm256_sign_epi8(_mm256_set1_epi32(x), (__m256i)w);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), signs);
  return _mm256_add_epi32(sums, nibble_sums(pairs));
}
INLINE Sums add_nibbles(Sums sums, int32_t x, Bytes w) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
enum { ZERO = 0 };
INLINE Sums nibble_sums(Sums sums) { return sums; }
INLINE Sums add_bytes(Sums sums, int32_t x, Bytes w) {
  return vdotq_s32(sums, vreinterpretq_s8_s32(vdupq_n_s32(x)), (int8x16_t)w);
}
INLINE Sums add_nibbles(Sums sums, int32_t x, Bytes w) { return add_bytes(sums, x, w); }
#elif defined(__wasm_simd128__)
enum { ZERO = 0 };
INLINE Sums nibble_sums(Sums sums) { return sums; }
INLINE Sums add_bytes(Sums sums, int32_t x, Bytes w) {
  v128_t wide = wasm_i16x8_extend_low_i8x16(wasm_i32x4_splat(x));
  v128_t low = wasm_i32x4_dot_i16x8(wide, wasm_i16x8_extend_low_i8x16((v128_t)w));
  v128_t high = wasm_i32x4_dot_i16x8(wide, wasm_i16x8_extend_high_i8x16((v128_t)w));
  Ints even = (Ints)wasm_i32x4_shuffle(low, high, 0, 2, 4, 6);
  return (Sums)((Ints)sums + even + (Ints)wasm_i32x4_shuffle(low, high, 1, 3, 5, 7));
}
INLINE Sums add_nibbles(Sums sums, int32_t x, Bytes w) { return add_bytes(sums, x, w); }
#else
enum { ZERO = 0 };
INLINE Sums nibble_sums(Sums sums) { return sums; }
INLINE Sums add_bytes(Sums sums, int32_t x, Bytes w) {
  int8_t four[4];
  memcpy(four, &x, 4);
  for (int i = 0; i < 4 * WIDTH; i++) sums[i / 4] += four[i % 4] * (int8_t)w[i];
  return sums;
}
INLINE Sums add_nibbles(Sums sums, int32_t x, Bytes w) { return add_bytes(sums, x, w); }
#endif
