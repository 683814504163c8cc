#include <cstring>

#include "schedule.h"

namespace kvq {

const LanePlan& lane_plan(LanePlan* kept, int64_t head_dim, int bits, int64_t lanes) {
  LanePlan& plan = *kept;
  if (plan.head_dim == head_dim && plan.bits == bits && plan.lanes == lanes) return plan;
  const int64_t row_bytes = SideFormat{bits}.row_bytes(head_dim);
  plan.head_dim = head_dim;
  plan.bits = bits;
  plan.lanes = lanes;
  plan.vectors = bits == 8 ? 1 : 2;
  plan.steps = (row_bytes + lanes - 1) / lanes;
  plan.width = plan.steps * plan.vectors * lanes;
  plan.narrow = row_bytes < lanes;
  plan.identity = bits == 8 && plan.width == head_dim;
  int64_t covered = 0;  // bytes of a row that earlier steps hold
  for (int64_t s = 0; s < plan.steps; ++s) {
    const int64_t last = row_bytes - lanes, at = s * lanes;
    plan.offset[s] = static_cast<int32_t>(plan.narrow ? 0 : at < last ? at : last);
    for (int64_t v = 0; v < plan.vectors; ++v) {
      for (int64_t i = 0; i < lanes; ++i) {
        const int64_t byte = plan.offset[s] + i;
        const bool fresh = byte >= covered && byte < row_bytes;
        const int64_t channel = bits == 8 ? byte : nibble_channel(byte, static_cast<int>(v), head_dim);
        plan.channel[(s * plan.vectors + v) * lanes + i] = static_cast<int16_t>(fresh ? channel : -1);
      }
    }
    covered = plan.offset[s] + lanes;
  }
  return plan;
}

}  // namespace kvq
