// Rows and blocks of tokens to bytes: what append writes. kvq_ops/reference.py says what each coding means; every
// operation here rounds as it does there.
#pragma once

#include <cmath>
#include <cstring>

#include "codec-inl.h"

namespace kvq {
namespace KVQ_ISA {
namespace {

constexpr int64_t kRowsAhead = 6;

// Lanes N apart become their sum and their difference. The products are exact, so fma rounds as add and sub do.
template <int N>
inline F32 butterfly(F32 x) {
  struct Signs {
    alignas(64) float lane[kFloats];
    constexpr Signs() : lane() {
      for (int i = 0; i < kFloats; ++i) lane[i] = i & N ? -1.0f : 1.0f;
    }
  };
  static constexpr Signs kSigns;
  return fma(x, load_f32(kSigns.lane), swap<N>(x));
}

// Orthonormal Hadamard transform of x in place, in blocks of the largest power of two that divides count; x reaches to
// a multiple of 16.
inline void rotate_row(float* x, int64_t count) {
  const int64_t block = count & -count;
  const F32 norm = set_f32(static_cast<float>(1.0 / std::sqrt(static_cast<double>(block))));
  for (int64_t i = 0; i < count; i += kFloats) {
    F32 y = mul(load_f32(x + i), norm);
    if (block > 1) y = butterfly<1>(y);
    if (block > 2) y = butterfly<2>(y);
    if constexpr (kFloats > 4) {
      if (block > 4) y = butterfly<4>(y);
    }
    if constexpr (kFloats > 8) {
      if (block > 8) y = butterfly<8>(y);
    }
    store_f32(x + i, y);
  }
  for (int64_t distance = kFloats; distance < block; distance *= 2) {
    for (int64_t first = 0; first < count; first += 2 * distance) {
      float *low = x + first, *high = low + distance;
      for (int64_t i = 0; i < distance; i += kFloats) {
        const F32 a = load_f32(low + i), b = load_f32(high + i);
        store_f32(low + i, add(a, b));
        store_f32(high + i, sub(a, b));
      }
    }
  }
}

inline void clamp_row(float* x, int64_t count, float limit) {
  for (int64_t i = 0; i < count; i += kFloats) {
    store_f32(x + i, min(max(load_f32(x + i), set_f32(-limit)), set_f32(limit)));
  }
}

// The scale of an affine coding: a row's or a channel's range over the largest code, 1 for none.
inline float affine_scale(float low, float high, int limit, bool narrow) {
  float scale = (high - low) / static_cast<float>(2 * limit + 1);
  if (narrow) scale = float_of((bits_of(scale) + 0xffffu) & ~0xffffu);
  return scale != 0.0f ? scale : 1.0f;
}

// One row with one offset and one scale.
inline void token_row(float* x, int64_t count, const SideFormat& format, float* scale, float* zero, int32_t* code) {
  if (absmax_bits(x, count) >= 0x7f800000) {
    *scale = *zero = float_of(0x7fc00000u);
    for (int64_t i = 0; i < count; ++i) code[i] = -format.limit() - 1;
    return;
  }
  clamp_row(x, count, kMaxMagnitude);
  float low = x[0], high = x[0];
  for (int64_t i = 1; i < count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  *zero = low + 0.0f;  // no -0
  *scale = affine_scale(*zero, high, format.limit(), false);
  const F32 most = set_f32(static_cast<float>(2 * format.limit() + 1)), half = set_f32(format.limit() + 1.0f);
  for (int64_t i = 0; i < count; i += kFloats) {
    const F32 steps = round_even(div(sub(load_f32(x + i), set_f32(*zero)), set_f32(*scale)));
    store_i32(code + i, to_i32(sub(min(max(steps, set_f32(0.0f)), most), half)));
  }
}

// The codes of the levels nearest to z / m, and the squares of what they miss z by; both reach to a multiple of 16.
inline void nearest_codes(const float* z, int64_t count, float m, const SideFormat& format, int32_t* code,
                          float* square) {
  const F32 scale = set_f32(m), half = set_f32(0.5f);
  if (format.bits == 8) {
    const F32 low = set_f32(-128.0f), high = set_f32(127.0f);
    for (int64_t i = 0; i < count; i += kFloats) {
      const F32 x = load_f32(z + i);
      const F32 c = min(max(round_even(sub(div(x, scale), half)), low), high);
      const F32 error = sub(mul(add(c, half), scale), x);
      store_f32(square + i, mul(error, error));
      store_i32(code + i, to_i32(c));
    }
    return;
  }
  alignas(64) float x[kNibbleBlock];
  for (int64_t i = 0; i < count; i += kFloats) store_f32(x + i, div(load_f32(z + i), scale));
  for (int64_t i = 0; i < kNibbleBlock; ++i) code[i] = -8;
  for (int k = 0; k < 15; ++k) {
    const float middle = level_middle(k);
    for (int64_t i = 0; i < count; ++i) code[i] += x[i] >= middle ? 1 : 0;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float error = static_cast<float>(kLevels[code[i] + 8]) * m - z[i];
    square[i] = error * error;
  }
}

// One group of a row, already divided by the row's unit (z, zeros from count to width): codes and the mantissa.
inline int group_codes(const float* z, int64_t count, int64_t width, float most, const SideFormat& format,
                       int32_t* code) {
  float best = __builtin_huge_valf();
  int chosen = 1;
  for (int less = 0; less < 3; ++less) {
    const float m = most - static_cast<float>(less) > 1.0f ? most - static_cast<float>(less) : 1.0f;
    if (less > 0 && static_cast<int>(m) == chosen) continue;  // the same again cannot be better
    alignas(64) float square[kNibbleBlock] = {};
    alignas(64) int32_t tried[kNibbleBlock];
    nearest_codes(z, count, m, format, tried, square);
    for (int64_t i = count; i < width; ++i) square[i] = 0.0f;
    for (int64_t n = width / 2; n > 0; n /= 2) {
      for (int64_t i = 0; i < n; ++i) square[i] += square[i + n];
    }
    if (square[0] < best) {
      best = square[0];
      chosen = static_cast<int>(m);
      std::memcpy(code, tried, static_cast<size_t>(count) * sizeof(int32_t));
    }
  }
  return chosen;
}

// One row in groups; `scales` are the bytes that say unit and mantissas. x has zeros past count.
inline void group_row(float* x, int64_t count, const SideFormat& format, uint8_t* scales, int32_t* code) {
  const float top = format.bits == 4 ? static_cast<float>(kLevels[15]) : 127.5f;
  std::memset(scales, 0, static_cast<size_t>(format.group_bytes(count)));
  std::memset(code, 0, static_cast<size_t>(count) * sizeof(int32_t));
  if (absmax_bits(x, count) >= 0x7f800000) {
    scales[0] = 255;
    return;
  }
  clamp_row(x, count, format.rotated ? kMaxRotated : kMaxMagnitude);
  if (format.rotated) rotate_row(x, count);
  struct Span {
    int64_t start, size;
    float scale;
  } spans[kMaxGroups];
  int64_t groups = 0;
  float widest = 0.0f;
  for (int64_t start = 0; start < count; start += kNibbleBlock) {
    const int64_t size = count - start < kNibbleBlock ? count - start : kNibbleBlock;
    const int64_t first = format.first_group(size);
    const Span both[2] = {{start, first, 0.0f}, {start + first, size - first, 0.0f}};
    for (const Span& span : both) {
      if (span.size == 0) continue;
      alignas(64) float part[kNibbleBlock] = {};
      std::memcpy(part, x + span.start, static_cast<size_t>(span.size) * sizeof(float));
      const float scale = float_of(static_cast<uint32_t>(absmax_bits(part, kNibbleBlock))) / top;
      widest = scale > widest ? scale : widest;
      spans[groups++] = Span{span.start, span.size, scale};
    }
  }
  if (widest == 0.0f) return;
  const uint32_t bits = bits_of(widest / static_cast<float>(kMantissas));
  uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
  exponent = exponent < 1 ? 1 : exponent;
  const float unit = float_of(exponent << 23);
  scales[0] = static_cast<uint8_t>(exponent);
  for (int64_t g = 0; g < groups; ++g) {
    const Span& span = spans[g];
    alignas(64) float z[kNibbleBlock] = {};
    std::memcpy(z, x + span.start, static_cast<size_t>(span.size) * sizeof(float));
    for (int64_t i = 0; i < span.size; i += kFloats) store_f32(z + i, div(load_f32(z + i), set_f32(unit)));
    float most = std::ceil(span.scale / unit);
    most = most < 1.0f ? 1.0f : most > kMantissas ? static_cast<float>(kMantissas) : most;
    const int mantissa = group_codes(z, span.size, format.group, most, format, code + span.start);
    scales[1 + g / 2] = static_cast<uint8_t>(scales[1 + g / 2] | (mantissa - 1) << (g % 2 ? 4 : 0));
  }
}

void append_side(const MutableSide& side, const SideFormat& format, const Rows& rows, int64_t head_dim, int64_t b,
                 int64_t h, int64_t t, int64_t token) {
  alignas(64) float x[kMaxHeadDim];
  alignas(64) int32_t code[kMaxHeadDim];
  const char* row = rows.row(b, h, t);
  // A few rows ahead: a row ends before the hardware sees its stream. Past the last row the address is harmless.
  const int64_t stride = rows.stride_token * item_bytes(rows.dtype);
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(row) + static_cast<uintptr_t>(kRowsAhead * stride);
  for (int64_t i = 0; i < head_dim * item_bytes(rows.dtype); i += 64) {
    prefetch(reinterpret_cast<const void*>(ahead + static_cast<uintptr_t>(i)));
  }
  load_row(row, rows.dtype, rows.stride_dim, head_dim, x);
  if (format.coding == Coding::kGroup) {
    uint8_t bytes[1 + kMaxGroups / 2];
    group_row(x, head_dim, format, bytes, code);
    for (int64_t i = 0; i < format.group_bytes(head_dim); ++i) side.scales.row(b, h, i)[token] = bytes[i];
  } else {
    float* scale = reinterpret_cast<float*>(side.scales.row(b, h, token));
    if (format.coding == Coding::kToken) {
      token_row(x, head_dim, format, scale, reinterpret_cast<float*>(side.zeros.row(b, h, token)), code);
    } else {
      *scale = quantize_row(x, head_dim, format.limit(), code);
    }
  }
  pack_row(code, head_dim, format.bits, side.codes.row(b, h, token));
}

void append_row(const AppendParams& p, int64_t b, int64_t h, int64_t t) {
  const int64_t token = p.lengths[b] + t;
  if (token < p.format.sinks) {
    copy_row(p.key_rows, b, h, t, p.head_dim, p.key.full.row(b, h, token));
    copy_row(p.value_rows, b, h, t, p.head_dim, p.value.full.row(b, h, token));
    return;
  }
  if (p.format.key.coding != Coding::kChannel) {
    append_side(p.key, p.format.key, p.key_rows, p.head_dim, b, h, t, token);
  }
  append_side(p.value, p.format.value, p.value_rows, p.head_dim, b, h, t, token);
}

// Keys of one block of tokens, `channels` <= 64 of them: x [tokens, 64] to codes, and scales and offsets by channel.
inline void channel_codes(float* x, int64_t tokens, const SideFormat& format, float* scale, float* zero,
                          int32_t* code) {
  constexpr int64_t kWide = kNibbleBlock;
  alignas(64) float low[kWide], high[kWide];
  alignas(64) int32_t most[kWide];
  for (int64_t c = 0; c < kWide; c += kFloats) {
    F32 least = load_f32(x + c), largest = least;
    I32 bits = abs_bits(least);
    for (int64_t j = 1; j < tokens; ++j) {
      const F32 row = load_f32(x + j * kWide + c);
      least = min(least, row);
      largest = max(largest, row);
      bits = max_i32(bits, abs_bits(row));
    }
    store_f32(low + c, least);
    store_f32(high + c, largest);
    store_i32(most + c, bits);
  }
  for (int64_t c = 0; c < kWide; ++c) {
    const bool finite = most[c] < 0x7f800000;
    if (!finite) {
      for (int64_t j = 0; j < tokens; ++j) x[j * kWide + c] = 0.0f;
    }
    const auto clamp = [&](float v) {
      return v < -kMaxMagnitude ? -kMaxMagnitude : v > kMaxMagnitude ? kMaxMagnitude : v;
    };
    zero[c] = finite ? clamp(low[c]) + 0.0f : 0.0f;  // no -0
    scale[c] = finite ? affine_scale(zero[c], clamp(high[c]), format.limit(), format.narrow_scales) : 1.0f;
  }
  const F32 top = set_f32(static_cast<float>(2 * format.limit() + 1)), half = set_f32(format.limit() + 1.0f);
  for (int64_t j = 0; j < tokens; ++j) {
    clamp_row(x + j * kWide, kWide, kMaxMagnitude);
    for (int64_t c = 0; c < kWide; c += kFloats) {
      const F32 steps = round_even(div(sub(load_f32(x + j * kWide + c), load_f32(zero + c)), load_f32(scale + c)));
      store_i32(code + j * kWide + c, to_i32(sub(min(max(steps, set_f32(0.0f)), top), half)));
    }
  }
  for (int64_t c = 0; c < kWide; ++c) {
    if (most[c] >= 0x7f800000) scale[c] = zero[c] = float_of(0x7fc00000u);
  }
}

void freeze_block(const AppendParams& p, int64_t b, int64_t h, int64_t block) {
  constexpr int64_t kWide = kNibbleBlock;
  alignas(64) float x[kMaxKeyBlock * kWide], scale[kWide], zero[kWide];
  alignas(64) int32_t code[kMaxKeyBlock * kWide];
  const SideFormat& format = p.format.key;
  const int64_t tokens = format.key_block, first_token = p.format.sinks + block * tokens;
  const int64_t item = item_bytes(p.key_rows.dtype);
  for (int64_t first = 0; first < p.head_dim; first += kWide) {
    const int64_t channels = p.head_dim - first < kWide ? p.head_dim - first : kWide;
    std::memset(x, 0, sizeof x);
    for (int64_t j = 0; j < tokens; ++j) {
      const int64_t token = first_token + j, t = token - p.lengths[b];
      if (t < 0) {
        const uint8_t* row = p.key.full.row(b, h, p.format.slot(token)) + first * item;
        load_row(reinterpret_cast<const char*>(row), p.key_rows.dtype, 1, channels, x + j * kWide);
      } else {
        const char* row = p.key_rows.row(b, h, t) + first * p.key_rows.stride_dim * item;
        load_row(row, p.key_rows.dtype, p.key_rows.stride_dim, channels, x + j * kWide);
      }
    }
    channel_codes(x, tokens, format, scale, zero, code);
    for (int64_t j = 0; j < tokens; ++j) {
      uint8_t* to = p.key.codes.row(b, h, first_token + j) + format.row_bytes(first);
      pack_row(code + j * kWide, channels, format.bits, to);
    }
    std::memcpy(p.key.zeros.row(b, h, block) + first * 4, zero, static_cast<size_t>(channels) * sizeof(float));
    uint8_t* scales = p.key.scales.row(b, h, block);
    if (!format.narrow_scales) {
      std::memcpy(scales + first * 4, scale, static_cast<size_t>(channels) * sizeof(float));
    } else {
      for (int64_t c = 0; c < channels; ++c) {
        const uint16_t narrow = static_cast<uint16_t>(bits_of(scale[c]) >> 16);
        std::memcpy(scales + (first + c) * 2, &narrow, 2);
      }
    }
  }
}

}  // namespace
}  // namespace KVQ_ISA
}  // namespace kvq
