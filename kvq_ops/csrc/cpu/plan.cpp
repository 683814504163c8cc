#include <cstring>

#include "schedule.h"

namespace kvq {

namespace {

// The group that holds byte `byte` of a row, in nibbles `high`; 0 for codings without groups.
int64_t group_of(const SideFormat& format, int64_t head_dim, int64_t byte, int64_t high) {
  if (format.coding != Coding::kGroup) return 0;
  const int64_t channel = format.bits == 8 ? byte : nibble_channel(byte, static_cast<int>(high), head_dim);
  const int64_t block = channel / kNibbleBlock, start = block * kNibbleBlock;
  const int64_t size = head_dim - start < kNibbleBlock ? head_dim - start : kNibbleBlock;
  if (format.group == kNibbleBlock) return block;
  return 2 * block + (channel - start >= format.first_group(size) ? 1 : 0);
}

}  // namespace

const LanePlan& lane_plan(LanePlan* kept, int64_t head_dim, const SideFormat& format, int64_t lanes) {
  LanePlan& plan = *kept;
  const int bits = format.bits;
  if (plan.head_dim == head_dim && plan.bits == bits && plan.lanes == lanes && plan.group_size == format.group) {
    return plan;
  }
  const int64_t row_bytes = format.row_bytes(head_dim);
  plan.group_size = format.group;
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
    // A step's new bytes never cross a block of 64 codes: steps are as wide as half a block or a part of it.
    for (int64_t v = 0; v < plan.vectors; ++v) {
      plan.group[s * plan.vectors + v] = static_cast<int16_t>(group_of(format, head_dim, s * lanes, v));
    }
    covered = plan.offset[s] + lanes;
  }
  // Overlapping steps hold channels twice, and so does a step over the short last block of 4-bit rows.
  plan.runs = !plan.narrow && row_bytes % lanes == 0 && (bits == 8 || head_dim % kNibbleBlock == 0);
  return plan;
}

}  // namespace kvq
