#define KVQ_ISA avx512_vnni
#define KVQ_ISA_NAME "avx512_vnni"
#define KVQ_VNNI
#include "simd_avx512.h"

#include "kernels-inl.h"
