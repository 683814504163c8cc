// Rejections of the ops, worded like kvq_ops/checks.py: `<op>: <argument> must <requirement>, got <value>`.
// tests/test_errors.py compares the two texts.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "cpu/params.h"
#include "format.h"

namespace kvq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The error text names the op, so checks carry it.
struct Checker {
  const char* op;

  [[noreturn]] void fail(const std::string& argument, const std::string& requirement, const std::string& got) const {
    throw std::runtime_error(std::string(op) + ": " + argument + " must " + requirement + ", got " + got);
  }
};

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline int64_t item_size(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Int       ? 4
         : dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ? 2
                                                                      : 1;
}

inline std::string list_text(const int64_t* items, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(items[i]);
  return text + "]";
}

// What checks and kernels ask of a tensor, read through the stable ABI once.
struct View {
  const char* name;
  int64_t dim = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  ScalarType dtype = ScalarType::Undefined;
  int32_t device_type = 0, device_index = 0;
  void* data = nullptr;

  View(const char* argument, const Tensor& tensor) : name(argument) {
    int64_t *size = nullptr, *stride = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &size));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &stride));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device_index));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
    dtype = tensor.scalar_type();
    sizes = size;
    strides = stride;
  }

  std::string shape_text() const { return list_text(sizes, static_cast<size_t>(dim)); }
  std::string device_text() const {
    if (device_type == aoti_torch_device_type_cpu()) return "cpu";
    const std::string kind = device_type == aoti_torch_device_type_cuda()   ? "cuda"
                             : device_type == aoti_torch_device_type_meta() ? "meta"
                                                                            : "device " + std::to_string(device_type);
    return device_index < 0 ? kind : kind + ":" + std::to_string(device_index);
  }
  bool same_device(const View& other) const {
    return device_type == other.device_type && device_index == other.device_index;
  }
  bool same_shape(std::initializer_list<int64_t> shape) const {
    if (static_cast<size_t>(dim) != shape.size()) return false;
    const int64_t* size = sizes;
    for (const int64_t want : shape) {
      if (*size++ != want) return false;
    }
    return true;
  }
};

constexpr const char* kFormats =
    "be one of int4, int4_g32, int4_g64, int4_hq, int4_kivi, int8, int8_hq, int8_kivi, k8v4 or <key>/<value> of them";

// A format argument: a string that the dispatcher hands over and the op frees. (The header's conversion to
// std::string leaks one string a call.)
class FormatArgument {
 public:
  explicit FormatArgument(StringHandle handle) : handle_(handle) {
    size_t length = 0;
    const char* text = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
    text_ = text;
    length_ = length;
  }
  ~FormatArgument() { torch_delete_string(handle_); }
  FormatArgument(const FormatArgument&) = delete;
  FormatArgument& operator=(const FormatArgument&) = delete;

  std::string text() const { return std::string(text_, length_); }
  CacheFormat parse(const Checker& check) const {
    CacheFormat format;
    if (!parse_format(text_, length_, &format)) {
      check.fail("format", kFormats, "'" + text() + "'");
    }
    return format;
  }

 private:
  StringHandle handle_;
  const char* text_;
  size_t length_;
};

using OptionalTensor = std::optional<Tensor>;

// The cache's tensors as the ops take them. Some formats have no zeros or no rows in full precision.
struct CacheViews {
  View key_codes, key_scales, value_codes, value_scales, lengths;
  std::optional<View> key_zeros, value_zeros, key_full, value_full;

  CacheViews(const Tensor& key_codes_, const Tensor& key_scales_, const Tensor& value_codes_,
             const Tensor& value_scales_, const Tensor& lengths_, const OptionalTensor& key_zeros_,
             const OptionalTensor& value_zeros_, const OptionalTensor& key_full_, const OptionalTensor& value_full_)
      : key_codes("key_codes", key_codes_),
        key_scales("key_scales", key_scales_),
        value_codes("value_codes", value_codes_),
        value_scales("value_scales", value_scales_),
        lengths("lengths", lengths_) {
    if (key_zeros_) key_zeros.emplace("key_zeros", *key_zeros_);
    if (value_zeros_) value_zeros.emplace("value_zeros", *value_zeros_);
    if (key_full_) key_full.emplace("key_full", *key_full_);
    if (value_full_) value_full.emplace("value_full", *value_full_);
  }

  int64_t batch() const { return key_codes.sizes[0]; }
  int64_t heads_kv() const { return key_codes.sizes[1]; }
  int64_t max_tokens() const { return key_codes.sizes[2]; }
};

void check_float(const Checker&, const View&);
void check_head_dim(const Checker&, const View&);
void check_four_dimensions(const Checker&, const View& codes);
// Every part against the format, for `like` [batch, ..., head_dim].
void check_cache(const Checker&, const CacheViews&, const FormatArgument&, const CacheFormat&, const View& like,
                 int64_t heads_kv);
// Rows in full precision of an append are those of the key; of an attend any floats.
void check_full_dtype(const Checker&, const CacheViews&, const View* key);
// Nothing that is written through these parts may be the same memory twice.
void check_no_overlap(const Checker&, const CacheViews&);
// A copy of the lengths, kept until this thread's next call: each lies in 0..max_tokens. Checks and kernels read the
// copy alone, so another thread that writes lengths meanwhile cannot lead them out of bounds.
const int32_t* checked_lengths(const Checker&, const CacheViews&);

Dtype float_dtype(ScalarType);
Parallel torch_pool();

template <class Byte>
PartT<Byte> make_part(const View& part) {
  const int64_t item = item_size(part.dtype);
  return {static_cast<Byte*>(part.data), part.strides[0] * item, part.strides[1] * item, part.strides[2] * item};
}

template <class Byte>
SideT<Byte> make_side(const View& codes, const View& scales, const std::optional<View>& zeros,
                      const std::optional<View>& full) {
  SideT<Byte> side{make_part<Byte>(codes), make_part<Byte>(scales), {}, {}};
  if (zeros) side.zeros = make_part<Byte>(*zeros);
  if (full) side.full = make_part<Byte>(*full);
  return side;
}

}  // namespace kvq
