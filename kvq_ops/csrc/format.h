// The facts of kvq_ops/format.py that kernels need. tests/test_format.py holds the two together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvq {

constexpr int64_t kMinHeadDim = 8;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kNibbleBlock = 64;  // codes in one block of the 4-bit byte order

// Beyond this magnitude codes saturate, so that 127 * (absmax / 127) stays finite in fp32.
constexpr float kMaxMagnitude = 1.6e38f;

struct SideFormat {
  int bits = 8;

  int limit() const { return (1 << (bits - 1)) - 1; }
  int64_t row_bytes(int64_t head_dim) const { return head_dim * bits / 8; }
};

struct CacheFormat {
  SideFormat key, value;
};

inline bool parse_side(const char* text, size_t length, SideFormat* side) {
  if (length != 4 || std::memcmp(text, "int", 3) != 0 || (text[3] != '4' && text[3] != '8')) return false;
  side->bits = text[3] - '0';
  return true;
}

// "int8", "int4" or "<key>/<value>".
inline bool parse_format(const char* text, size_t length, CacheFormat* format) {
  const char* slash = static_cast<const char*>(std::memchr(text, '/', length));
  const size_t key_length = slash ? static_cast<size_t>(slash - text) : length;
  if (!parse_side(text, key_length, &format->key)) return false;
  format->value = format->key;
  return slash ? parse_side(slash + 1, length - key_length - 1, &format->value) : true;
}

// Channel of the low (high = 0) or high nibble of byte `byte` of a 4-bit row.
inline int64_t nibble_channel(int64_t byte, int high, int64_t head_dim) {
  const int64_t block = byte / (kNibbleBlock / 2), within = byte % (kNibbleBlock / 2);
  const int64_t first = block * kNibbleBlock;
  const int64_t codes = head_dim - first < kNibbleBlock ? head_dim - first : kNibbleBlock;
  return first + within + (high ? codes / 2 : 0);
}

}  // namespace kvq
