// The schemas: the contract of every backend. tests/test_schema.py holds them to the letter.
//
// The optional tensors belong to formats that keep zero points (`_zeros`) or rows in full precision (`_full`); formats
// without them refuse them. `append` advances `lengths` itself, so that no aten op touches them inside a model.
#include "ops.h"

// The ops' namespace: a build for the Hugging Face Hub, which sets the second name, has one of its own. torch's macros
// paste the name that they are given, so these expand it first.
#ifndef KVQ_NAMESPACE
#ifdef TORCH_EXTENSION_NAME
#define KVQ_NAMESPACE TORCH_EXTENSION_NAME
#else
#define KVQ_NAMESPACE kvq
#endif
#endif
#define KVQ_LIBRARY(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define KVQ_LIBRARY_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

KVQ_LIBRARY(KVQ_NAMESPACE, m) {
  m.def(
      "append(Tensor(a!) key_codes, Tensor(b!) key_scales, Tensor(c!) value_codes, Tensor(d!) value_scales, "
      "Tensor(e!) lengths, Tensor key, Tensor value, str format, Tensor(f!)? key_zeros=None, "
      "Tensor(g!)? value_zeros=None, Tensor(h!)? key_full=None, Tensor(i!)? value_full=None) -> ()");
  m.def(
      "attend(Tensor query, Tensor key_codes, Tensor key_scales, Tensor value_codes, Tensor value_scales, "
      "Tensor lengths, str format, float? scale=None, Tensor? key_zeros=None, Tensor? value_zeros=None, "
      "Tensor? key_full=None, Tensor? value_full=None) -> Tensor");
  m.def(
      "attend_lse(Tensor query, Tensor key_codes, Tensor key_scales, Tensor value_codes, Tensor value_scales, "
      "Tensor lengths, str format, float? scale=None, Tensor? key_zeros=None, Tensor? value_zeros=None, "
      "Tensor? key_full=None, Tensor? value_full=None) -> (Tensor, Tensor)");
  m.def("cpu_isa() -> str");
  m.def("schema_version() -> int");
}

namespace {

std::string cpu_isa() {
  return kvq::kernels().name;
}

// SCHEMA_VERSION of format.py: compiled models carry the number that they were made with.
int64_t schema_version() {
  return 1;
}

}  // namespace

KVQ_LIBRARY_IMPL(KVQ_NAMESPACE, CPU, m) {
  m.impl("append", TORCH_BOX(&kvq::append_cpu));
  m.impl("attend", TORCH_BOX(&kvq::attend_cpu));
  m.impl("attend_lse", TORCH_BOX(&kvq::attend_lse_cpu));
}

KVQ_LIBRARY_IMPL(KVQ_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("schema_version", TORCH_BOX(&schema_version));
}
