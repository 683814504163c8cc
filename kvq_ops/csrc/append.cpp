#include "ops.h"

namespace kvq {

namespace {

void check_rows(const Checker& check, const View& key, const View& value, const CacheViews& cache) {
  if (key.dim != 4) check.fail("key", "have shape [batch, heads_kv, tokens, head_dim]", key.shape_text());
  check_float(check, key);
  check_head_dim(check, key);
  check_four_dimensions(check, cache.key_codes);
  if (value.dtype != key.dtype) {
    check.fail("value", "be " + dtype_name(key.dtype) + " like key", dtype_name(value.dtype));
  }
  if (!value.same_shape({key.sizes[0], key.sizes[1], key.sizes[2], key.sizes[3]})) {
    check.fail("value", "have shape " + key.shape_text() + " like key", value.shape_text());
  }
  if (!value.same_device(key)) check.fail("value", "be on " + key.device_text(), value.device_text());
}

void check_room(const Checker& check, const CacheViews& cache, const int32_t* lengths, int64_t tokens) {
  for (int64_t b = 0; b < cache.batch(); ++b) {
    if (lengths[b] + tokens > cache.max_tokens()) {
      check.fail("lengths",
                 "leave room for " + std::to_string(tokens) + " more tokens in max_tokens " +
                     std::to_string(cache.max_tokens()),
                 std::to_string(lengths[b]) + " at " + std::to_string(b));
    }
  }
}

Rows make_rows(const View& x) {
  return {x.data, float_dtype(x.dtype), x.strides[0], x.strides[1], x.strides[2], x.strides[3]};
}

}  // namespace

void append_cpu(const Tensor& key_codes, const Tensor& key_scales, const Tensor& value_codes,
                const Tensor& value_scales, const Tensor& lengths, const Tensor& key, const Tensor& value,
                StringHandle format_text, const OptionalTensor& key_zeros, const OptionalTensor& value_zeros,
                const OptionalTensor& key_full, const OptionalTensor& value_full) {
  const Checker check{"kvq::append"};
  const FormatArgument format_argument(format_text);
  const CacheFormat format = format_argument.parse(check);
  const CacheViews cache(key_codes, key_scales, value_codes, value_scales, lengths, key_zeros, value_zeros, key_full,
                         value_full);
  const View k("key", key), v("value", value);
  check_rows(check, k, v, cache);
  check_cache(check, cache, format_argument, format, k, k.sizes[1]);
  check_full_dtype(check, cache, &k);
  check_no_overlap(check, cache);
  const int32_t* lengths_before = checked_lengths(check, cache);
  check_room(check, cache, lengths_before, k.sizes[2]);

  AppendParams p;
  p.key = make_side<uint8_t>(cache.key_codes, cache.key_scales, cache.key_zeros, cache.key_full);
  p.value = make_side<uint8_t>(cache.value_codes, cache.value_scales, cache.value_zeros, cache.value_full);
  p.key_rows = make_rows(k);
  p.value_rows = make_rows(v);
  p.format = format;
  p.lengths = lengths_before;
  p.batch = k.sizes[0];
  p.heads_kv = k.sizes[1];
  p.tokens = k.sizes[2];
  p.head_dim = k.sizes[3];
  append(p, kernels(), torch_pool());
  int32_t* after = static_cast<int32_t*>(cache.lengths.data);
  for (int64_t b = 0; b < p.batch; ++b) after[b] = lengths_before[b] + static_cast<int32_t>(p.tokens);
}

}  // namespace kvq
