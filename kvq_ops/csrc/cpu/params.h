// What the CPU kernels take: plain structs whose pointers carry their shapes. No torch from here down, so that the
// kernels build in seconds, on any machine, and run in an emulator.
#pragma once

#include <cstdint>
#include <cstring>

#include "../format.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined operands of its own AVX-512 intrinsics for ours (GCC bug 105593), and the zero padding
// of row buffers for missing.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace kvq {

enum class Dtype { kFloat32, kBFloat16, kFloat16 };

inline int64_t item_bytes(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

// One tensor of a cache, [batch, heads_kv, rows, ...]: strides in bytes, what lies in a row contiguous.
template <class Byte>
struct PartT {
  Byte* data = nullptr;
  int64_t stride_batch = 0, stride_head = 0, stride_row = 0;

  Byte* row(int64_t b, int64_t h, int64_t r) const {
    return data + b * stride_batch + h * stride_head + r * stride_row;
  }
};

// One side of a cache: kvq_ops/format.py says what each part holds for which coding. Those that a format has not are
// null.
template <class Byte>
struct SideT {
  PartT<Byte> codes, scales, zeros, full;
};
using Side = SideT<const uint8_t>;
using MutableSide = SideT<uint8_t>;

// A floating tensor [batch, heads, tokens, head_dim] of any strides, in elements.
struct Rows {
  const void* data;
  Dtype dtype;
  int64_t stride_batch, stride_head, stride_token, stride_dim;

  const char* row(int64_t b, int64_t h, int64_t t) const {
    return static_cast<const char*>(data) + (b * stride_batch + h * stride_head + t * stride_token) * item_bytes(dtype);
  }
};

// Row t of (b, h) as it is, to contiguous memory.
inline void copy_row(const Rows& rows, int64_t b, int64_t h, int64_t t, int64_t head_dim, uint8_t* to) {
  const int64_t item = item_bytes(rows.dtype), stride = rows.stride_dim * item;
  const char* from = rows.row(b, h, t);
  if (rows.stride_dim == 1) {
    std::memcpy(to, from, static_cast<size_t>(head_dim * item));
    return;
  }
  for (int64_t i = 0; i < head_dim; ++i) std::memcpy(to + i * item, from + i * stride, static_cast<size_t>(item));
}

struct AppendParams {
  MutableSide key, value;
  Rows key_rows, value_rows;
  CacheFormat format;      // rows in full precision have the dtype of key_rows
  const int32_t* lengths;  // [batch], the length before this append
  int64_t batch, heads_kv, tokens, head_dim;
};

struct AttendParams {
  Rows query;
  Side key, value;
  CacheFormat format;
  Dtype full_dtype;        // of rows in full precision
  const int32_t* lengths;  // [batch]
  int64_t batch, heads_q, heads_kv, tokens, head_dim;
  float scale;
  void* out;   // [batch, heads_q, tokens, head_dim], contiguous, dtype of query
  float* lse;  // [batch, heads_q, tokens], contiguous, or null

  int64_t group() const { return heads_q / heads_kv; }
  int64_t rows() const { return group() * tokens; }  // query rows that read one head of the cache
  bool float_queries() const { return format.key.coding == Coding::kChannel || format.sinks > 0; }
};

// How the codes of one side lie in vector registers: vector v of step s holds, in lane i, the code of channel
// channel[(s * vectors + v) * lanes + i]; -1 where another lane already holds it (the last step overlaps the one
// before, so that no load passes the end of a row). Loads of step s start at byte offset[s] of a row.
struct LanePlan {
  static constexpr int64_t kMaxLanes = kMaxHeadDim + 128;
  int64_t head_dim = 0;
  int bits = 0;
  int64_t group_size = 0;
  int64_t lanes = 0;
  int64_t vectors = 0, steps = 0, width = 0;  // width = steps * vectors * lanes
  bool identity = false;                      // lane i holds channel i
  bool narrow = false;                        // a row is shorter than one load: rows are copied to a padded buffer
  bool runs = false;                          // each vector holds neighbouring channels, none of them twice
  int32_t offset[kMaxHeadDim / 2 + 1];
  int16_t channel[kMaxLanes];
  int16_t group[kMaxLanes / 8];  // of the vector's fresh lanes: which group of coding kGroup
};

constexpr int64_t kBlockTokens = 64;  // tokens whose logits and weights are formed together

// Running softmax of one query row over a run of tokens: sum and acc are relative to exp(max).
struct Partial {
  float max, sum;
};

// One piece of work: `rows` query rows (row = token * group + head in the group) of one sequence and KV head over
// tokens first..last, and over the sinks before them. Results go to partial[row] and acc[row * value_plan.width].
struct Unit {
  int64_t b, h;
  int64_t first_row, rows;
  int64_t first_token, last_token;
  bool sinks;
  Partial* partial;
  float* acc;
};

// Query rows of one call, [batch, heads_kv, rows]: as integers in the layout the key product wants, and as floats.
// Keys coded per channel need the floats alone: their scales go into the query, block by block.
struct Queries {
  int16_t* codes;  // [..., key_plan.width]
  float* scales;   // logit = scales * key scale * (codes . key codes)
  int32_t* sums;   // sum of the codes, for unsigned key codes
  float* floats;   // [..., float_width(head_dim)], times the softmax scale, zeros past head_dim; null where not needed
};

inline int64_t float_width(int64_t head_dim) {
  return (head_dim + 15) / 16 * 16;
}

// What one instruction set provides. All tables hold the same functions, made from kernels-inl.h.
struct Kernels {
  const char* name;
  int64_t lanes;  // int16 lanes of a vector: the grain of a LanePlan
  // Codes row t of head h of sequence b, keys and values; not keys that are coded per channel.
  void (*append_row)(const AppendParams&, int64_t b, int64_t h, int64_t t);
  // Codes block `block` of tokens of keys that are coded per channel.
  void (*freeze_block)(const AppendParams&, int64_t b, int64_t h, int64_t block);
  // Fills entry `at` of Queries with query row r of (b, h).
  void (*prepare_query)(const AttendParams&, const LanePlan& key_plan, int64_t b, int64_t h, int64_t r, const Queries&,
                        int64_t at);
  void (*attend_unit)(const AttendParams&, const LanePlan& key_plan, const LanePlan& value_plan, const Queries&,
                      const Unit&);
  // Merges `splits` partials of one row in order and writes output and lse; acc of split s is acc[s * acc_stride].
  void (*merge_row)(const AttendParams&, const LanePlan& value_plan, int64_t b, int64_t h, int64_t r, int64_t splits,
                    const Partial* partial, int64_t partial_stride, float* acc, int64_t acc_stride);
};

// The table in use: the best that this processor runs, or the one that KVQ_CPU_ISA names. Throws
// std::runtime_error where that is unknown or cannot run here.
const Kernels& kernels();

// Runs body(i) for i in 0..workers on as many threads as the host gives. The op passes torch's pool.
struct Parallel {
  void (*run)(int64_t workers, void (*body)(int64_t, void*), void* context);
  int64_t threads;
};

void append(const AppendParams&, const Kernels&, const Parallel&);
void attend(const AttendParams&, const Kernels&, const Parallel&);

}  // namespace kvq
