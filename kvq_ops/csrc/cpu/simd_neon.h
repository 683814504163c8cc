// The alphabet of AArch64 NEON, with SDOT where the compiler may use it: 16 int16 lanes in two registers, 8 int32 or
// fp32 lanes in two. See simd_scalar.h for what each word means.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "params.h"

namespace kvq {
namespace KVQ_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int kAccumulators = 8;  // pairs of registers, of 32

struct I16 {
  int16x8_t lo, hi;
};
struct I32 {
  int32x4_t lo, hi;
};
struct F32 {
  float32x4_t lo, hi;
};

// Int16 products. A pair is lanes i and i + 4 of a register: what the widening multiplies take.
inline I32 zero_i32() {
  return {vdupq_n_s32(0), vdupq_n_s32(0)};
}
inline I32 dot(I32 sum, I16 a, I16 b) {
  sum.lo = vmlal_high_s16(vmlal_s16(sum.lo, vget_low_s16(a.lo), vget_low_s16(b.lo)), a.lo, b.lo);
  sum.hi = vmlal_high_s16(vmlal_s16(sum.hi, vget_low_s16(a.hi), vget_low_s16(b.hi)), a.hi, b.hi);
  return sum;
}
inline void pin(I32& x) {
  asm volatile("" : "+w"(x.lo), "+w"(x.hi));
}
inline I16 load_i16(const int16_t* p) {
  return {vld1q_s16(p), vld1q_s16(p + 8)};
}
inline I16 pair_i16(const int16_t* p) {
  const int16x8_t pair = vcombine_s16(vdup_n_s16(p[0]), vdup_n_s16(p[1]));
  return {pair, pair};
}
inline I16 load_signed(const uint8_t* p) {
  const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
  return {vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x)};
}
inline I16 load_unsigned(const uint8_t* p) {
  const uint8x16_t x = vld1q_u8(p);
  return {vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))), vreinterpretq_s16_u16(vmovl_high_u8(x))};
}
inline I16 low_nibbles(I16 bytes) {
  return {vandq_s16(bytes.lo, vdupq_n_s16(15)), vandq_s16(bytes.hi, vdupq_n_s16(15))};
}
inline I16 high_nibbles(I16 bytes) {
  return {vshrq_n_s16(bytes.lo, 4), vshrq_n_s16(bytes.hi, 4)};
}
inline I16 levels_of(uint8x16_t nibbles) {
  const int8x16_t x = vqtbl1q_s8(vld1q_s8(kLevels), nibbles);
  return {vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x)};
}
inline I16 low_levels(const uint8_t* p) {
  return levels_of(vandq_u8(vld1q_u8(p), vdupq_n_u8(15)));
}
inline I16 high_levels(const uint8_t* p) {
  return levels_of(vshrq_n_u8(vld1q_u8(p), 4));
}
inline I16 set_i16(int16_t x) {
  return {vdupq_n_s16(x), vdupq_n_s16(x)};
}
inline I16 mul_i16(I16 a, I16 b) {
  return {vmulq_s16(a.lo, b.lo), vmulq_s16(a.hi, b.hi)};
}
inline int16x8_t scale_by_mantissa(int16x8_t w, int16x8_t m) {
  return vaddq_s16(w, vqrdmulhq_s16(w, vshlq_n_s16(vsubq_s16(m, vdupq_n_s16(16)), 11)));
}
inline I16 scale_by_mantissa(I16 w, I16 m) {
  return {scale_by_mantissa(w.lo, m.lo), scale_by_mantissa(w.hi, m.hi)};
}
inline void store_i16(int16_t* p, I16 x) {
  vst1q_s16(p, x.lo);
  vst1q_s16(p + 8, x.hi);
}
inline int16x8_t low_halves(int16x8_t a, int16x8_t b) {
  return vcombine_s16(vget_low_s16(a), vget_low_s16(b));
}
inline int16x8_t high_halves(int16x8_t a, int16x8_t b) {
  return vcombine_s16(vget_high_s16(a), vget_high_s16(b));
}
inline void interleave(I16 a, I16 b, I16* first, I16* second) {
  *first = {low_halves(a.lo, b.lo), high_halves(a.lo, b.lo)};
  *second = {low_halves(a.hi, b.hi), high_halves(a.hi, b.hi)};
}
inline void natural_order(I32 first, I32 second, I32* low, I32* high) {
  *low = first;
  *high = second;
}
inline void sum4(I32 a, I32 b, I32 c, I32 d, int32_t out[4]) {
  const int32x4_t ab = vpaddq_s32(vaddq_s32(a.lo, a.hi), vaddq_s32(b.lo, b.hi));
  const int32x4_t cd = vpaddq_s32(vaddq_s32(c.lo, c.hi), vaddq_s32(d.lo, d.hi));
  vst1q_s32(out, vpaddq_s32(ab, cd));
}

