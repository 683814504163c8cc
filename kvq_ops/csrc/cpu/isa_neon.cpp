#ifdef __aarch64__
#define KVQ_ISA neon
#define KVQ_ISA_NAME "neon"
#include "simd_neon.h"

#include "kernels-inl.h"
#endif
