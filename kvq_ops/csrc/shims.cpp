// The ops as plain C functions, which a package by AOTInductor can call without the dispatcher or the proxy executor:
// a few microseconds less a call. Names, types and their order are what Inductor's code generator writes for schemas in
// library.cpp; kvq_ops/integrations/package.py declares the same. What an op refuses is thrown through them, so that a
// package says it in the op's own words.
#include <cstring>

#include "ops.h"

namespace {

using kvq::OptionalTensor;
using kvq::Tensor;

// A tensor of the caller's, which stays his.
Tensor borrow(AtenTensorHandle handle) {
  AtenTensorHandle own = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &own));
  return Tensor(own);
}

OptionalTensor borrow(const AtenTensorHandle* handle) {
  return handle ? OptionalTensor(borrow(*handle)) : std::nullopt;
}

StringHandle string(const char* text) {
  StringHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_new_string_handle(text, std::strlen(text), &handle));
  return handle;
}

std::optional<double> number(const double* x) {
  return x ? std::optional<double>(*x) : std::nullopt;
}

void give(const Tensor& tensor, AtenTensorHandle* out) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), out));
}

}  // namespace

#define KVQ_SHIM extern "C" __attribute__((visibility("default"))) AOTITorchError

// The last argument is where Inductor would like the result of an op that has none.
KVQ_SHIM aoti_torch_cpu_append(AtenTensorHandle key_codes, AtenTensorHandle key_scales, AtenTensorHandle value_codes,
                               AtenTensorHandle value_scales, AtenTensorHandle lengths, AtenTensorHandle key,
                               AtenTensorHandle value, const char* format, AtenTensorHandle* key_zeros,
                               AtenTensorHandle* value_zeros, AtenTensorHandle* key_full, AtenTensorHandle* value_full,
                               void*) {
  kvq::append_cpu(borrow(key_codes), borrow(key_scales), borrow(value_codes), borrow(value_scales), borrow(lengths),
                  borrow(key), borrow(value), string(format), borrow(key_zeros), borrow(value_zeros), borrow(key_full),
                  borrow(value_full));
  return AOTI_TORCH_SUCCESS;
}

KVQ_SHIM aoti_torch_cpu_attend(AtenTensorHandle query, AtenTensorHandle key_codes, AtenTensorHandle key_scales,
                               AtenTensorHandle value_codes, AtenTensorHandle value_scales, AtenTensorHandle lengths,
                               const char* format, double* scale, AtenTensorHandle* key_zeros,
                               AtenTensorHandle* value_zeros, AtenTensorHandle* key_full, AtenTensorHandle* value_full,
                               AtenTensorHandle* out) {
  give(kvq::attend_cpu(borrow(query), borrow(key_codes), borrow(key_scales), borrow(value_codes), borrow(value_scales),
                       borrow(lengths), string(format), number(scale), borrow(key_zeros), borrow(value_zeros),
                       borrow(key_full), borrow(value_full)),
       out);
  return AOTI_TORCH_SUCCESS;
}

KVQ_SHIM aoti_torch_cpu_attend_lse(AtenTensorHandle query, AtenTensorHandle key_codes, AtenTensorHandle key_scales,
                                   AtenTensorHandle value_codes, AtenTensorHandle value_scales,
                                   AtenTensorHandle lengths, const char* format, double* scale,
                                   AtenTensorHandle* key_zeros, AtenTensorHandle* value_zeros,
                                   AtenTensorHandle* key_full, AtenTensorHandle* value_full, AtenTensorHandle* out,
                                   AtenTensorHandle* lse) {
  const auto results = kvq::attend_lse_cpu(
      borrow(query), borrow(key_codes), borrow(key_scales), borrow(value_codes), borrow(value_scales), borrow(lengths),
      string(format), number(scale), borrow(key_zeros), borrow(value_zeros), borrow(key_full), borrow(value_full));
  give(std::get<0>(results), out);
  give(std::get<1>(results), lse);
  return AOTI_TORCH_SUCCESS;
}
