// C code for this processor; so far it says only which instructions the compiler may use.

#ifdef _OPENMP
#define THREADS ""
#else
#define THREADS ", one thread"
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
#ifdef __AVX512VNNI__
const char kernel[64] = "AVX-512 VNNI" THREADS;
#else
const char kernel[64] = "AVX-512" THREADS;
#endif
#elif defined(__AVX2__) && defined(__FMA__)
const char kernel[64] = "AVX2" THREADS;
#elif defined(__ARM_FEATURE_DOTPROD)
const char kernel[64] = "NEON" THREADS;
#elif defined(__wasm_simd128__)
const char kernel[64] = "WebAssembly" THREADS;
#else
const char kernel[64] = "plain C" THREADS;
#endif
