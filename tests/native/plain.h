// What the bytes of a cache mean, by plain loops that share nothing with the kernels but the facts of format.h: rows
// to bytes in fp32, rounded as kvq_ops/reference.py says, and bytes to numbers in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/params.h"

namespace plain {

using kvq::Coding;
using kvq::Dtype;
using kvq::SideFormat;

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// fp32 or bf16.
inline float load(const uint8_t* from, Dtype dtype) {
  uint32_t bits = 0;
  if (dtype == Dtype::kFloat32) {
    std::memcpy(&bits, from, 4);
  } else {
    uint16_t high;
    std::memcpy(&high, from, 2);
    bits = static_cast<uint32_t>(high) << 16;
  }
  return float_of_bits(bits);
}

// One tensor [batch, heads, rows, row bytes] in exactly as many bytes: a sanitizer sees any access past them.
struct Part {
  int64_t heads = 0, rows = 0, row_bytes = 0;
  std::vector<uint8_t> bytes;

  Part() = default;
  Part(int64_t batch, int64_t heads_, int64_t rows_, int64_t row_bytes_)
      : heads(heads_),
        rows(rows_),
        row_bytes(row_bytes_),
        bytes(static_cast<size_t>(batch * heads_ * rows_ * row_bytes_), 0xa5) {}

  uint8_t* row(int64_t b, int64_t h, int64_t r) { return bytes.data() + ((b * heads + h) * rows + r) * row_bytes; }
  const uint8_t* row(int64_t b, int64_t h, int64_t r) const { return const_cast<Part*>(this)->row(b, h, r); }
  float number(int64_t b, int64_t h, int64_t r) const { return load(row(b, h, r), Dtype::kFloat32); }