// Products of keys and queries
#ifdef KVQ_NEON_DOT
// SDOT multiplies bytes: a query code is 256 * high + low, and the two halves sum apart.
constexpr int kQueryLimit = 127 * 256 + 127;
using KeyCode = int8x16_t;
struct KeyQuery {
  int8x16_t high, low;
};
struct KeySum {
  int32x4_t high, low;
};
inline KeySum zero_key_sum() {
  return {vdupq_n_s32(0), vdupq_n_s32(0)};
}
inline KeyCode load_key_signed(const uint8_t* p) {
  return vreinterpretq_s8_u8(vld1q_u8(p));
}
inline KeyCode load_key_unsigned(const uint8_t* p) {
  return vreinterpretq_s8_u8(vld1q_u8(p));
}
inline KeyCode key_low_nibbles(KeyCode bytes) {
  return vandq_s8(bytes, vdupq_n_s8(15));
}
inline KeyCode key_high_nibbles(KeyCode bytes) {
  return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(bytes), 4));
}
inline KeyQuery load_query(const int16_t* p) {
  const int8_t* bytes = reinterpret_cast<const int8_t*>(p);
  return {vld1q_s8(bytes), vld1q_s8(bytes + kLanes)};
}
inline void pin_key(KeySum& x) {
  asm volatile("" : "+w"(x.high), "+w"(x.low));
}
inline KeySum dot_key(KeySum sum, KeyCode code, KeyQuery query) {
  return {vdotq_s32(sum.high, code, query.high), vdotq_s32(sum.low, code, query.low)};
}
inline int32x4_t whole(KeySum x) {
  return vaddq_s32(vshlq_n_s32(x.high, 8), x.low);
}
inline void sum4_keys(KeySum a, KeySum b, KeySum c, KeySum d, int32_t out[4]) {
  vst1q_s32(out, vpaddq_s32(vpaddq_s32(whole(a), whole(b)), vpaddq_s32(whole(c), whole(d))));
}
inline void arrange_query(int16_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    int8_t bytes[2 * kLanes];
    for (int j = 0; j < kLanes; ++j) {
      bytes[kLanes + j] = static_cast<int8_t>(codes[i + j] & 255);
      bytes[j] = static_cast<int8_t>((codes[i + j] - bytes[kLanes + j]) / 256);
    }
    __builtin_memcpy(codes + i, bytes, sizeof bytes);
  }
}
#else
#include "key_i16-inl.h"
#endif

// Int32
inline I32 load_i32(const int32_t* p) {
  return {vld1q_s32(p), vld1q_s32(p + 4)};
}
inline void store_i32(int32_t* p, I32 x) {
  vst1q_s32(p, x.lo);
  vst1q_s32(p + 4, x.hi);
}
inline I32 set_i32(int32_t x) {
  return {vdupq_n_s32(x), vdupq_n_s32(x)};
}
inline I32 sub_i32(I32 a, I32 b) {
  return {vsubq_s32(a.lo, b.lo), vsubq_s32(a.hi, b.hi)};
}
inline I32 max_i32(I32 a, I32 b) {
  return {vmaxq_s32(a.lo, b.lo), vmaxq_s32(a.hi, b.hi)};
}
inline int32_t reduce_max_i32(I32 x) {
  return vmaxvq_s32(vmaxq_s32(x.lo, x.hi));
}

