// The table of one ISA: append and attend, written once over the alphabet of simd_*.h, which the including file chose.
#pragma once

#include <cmath>

#include "append-inl.h"
#include "attend-inl.h"

namespace kvq {
namespace KVQ_ISA {
namespace {

inline int64_t sum_of_magnitudes(const int32_t* code, int64_t count) {
  int32_t sum = 0;  // at most 1024 * 32767
  for (int64_t i = 0; i < count; ++i) sum += code[i] < 0 ? -code[i] : code[i];
  return sum;
}

void prepare_query(const AttendParams& p, const LanePlan& plan, int64_t b, int64_t h, int64_t r, const Queries& queries,
                   int64_t at) {
  alignas(64) float x[kMaxHeadDim];
  alignas(64) int32_t code[kMaxHeadDim];
  const int64_t head = h * p.group() + r % p.group();
  load_row(p.query.row(b, head, r / p.group()), p.query.dtype, p.query.stride_dim, p.head_dim, x);
  if (queries.floats) {
    const int64_t width = float_width(p.head_dim);
    for (int64_t i = 0; i < width; i += kFloats) {
      store_f32(queries.floats + at * width + i, mul(load_f32(x + i), set_f32(p.scale)));
    }
  }
  if (p.format.key.coding == Coding::kChannel) return;
  int16_t* codes = queries.codes + at * plan.width;
  // Logits must stay inside int32 whatever the keys hold; a row that might not takes fewer bits.
  const bool groups = p.format.key.coding == Coding::kGroup;
  const int64_t largest = groups ? 127 * kMantissas : plan.bits == 8 ? 128 : 15;
  float scale = quantize_row(x, p.head_dim, kQueryLimit, code);
  for (int limit = kQueryLimit / 2; largest * sum_of_magnitudes(code, p.head_dim) > INT32_MAX; limit /= 2) {
    scale = quantize_row(x, p.head_dim, limit, code);
  }
  queries.scales[at] = scale * p.scale;
  int32_t total = 0;
  for (int64_t i = 0; i < p.head_dim; ++i) total += code[i];
  queries.sums[at] = total;
  if (plan.identity) {
    for (int64_t i = 0; i < plan.width; ++i) codes[i] = static_cast<int16_t>(code[i]);
  } else {
    for (int64_t i = 0; i < plan.width; ++i) {
      codes[i] = plan.channel[i] < 0 ? int16_t{0} : static_cast<int16_t>(code[plan.channel[i]]);
    }
  }
  if (!groups) arrange_query(codes, plan.width);
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
    for (int64_t i = p.head_dim; i % 16 != 0; ++i) channels[i] = 0.0f;
  }
  float* row = plan.identity ? acc : channels;
  if (p.format.value.rotated) rotate_row(row, p.head_dim);
  const int64_t head = h * p.group() + r % p.group();
  const int64_t at = (b * p.heads_q + head) * p.tokens + r / p.group();
  store_row(static_cast<char*>(p.out) + at * p.head_dim * item_bytes(p.query.dtype), p.query.dtype, p.head_dim, row);
  if (p.lse) p.lse[at] = most + __builtin_logf(sum);
}

}  // namespace

const Kernels& table();
const Kernels& table() {
  static const Kernels kTable = {KVQ_ISA_NAME, kLanes, append_row, freeze_block, prepare_query, attend_unit, merge_row};
  return kTable;
}

}  // namespace KVQ_ISA
}  // namespace kvq