  template <class Byte>
  kvq::PartT<Byte> part(int64_t first) {
    if (bytes.empty()) return {};
    return {row(first, 0, 0), heads * rows * row_bytes, rows * row_bytes, row_bytes};
  }
};

inline void store(Part* part, int64_t b, int64_t h, int64_t r, float x) {
  std::memcpy(part->row(b, h, r), &x, sizeof x);
}

struct Span {
  int64_t start, size;
};

// Groups of channels, by the words of kvq_ops/format.py.
inline std::vector<Span> spans(const SideFormat& format, int64_t head_dim) {
  std::vector<Span> found;
  for (int64_t start = 0; start < head_dim; start += 64) {
    const int64_t size = std::min<int64_t>(64, head_dim - start);
    const int64_t middle = format.group == 64 ? size : format.bits == 4 ? size / 2 : std::min<int64_t>(size, 32);
    found.push_back({start, middle});
    if (middle < size) found.push_back({start + middle, size - middle});
  }
  return found;
}

inline void set_code(uint8_t* row, int bits, int64_t head_dim, int64_t channel, int code) {
  if (bits == 8) {
    row[channel] = static_cast<uint8_t>(code);
    return;
  }
  const int64_t first = channel / 64 * 64, half = std::min<int64_t>(head_dim - first, 64) / 2, within = channel - first;
  uint8_t* byte = row + first / 2 + within % half;
  const int nibble = code + 8;
  *byte = static_cast<uint8_t>(within < half ? (*byte & 0xf0) | nibble : (*byte & 15) | nibble << 4);
}

inline int get_code(const uint8_t* row, int bits, int64_t head_dim, int64_t channel) {
  if (bits == 8) return static_cast<int8_t>(row[channel]);
  const int64_t first = channel / 64 * 64, half = std::min<int64_t>(head_dim - first, 64) / 2, within = channel - first;
  const uint8_t byte = row[first / 2 + within % half];
  return (within < half ? byte & 15 : byte >> 4) - 8;
}

template <class Number>
void rotate(std::vector<Number>* x) {
  const int64_t count = static_cast<int64_t>(x->size()), block = count & -count;
  const Number norm = static_cast<Number>(static_cast<float>(1.0 / std::sqrt(static_cast<double>(block))));
  for (Number& item : *x) item *= norm;
  for (int64_t distance = 1; distance < block; distance *= 2) {
    for (int64_t i = 0; i < count; ++i) {
      if (i / distance % 2 == 1) continue;
      Number &low = (*x)[static_cast<size_t>(i)], &high = (*x)[static_cast<size_t>(i + distance)];
      const Number sum = low + high;
      high = low - high;
      low = sum;
    }
  }
}

inline float clamp(float x, float low, float high) {
  return x < low ? low : x > high ? high : x;
}

inline int affine_code(float x, float low, float scale, int limit) {
  return static_cast<int>(clamp(std::nearbyint((x - low) / scale), 0.0f, static_cast<float>(2 * limit + 1))) - limit -
         1;
}

inline float affine_scale(float low, float high, const SideFormat& format) {
  float scale = (high - low) / static_cast<float>(2 * format.limit() + 1);
  if (format.narrow_scales) scale = float_of_bits((bits_of_float(scale) + 0xffffu) & ~0xffffu);
  return scale == 0.0f ? 1.0f : scale;
}

// The mantissa of one group of a row divided by its unit, and its codes.
inline float level(int code, int bits) {
  constexpr float kTable[] = {6, 18, 31, 45, 60, 78, 99, 127};
  if (bits == 8) return static_cast<float>(code) + 0.5f;
  return code < 0 ? -kTable[-code - 1] : kTable[code];
}

// Of two levels that are as near the upper one; 8-bit levels are even steps, ties to even.
inline int nearest_code(float x, int bits) {
  if (bits == 8) return static_cast<int>(clamp(std::nearbyint(x - 0.5f), -128.0f, 127.0f));
  int code = -8;
  while (code < 7 && x - level(code, 4) >= level(code + 1, 4) - x) ++code;
  return code;
}

inline int group_codes(const std::vector<float>& z, float most, int64_t width, int bits, std::vector<int>* codes) {
  float best = HUGE_VALF;
  int chosen = 0;
  for (int less = 0; less < 3; ++less) {
    const float m = std::fmax(most - static_cast<float>(less), 1.0f);
    std::vector<float> squares(static_cast<size_t>(width), 0.0f);
    std::vector<int> tried;
    for (size_t i = 0; i < z.size(); ++i) {
      const int code = nearest_code(z[i] / m, bits);
      const float error = level(code, bits) * m - z[i];
      squares[i] = error * error;
      tried.push_back(code);
    }
    for (size_t n = squares.size() / 2; n > 0; n /= 2) {
      for (size_t i = 0; i < n; ++i) squares[i] += squares[i + n];
    }
    if (squares[0] < best) {
      best = squares[0];
      chosen = static_cast<int>(m);
      *codes = tried;
    }
  }
  return chosen;
}

// One side of a cache and its rows as they came.
struct Side {
  SideFormat format;
  bool key;
  int64_t head_dim, sinks;
  Dtype dtype;
  Part codes, scales, zeros, full;

  Side(const kvq::CacheFormat& cache, bool key_, int64_t batch, int64_t heads, int64_t tokens, int64_t head_dim_,
       Dtype dtype_)
      : format(key_ ? cache.key : cache.value),
        key(key_),
        head_dim(head_dim_),
        sinks(cache.sinks),
        dtype(dtype_),
        codes(batch, heads, tokens, head_dim_ * format.bits / 8) {
    const int64_t item = dtype == Dtype::kFloat32 ? 4 : 2, slots = sinks + (key ? 2 * format.key_block : 0);
    if (format.coding == Coding::kChannel) {
      const int64_t blocks = std::max<int64_t>(1, (tokens - sinks) / format.key_block);
      scales = Part(batch, heads, blocks, head_dim * (format.narrow_scales ? 2 : 4));
      zeros = Part(batch, heads, blocks, head_dim * 4);
    } else if (format.coding == Coding::kGroup) {
      const int64_t groups = static_cast<int64_t>(spans(format, head_dim).size());
      scales = Part(batch, heads, 1 + (groups + 1) / 2, tokens);
    } else {
      scales = Part(batch, heads, tokens, 4);
      if (format.coding == Coding::kToken) zeros = Part(batch, heads, tokens, 4);
    }
    if (slots > 0) full = Part(batch, heads, slots, head_dim * item);
  }

