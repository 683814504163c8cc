// Append and attend for one ISA, written once over the alphabet of simd_*.h, which the including file chose.
//
// Attend reads one head of the cache once for all query rows that share it, in blocks of 64 tokens: integer logits
// (int16 query times codes, exact in int32), a running softmax in fp32, weights as int16 with a power-of-two scale,
// integer value sums of a block, fp32 accumulation over blocks. Nothing depends on threads, capacity or batch.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>

#include "tiles-inl.h"

namespace kvq {
namespace KVQ_ISA {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

// exp(x) for x <= 0, exactly 1 at 0, 0 below -87; relative error about 1e-7. Cody-Waite reduction and Taylor series.
inline F32 exp_nonpositive(F32 x) {
  const F32 y = at_least(-87.0f, x);
  const F32 n = round_even(mul(y, set_f32(1.44269504088896341f)));
  const F32 r = fma(n, set_f32(-1.42860682030941723e-6f), fma(n, set_f32(-0.693145751953125f), y));
  F32 e = set_f32(1.0f / 5040);
  e = fma(e, r, set_f32(1.0f / 720));
  e = fma(e, r, set_f32(1.0f / 120));
  e = fma(e, r, set_f32(1.0f / 24));
  e = fma(e, r, set_f32(1.0f / 6));
  e = fma(e, r, set_f32(0.5f));
  e = fma(e, r, set_f32(1.0f));
  e = fma(e, r, set_f32(1.0f));
  return zero_below(x, -87.0f, scale_by_power(e, to_i32(n)));
}

inline float exp_nonpositive(float x) {
  float lanes[kFloats];
  store_f32(lanes, exp_nonpositive(set_f32(x)));
  return lanes[0];
}

constexpr int64_t kRowsAhead = 6;

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
  *side.scale(b, h, token) = quantize_row(x, head_dim, format.limit(), code);
  pack_row(code, head_dim, format.bits, side.row(b, h, token));
}

void append_row(const AppendParams& p, int64_t b, int64_t h, int64_t t) {
  const int64_t token = p.lengths[b] + t;
  append_side(p.key, p.format.key, p.key_rows, p.head_dim, b, h, t, token);
  append_side(p.value, p.format.value, p.value_rows, p.head_dim, b, h, t, token);
}

inline int64_t sum_of_magnitudes(const int32_t* code, int64_t count) {
  int32_t sum = 0;  // at most 1024 * 32767
  for (int64_t i = 0; i < count; ++i) sum += code[i] < 0 ? -code[i] : code[i];
  return sum;
}

void prepare_query(const AttendParams& p, const LanePlan& plan, int64_t b, int64_t h, int64_t r, int16_t* codes,
                   float* scale, int32_t* sum) {
  alignas(64) float x[kMaxHeadDim];
  alignas(64) int32_t code[kMaxHeadDim];
  const int64_t head = h * p.group() + r % p.group();
  load_row(p.query.row(b, head, r / p.group()), p.query.dtype, p.query.stride_dim, p.head_dim, x);
  // Logits must stay inside int32 whatever the keys hold; a row that might not takes one bit less.
  const int64_t largest = plan.bits == 8 ? 128 : 15;
  *scale = quantize_row(x, p.head_dim, kQueryLimit, code);
  if (largest * sum_of_magnitudes(code, p.head_dim) > INT32_MAX) {
    *scale = quantize_row(x, p.head_dim, kQueryLimit / 2, code);
  }
  *scale *= p.scale;
  int32_t total = 0;
  for (int64_t i = 0; i < p.head_dim; ++i) total += code[i];
  *sum = total;
  if (plan.identity) {
    for (int64_t i = 0; i < plan.width; ++i) codes[i] = static_cast<int16_t>(code[i]);
  } else {
    for (int64_t i = 0; i < plan.width; ++i) {
      codes[i] = plan.channel[i] < 0 ? int16_t{0} : static_cast<int16_t>(code[plan.channel[i]]);
    }
  }
  arrange_query(codes, plan.width);
}

// Logits of one row over a block to weight codes; `seen` of the tokens are visible to the row.
inline void softmax_row(const int32_t* logits, int32_t offset, float query_scale, const float* key_scale,
                        const float* value_scale, int64_t seen, Partial* partial, Weights* weights, int64_t r) {
  alignas(64) float x[kBlockTokens];
  const F32 unit = set_f32(query_scale);
  const I32 zero_point = set_i32(offset);
  for (int64_t j = 0; j < kBlockTokens; j += kFloats) {
    const F32 exact = to_f32(sub_i32(load_i32(logits + j), zero_point));
    store_f32(x + j, mul(mul(exact, unit), load_f32(key_scale + j)));
  }
  for (int64_t j = seen; j < kBlockTokens; ++j) x[j] = -kInfinity;
  F32 most = load_f32(x);
  for (int64_t j = kFloats; j < kBlockTokens; j += kFloats) most = max(most, load_f32(x + j));
  const float block_max = reduce_max(most), old_max = partial->max;
  const float new_max = block_max > old_max ? block_max : old_max;
  const float base = new_max < -FLT_MAX ? -FLT_MAX : new_max;  // no token seen yet: exp(-inf) must be 0, not NaN
  const float correction = old_max == new_max ? 1.0f : exp_nonpositive(old_max - base);

  F32 sum = set_f32(0.0f);
  for (int64_t j = 0; j < kBlockTokens; j += kFloats) {
    const F32 e = exp_nonpositive(sub(load_f32(x + j), set_f32(base)));
    sum = add(sum, e);
    store_f32(x + j, mul(e, load_f32(value_scale + j)));
  }
  for (int64_t j = seen; j < kBlockTokens; ++j) x[j] = 0.0f;  // 0 times the NaN scale of a token not seen
  partial->max = new_max;
  partial->sum = partial->sum * correction + reduce_add(sum);

  // The power of two that takes the largest weight to 2^14..2^15: uniform weights stay exact.
  const int32_t bits = absmax_bits(x, kBlockTokens);
  const int32_t exponent = (bits >> 23) - 127 > -112 ? (bits >> 23) - 127 : -112;  // 2^(exponent - 14) stays normal
  const bool finite = bits < 0x7f800000;
  const F32 up = set_f32(finite ? float_of(static_cast<uint32_t>(127 + 14 - exponent) << 23) : 0.0f);
  F32 total = set_f32(0.0f);
  for (int64_t j = 0; j < kBlockTokens; j += kLanes) {
    const F32 low = min(round_even(mul(load_f32(x + j), up)), set_f32(32767.0f));
    const F32 high = min(round_even(mul(load_f32(x + j + kFloats), up)), set_f32(32767.0f));
    total = add(total, add(low, high));  // integers below 2^24: exact
    store_i16(weights->code + r * kBlockTokens + j, to_i32(low), to_i32(high));
  }
  weights->scale[r] = float_of(finite ? static_cast<uint32_t>(127 - 14 + exponent) << 23 : 0x7fc00000u);
  weights->sum[r] = finite ? static_cast<int32_t>(reduce_add(total)) : 0;
  weights->correction[r] = correction;
}

// The rows of a block, copied to a padded buffer where a row is shorter than one load.
inline Block make_block(const Side& side, const LanePlan& plan, int64_t row_bytes, int64_t b, int64_t h, int64_t token,
                        int64_t tokens, uint8_t* padded) {
  const Block block{side.row(b, h, token), side.codes_token, tokens, row_bytes};
  if (!plan.narrow) return block;
  for (int64_t j = 0; j < tokens; ++j) {
    std::memset(padded + j * kLanes, 0, kLanes);
    std::memcpy(padded + j * kLanes, block.row(j), static_cast<size_t>(row_bytes));
  }
  return Block{padded, kLanes, tokens, kLanes};
}

inline void load_scales(const Side& side, int64_t b, int64_t h, int64_t token, int64_t tokens, float* scales) {
  const float* from = side.scale(b, h, token);
  if (side.scales_token == 1) {
    if (tokens == kBlockTokens) {
      for (int64_t j = 0; j < kBlockTokens; j += kFloats) store_f32(scales + j, load_f32(from + j));
      return;
    }
    std::memcpy(scales, from, static_cast<size_t>(tokens) * sizeof(float));
  } else {
    for (int64_t j = 0; j < tokens; ++j) scales[j] = from[j * side.scales_token];
  }
  for (int64_t j = tokens; j < kBlockTokens; ++j) scales[j] = 0.0f;
}

// One block of tokens: rows and scales (0 past the last token) of both sides.
struct Tokens {
  Tokens(const Block& keys_, const Block& values_) : keys(keys_), values(values_), ahead(keys_, values_) {}

