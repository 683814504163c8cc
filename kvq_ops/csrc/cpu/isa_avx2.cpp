#define KVQ_ISA avx2
#define KVQ_ISA_NAME "avx2"
#include "simd_avx2.h"

#include "kernels-inl.h"
