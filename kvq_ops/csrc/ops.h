// The ops as the dispatcher calls them; schemas stand in library.cpp.
#pragma once

#include <tuple>

#include "checks.h"

namespace kvq {

void append_cpu(const Tensor& key_codes, const Tensor& key_scales, const Tensor& value_codes,
                const Tensor& value_scales, const Tensor& lengths, const Tensor& key, const Tensor& value,
                StringHandle format, const OptionalTensor& key_zeros, const OptionalTensor& value_zeros,
                const OptionalTensor& key_full, const OptionalTensor& value_full);

Tensor attend_cpu(const Tensor& query, const Tensor& key_codes, const Tensor& key_scales, const Tensor& value_codes,
                  const Tensor& value_scales, const Tensor& lengths, StringHandle format, std::optional<double> scale,
                  const OptionalTensor& key_zeros, const OptionalTensor& value_zeros, const OptionalTensor& key_full,
                  const OptionalTensor& value_full);

std::tuple<Tensor, Tensor> attend_lse_cpu(const Tensor& query, const Tensor& key_codes, const Tensor& key_scales,
                                          const Tensor& value_codes, const Tensor& value_scales, const Tensor& lengths,
                                          StringHandle format, std::optional<double> scale,
                                          const OptionalTensor& key_zeros, const OptionalTensor& value_zeros,
                                          const OptionalTensor& key_full, const OptionalTensor& value_full);

}  // namespace kvq
