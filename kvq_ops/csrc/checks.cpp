#include "checks.h"

#include <limits>
#include <vector>

namespace kvq {

namespace {

// What a part must be; [batch, heads_kv, tokens] of any strides, others contiguous in their last dimension.
struct Expected {
  ScalarType dtype;
  int64_t dim;
  int64_t shape[4];
};

void check_part(const Checker& check, const View& part, const Expected& want, const View& like) {
  if (part.dtype != want.dtype) check.fail(part.name, "be " + dtype_name(want.dtype), dtype_name(part.dtype));
  bool same = part.dim == want.dim;
  for (int64_t i = 0; same && i < want.dim; ++i) same = part.sizes[i] == want.shape[i];
  if (!same) {
    check.fail(part.name, "have shape " + list_text(want.shape, static_cast<size_t>(want.dim)), part.shape_text());
  }
  const int64_t last = part.dim - 1;
  if (part.dim != 3 && part.sizes[last] > 1 && part.strides[last] != 1) {
    check.fail(part.name, "be contiguous in its last dimension", "stride " + std::to_string(part.strides[last]));
  }
  if (!part.same_device(like)) check.fail(part.name, "be on " + like.device_text(), part.device_text());
}

ScalarType codes_dtype(const SideFormat& side) {
  return side.bits == 8 ? ScalarType::Char : ScalarType::Byte;
}

void run_on_torch_pool(int64_t workers, void (*body)(int64_t, void*), void* context) {
  torch::stable::parallel_for(0, workers, 1, [body, context](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i, context);
  });
}

}  // namespace

void check_float(const Checker& check, const View& x) {
  if (x.dtype != ScalarType::Float && x.dtype != ScalarType::BFloat16 && x.dtype != ScalarType::Half) {
    check.fail(x.name, "be float32, bfloat16 or float16", dtype_name(x.dtype));
  }
}

void check_head_dim(const Checker& check, const View& x) {
  const int64_t head_dim = x.sizes[x.dim - 1];
  if (head_dim % 2 != 0 || head_dim < kMinHeadDim || head_dim > kMaxHeadDim) {
    check.fail(x.name,
               "have an even head_dim from " + std::to_string(kMinHeadDim) + " to " + std::to_string(kMaxHeadDim),
               std::to_string(head_dim));
  }
}