  Block keys, values;
  Ahead ahead;
  alignas(64) float key_scale[kBlockTokens], value_scale[kBlockTokens];
};

template <class KeyCodec, class ValueCodec>
struct Attend {
  const AttendParams& p;
  const LanePlan &key_plan, &value_plan;
  const Queries& queries;
  const Unit& unit;

  // One register tile of query rows over one block.
  template <int ROWS>
  void tile(Tokens* block, int64_t row, const int64_t* seen) const {
    alignas(64) int32_t logits[ROWS * kBlockTokens];
    Weights weights;
    const int64_t at = (unit.b * p.heads_kv + unit.h) * p.rows() + unit.first_row + row;
    if (block->keys.tokens < kBlockTokens) std::memset(logits, 0, sizeof logits);  // tiles leave the rest
    key_block<KeyCodec, ROWS>(block->keys, key_plan, queries.codes + at * key_plan.width, logits, &block->ahead);
    for (int64_t r = 0; r < ROWS; ++r) {
      softmax_row(logits + r * kBlockTokens, KeyCodec::kOffset * queries.sums[at + r], queries.scales[at + r],
                  block->key_scale, block->value_scale, seen[r], unit.partial + row + r, &weights, r);
    }
    float* acc = unit.acc + row * value_plan.width;
    value_block<ValueCodec, 0, ROWS>(block->values, value_plan, weights, acc, &block->ahead);
    if (ValueCodec::kVectors == 2) {
      value_block<ValueCodec, ValueCodec::kVectors - 1, ROWS>(block->values, value_plan, weights, acc, &block->ahead);
    }
  }

