// The alphabet in plain C++, and what each of its words means: 8 int16 lanes, 4 int32 or fp32 lanes, written as loops
// that compilers may vectorise. A new instruction set provides the same names.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../format.h"
#include "half.h"

namespace kvq {
namespace KVQ_ISA {
namespace {

constexpr int kLanes = 8;         // int16 lanes; int32 and fp32 vectors have half as many
constexpr int kAccumulators = 8;  // int32 vectors that a product may keep in registers

struct I16 {
  int16_t v[kLanes];
};
struct I32 {
  int32_t v[kLanes / 2];
};
struct F32 {
  float v[kLanes / 2];
};

#define KVQ_EACH(count) for (int i = 0; i < (count); ++i)
constexpr int kHalf = kLanes / 2;

// Int16 products
inline I32 zero_i32() {
  return I32{};
}
// sum[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1], exact in int32
inline I32 dot(I32 sum, I16 a, I16 b) {
  KVQ_EACH(kHalf) sum.v[i] += int32_t{a.v[2 * i]} * b.v[2 * i] + int32_t{a.v[2 * i + 1]} * b.v[2 * i + 1];
  return sum;
}
// Keeps x in a register at this point: compilers otherwise move the products of a tile together and spill its sums.
inline void pin(I32&) {}
inline I16 load_i16(const int16_t* p) {
  I16 x;
  std::memcpy(x.v, p, sizeof x.v);
  return x;
}
// p[0], p[1], p[0], p[1], ...
inline I16 pair_i16(const int16_t* p) {
  I16 x;
  KVQ_EACH(kLanes) x.v[i] = p[i & 1];
  return x;
}
// kLanes bytes as int8, widened
inline I16 load_signed(const uint8_t* p) {
  I16 x;
  KVQ_EACH(kLanes) x.v[i] = static_cast<int8_t>(p[i]);
  return x;
}
// kLanes bytes, zero-extended
inline I16 load_unsigned(const uint8_t* p) {
  I16 x;
  KVQ_EACH(kLanes) x.v[i] = p[i];
  return x;
}
inline I16 low_nibbles(I16 bytes) {
  KVQ_EACH(kLanes) bytes.v[i] = static_cast<int16_t>(bytes.v[i] & 15);
  return bytes;
}
inline I16 high_nibbles(I16 bytes) {
  KVQ_EACH(kLanes) bytes.v[i] = static_cast<int16_t>(bytes.v[i] >> 4);
  return bytes;
}
// kLanes bytes: what the 4-bit codes of their low nibbles stand for in coding kGroup
inline I16 low_levels(const uint8_t* p) {
  I16 x;
  KVQ_EACH(kLanes) x.v[i] = kLevels[p[i] & 15];
  return x;
}
inline I16 high_levels(const uint8_t* p) {
  I16 x;
  KVQ_EACH(kLanes) x.v[i] = kLevels[p[i] >> 4];
  return x;
}
inline I16 set_i16(int16_t x) {
  I16 y;
  KVQ_EACH(kLanes) y.v[i] = x;
  return y;
}
// The low 16 bits of the products
inline I16 mul_i16(I16 a, I16 b) {
  KVQ_EACH(kLanes) a.v[i] = static_cast<int16_t>(a.v[i] * b.v[i]);
  return a;
}
// w * m / 16, halves up; m is 1..16
inline I16 scale_by_mantissa(I16 w, I16 m) {
  KVQ_EACH(kLanes) w.v[i] = static_cast<int16_t>(w.v[i] + ((w.v[i] * (m.v[i] - 16) + 8) >> 4));
  return w;
}
inline void store_i16(int16_t* p, I16 x) {
  KVQ_EACH(kLanes) p[i] = x.v[i];
}
// Pairs (a[i], b[i]) in two vectors, in an order of the ISA's choice that natural_order undoes.
inline void interleave(I16 a, I16 b, I16* first, I16* second) {
  KVQ_EACH(kHalf) {
    first->v[2 * i] = a.v[i];
    first->v[2 * i + 1] = b.v[i];
    second->v[2 * i] = a.v[kHalf + i];
    second->v[2 * i + 1] = b.v[kHalf + i];
  }
}
// Sums of interleaved products, lane by lane, to the order of the bytes.
inline void natural_order(I32 first, I32 second, I32* low, I32* high) {
  *low = first;
  *high = second;
}
// out[k] = the sum of the lanes of the k-th vector
inline void sum4(I32 a, I32 b, I32 c, I32 d, int32_t out[4]) {
  const I32* vectors[4] = {&a, &b, &c, &d};
  for (int k = 0; k < 4; ++k) {
    out[k] = 0;
    KVQ_EACH(kHalf) out[k] += vectors[k]->v[i];
  }
}

// Products of keys and queries
#include "key_i16-inl.h"

// Int32
inline I32 load_i32(const int32_t* p) {
  I32 x;
  std::memcpy(x.v, p, sizeof x.v);
  return x;
}
inline void store_i32(int32_t* p, I32 x) {
  std::memcpy(p, x.v, sizeof x.v);
}
inline I32 set_i32(int32_t x) {
  I32 y;
  KVQ_EACH(kHalf) y.v[i] = x;
  return y;
}
inline I32 sub_i32(I32 a, I32 b) {
  KVQ_EACH(kHalf) a.v[i] -= b.v[i];
  return a;
}
inline I32 max_i32(I32 a, I32 b) {
  KVQ_EACH(kHalf) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline int32_t reduce_max_i32(I32 x) {
  int32_t most = x.v[0];
  KVQ_EACH(kHalf) most = x.v[i] > most ? x.v[i] : most;
  return most;
}

// Fp32
inline F32 load_f32(const float* p) {
  F32 x;
  std::memcpy(x.v, p, sizeof x.v);
  return x;
}
inline void store_f32(float* p, F32 x) {
  std::memcpy(p, x.v, sizeof x.v);
}
inline F32 set_f32(float x) {
  F32 y;
  KVQ_EACH(kHalf) y.v[i] = x;
  return y;
}
inline F32 add(F32 a, F32 b) {
  KVQ_EACH(kHalf) a.v[i] += b.v[i];
  return a;
}
inline F32 sub(F32 a, F32 b) {
  KVQ_EACH(kHalf) a.v[i] -= b.v[i];
  return a;
}
inline F32 mul(F32 a, F32 b) {
  KVQ_EACH(kHalf) a.v[i] *= b.v[i];
  return a;
}
inline F32 div(F32 a, F32 b) {
  KVQ_EACH(kHalf) a.v[i] /= b.v[i];
  return a;
}
// a * b + c, rounded once or twice: only attention may use it, never quantization
inline F32 fma(F32 a, F32 b, F32 c) {
  KVQ_EACH(kHalf) a.v[i] = a.v[i] * b.v[i] + c.v[i];
  return a;
}
// min and max of two numbers; where one is NaN either may come out
inline F32 min(F32 a, F32 b) {
  KVQ_EACH(kHalf) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F32 max(F32 a, F32 b) {
  KVQ_EACH(kHalf) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
// max(low, x) that keeps a NaN
inline F32 at_least(float low, F32 x) {
  KVQ_EACH(kHalf) x.v[i] = x.v[i] < low ? low : x.v[i];
  return x;
}
// 0 where x < low, value elsewhere and where x is NaN
inline F32 zero_below(F32 x, float low, F32 value) {
  KVQ_EACH(kHalf) value.v[i] = x.v[i] < low ? 0.0f : value.v[i];
  return value;
}
// The bits of |x|: they order like |x|, above them infinity, above that NaN.
inline I32 abs_bits(F32 x) {
  I32 y;
  KVQ_EACH(kHalf) y.v[i] = static_cast<int32_t>(bits_of(x.v[i]) & 0x7fffffffu);
  return y;
}
// Nearest integer, ties to even
inline F32 round_even(F32 x) {
  KVQ_EACH(kHalf) x.v[i] = std::nearbyint(x.v[i]);
  return x;
}
// Nearest integer, ties to even; any value for NaN and beyond the range
inline I32 to_i32(F32 x) {
  I32 y;
  KVQ_EACH(kHalf) {
    const float r = std::nearbyint(x.v[i]);
    y.v[i] = std::fabs(r) < 2147483648.0f ? static_cast<int32_t>(r) : INT32_MIN;
  }
  return y;
}
inline F32 to_f32(I32 x) {
  F32 y;
  KVQ_EACH(kHalf) y.v[i] = static_cast<float>(x.v[i]);
  return y;
}
// x * 2^n, n in -126..127 (any value outside)
inline F32 scale_by_power(F32 x, I32 n) {
  KVQ_EACH(kHalf) x.v[i] *= float_of((static_cast<uint32_t>(n.v[i]) + 127u) << 23);
  return x;
}
// Lane i takes lane i ^ N; N is a power of two below the number of lanes
template <int N>
inline F32 swap(F32 x) {
  F32 y = x;
  KVQ_EACH(kHalf) y.v[i] = x.v[i ^ N];
  return y;
}
inline float reduce_add(F32 x) {
  float sum = 0.0f;
  KVQ_EACH(kHalf) sum += x.v[i];
  return sum;
}
inline float reduce_max(F32 x) {
  float most = x.v[0];
  KVQ_EACH(kHalf) most = x.v[i] > most ? x.v[i] : most;
  return most;
}
// Both vectors as int16, saturated
inline void store_i16(int16_t* p, I32 low, I32 high) {
  KVQ_EACH(kLanes) {
    const int32_t x = i < kHalf ? low.v[i] : high.v[i - kHalf];
    p[i] = static_cast<int16_t>(x < INT16_MIN ? INT16_MIN : x > INT16_MAX ? INT16_MAX : x);
  }
}

// 16-bit floats, rounded to nearest, ties to even
inline F32 load_bf16(const uint16_t* p) {
  F32 x;
  KVQ_EACH(kHalf) x.v[i] = from_bf16(p[i]);
  return x;
}
inline F32 load_f16(const uint16_t* p) {
  F32 x;
  KVQ_EACH(kHalf) x.v[i] = from_f16(p[i]);
  return x;
}
inline void store_bf16(uint16_t* p, F32 x) {
  KVQ_EACH(kHalf) p[i] = to_bf16(x.v[i]);
}
inline void store_f16(uint16_t* p, F32 x) {
  KVQ_EACH(kHalf) p[i] = to_f16(x.v[i]);
}

inline void prefetch(const void* p) {
  __builtin_prefetch(p);
}

#undef KVQ_EACH

}  // namespace
}  // namespace KVQ_ISA
}  // namespace kvq
