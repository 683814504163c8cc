// The facts of kvq_ops/format.py that kernels need. tests/test_format.py holds the two together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvq {

constexpr int64_t kMinHeadDim = 8;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kNibbleBlock = 64;  // codes in one block of the 4-bit byte order
constexpr int64_t kMaxSinks = 64;
constexpr int64_t kMaxGroups = kMaxHeadDim / 32;
constexpr int64_t kMaxKeyBlock = 64;
constexpr int kMantissas = 16;  // a group's scale is 1..16 times its row's unit

// What the 4-bit codes -8..7 of coding kGroup stand for, and where the nearest level changes.
constexpr int8_t kLevels[16] = {-127, -99, -78, -60, -45, -31, -18, -6, 6, 18, 31, 45, 60, 78, 99, 127};
inline float level_middle(int i) {
  return 0.5f * static_cast<float>(kLevels[i] + kLevels[i + 1]);
}

// Beyond this magnitude codes saturate, so that 127 * (absmax / 127) stays finite in fp32.
constexpr float kMaxMagnitude = 1.6e38f;
constexpr float kMaxRotated = 1e37f;  // the same for rows whose channels sum

enum class Coding { kRow, kGroup, kChannel, kToken };

struct SideFormat {
  int bits = 8;
  Coding coding = Coding::kRow;
  int64_t group = 0;           // channels, of coding kGroup
  int64_t key_block = 0;       // tokens, of coding kChannel
  bool rotated = false;        // coded after a Hadamard transform
  bool narrow_scales = false;  // bf16, of coding kChannel

  int limit() const { return (1 << (bits - 1)) - 1; }
  int64_t row_bytes(int64_t head_dim) const { return head_dim * bits / 8; }
  // Channels of the first and the second group of a block of `size` <= 64 codes; the second may be empty.
  int64_t first_group(int64_t size) const {
    return group == kNibbleBlock ? size : bits == 4 ? size / 2 : size < 32 ? size : 32;
  }
  int64_t groups(int64_t head_dim) const {
    const int64_t whole = head_dim / kNibbleBlock, rest = head_dim % kNibbleBlock;
    const int64_t last = rest == 0 ? 0 : first_group(rest) < rest ? 2 : 1;
    return whole * (group == kNibbleBlock ? 1 : 2) + last;
  }
  int64_t group_bytes(int64_t head_dim) const { return 1 + (groups(head_dim) + 1) / 2; }
};

struct CacheFormat {
  SideFormat key, value;
  int64_t sinks = 0;

  int64_t key_slots() const { return sinks + 2 * key.key_block; }
  // The first token whose key is not coded yet.
  int64_t frozen(int64_t length) const {
    if (!key.key_block || length <= sinks) return length;
    return sinks + (length - sinks) / key.key_block * key.key_block;
  }
  // The row of key_full that holds a token after the sinks.
  int64_t slot(int64_t token) const { return sinks + (token - sinks) % (2 * key.key_block); }
};

struct Text {
  const char* data;
  size_t length;

  bool is(const char* other) const { return length == std::strlen(other) && std::memcmp(data, other, length) == 0; }
  bool starts(const char* other) const {
    return length >= std::strlen(other) && std::memcmp(data, other, std::strlen(other)) == 0;
  }
  // What follows `count` characters.
  Text from(size_t count) const { return {data + count, length - count}; }
};

inline bool parse_side(Text text, bool key, SideFormat* side) {
  if (!text.starts("int4") && !text.starts("int8")) return false;
  *side = SideFormat{};
  side->bits = text.data[3] - '0';
  const Text scheme = text.from(4);
  if (scheme.length == 0) return true;
  if (scheme.is("_kivi")) {
    side->coding = key ? Coding::kChannel : Coding::kToken;
    side->key_block = key ? 32 : 0;
    return true;
  }
  if (scheme.is("_hq")) {
    side->coding = key ? Coding::kChannel : Coding::kGroup;
    side->key_block = key ? 64 : 0;
    side->group = key ? 0 : 32;
    side->rotated = !key;
    side->narrow_scales = key;
    return true;
  }
  if (side->bits != 4 || (!scheme.is("_g32") && !scheme.is("_g64"))) return false;
  side->coding = Coding::kGroup;
  side->group = scheme.is("_g32") ? 32 : 64;
  return true;
}

// "sinks" and a number from 0 to kMaxSinks without leading zeros.
inline bool parse_sinks(Text text, int64_t* sinks) {
  const Text digits = text.from(5);
  if (digits.length == 0 || digits.length > 2 || (digits.length > 1 && digits.data[0] == '0')) return false;
  *sinks = 0;
  for (size_t i = 0; i < digits.length; ++i) {
    if (digits.data[i] < '0' || digits.data[i] > '9') return false;
    *sinks = 10 * *sinks + (digits.data[i] - '0');
  }
  return *sinks <= kMaxSinks;
}

// A preset or "<key>/<value>", perhaps with "/sinks<n>" after it.
inline bool parse_format(const char* data, size_t length, CacheFormat* format) {
  Text words[3], rest{data, length};
  size_t count = 0;
  for (;;) {
    const void* slash = rest.length ? std::memchr(rest.data, '/', rest.length) : nullptr;
    const size_t size = slash ? static_cast<size_t>(static_cast<const char*>(slash) - rest.data) : rest.length;
    if (count == 3) return false;
    words[count++] = {rest.data, size};
    if (!slash) break;
    rest = rest.from(size + 1);
  }
  int64_t sinks = -1;
  if (count > 1 && words[count - 1].starts("sinks") && !parse_sinks(words[--count], &sinks)) return false;
  if (count == 1 && words[0].is("k8v4")) {
    words[0] = {"int8", 4};
    words[1] = {"int4_hq", 7};
    count = 2;
  }
  if (count > 2) return false;
  if (!parse_side(words[0], true, &format->key) || !parse_side(words[count - 1], false, &format->value)) return false;
  format->sinks = sinks >= 0 ? sinks : format->key.key_block ? 4 : 0;
  return true;
}

// Channel of the low (high = 0) or high nibble of byte `byte` of a 4-bit row.
inline int64_t nibble_channel(int64_t byte, int high, int64_t head_dim) {
  const int64_t block = byte / (kNibbleBlock / 2), within = byte % (kNibbleBlock / 2);
  const int64_t first = block * kNibbleBlock;
  const int64_t codes = head_dim - first < kNibbleBlock ? head_dim - first : kNibbleBlock;
  return first + within + (high ? codes / 2 : 0);
}

}  // namespace kvq
