// Attend over one run of tokens for one ISA.
//
// One head of the cache is read once for all query rows that share it, in blocks of 64 tokens: integer logits (int16
// query times codes, exact in int32), a running softmax in fp32, weights as int16 with a power-of-two scale, integer
// value sums of a block, fp32 accumulation over blocks. Keys coded per channel put their scales into the query, once a
// block, and their offsets into one number to add. Rows in full precision (sinks, keys of the unfinished block) take
// fp32 products. Nothing depends on threads, capacity or batch.
#pragma once

#include <cfloat>
#include <cstring>

#include "append-inl.h"
#include "softmax-inl.h"
#include "tiles-inl.h"

namespace kvq {
namespace KVQ_ISA {
namespace {

// logits[r * kBlockTokens] = query row r . key, for ROWS rows, one by one or together.
template <int ROWS>
inline void float_dots(const float* query, int64_t width, const float* key, float* logits) {
  F32 even[ROWS], odd[ROWS];
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) even[r] = odd[r] = set_f32(0.0f);
  int64_t i = 0;
  for (; i + 2 * kFloats <= width; i += 2 * kFloats) {
    const F32 first = load_f32(key + i), second = load_f32(key + i + kFloats);
    KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
      even[r] = fma(load_f32(query + r * width + i), first, even[r]);
      odd[r] = fma(load_f32(query + r * width + i + kFloats), second, odd[r]);
    }
  }
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
    if (i < width) even[r] = fma(load_f32(query + r * width + i), load_f32(key + i), even[r]);
    logits[r * kBlockTokens] = reduce_add(add(even[r], odd[r]));
  }
}

