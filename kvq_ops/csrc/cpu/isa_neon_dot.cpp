// Where a build gives all files the same flags and builds all files on every machine, this one sees to itself.
#ifdef __aarch64__
#ifndef __ARM_FEATURE_DOTPROD
#pragma GCC target("arch=armv8.2-a+dotprod+fp16")
#endif
#define KVQ_NEON_DOT
#define KVQ_ISA neon_dot
#define KVQ_ISA_NAME "neon_dot"
#include "simd_neon.h"

#include "kernels-inl.h"
#endif
