// _kvq_shims.so: the functions of ../shims.cpp once more, for a process in which the main library is loaded for itself
// alone. A package finds them only in the global scope, and a library that is opened there brings along all that it
// needs: torch's thousands of names would then come before those that other extension modules carry with them. This one
// needs nothing, and hands every call on to where `kvq_open_shims` says. All arguments are pointers.
#include <cstdint>

namespace {

using Thirteen = int32_t (*)(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*);
using Fourteen = int32_t (*)(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                             void*);

Thirteen append = nullptr, attend = nullptr;
Fourteen attend_lse = nullptr;

}  // namespace

#define KVQ_FORWARD extern "C" __attribute__((visibility("default")))

KVQ_FORWARD void kvq_open_shims(void* to_append, void* to_attend, void* to_attend_lse) {
  append = reinterpret_cast<Thirteen>(to_append);
  attend = reinterpret_cast<Thirteen>(to_attend);
  attend_lse = reinterpret_cast<Fourteen>(to_attend_lse);
}

KVQ_FORWARD int32_t aoti_torch_cpu_append(void* a, void* b, void* c, void* d, void* e, void* f, void* g, void* h,
                                          void* i, void* j, void* k, void* l, void* m) {
  return append(a, b, c, d, e, f, g, h, i, j, k, l, m);
}

KVQ_FORWARD int32_t aoti_torch_cpu_attend(void* a, void* b, void* c, void* d, void* e, void* f, void* g, void* h,
                                          void* i, void* j, void* k, void* l, void* m) {
  return attend(a, b, c, d, e, f, g, h, i, j, k, l, m);
}

KVQ_FORWARD int32_t aoti_torch_cpu_attend_lse(void* a, void* b, void* c, void* d, void* e, void* f, void* g, void* h,
                                              void* i, void* j, void* k, void* l, void* m, void* n) {
  return attend_lse(a, b, c, d, e, f, g, h, i, j, k, l, m, n);
}
