#include <limits>

#include "ops.h"

namespace kvq {

namespace {

std::string float_text(double x) {
  return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

void check_query(const Checker& check, const View& query) {
  if (query.dim != 3 && query.dim != 4) {
    check.fail("query", "have shape [batch, heads_q, head_dim] or [batch, heads_q, tokens, head_dim]",
               query.shape_text());
  }
  check_float(check, query);
  check_head_dim(check, query);
}

void check_heads(const Checker& check, const View& query, const View& key_codes) {
  check_four_dimensions(check, key_codes);
  const int64_t heads_kv = key_codes.sizes[1];
  if (heads_kv == 0) check.fail("key_codes", "have at least 1 head", "0");
  if (query.sizes[1] % heads_kv != 0) {
    check.fail("query", "have a multiple of the cache's heads_kv heads",
               std::to_string(query.sizes[1]) + " (heads_kv " + std::to_string(heads_kv) + ")");
  }
}

void check_tokens(const Checker& check, const CacheViews& cache, const int32_t* lengths, int64_t tokens) {
  for (int64_t b = 0; b < cache.batch(); ++b) {
    if (lengths[b] != 0 && lengths[b] < tokens) {
      check.fail("query", "have at most as many tokens as each sequence holds",
                 std::to_string(tokens) + " (length " + std::to_string(lengths[b]) + " at " + std::to_string(b) + ")");
    }
  }
}

Tensor attend_any(const char* op, const Tensor& query, const CacheViews& cache, const FormatArgument& format_argument,
                  std::optional<double> scale, Tensor* lse) {
  const Checker check{op};
  const CacheFormat format = format_argument.parse(check);
  const View q("query", query);
  check_query(check, q);
  check_heads(check, q, cache.key_codes);
  check_cache(check, cache, format_argument, format, q, cache.key_codes.sizes[1]);
  check_full_dtype(check, cache, nullptr);
  // Kernels take it in fp32: beyond that range it is infinite.
  if (scale && !(std::fabs(*scale) <= std::numeric_limits<float>::max()))
    check.fail("scale", "be finite", float_text(*scale));
  const int32_t* held = checked_lengths(check, cache);
  const bool one = q.dim == 3;
  const int64_t tokens = one ? 1 : q.sizes[2], head_dim = q.sizes[q.dim - 1];
  check_tokens(check, cache, held, tokens);

  const Tensor out = torch::stable::new_empty(query, {q.sizes, static_cast<size_t>(q.dim)});
  AttendParams p;
  p.query = {q.data, float_dtype(q.dtype), q.strides[0], q.strides[1], one ? 0 : q.strides[2], q.strides[q.dim - 1]};
  p.key = make_side<const uint8_t>(cache.key_codes, cache.key_scales, cache.key_zeros, cache.key_full);
  p.value = make_side<const uint8_t>(cache.value_codes, cache.value_scales, cache.value_zeros, cache.value_full);
  p.format = format;
  p.full_dtype = cache.key_full ? float_dtype(cache.key_full->dtype) : Dtype::kFloat32;
  p.lengths = held;
  p.batch = q.sizes[0];
  p.heads_q = q.sizes[1];
  p.heads_kv = cache.heads_kv();
  p.tokens = tokens;
  p.head_dim = head_dim;
  p.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(head_dim)));
  p.out = out.mutable_data_ptr();
  p.lse = nullptr;
  if (lse) {
    *lse = torch::stable::new_empty(query, {q.sizes, static_cast<size_t>(q.dim) - 1}, ScalarType::Float);
    p.lse = static_cast<float*>(lse->mutable_data_ptr());
  }
  attend(p, kernels(), torch_pool());
  return out;
}

}  // namespace

Tensor attend_cpu(const Tensor& query, const Tensor& key_codes, const Tensor& key_scales, const Tensor& value_codes,
                  const Tensor& value_scales, const Tensor& lengths, StringHandle format_text,
                  std::optional<double> scale, const OptionalTensor& key_zeros, const OptionalTensor& value_zeros,
                  const OptionalTensor& key_full, const OptionalTensor& value_full) {
  const FormatArgument format(format_text);
  const CacheViews cache(key_codes, key_scales, value_codes, value_scales, lengths, key_zeros, value_zeros, key_full,
                         value_full);
  return attend_any("kvq::attend", query, cache, format, scale, nullptr);
}

std::tuple<Tensor, Tensor> attend_lse_cpu(const Tensor& query, const Tensor& key_codes, const Tensor& key_scales,
                                          const Tensor& value_codes, const Tensor& value_scales, const Tensor& lengths,
                                          StringHandle format_text, std::optional<double> scale,
                                          const OptionalTensor& key_zeros, const OptionalTensor& value_zeros,
                                          const OptionalTensor& key_full, const OptionalTensor& value_full) {
  const FormatArgument format(format_text);
  const CacheViews cache(key_codes, key_scales, value_codes, value_scales, lengths, key_zeros, value_zeros, key_full,
                         value_full);
  Tensor lse;
  const Tensor out = attend_any("kvq::attend_lse", query, cache, format, scale, &lse);
  return {out, lse};
}

}  // namespace kvq
