// Which of the compiled instruction sets run here: what the processor has, and for the wider registers what the
// system saves, since the compiler's runtime asks for both.

#define PK_SUPPORTS(set) extern "C" __attribute__((visibility("default"))) int pk_supports_##set()

#if defined(__x86_64__)
PK_SUPPORTS(generic) { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt"); }
PK_SUPPORTS(avx2) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
PK_SUPPORTS(avx512) {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
PK_SUPPORTS(generic) { return 1; }
#endif

// Whether the kernels use OpenMP.
extern "C" __attribute__((visibility("default"))) int pk_has_threads() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}
