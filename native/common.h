// Helpers of gpt.c.
#ifndef COMMON_H
#define COMMON_H
#define INLINE static inline __attribute__((always_inline))

#endif
