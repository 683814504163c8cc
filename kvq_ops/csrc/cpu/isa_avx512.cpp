#define KVQ_ISA avx512
#define KVQ_ISA_NAME "avx512"
#include "simd_avx512.h"

#include "kernels-inl.h"
