#if defined(__x86_64__)
#define COLLECTIVES_ISA isa_avx512
#define COLLECTIVES_ISA_NAME "avx512"
#define COLLECTIVES_VECTOR_BYTES 64
#include "kernels/quantize.inl"
#endif
