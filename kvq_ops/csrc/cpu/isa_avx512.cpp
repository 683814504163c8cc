// Where a build gives all files the same flags and builds all files on every machine, this one sees to itself.
#ifdef __x86_64__
#ifndef __AVX512BW__
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#endif
#define KVQ_ISA avx512
#define KVQ_ISA_NAME "avx512"
#include "simd_avx512.h"

#include "kernels-inl.h"
#endif
