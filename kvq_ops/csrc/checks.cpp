#include "checks.h"

#include <limits>
#include <vector>

namespace kvq {

namespace {

void check_part(const Checker& check, const View& part, ScalarType dtype, std::initializer_list<int64_t> shape,
                bool contiguous, const View& like) {
  if (part.dtype != dtype) check.fail(part.name, "be " + dtype_name(dtype), dtype_name(part.dtype));
  if (!part.same_shape(shape)) {
    check.fail(part.name, "have shape " + list_text(shape.begin(), shape.size()), part.shape_text());
  }
  const int64_t last = part.dim - 1;
  if (contiguous && part.sizes[last] > 1 && part.strides[last] != 1) {
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

void check_cache(const Checker& check, const CacheViews& cache, const CacheFormat& format, const View& like,
                 int64_t heads_kv) {
  const int64_t batch = like.sizes[0], head_dim = like.sizes[like.dim - 1], tokens = cache.max_tokens();
  check_part(check, cache.key_codes, codes_dtype(format.key), {batch, heads_kv, tokens, format.key.row_bytes(head_dim)},
             true, like);
  check_part(check, cache.key_scales, ScalarType::Float, {batch, heads_kv, tokens}, false, like);
  check_part(check, cache.value_codes, codes_dtype(format.value),
             {batch, heads_kv, tokens, format.value.row_bytes(head_dim)}, true, like);
  check_part(check, cache.value_scales, ScalarType::Float, {batch, heads_kv, tokens}, false, like);
  check_part(check, cache.lengths, ScalarType::Int, {batch}, true, like);
}

void check_unused(const Checker& check, const FormatArgument& format, const OptionalTensor& key_zeros,
                  const OptionalTensor& value_zeros, const OptionalTensor& key_full, const OptionalTensor& value_full) {
  const auto refuse = [&](const char* name, const OptionalTensor& tensor) {
    if (tensor) check.fail(name, "be None for format " + format.text(), "a tensor");
  };
  refuse("key_zeros", key_zeros);
  refuse("value_zeros", value_zeros);
  refuse("key_full", key_full);
  refuse("value_full", value_full);
}

void check_no_overlap(const Checker& check, const View& part) {
  for (int64_t i = 0; i < part.dim; ++i) {
    if (part.sizes[i] > 1 && part.strides[i] == 0) {
      check.fail(part.name, "not overlap itself", "strides " + list_text(part.strides, static_cast<size_t>(part.dim)));
    }
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