// A row of floats from channel order to the order of a plan's lanes.
inline void to_lanes(const LanePlan& plan, const float* x, float* lanes) {
  if (plan.identity) {
    std::memcpy(lanes, x, static_cast<size_t>(plan.width) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < plan.width; ++i) lanes[i] = plan.channel[i] < 0 ? 0.0f : x[plan.channel[i]];
}

// Scales and offsets of one block of keys, by channel.
struct ChannelScales {
  alignas(64) float scale[kMaxHeadDim], zero[kMaxHeadDim];

  void load(const AttendParams& p, int64_t b, int64_t h, int64_t block) {
    const int64_t width = float_width(p.head_dim);
    const char* scales = reinterpret_cast<const char*>(p.key.scales.row(b, h, block));
    load_row(scales, p.format.key.narrow_scales ? Dtype::kBFloat16 : Dtype::kFloat32, 1, p.head_dim, scale);
    load_row(reinterpret_cast<const char*>(p.key.zeros.row(b, h, block)), Dtype::kFloat32, 1, p.head_dim, zero);
    if (p.format.key.bits == 4) return;  // nibbles count from 0
    for (int64_t i = 0; i < width; i += kFloats) {
      store_f32(zero + i, fma(load_f32(scale + i), set_f32(128.0f), load_f32(zero + i)));
    }
  }
};

// Query rows with a block's scales in them, as codes: logit = unit[r] * (codes . key codes) + base[r].
template <int ROWS>
KVQ_NOINLINE void scale_queries(const float* query, const ChannelScales& keys, const LanePlan& plan, int limit,
                                int16_t* codes, float* unit, float* base) {
  const int64_t width = float_width(plan.head_dim);
  F32 offset[ROWS], inverse[ROWS];
  I32 most[ROWS];
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
    offset[r] = set_f32(0.0f);
    most[r] = zero_i32();
  }
  alignas(64) float product[ROWS * kMaxHeadDim];
  for (int64_t i = 0; i < width; i += kFloats) {
    const F32 scale = load_f32(keys.scale + i), zero = load_f32(keys.zero + i);
    KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
      const F32 q = load_f32(query + r * width + i), x = mul(q, scale);
      store_f32(product + r * width + i, x);
      offset[r] = fma(q, zero, offset[r]);
      most[r] = max_i32(most[r], abs_bits(x));
    }
  }
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
    base[r] = reduce_add(offset[r]);
    const int32_t bits = reduce_max_i32(most[r]);
    const bool finite = bits < 0x7f800000;
    const float largest = float_of(static_cast<uint32_t>(bits));
    // Below, a reciprocal would overflow: such a query sees no keys but their offsets.
    inverse[r] = set_f32(finite && largest > 1e-30f ? static_cast<float>(limit) / largest : 0.0f);
    unit[r] = finite ? largest / static_cast<float>(limit) : float_of(0x7fc00000u);
  }
  if (plan.runs) {
    for (int64_t i = 0; i < plan.width; i += kLanes) {
      const int64_t c = plan.channel[i];
      KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
        const float* x = product + r * width + c;
        store_i16(codes + r * plan.width + i, to_i32(mul(load_f32(x), inverse[r])),
                  to_i32(mul(load_f32(x + kFloats), inverse[r])));
      }
    }
  } else {
    alignas(64) int32_t code[kMaxHeadDim];
    for (int r = 0; r < ROWS; ++r) {
      for (int64_t i = 0; i < width; i += kFloats) {
        store_i32(code + i, to_i32(mul(load_f32(product + r * width + i), inverse[r])));
      }
      for (int64_t i = 0; i < plan.width; ++i) {
        codes[r * plan.width + i] = plan.channel[i] < 0 ? int16_t{0} : static_cast<int16_t>(code[plan.channel[i]]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) arrange_query(codes + r * plan.width, plan.width);
}

// Unit and mantissas of coding kGroup for a block of tokens: scale[j] is the token's unit (NaN for a row that is not
// finite, 0 past the last), mantissa[g * kBlockTokens + j] the multiple of it in group g.
inline void load_groups(const PartT<const uint8_t>& part, const SideFormat& format, int64_t head_dim, int64_t b,
                        int64_t h, int64_t token, int64_t tokens, float* scale, int16_t* mantissa) {
  uint8_t padded[kBlockTokens];
  const auto plane = [&](int64_t i) {
    const uint8_t* from = part.row(b, h, i) + token;
    if (tokens == kBlockTokens) return from;
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, from, static_cast<size_t>(tokens));
    return static_cast<const uint8_t*>(padded);
  };
  const uint8_t* exponent = plane(0);
  for (int64_t j = 0; j < kBlockTokens; ++j) {
    const uint32_t bits = exponent[j] == 255 ? 0x7fc00000u : static_cast<uint32_t>(exponent[j]) << 23;
    std::memcpy(scale + j, &bits, sizeof bits);
  }
  const int64_t pairs = format.group_bytes(head_dim) - 1;
  for (int64_t i = 0; i < pairs; ++i, mantissa += 2 * kBlockTokens) {
    const uint8_t* pair = plane(1 + i);
    for (int64_t j = 0; j < kBlockTokens; ++j) {
      mantissa[j] = static_cast<int16_t>((pair[j] & 15) + 1);
      mantissa[kBlockTokens + j] = static_cast<int16_t>((pair[j] >> 4) + 1);
    }
  }
}

inline void load_floats(const PartT<const uint8_t>& part, int64_t b, int64_t h, int64_t token, int64_t tokens,
                        float* to) {
  const uint8_t* from = part.row(b, h, token);
  if (part.stride_row == 4 && tokens == kBlockTokens) {
    for (int64_t j = 0; j < kBlockTokens; j += kFloats) {
      store_f32(to + j, load_f32(reinterpret_cast<const float*>(from) + j));
    }
    return;
  }
  for (int64_t j = 0; j < tokens; ++j) std::memcpy(to + j, from + j * part.stride_row, sizeof(float));
  for (int64_t j = tokens; j < kBlockTokens; ++j) to[j] = 0.0f;
}

// The rows of a block, copied to a padded buffer where a row is shorter than one load.
inline Block make_block(const Side& side, const LanePlan& plan, int64_t row_bytes, int64_t b, int64_t h, int64_t token,
                        int64_t tokens, uint8_t* padded) {
  const Block block{side.codes.row(b, h, token), side.codes.stride_row, tokens, row_bytes};
  if (!plan.narrow) return block;
  for (int64_t j = 0; j < tokens; ++j) {
    std::memset(padded + j * kLanes, 0, kLanes);
    std::memcpy(padded + j * kLanes, block.row(j), static_cast<size_t>(row_bytes));
  }
  return Block{padded, kLanes, tokens, kLanes};
}

// One block of tokens: rows of both sides, and what scales them.
struct Tokens {
  Tokens(const Block& keys_, const Block& values_, int64_t first_)
      : keys(keys_), values(values_), first(first_), ahead(keys_, values_) {}

  Block keys, values;
  int64_t first;  // token
  int64_t coded;  // tokens whose keys are codes; those after them are in full precision
  Ahead ahead;
  alignas(64) float key_scale[kBlockTokens], value_scale[kBlockTokens], value_zero[kBlockTokens];
  alignas(64) int16_t key_mantissa[kMaxGroups * kBlockTokens], value_mantissa[kMaxGroups * kBlockTokens];
  ChannelScales channels[kBlockTokens / 32];  // of coding kChannel, one for each block of keys
};

struct Attend {
  const AttendParams& p;
  const LanePlan &key_plan, &value_plan;
  const Queries& queries;
  const Unit& unit;
  const int64_t frozen = p.format.frozen(p.lengths[unit.b]);
  const int64_t query_width = float_width(p.head_dim);
  // Logits must stay inside int32 whatever the keys hold.
  const int query_limit =
      (p.format.key.bits == 8 ? 128 : 15) * kQueryLimit * p.head_dim > INT32_MAX ? kQueryLimit / 2 : kQueryLimit;

  int64_t query_row(int64_t row) const { return (unit.b * p.heads_kv + unit.h) * p.rows() + unit.first_row + row; }

  template <int ROWS>
  void key_codes(const Block& keys, const int16_t* query, const int16_t* mantissa, int32_t* logits,
                 Ahead* ahead) const {
    if (p.format.key.coding == Coding::kGroup) {
      return group_key_block<ROWS>(keys, key_plan, query, mantissa, logits, ahead);
    }
    if (p.format.key.bits == 8) return key_block<Codec8, ROWS>(keys, key_plan, query, logits, ahead);
    key_block<Codec4, ROWS>(keys, key_plan, query, logits, ahead);
  }

  // Keys that are coded row by row.
  template <int ROWS>
  void row_logits(Tokens* block, int64_t at, float* logits) const {
    alignas(64) int32_t exact[ROWS * kBlockTokens];
    if (block->keys.tokens < kBlockTokens) std::memset(exact, 0, sizeof exact);  // tiles leave the rest
    key_codes<ROWS>(block->keys, queries.codes + at * key_plan.width, block->key_mantissa, exact, &block->ahead);
    const bool offset = p.format.key.bits == 4 && p.format.key.coding == Coding::kRow;
    for (int64_t r = 0; r < ROWS; ++r) {
      const F32 unit = set_f32(queries.scales[at + r]);
      const I32 zero_point = set_i32(offset ? Codec4::kOffset * queries.sums[at + r] : 0);
      for (int64_t j = 0; j < kBlockTokens; j += kFloats) {
        const F32 x = to_f32(sub_i32(load_i32(exact + r * kBlockTokens + j), zero_point));
        store_f32(logits + r * kBlockTokens + j, mul(mul(x, unit), load_f32(block->key_scale + j)));
      }
    }
  }

  // Keys that are coded per channel: their scales go into the query.
  template <int ROWS>
  void channel_logits(Tokens* block, int64_t at, float* logits) const {
    alignas(64) int16_t codes[ROWS * LanePlan::kMaxLanes];
    alignas(64) int32_t exact[ROWS * kBlockTokens];
    const float* query = queries.floats + at * query_width;
    const int64_t key_block = p.format.key.key_block;
    for (int64_t i = 0; i * key_block < block->coded; ++i) {
      float unit[ROWS], base[ROWS];
      scale_queries<ROWS>(query, block->channels[i], key_plan, query_limit, codes, unit, base);
      Block keys = block->keys;
      keys.first += i * key_block * keys.stride;
      keys.tokens = key_block;
      key_codes<ROWS>(keys, codes, nullptr, exact + i * key_block, &block->ahead);
      for (int64_t r = 0; r < ROWS; ++r) {
        for (int64_t j = i * key_block; j < (i + 1) * key_block; j += kFloats) {
          const F32 x = to_f32(load_i32(exact + r * kBlockTokens + j));
          store_f32(logits + r * kBlockTokens + j, fma(x, set_f32(unit[r]), set_f32(base[r])));
        }
      }
    }
    for (int64_t j = block->coded; j < block->values.tokens; ++j) {
      alignas(64) float key[kMaxHeadDim];
      full_row(p.key.full, p.format.slot(block->first + j), key);
      float_dots<ROWS>(query, query_width, key, logits + j);
    }
  }

  void full_row(const PartT<const uint8_t>& part, int64_t slot, float* x) const {
    load_row(reinterpret_cast<const char*>(part.row(unit.b, unit.h, slot)), p.full_dtype, 1, p.head_dim, x);
  }

  template <int ROWS>
  void add_values(Tokens* block, const Weights& weights, float* acc) const {
    const SideFormat& format = p.format.value;
    if (format.coding == Coding::kGroup) {
      if (format.bits == 8)
        return value_block<Codec8, ROWS, true>(block->values, value_plan, weights, acc, &block->ahead);
      return value_block<CodecLevels, ROWS, true>(block->values, value_plan, weights, acc, &block->ahead);
    }
    if (format.bits == 8)
      return value_block<Codec8, ROWS, false>(block->values, value_plan, weights, acc, &block->ahead);
    value_block<Codec4, ROWS, false>(block->values, value_plan, weights, acc, &block->ahead);
  }

  // One register tile of query rows over one block.
  template <int ROWS>
  void tile(Tokens* block, int64_t row, const int64_t* seen) const {
    alignas(64) float logits[ROWS * kBlockTokens];
    Weights weights;
    const int64_t at = query_row(row);
    if (p.format.key.coding == Coding::kChannel) {
      channel_logits<ROWS>(block, at, logits);
    } else {
      row_logits<ROWS>(block, at, logits);
    }
    const SideFormat& format = p.format.value;
    const bool sums = format.coding == Coding::kRow && format.bits == 4;  // whose codes have an offset
    for (int64_t r = 0; r < ROWS; ++r) {
      alignas(64) float visible_zeros[kBlockTokens];
      const float* zeros = format.coding == Coding::kToken ? block->value_zero : nullptr;
      if (zeros && seen[r] < block->values.tokens) {  // 0 times the NaN of a token not seen
        std::memset(visible_zeros, 0, sizeof visible_zeros);
        std::memcpy(visible_zeros, zeros, static_cast<size_t>(seen[r]) * sizeof(float));
        zeros = visible_zeros;
      }
      softmax_row(logits + r * kBlockTokens, block->value_scale, zeros, seen[r], sums, unit.partial + row + r, &weights,
                  r);
    }
    if (format.coding == Coding::kGroup) {
      const int64_t groups = format.groups(p.head_dim);
      format.bits == 8 ? group_weights<true>(block->value_mantissa, groups, ROWS, &weights)
                       : group_weights<false>(block->value_mantissa, groups, ROWS, &weights);
    }
    add_values<ROWS>(block, weights, unit.acc + row * value_plan.width);
  }

  void tile(int64_t rows, Tokens* block, int64_t row, const int64_t* seen) const {
    switch (rows) {
      case 1:
        return tile<1>(block, row, seen);
      case 2:
        return tile<2>(block, row, seen);
      case 3:
        return tile<3>(block, row, seen);
      case 4:
        return tile<4>(block, row, seen);
      case 5:
        return tile<5>(block, row, seen);
      default:
        return tile<6>(block, row, seen);
    }
  }

  // How many tokens from `first` on query row `row` of the unit sees: those up to its own position.
  int64_t visible(int64_t row, int64_t first, int64_t most) const {
    const int64_t t = (unit.first_row + row) / p.group();
    const int64_t count = p.lengths[unit.b] - p.tokens + 1 + t - first;
    return count < 0 ? 0 : count < most ? count : most;
  }

  void tiles(Tokens* block) const {
    const int64_t count = (unit.rows + kMaxRows - 1) / kMaxRows;
    for (int64_t i = 0, row = 0; i < count; ++i) {
      const int64_t rows = (unit.rows - row + count - i - 1) / (count - i);
      int64_t seen[kMaxRows], most = 0;
      for (int64_t r = 0; r < rows; ++r) {
        seen[r] = visible(row + r, block->first, block->values.tokens);
        most = seen[r] > most ? seen[r] : most;
      }
      if (most > 0) tile(rows, block, row, seen);
      row += rows;
    }
  }

  // The first tokens, in full precision: their share is what a row starts from.
  void sinks(int64_t row, int64_t rows) const {
    alignas(64) float logits[kMaxRows * kBlockTokens], x[kMaxHeadDim], lanes[LanePlan::kMaxLanes];
    const int64_t held = p.lengths[unit.b] < p.format.sinks ? p.lengths[unit.b] : p.format.sinks;
    for (int64_t j = 0; j < held; ++j) {
      full_row(p.key.full, j, x);
      for (int64_t r = 0; r < rows; ++r) {
        float_dots<1>(queries.floats + query_row(row + r) * query_width, query_width, x, logits + r * kBlockTokens + j);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* weight = logits + r * kBlockTokens;
      const int64_t seen = visible(row + r, 0, held);
      float most = -kInfinity, sum = 0.0f;
      for (int64_t j = 0; j < seen; ++j) most = weight[j] > most || weight[j] != weight[j] ? weight[j] : most;
      for (int64_t j = 0; j < held; ++j) {
        weight[j] = j < seen ? exp_nonpositive(weight[j] - (most < -FLT_MAX ? -FLT_MAX : most)) : 0.0f;
        sum += weight[j];
      }
      unit.partial[row + r] = Partial{most, sum};
    }
    for (int64_t j = 0; j < held; ++j) {
      full_row(p.value.full, j, x);
      if (p.format.value.rotated) rotate_row(x, p.head_dim);
      to_lanes(value_plan, x, lanes);
      for (int64_t r = 0; r < rows; ++r) {
        if (j >= visible(row + r, 0, held)) continue;  // 0 times a NaN that this row does not see
        float* acc = unit.acc + (row + r) * value_plan.width;
        const F32 weight = set_f32(logits[r * kBlockTokens + j]);
        for (int64_t i = 0; i < value_plan.width; i += kFloats) {
          store_f32(acc + i, fma(weight, load_f32(lanes + i), load_f32(acc + i)));
        }
      }
    }
  }

  void load_scales(Tokens* block) const {
    const int64_t b = unit.b, h = unit.h, token = block->first, count = block->values.tokens;
    const SideFormat &key = p.format.key, &value = p.format.value;
    if (key.coding == Coding::kChannel) {
      for (int64_t i = 0; i * key.key_block < block->coded; ++i) {
        block->channels[i].load(p, b, h, (token - p.format.sinks) / key.key_block + i);
      }
    } else if (key.coding == Coding::kGroup) {
      load_groups(p.key.scales, key, p.head_dim, b, h, token, count, block->key_scale, block->key_mantissa);
    } else {
      load_floats(p.key.scales, b, h, token, count, block->key_scale);
    }
    if (value.coding == Coding::kGroup) {
      load_groups(p.value.scales, value, p.head_dim, b, h, token, count, block->value_scale, block->value_mantissa);
      return;
    }
    load_floats(p.value.scales, b, h, token, count, block->value_scale);
    if (value.coding != Coding::kToken) return;
    load_floats(p.value.zeros, b, h, token, count, block->value_zero);
    if (value.bits == 4) return;  // nibbles count from 0
    for (int64_t j = 0; j < kBlockTokens; ++j) block->value_zero[j] += 128.0f * block->value_scale[j];
  }

  // What scales the next block, which no stream of codes brings along. The address may lie past the cache.
  void fetch(const PartT<const uint8_t>& part, int64_t row, int64_t offset, int64_t bytes, Ahead* ahead) const {
    const int64_t at = unit.b * part.stride_batch + unit.h * part.stride_head + row * part.stride_row + offset;
    ahead->also(reinterpret_cast<uintptr_t>(part.data) + static_cast<uintptr_t>(at), bytes);
  }

  void fetch_scales(int64_t token, Ahead* ahead) const {
    const SideFormat &key = p.format.key, &value = p.format.value;
    if (key.coding == Coding::kChannel) {
      const int64_t block = (token - p.format.sinks) / key.key_block, count = kBlockTokens / key.key_block;
      const int64_t bytes = p.head_dim * (key.narrow_scales ? 2 : 4);
      fetch(p.key.scales, block, 0, (count - 1) * p.key.scales.stride_row + bytes, ahead);
      fetch(p.key.zeros, block, 0, (count - 1) * p.key.zeros.stride_row + p.head_dim * 4, ahead);
    }
    if (value.coding == Coding::kGroup) {
      for (int64_t i = 0; i < value.group_bytes(p.head_dim); ++i) fetch(p.value.scales, i, token, kBlockTokens, ahead);
    }
  }

  void run() const {
    alignas(64) uint8_t padded_keys[kBlockTokens * kLanes], padded_values[kBlockTokens * kLanes];
    const int64_t key_bytes = p.format.key.row_bytes(p.head_dim), value_bytes = p.format.value.row_bytes(p.head_dim);
    for (int64_t r = 0; r < unit.rows; ++r) unit.partial[r] = Partial{-kInfinity, 0.0f};
    std::memset(unit.acc, 0, static_cast<size_t>(unit.rows * value_plan.width) * sizeof(float));
    if (unit.sinks) {
      for (int64_t row = 0; row < unit.rows; row += kMaxRows) {
        sinks(row, unit.rows - row < kMaxRows ? unit.rows - row : kMaxRows);
      }
    }
    for (int64_t token = unit.first_token; token < unit.last_token; token += kBlockTokens) {
      const int64_t left = unit.last_token - token, count = left < kBlockTokens ? left : kBlockTokens;
      const Block keys = make_block(p.key, key_plan, key_bytes, unit.b, unit.h, token, count, padded_keys);
      const Block values = make_block(p.value, value_plan, value_bytes, unit.b, unit.h, token, count, padded_values);
      Tokens block(keys, values, token);
      block.coded = frozen - token < 0 ? 0 : frozen - token < count ? frozen - token : count;
      load_scales(&block);
      fetch_scales(token + kBlockTokens, &block.ahead);
      tiles(&block);
    }
  }
};

void attend_unit(const AttendParams& p, const LanePlan& key_plan, const LanePlan& value_plan, const Queries& queries,
                 const Unit& unit) {
  Attend{p, key_plan, value_plan, queries, unit}.run();
}

}  // namespace
}  // namespace KVQ_ISA
}  // namespace kvq
