#define KVQ_ISA scalar
#define KVQ_ISA_NAME "scalar"
#include "simd_scalar.h"

#include "kernels-inl.h"
