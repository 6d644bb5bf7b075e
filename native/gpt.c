// Code for the CPU. It has nothing yet but the name of what it may use of this processor.
#ifdef _OPENMP
#define THREADS ""
#else
#define THREADS ", one thread"
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
const char kernel[64] = "AVX-512 VNNI" THREADS;
#elif defined(__AVX2__)
const char kernel[64] = "AVX2" THREADS;
#elif defined(__ARM_NEON)
const char kernel[64] = "NEON" THREADS;
#else
const char kernel[64] = "plain C" THREADS;
#endif
