#if defined(__x86_64__)
#define COLLECTIVES_ISA isa_avx2
#define COLLECTIVES_ISA_NAME "avx2"
#define COLLECTIVES_VECTOR_BYTES 32
#include "kernels/quantize.inl"
#endif
