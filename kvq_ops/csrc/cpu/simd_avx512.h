// The alphabet of AVX-512 (F, BW, DQ, VL), with VNNI where the including file says KVQ_VNNI: 32 int16 lanes, 16 int32
// or fp32 lanes. See simd_scalar.h for what each word means.
#pragma once

#include "params.h"

#include <immintrin.h>

#include <cstdint>

namespace kvq {
namespace KVQ_ISA {
namespace {

constexpr int kLanes = 32;
constexpr int kAccumulators = 24;  // of 32 registers

using I16 = __m512i;
using I32 = __m512i;
using F32 = __m512;

// Int16 products
inline I32 zero_i32() {
  return _mm512_setzero_si512();
}
inline I32 dot(I32 sum, I16 a, I16 b) {
#ifdef KVQ_VNNI
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
inline void pin(I32& x) {
  asm volatile("" : "+v"(x));
}
inline I16 load_i16(const int16_t* p) {
  return _mm512_load_si512(p);
}
inline I16 pair_i16(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
inline I16 load_signed(const uint8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline I16 load_unsigned(const uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline I16 low_nibbles(I16 bytes) {
  return _mm512_and_si512(bytes, _mm512_set1_epi16(15));
}
inline I16 high_nibbles(I16 bytes) {
  return _mm512_srli_epi16(bytes, 4);
}
// The table twice: a lane's index is its low 5 bits, one of which is not the nibble's.
inline I16 levels_of(I16 nibbles) {
  const __m256i table = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kLevels)));
  return _mm512_permutexvar_epi16(nibbles, _mm512_broadcast_i64x4(table));
}
inline I16 low_levels(const uint8_t* p) {
  return levels_of(load_unsigned(p));
}
inline I16 high_levels(const uint8_t* p) {
  return levels_of(_mm512_srli_epi16(load_unsigned(p), 4));
}
inline I16 set_i16(int16_t x) {
  return _mm512_set1_epi16(x);
}
inline I16 mul_i16(I16 a, I16 b) {
  return _mm512_mullo_epi16(a, b);
}
inline I16 scale_by_mantissa(I16 w, I16 m) {
  return _mm512_add_epi16(w, _mm512_mulhrs_epi16(w, _mm512_slli_epi16(_mm512_sub_epi16(m, _mm512_set1_epi16(16)), 11)));
}
inline void store_i16(int16_t* p, I16 x) {
  _mm512_store_si512(p, x);
}
inline void interleave(I16 a, I16 b, I16* first, I16* second) {
  *first = _mm512_unpacklo_epi16(a, b);
  *second = _mm512_unpackhi_epi16(a, b);
}
inline void natural_order(I32 first, I32 second, I32* low, I32* high) {
  const __m512i take_low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i take_high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  *low = _mm512_permutex2var_epi64(first, take_low, second);
  *high = _mm512_permutex2var_epi64(first, take_high, second);
}
inline __m512i add_pairs32(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
inline void sum4(I32 a, I32 b, I32 c, I32 d, int32_t out[4]) {
  const __m512i ab = add_pairs32(a, b), cd = add_pairs32(c, d);
  const __m512i x = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i y = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), sums);
}

// Products of keys and queries
#include "key_i16-inl.h"

// Int32
inline I32 load_i32(const int32_t* p) {
  return _mm512_load_si512(p);
}
inline void store_i32(int32_t* p, I32 x) {
  _mm512_store_si512(p, x);
}
inline I32 set_i32(int32_t x) {
  return _mm512_set1_epi32(x);
}
inline I32 sub_i32(I32 a, I32 b) {
  return _mm512_sub_epi32(a, b);
}
inline I32 max_i32(I32 a, I32 b) {
  return _mm512_max_epi32(a, b);
}
inline int32_t reduce_max_i32(I32 x) {
  return _mm512_reduce_max_epi32(x);
}

// Fp32
inline F32 load_f32(const float* p) {
  return _mm512_loadu_ps(p);
}
inline void store_f32(float* p, F32 x) {
  _mm512_storeu_ps(p, x);
}
inline F32 set_f32(float x) {
  return _mm512_set1_ps(x);
}
inline F32 add(F32 a, F32 b) {
  return _mm512_add_ps(a, b);
}
inline F32 sub(F32 a, F32 b) {
  return _mm512_sub_ps(a, b);
}
inline F32 mul(F32 a, F32 b) {
  return _mm512_mul_ps(a, b);
}
inline F32 div(F32 a, F32 b) {
  return _mm512_div_ps(a, b);
}
inline F32 fma(F32 a, F32 b, F32 c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline F32 min(F32 a, F32 b) {
  return _mm512_min_ps(a, b);
}
inline F32 max(F32 a, F32 b) {
  return _mm512_max_ps(a, b);
}
inline F32 at_least(float low, F32 x) {
  return _mm512_max_ps(_mm512_set1_ps(low), x);
}
inline F32 zero_below(F32 x, float low, F32 value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_NLT_UQ), value);
}
inline I32 abs_bits(F32 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}
inline F32 round_even(F32 x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline I32 to_i32(F32 x) {
  return _mm512_cvtps_epi32(x);
}
inline F32 to_f32(I32 x) {
  return _mm512_cvtepi32_ps(x);
}
inline F32 scale_by_power(F32 x, I32 n) {
  return _mm512_mul_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)));
}
template <int N>
inline F32 swap(F32 x) {
  return N == 1   ? _mm512_permute_ps(x, 0xb1)
         : N == 2 ? _mm512_permute_ps(x, 0x4e)
         : N == 4 ? _mm512_shuffle_f32x4(x, x, 0xb1)
                  : _mm512_shuffle_f32x4(x, x, 0x4e);
}
inline float reduce_add(F32 x) {
  return _mm512_reduce_add_ps(x);
}
inline float reduce_max(F32 x) {
  return _mm512_reduce_max_ps(x);
}
inline void store_i16(int16_t* p, I32 low, I32 high) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_store_si512(p, _mm512_permutexvar_epi64(order, _mm512_packs_epi32(low, high)));
}

// 16-bit floats
inline F32 load_bf16(const uint16_t* p) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
inline F32 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_f16(uint16_t* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(uint16_t* p, F32 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i y = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  y = _mm512_mask_mov_epi32(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(y));
}

inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace
}  // namespace KVQ_ISA
}  // namespace kvq
