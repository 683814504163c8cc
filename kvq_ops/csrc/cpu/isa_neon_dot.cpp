#define KVQ_ISA neon_dot
#define KVQ_ISA_NAME "neon_dot"
#include "simd_neon.h"

#include "kernels-inl.h"