// Fp32
inline F32 load_f32(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4)};
}
inline void store_f32(float* p, F32 x) {
  vst1q_f32(p, x.lo);
  vst1q_f32(p + 4, x.hi);
}
inline F32 set_f32(float x) {
  return {vdupq_n_f32(x), vdupq_n_f32(x)};
}
inline F32 add(F32 a, F32 b) {
  return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)};
}
inline F32 sub(F32 a, F32 b) {
  return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)};
}
inline F32 mul(F32 a, F32 b) {
  return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)};
}
inline F32 div(F32 a, F32 b) {
  return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)};
}
inline F32 fma(F32 a, F32 b, F32 c) {
  return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)};
}
inline F32 min(F32 a, F32 b) {
  return {vminq_f32(a.lo, b.lo), vminq_f32(a.hi, b.hi)};
}
inline F32 max(F32 a, F32 b) {
  return {vmaxnmq_f32(a.lo, b.lo), vmaxnmq_f32(a.hi, b.hi)};
}
inline F32 at_least(float low, F32 x) {
  return {vmaxq_f32(vdupq_n_f32(low), x.lo), vmaxq_f32(vdupq_n_f32(low), x.hi)};
}
inline float32x4_t zero_below(float32x4_t x, float low, float32x4_t value) {
  const uint32x4_t below = vcltq_f32(x, vdupq_n_f32(low));
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), below));
}
inline F32 zero_below(F32 x, float low, F32 value) {
  return {zero_below(x.lo, low, value.lo), zero_below(x.hi, low, value.hi)};
}
inline I32 abs_bits(F32 x) {
  return {vreinterpretq_s32_f32(vabsq_f32(x.lo)), vreinterpretq_s32_f32(vabsq_f32(x.hi))};
}
inline F32 round_even(F32 x) {
  return {vrndnq_f32(x.lo), vrndnq_f32(x.hi)};
}
inline I32 to_i32(F32 x) {
  return {vcvtnq_s32_f32(x.lo), vcvtnq_s32_f32(x.hi)};
}
inline F32 to_f32(I32 x) {
  return {vcvtq_f32_s32(x.lo), vcvtq_f32_s32(x.hi)};
}
inline float32x4_t power(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
inline F32 scale_by_power(F32 x, I32 n) {
  return {vmulq_f32(x.lo, power(n.lo)), vmulq_f32(x.hi, power(n.hi))};
}
template <int N>
inline F32 swap(F32 x) {
  if (N == 1) return {vrev64q_f32(x.lo), vrev64q_f32(x.hi)};
  if (N == 2) return {vextq_f32(x.lo, x.lo, 2), vextq_f32(x.hi, x.hi, 2)};
  return {x.hi, x.lo};
}
inline float reduce_add(F32 x) {
  return vaddvq_f32(vaddq_f32(x.lo, x.hi));
}
inline float reduce_max(F32 x) {
  return vmaxnmvq_f32(vmaxnmq_f32(x.lo, x.hi));
}
inline void store_i16(int16_t* p, I32 low, I32 high) {
  vst1q_s16(p, vcombine_s16(vqmovn_s32(low.lo), vqmovn_s32(low.hi)));
  vst1q_s16(p + 8, vcombine_s16(vqmovn_s32(high.lo), vqmovn_s32(high.hi)));
}

// 16-bit floats
inline F32 load_bf16(const uint16_t* p) {
  const uint16x8_t x = vld1q_u16(p);
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))};
}
inline F32 load_f16(const uint16_t* p) {
  const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)};
}
inline void store_f16(uint16_t* p, F32 x) {
  vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.lo), x.hi)));
}
inline uint16x4_t narrow_bf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t number = vceqq_f32(x, x);
  return vshrn_n_u32(vbslq_u32(number, rounded, vdupq_n_u32(0x7fc00000u)), 16);
}
inline void store_bf16(uint16_t* p, F32 x) {
  vst1q_u16(p, vcombine_u16(narrow_bf16(x.lo), narrow_bf16(x.hi)));
}

inline void prefetch(const void* p) {
  __builtin_prefetch(p);
}

}  // namespace
}  // namespace KVQ_ISA
}  // namespace kvq
