// The alphabet of AVX2 + FMA + F16C: 16 int16 lanes, 8 int32 or fp32 lanes. See simd_scalar.h for what each word means.
#pragma once

#include "params.h"

#include <immintrin.h>

#include <cstdint>

namespace kvq {
namespace KVQ_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int kAccumulators = 12;  // of 16 registers

using I16 = __m256i;
using I32 = __m256i;
using F32 = __m256;

// Int16 products
inline I32 zero_i32() {
  return _mm256_setzero_si256();
}
inline I32 dot(I32 sum, I16 a, I16 b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
inline void pin(I32& x) {
  asm volatile("" : "+x"(x));
}
inline I16 load_i16(const int16_t* p) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
}
inline I16 pair_i16(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}
inline I16 load_signed(const uint8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I16 load_unsigned(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I16 low_nibbles(I16 bytes) {
  return _mm256_and_si256(bytes, _mm256_set1_epi16(15));
}
inline I16 high_nibbles(I16 bytes) {
  return _mm256_srli_epi16(bytes, 4);
}
inline I16 levels_of(__m128i nibbles) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kLevels));
  return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, _mm_and_si128(nibbles, _mm_set1_epi8(15))));
}
inline I16 low_levels(const uint8_t* p) {
  return levels_of(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I16 high_levels(const uint8_t* p) {
  return levels_of(_mm_srli_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), 4));
}
inline I16 set_i16(int16_t x) {
  return _mm256_set1_epi16(x);
}
inline I16 mul_i16(I16 a, I16 b) {
  return _mm256_mullo_epi16(a, b);
}
inline I16 scale_by_mantissa(I16 w, I16 m) {
  return _mm256_add_epi16(w, _mm256_mulhrs_epi16(w, _mm256_slli_epi16(_mm256_sub_epi16(m, _mm256_set1_epi16(16)), 11)));
}
inline void store_i16(int16_t* p, I16 x) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), x);
}
inline void interleave(I16 a, I16 b, I16* first, I16* second) {
  *first = _mm256_unpacklo_epi16(a, b);
  *second = _mm256_unpackhi_epi16(a, b);
}
inline void natural_order(I32 first, I32 second, I32* low, I32* high) {
  *low = _mm256_permute2x128_si256(first, second, 0x20);
  *high = _mm256_permute2x128_si256(first, second, 0x31);
}
inline void sum4(I32 a, I32 b, I32 c, I32 d, int32_t out[4]) {
  const __m256i x = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), sums);
}

// Products of keys and queries
#include "key_i16-inl.h"

// Int32
inline I32 load_i32(const int32_t* p) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
}
inline void store_i32(int32_t* p, I32 x) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), x);
}
inline I32 set_i32(int32_t x) {
  return _mm256_set1_epi32(x);
}
inline I32 sub_i32(I32 a, I32 b) {
  return _mm256_sub_epi32(a, b);
}
inline I32 max_i32(I32 a, I32 b) {
  return _mm256_max_epi32(a, b);
}
inline int32_t reduce_max_i32(I32 x) {
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1));
  return _mm_cvtsi128_si32(y);
}

// Fp32
inline F32 load_f32(const float* p) {
  return _mm256_loadu_ps(p);
}
inline void store_f32(float* p, F32 x) {
  _mm256_storeu_ps(p, x);
}
inline F32 set_f32(float x) {
  return _mm256_set1_ps(x);
}
inline F32 add(F32 a, F32 b) {
  return _mm256_add_ps(a, b);
}
inline F32 sub(F32 a, F32 b) {
  return _mm256_sub_ps(a, b);
}
inline F32 mul(F32 a, F32 b) {
  return _mm256_mul_ps(a, b);
}
inline F32 div(F32 a, F32 b) {
  return _mm256_div_ps(a, b);
}
inline F32 fma(F32 a, F32 b, F32 c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline F32 min(F32 a, F32 b) {
  return _mm256_min_ps(a, b);
}
inline F32 max(F32 a, F32 b) {
  return _mm256_max_ps(a, b);
}
inline F32 at_least(float low, F32 x) {
  return _mm256_max_ps(_mm256_set1_ps(low), x);
}
inline F32 zero_below(F32 x, float low, F32 value) {
  return _mm256_and_ps(value, _mm256_cmp_ps(x, _mm256_set1_ps(low), _CMP_NLT_UQ));
}
inline I32 abs_bits(F32 x) {
  return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}
inline F32 round_even(F32 x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline I32 to_i32(F32 x) {
  return _mm256_cvtps_epi32(x);
}
inline F32 to_f32(I32 x) {
  return _mm256_cvtepi32_ps(x);
}
inline F32 scale_by_power(F32 x, I32 n) {
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)));
}
template <int N>
inline F32 swap(F32 x) {
  return N == 1 ? _mm256_permute_ps(x, 0xb1) : N == 2 ? _mm256_permute_ps(x, 0x4e) : _mm256_permute2f128_ps(x, x, 1);
}
inline float reduce_add(F32 x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float reduce_max(F32 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline void store_i16(int16_t* p, I32 low, I32 high) {
  const __m256i packed = _mm256_packs_epi32(low, high);
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

// 16-bit floats
inline F32 load_bf16(const uint16_t* p) {
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
inline F32 load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_f16(uint16_t* p, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(uint16_t* p, F32 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i y = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  y = _mm256_blendv_epi8(y, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(y, y), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace
}  // namespace KVQ_ISA
}  // namespace kvq