  template <class Byte>
  kvq::SideT<Byte> side(int64_t first) {
    return {codes.part<Byte>(first), scales.part<Byte>(first), zeros.part<Byte>(first), full.part<Byte>(first)};
  }

  int64_t ring() const { return 2 * format.key_block; }
  int64_t slot(int64_t token) const { return token < sinks ? token : sinks + (token - sinks) % ring(); }
  int64_t frozen(int64_t length) const {
    if (format.key_block == 0 || length <= sinks) return length;
    return sinks + (length - sinks) / format.key_block * format.key_block;
  }

  // Everything that appending `length` rows [length, head_dim] writes, in whatever pieces.
  void encode(int64_t b, int64_t h, int64_t length, const std::vector<uint8_t>& rows) {
    const int64_t item = dtype == Dtype::kFloat32 ? 4 : 2;
    const auto number = [&](int64_t t, int64_t d) { return load(rows.data() + (t * head_dim + d) * item, dtype); };
    for (int64_t t = 0; t < length; ++t) {
      const bool in_ring = format.coding == Coding::kChannel;  // older rows go where newer ones follow
      if (t < sinks || in_ring) {
        std::memcpy(full.row(b, h, slot(t)), rows.data() + t * head_dim * item, static_cast<size_t>(head_dim * item));
      }
      if (t < sinks || in_ring) continue;
      std::vector<float> x;
      for (int64_t d = 0; d < head_dim; ++d) x.push_back(number(t, d));
      encode_row(b, h, t, x);
    }
    for (int64_t first = sinks; format.key_block && first + format.key_block <= length; first += format.key_block) {
      for (int64_t d = 0; d < head_dim; ++d) {
        std::vector<float> x;
        for (int64_t t = first; t < first + format.key_block; ++t) x.push_back(number(t, d));
        encode_channel(b, h, first, d, x);
      }
    }
  }

  double decode(int64_t b, int64_t h, int64_t t, int64_t d) const {
    const int code = get_code(codes.row(b, h, t), format.bits, head_dim, d), above = code + format.limit() + 1;
    if (format.coding == Coding::kRow) return code * static_cast<double>(scales.number(b, h, t));
    if (format.coding == Coding::kToken) {
      return zeros.number(b, h, t) + above * static_cast<double>(scales.number(b, h, t));
    }
    if (format.coding == Coding::kChannel) {
      const int64_t block = (t - sinks) / format.key_block;
      const Dtype narrow = format.narrow_scales ? Dtype::kBFloat16 : Dtype::kFloat32;
      const double scale = load(scales.row(b, h, block) + d * (format.narrow_scales ? 2 : 4), narrow);
      return load(zeros.row(b, h, block) + d * 4, Dtype::kFloat32) + above * scale;
    }
    const std::vector<Span> all = spans(format, head_dim);
    int64_t g = 0;
    while (d >= all[static_cast<size_t>(g)].start + all[static_cast<size_t>(g)].size) ++g;
    const int pair = scales.row(b, h, 1 + g / 2)[t];
    return level(code, format.bits) * ((g % 2 ? pair >> 4 : pair & 15) + 1) *
           std::ldexp(1.0, scales.row(b, h, 0)[t] - 127);
  }

  // Token t of a sequence of `length` tokens as attend reads it.
  std::vector<double> row(int64_t b, int64_t h, int64_t t, int64_t length) const {
    std::vector<double> x;
    const bool kept = t < sinks || (key && t >= frozen(length));
    const int64_t item = dtype == Dtype::kFloat32 ? 4 : 2;
    for (int64_t d = 0; d < head_dim; ++d) {
      x.push_back(kept ? load(full.row(b, h, slot(t)) + d * item, dtype) : decode(b, h, t, d));
    }
    if (format.rotated && !kept) rotate(&x);
    return x;
  }