void check_four_dimensions(const Checker& check, const View& codes) {
  if (codes.dim != 4) {
    check.fail(codes.name, "have 4 dimensions [batch, heads_kv, max_tokens, row bytes]", codes.shape_text());
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // lengths are int32
  if (codes.sizes[2] > kMost) {
    check.fail(codes.name, "have at most " + std::to_string(kMost) + " tokens", std::to_string(codes.sizes[2]));
  }
}

void check_cache(const Checker& check, const CacheViews& cache, const FormatArgument& text, const CacheFormat& format,
                 const View& like, int64_t heads_kv) {
  const int64_t batch = like.sizes[0], head_dim = like.sizes[like.dim - 1], tokens = cache.max_tokens();
  const auto rows = [&](ScalarType dtype, int64_t last) { return Expected{dtype, 4, {batch, heads_kv, tokens, last}}; };
  const auto planes = [&](int64_t count) { return Expected{ScalarType::Byte, 4, {batch, heads_kv, count, tokens}}; };
  const Expected row_floats{ScalarType::Float, 3, {batch, heads_kv, tokens, 0}};
  const auto blocks = [&](ScalarType dtype) {
    const int64_t whole = tokens > format.sinks ? (tokens - format.sinks) / format.key.key_block : 0;
    return Expected{dtype, 4, {batch, heads_kv, whole > 1 ? whole : 1, head_dim}};
  };
  const auto side = [&](const SideFormat& coded, const View& codes, const View& scales) {
    check_part(check, codes, rows(codes_dtype(coded), coded.row_bytes(head_dim)), like);
    check_part(check, scales,
               coded.coding == Coding::kChannel ? blocks(coded.narrow_scales ? ScalarType::BFloat16 : ScalarType::Float)
               : coded.coding == Coding::kGroup ? planes(coded.group_bytes(head_dim))
                                                : row_floats,
               like);
  };
  side(format.key, cache.key_codes, cache.key_scales);
  side(format.value, cache.value_codes, cache.value_scales);
  check_part(check, cache.lengths, Expected{ScalarType::Int, 1, {batch, 0, 0, 0}}, like);

  const auto optional = [&](const char* name, const std::optional<View>& part, bool wanted, const Expected& want) {
    if (part && !wanted) check.fail(name, "be None for format " + text.text(), "a tensor");
    if (!part && wanted) check.fail(name, "be a tensor for format " + text.text(), "None");
    if (part) check_part(check, *part, want, like);
  };
  const auto full = [&](const std::optional<View>& part, int64_t slots) {
    return Expected{part ? part->dtype : ScalarType::Float, 4, {batch, heads_kv, slots, head_dim}};
  };
  const bool channel = format.key.coding == Coding::kChannel;
  optional("key_zeros", cache.key_zeros, channel, channel ? blocks(ScalarType::Float) : row_floats);
  optional("value_zeros", cache.value_zeros, format.value.coding == Coding::kToken, row_floats);
  optional("key_full", cache.key_full, format.key_slots() > 0, full(cache.key_full, format.key_slots()));
  optional("value_full", cache.value_full, format.sinks > 0, full(cache.value_full, format.sinks));
}

void check_full_dtype(const Checker& check, const CacheViews& cache, const View* key) {
  for (const std::optional<View>* part : {&cache.key_full, &cache.value_full}) {
    if (!*part) continue;
    const View& full = **part;
    if (key && full.dtype != key->dtype) {
      check.fail("key", "be " + dtype_name(full.dtype) + " like " + full.name, dtype_name(key->dtype));
    }
    check_float(check, full);
    if (full.dtype != cache.key_full->dtype) {
      check.fail(full.name, "be " + dtype_name(cache.key_full->dtype) + " like key_full", dtype_name(full.dtype));
    }
  }
}

void check_no_overlap(const Checker& check, const CacheViews& cache) {
  const auto one = [&](const View& part) {
    for (int64_t i = 0; i < part.dim; ++i) {
      if (part.sizes[i] > 1 && part.strides[i] == 0) {
        check.fail(part.name, "not overlap itself",
                   "strides " + list_text(part.strides, static_cast<size_t>(part.dim)));
      }
    }
  };
  for (const View* part : {&cache.key_codes, &cache.key_scales, &cache.value_codes, &cache.value_scales}) one(*part);
  for (const std::optional<View>* part : {&cache.key_zeros, &cache.value_zeros, &cache.key_full, &cache.value_full}) {
    if (*part) one(**part);
  }
}

const int32_t* checked_lengths(const Checker& check, const CacheViews& cache) {
  static thread_local std::vector<int32_t> copy;
  const int32_t* lengths = static_cast<const int32_t*>(cache.lengths.data);
  copy.assign(lengths, lengths + cache.batch());
  for (size_t b = 0; b < copy.size(); ++b) {
    if (copy[b] < 0 || copy[b] > cache.max_tokens()) {
      check.fail("lengths", "lie in 0.." + std::to_string(cache.max_tokens()),
                 std::to_string(copy[b]) + " at " + std::to_string(b));
    }
  }
  return copy.data();
}

Dtype float_dtype(ScalarType dtype) {
  return dtype == ScalarType::Float      ? Dtype::kFloat32
         : dtype == ScalarType::BFloat16 ? Dtype::kBFloat16
                                         : Dtype::kFloat16;
}

Parallel torch_pool() {
  return Parallel{run_on_torch_pool, static_cast<int64_t>(torch::stable::get_num_threads())};
}

}  // namespace kvq
