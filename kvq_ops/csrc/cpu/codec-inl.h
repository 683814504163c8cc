// Bytes of one side to int16 lanes, and rows of floats to bytes: the only CPU code that knows bit order.
#pragma once

#include <cstdint>

#include "half.h"
#include "params.h"

namespace kvq {
namespace KVQ_ISA {
namespace {

constexpr int kFloats = kLanes / 2;

#if defined(__clang__)
#define KVQ_UNROLL _Pragma("unroll")
#else
#define KVQ_UNROLL _Pragma("GCC unroll 32")
#endif

// Tiles fill the registers: they are compiled apart from what surrounds them.
#define KVQ_NOINLINE __attribute__((noinline))

// int8 rows: one vector of signed codes a load.
struct Codec8 {
  static constexpr int kVectors = 1;
  static constexpr int kOffset = 0;  // what a lane holds more than its code
  static I16 load(const uint8_t* p) { return load_signed(p); }
  static KeyCode load_key(const uint8_t* p) { return load_key_signed(p); }
  template <int V>
  static I16 vector(I16 bytes) {
    return bytes;
  }
  template <int V>
  static KeyCode key_vector(KeyCode bytes) {
    return bytes;
  }
};

// int4 rows: the low nibbles, then the high nibbles, each code + 8.
struct Codec4 {
  static constexpr int kVectors = 2;
  static constexpr int kOffset = 8;
  static I16 load(const uint8_t* p) { return load_unsigned(p); }
  static KeyCode load_key(const uint8_t* p) { return load_key_unsigned(p); }
  template <int V>
  static I16 vector(I16 bytes) {
    return V == 0 ? low_nibbles(bytes) : high_nibbles(bytes);
  }
  template <int V>
  static KeyCode key_vector(KeyCode bytes) {
    return V == 0 ? key_low_nibbles(bytes) : key_high_nibbles(bytes);
  }
};

// int4 rows of coding kGroup: what the codes stand for, by table.
struct CodecLevels {
  static constexpr int kVectors = 2;
  static constexpr int kOffset = 0;
  static const uint8_t* load(const uint8_t* p) { return p; }
  template <int V>
  static I16 vector(const uint8_t* p) {
    return V == 0 ? low_levels(p) : high_levels(p);
  }
};

// Reads `count` floats of any dtype and stride to fp32; x has room for a multiple of 16, zeros past count.
inline void load_row(const char* data, Dtype dtype, int64_t stride, int64_t count, float* x) {
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kFloats <= count; i += kFloats) {
      if (dtype == Dtype::kFloat32) store_f32(x + i, load_f32(reinterpret_cast<const float*>(data) + i));
      if (dtype == Dtype::kBFloat16) store_f32(x + i, load_bf16(reinterpret_cast<const uint16_t*>(data) + i));
      if (dtype == Dtype::kFloat16) store_f32(x + i, load_f16(reinterpret_cast<const uint16_t*>(data) + i));
    }
  }
  for (; i < count; ++i) {
    if (dtype == Dtype::kFloat32) x[i] = reinterpret_cast<const float*>(data)[i * stride];
    if (dtype == Dtype::kBFloat16) x[i] = from_bf16(reinterpret_cast<const uint16_t*>(data)[i * stride]);
    if (dtype == Dtype::kFloat16) x[i] = from_f16(reinterpret_cast<const uint16_t*>(data)[i * stride]);
  }
  for (; i % 16 != 0; ++i) x[i] = 0.0f;
}

// Writes `count` fp32 numbers as dtype, contiguous; x is readable to a multiple of 16.
inline void store_row(char* data, Dtype dtype, int64_t count, const float* x) {
  int64_t i = 0;
  for (; i + kFloats <= count; i += kFloats) {
    if (dtype == Dtype::kFloat32) store_f32(reinterpret_cast<float*>(data) + i, load_f32(x + i));
    if (dtype == Dtype::kBFloat16) store_bf16(reinterpret_cast<uint16_t*>(data) + i, load_f32(x + i));
    if (dtype == Dtype::kFloat16) store_f16(reinterpret_cast<uint16_t*>(data) + i, load_f32(x + i));
  }
  for (; i < count; ++i) {
    if (dtype == Dtype::kFloat32) reinterpret_cast<float*>(data)[i] = x[i];
    if (dtype == Dtype::kBFloat16) reinterpret_cast<uint16_t*>(data)[i] = to_bf16(x[i]);
    if (dtype == Dtype::kFloat16) reinterpret_cast<uint16_t*>(data)[i] = to_f16(x[i]);
  }
}

// The bits of the largest |x|; 0x7f800000 and above say that an infinity or a NaN is there.
inline int32_t absmax_bits(const float* x, int64_t count) {
  I32 most = zero_i32();
  for (int64_t i = 0; i < count; i += kFloats) most = max_i32(most, abs_bits(load_f32(x + i)));
  return reduce_max_i32(most);
}

// code[i] = clamp(round(x[i] / scale), -limit, limit): a true division, so that every backend gives the same code.
// Returns the scale; 0 or NaN (codes 0) where the row is zero or not finite. x and code reach to a multiple of 16.
inline float quantize_row(const float* x, int64_t count, int limit, int32_t* code) {
  const int32_t bits = absmax_bits(x, count);
  const bool finite = bits < 0x7f800000;
  const float most = float_of(static_cast<uint32_t>(bits));
  const float scale =
      finite ? (most < kMaxMagnitude ? most : kMaxMagnitude) / static_cast<float>(limit) : float_of(0x7fc00000u);
  if (!finite || scale == 0.0f) {
    for (int64_t i = 0; i < count; i += kFloats) store_i32(code + i, zero_i32());
    return scale;
  }
  const F32 divisor = set_f32(scale), low = set_f32(static_cast<float>(-limit)),
            high = set_f32(static_cast<float>(limit));
  for (int64_t i = 0; i < count; i += kFloats) {
    store_i32(code + i, to_i32(min(max(round_even(div(load_f32(x + i), divisor)), low), high)));
  }
  return scale;
}

inline void pack_row(const int32_t* code, int64_t count, int bits, uint8_t* bytes) {
  if (bits == 8) {
    for (int64_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(code[i]);
    return;
  }
  for (int64_t first = 0; first < count; first += kNibbleBlock) {
    const int64_t half = (count - first < kNibbleBlock ? count - first : kNibbleBlock) / 2;
    const int32_t* low = code + first;
    for (int64_t i = 0; i < half; ++i) {
      bytes[first / 2 + i] = static_cast<uint8_t>((low[i] + 8) | (low[half + i] + 8) << 4);
    }
  }
}

}  // namespace
}  // namespace KVQ_ISA
}  // namespace kvq