 private:
  void encode_row(int64_t b, int64_t h, int64_t t, std::vector<float> x) {
    if (format.coding == Coding::kGroup) return encode_groups(b, h, t, x);
    const auto range = std::minmax_element(x.begin(), x.end());
    float low = *range.first, scale = affine_scale(low, *range.second, format);
    if (format.coding == Coding::kRow) scale = std::fmax(-low, *range.second) / static_cast<float>(format.limit());
    for (int64_t d = 0; d < head_dim; ++d) {
      const float item = x[static_cast<size_t>(d)];
      const int code = format.coding == Coding::kRow ? static_cast<int>(std::nearbyint(item / scale))
                                                     : affine_code(item, low, scale, format.limit());
      set_code(codes.row(b, h, t), format.bits, head_dim, d, code);
    }
    store(&scales, b, h, t, scale);
    if (format.coding == Coding::kToken) store(&zeros, b, h, t, low);
  }

  void encode_groups(int64_t b, int64_t h, int64_t t, std::vector<float> x) {
    if (format.rotated) rotate(&x);
    const std::vector<Span> all = spans(format, head_dim);
    std::vector<float> wanted;
    for (const Span& span : all) {
      float most = 0.0f;
      for (int64_t i = 0; i < span.size; ++i) most = std::fmax(most, std::fabs(x[static_cast<size_t>(span.start + i)]));
      wanted.push_back(most / level(format.limit(), format.bits));
    }
    // The least power of two for which no group needs more than 16 times it.
    int exponent = 1;
    while (std::ldexp(16.0, exponent - 127) < *std::max_element(wanted.begin(), wanted.end())) ++exponent;
    const float unit = static_cast<float>(std::ldexp(1.0, exponent - 127));
    for (int64_t i = 0; i < scales.rows; ++i) scales.row(b, h, i)[t] = 0;
    scales.row(b, h, 0)[t] = static_cast<uint8_t>(exponent);
    for (size_t g = 0; g < all.size(); ++g) {
      std::vector<float> z;
      std::vector<int> chosen;
      for (int64_t i = 0; i < all[g].size; ++i) z.push_back(x[static_cast<size_t>(all[g].start + i)] / unit);
      const float most = clamp(std::ceil(wanted[g] / unit), 1.0f, 16.0f);
      const int mantissa = group_codes(z, most, format.group, format.bits, &chosen);
      for (int64_t i = 0; i < all[g].size; ++i) {
        set_code(codes.row(b, h, t), format.bits, head_dim, all[g].start + i, chosen[static_cast<size_t>(i)]);
      }
      uint8_t* pair = scales.row(b, h, 1 + static_cast<int64_t>(g) / 2) + t;
      *pair = static_cast<uint8_t>(*pair | (mantissa - 1) << (g % 2 ? 4 : 0));
    }
  }

  void encode_channel(int64_t b, int64_t h, int64_t first, int64_t d, const std::vector<float>& x) {
    const int64_t block = (first - sinks) / format.key_block;
    const auto range = std::minmax_element(x.begin(), x.end());
    const float low = *range.first, scale = affine_scale(low, *range.second, format);
    for (size_t j = 0; j < x.size(); ++j) {
      uint8_t* row = codes.row(b, h, first + static_cast<int64_t>(j));
      set_code(row, format.bits, head_dim, d, affine_code(x[j], low, scale, format.limit()));
    }
    std::memcpy(zeros.row(b, h, block) + d * 4, &low, 4);
    const uint32_t bits = bits_of_float(scale);
    const uint16_t narrow = static_cast<uint16_t>(bits >> 16);
    if (format.narrow_scales) {
      std::memcpy(scales.row(b, h, block) + d * 2, &narrow, 2);
    } else {
      std::memcpy(scales.row(b, h, block) + d * 4, &bits, 4);
    }
  }
};

}  // namespace plain
