// Chooses the kernel table once, at the first call.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "params.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvq {

namespace scalar {
const Kernels& table();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}
namespace avx512_vnni {
const Kernels& table();
}
#elif defined(__aarch64__)
namespace neon {
const Kernels& table();
}
namespace neon_dot {
const Kernels& table();
}
#endif

namespace {

struct Isa {
  const char* name;
  bool runs;  // on this processor
  const Kernels& (*table)();
};

#if defined(__x86_64__)
bool has_f16c() {  // GCC 10 has no name for it in __builtin_cpu_supports
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_vnni() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
bool has_dot() {
  return (getauxval(AT_HWCAP) & (1UL << 20)) != 0;  // HWCAP_ASIMDDP
}
#endif

const Kernels& choose() {
  // Best last.
  const Isa isas[] = {
      {"scalar", true, scalar::table},
#if defined(__x86_64__)
      {"avx2", has_avx2(), avx2::table},
      {"avx512", has_avx512(), avx512::table},
      {"avx512_vnni", has_vnni(), avx512_vnni::table},
#elif defined(__aarch64__)
      {"neon", true, neon::table},
      {"neon_dot", has_dot(), neon_dot::table},
#endif
  };
  const char* wanted = std::getenv("KVQ_CPU_ISA");
  const Isa* best = nullptr;
  std::string runnable;
  for (const Isa& isa : isas) {
    if (!isa.runs) continue;
    runnable += (runnable.empty() ? "" : ", ") + std::string(isa.name);
    if (!wanted || !*wanted || std::string(wanted) == isa.name) best = &isa;
  }
  if (!best) {
    throw std::runtime_error("kvq: KVQ_CPU_ISA must name an instruction set of this processor (" + runnable +
                             "), got '" + wanted + "'");
  }
  return best->table();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace kvq
