// Where a build gives all files the same flags and builds all files on every machine, this one sees to itself.
#ifdef __x86_64__
#ifndef __AVX2__
#pragma GCC target("avx2,fma,f16c")
#endif
#define KVQ_ISA avx2
#define KVQ_ISA_NAME "avx2"
#include "simd_avx2.h"

#include "kernels-inl.h"
#endif
