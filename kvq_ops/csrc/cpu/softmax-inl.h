// The running softmax of a query row, and weights as integers.
#pragma once

#include <cfloat>
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

// Logits x of one row over a block to weight codes; `seen` of the tokens are visible to the row, and value_zero, where
// the coding has it, is 0 for the others. The largest code lies in 2^14 .. 2^15. `sums`: the codes' sum is wanted. x is
// spoiled.
inline void softmax_row(float* x, const float* value_scale, const float* value_zero, int64_t seen, bool sums,
                        Partial* partial, Weights* weights, int64_t r) {
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
    store_f32(x + j, value_zero ? e : mul(e, load_f32(value_scale + j)));
  }
  float bias = 0.0f;
  if (value_zero) {
    F32 zeros = set_f32(0.0f);
    for (int64_t j = 0; j < kBlockTokens; j += kFloats) {
      const F32 e = load_f32(x + j);
      zeros = fma(e, load_f32(value_zero + j), zeros);
      store_f32(x + j, mul(e, load_f32(value_scale + j)));
    }
    bias = reduce_add(zeros);
  }
  for (int64_t j = seen; j < kBlockTokens; ++j) x[j] = 0.0f;  // 0 times the NaN scale of a token not seen
  partial->max = new_max;
  partial->sum = partial->sum * correction + reduce_add(sum);

  // The power of two that takes the largest weight to 2^14..2^15: uniform weights stay exact.
  const int32_t bits = absmax_bits(x, kBlockTokens);
  const int32_t exponent = (bits >> 23) - 127 > -112 ? (bits >> 23) - 127 : -112;  // 2^(exponent - 14) stays normal
  const bool finite = bits < 0x7f800000;
  const F32 up = set_f32(finite ? float_of(static_cast<uint32_t>(127 + 14 - exponent) << 23) : 0.0f);
  const F32 top = set_f32(static_cast<float>((2 << 14) - 1));
  F32 total = set_f32(0.0f);
  for (int64_t j = 0; j < kBlockTokens; j += kLanes) {
    const F32 low = min(round_even(mul(load_f32(x + j), up)), top);
    const F32 high = min(round_even(mul(load_f32(x + j + kFloats), up)), top);
    total = add(total, add(low, high));  // integers below 2^24: exact
    store_i16(weights->code + r * kBlockTokens + j, to_i32(low), to_i32(high));
  }
  weights->scale[r] = float_of(finite ? static_cast<uint32_t>(127 - 14 + exponent) << 23 : 0x7fc00000u);
  weights->sum[r] = finite && sums ? static_cast<int32_t>(reduce_add(total)) : 0;
  weights->correction[r] = correction;
  weights->bias[r * kMaxGroups] = bias;
}

// Weights of coding kGroup: those of each group are the tokens' times the group's mantissas. MIDDLES: a level lies half
// a step above its code.
template <bool MIDDLES>
inline void group_weights(const int16_t* mantissa, int64_t groups, int64_t rows, Weights* weights) {
  for (int64_t r = 0; r < rows; ++r) weights->scale[r] *= kMantissas;
  for (int64_t g = groups - 1; g >= 0; --g) {  // group 0 holds the tokens' own weights until the end
    I16 m[kBlockTokens / kLanes];
    KVQ_UNROLL for (int64_t j = 0; j < kBlockTokens; j += kLanes) {
      m[j / kLanes] = load_i16(mantissa + g * kBlockTokens + j);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int16_t* from = weights->code + r * kBlockTokens;
      int16_t* to = weights->code + g * Weights::kGroup + r * kBlockTokens;
      I32 sum = zero_i32();
      KVQ_UNROLL for (int64_t j = 0; j < kBlockTokens; j += kLanes) {
        const I16 x = scale_by_mantissa(load_i16(from + j), m[j / kLanes]);
        store_i16(to + j, x);
        if (MIDDLES) sum = dot(sum, x, set_i16(1));
      }
      float bias = 0.0f;
      if (MIDDLES) {
        int32_t four[4];
        sum4(sum, sum, sum, sum, four);
        bias = 0.5f * static_cast<float>(four[0]) * weights->scale[r];
      }
      weights->bias[r * kMaxGroups + g] = bias;
    }
  }
}

}  // namespace
}  // namespace KVQ_ISA
}  // namespace kvq
