#define COLLECTIVES_ISA isa_default
#define COLLECTIVES_ISA_NAME "default"
#define COLLECTIVES_VECTOR_BYTES 16
#include "kernels/quantize.inl"