  void tiles(Tokens* block, int64_t first_token) const {
    const int64_t count = (unit.rows + kMaxRows - 1) / kMaxRows;
    for (int64_t i = 0, row = 0; i < count; ++i) {
      const int64_t rows = (unit.rows - row + count - i - 1) / (count - i);
      int64_t seen[kMaxRows], most = 0;
      for (int64_t r = 0; r < rows; ++r) {
        // Query token t sees the tokens up to its own position.
        const int64_t t = (unit.first_row + row + r) / p.group();
        const int64_t visible = p.lengths[unit.b] - p.tokens + 1 + t - first_token;
        seen[r] = visible < 0 ? 0 : visible < block->keys.tokens ? visible : block->keys.tokens;
        most = seen[r] > most ? seen[r] : most;
      }
      if (most > 0) {
        switch (rows) {
          case 1:
            tile<1>(block, row, seen);
            break;
          case 2:
            tile<2>(block, row, seen);
            break;
          case 3:
            tile<3>(block, row, seen);
            break;
          case 4:
            tile<4>(block, row, seen);
            break;
          case 5:
            tile<5>(block, row, seen);
            break;
          default:
            tile<6>(block, row, seen);
            break;
        }
      }
      row += rows;
    }
  }

  void run() const {
    alignas(64) uint8_t padded_keys[kBlockTokens * kLanes], padded_values[kBlockTokens * kLanes];
    const int64_t key_bytes = p.format.key.row_bytes(p.head_dim), value_bytes = p.format.value.row_bytes(p.head_dim);
    for (int64_t r = 0; r < unit.rows; ++r) unit.partial[r] = Partial{-kInfinity, 0.0f};
    std::memset(unit.acc, 0, static_cast<size_t>(unit.rows * value_plan.width) * sizeof(float));
    for (int64_t token = unit.first_token; token < unit.last_token; token += kBlockTokens) {
      const int64_t left = unit.last_token - token, count = left < kBlockTokens ? left : kBlockTokens;
      const Block keys = make_block(p.key, key_plan, key_bytes, unit.b, unit.h, token, count, padded_keys);
      const Block values = make_block(p.value, value_plan, value_bytes, unit.b, unit.h, token, count, padded_values);
      Tokens block(keys, values);
      load_scales(p.key, unit.b, unit.h, token, count, block.key_scale);
      load_scales(p.value, unit.b, unit.h, token, count, block.value_scale);
      tiles(&block, token);
    }
  }
};

void attend_unit(const AttendParams& p, const LanePlan& key_plan, const LanePlan& value_plan, const Queries& queries,
                 const Unit& unit) {
  const bool key8 = p.format.key.bits == 8, value8 = p.format.value.bits == 8;
  if (key8 && value8) return Attend<Codec8, Codec8>{p, key_plan, value_plan, queries, unit}.run();
  if (key8) return Attend<Codec8, Codec4>{p, key_plan, value_plan, queries, unit}.run();
  if (value8) return Attend<Codec4, Codec8>{p, key_plan, value_plan, queries, unit}.run();
  return Attend<Codec4, Codec4>{p, key_plan, value_plan, queries, unit}.run();
}

void merge_row(const AttendParams& p, const LanePlan& plan, int64_t b, int64_t h, int64_t r, int64_t splits,
               const Partial* partial, int64_t partial_stride, float* acc, int64_t acc_stride) {
  alignas(64) float channels[kMaxHeadDim];
  float most = -kInfinity, sum = 0.0f;
  for (int64_t s = 0; s < splits; ++s)
    most = partial[s * partial_stride].max > most ? partial[s * partial_stride].max : most;
  const float base = most < -FLT_MAX ? -FLT_MAX : most;
  for (int64_t s = 0; s < splits; ++s) {
    const Partial& part = partial[s * partial_stride];
    const float share = part.max == most ? 1.0f : exp_nonpositive(part.max - base);
    sum += part.sum * share;
    const float* from = acc + s * acc_stride;
    for (int64_t i = 0; i < plan.width; i += kFloats) {
      const F32 x = mul(load_f32(from + i), set_f32(share));
      store_f32(acc + i, s == 0 ? x : add(load_f32(acc + i), x));
    }
  }
  for (int64_t i = 0; i < plan.width; i += kFloats) store_f32(acc + i, div(load_f32(acc + i), set_f32(sum)));
  if (!plan.identity) {
    for (int64_t i = 0; i < plan.width; ++i) {
      if (plan.channel[i] >= 0) channels[plan.channel[i]] = acc[i];
    }
  }
  const int64_t head = h * p.group() + r % p.group();
  const int64_t at = (b * p.heads_q + head) * p.tokens + r / p.group();
  store_row(static_cast<char*>(p.out) + at * p.head_dim * item_bytes(p.query.dtype), p.query.dtype, p.head_dim,
            plan.identity ? acc : channels);
  if (p.lse) p.lse[at] = most + __builtin_logf(sum);
}

}  // namespace

const Kernels& table();
const Kernels& table() {
  static const Kernels kTable = {KVQ_ISA_NAME, kLanes, append_row, prepare_query, attend_unit, merge_row};
  return kTable;
}

}  // namespace KVQ_ISA
}  // namespace kvq
