// Dot products of Q8 weights with inputs quantised in blocks of 32. Part of gpt.c.
//
// A ByteVector holds the weights of four inputs for each of WIDTH outputs. dot_add_q8 adds to each
// sum the dot product of four int8 weights and four int8 inputs x.

typedef uint8_t ByteVector __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));
typedef int32_t IntVector __attribute__((vector_size(4 * WIDTH)));

INLINE Sums dot_add_q8(Sums sums, int32_t x, ByteVector w) {
  IntVector lanes = (IntVector)sums;  // the lanes of Sums depend on the processor
  int8_t bytes[4];
  memcpy(bytes, &x, 4);
  for (int i = 0; i < 4 * WIDTH; i++) lanes[i / 4] += bytes[i % 4] * (int8_t)w[i];
  return (Sums)lanes;
}
