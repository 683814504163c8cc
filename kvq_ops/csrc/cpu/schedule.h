// How append and attend are cut into work, whatever the instruction set.
#pragma once

#include <cstdlib>
#include <new>

#include "params.h"

namespace kvq {

// The plan for rows of this kind, made anew in *kept only where it holds another.
const LanePlan& lane_plan(LanePlan* kept, int64_t head_dim, const SideFormat& format, int64_t lanes);

// Memory for one call, 64-byte aligned. A thread keeps up to kKept bytes from call to call: a fresh allocation of
// this size would be mapped and cleared by the system every time, which costs as much as a short attend.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    Kept& kept = this_thread();
    if (bytes > kKept) {
      data_ = own_ = allocate(bytes);
      return;
    }
    if (bytes > kept.bytes) {
      std::free(kept.data);
      kept.bytes = 0;
      kept.data = nullptr;
      kept.data = allocate(bytes);
      kept.bytes = bytes;
    }
    data_ = kept.data;
  }
  ~Scratch() { std::free(own_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const { return data_; }

 private:
  static constexpr size_t kKept = size_t{16} << 20;
  struct Kept {
    char* data = nullptr;
    size_t bytes = 0;
    ~Kept() { std::free(data); }
  };
  static Kept& this_thread() {
    static thread_local Kept kept;
    return kept;
  }
  static char* allocate(size_t bytes) {
    void* data = nullptr;
    if (posix_memalign(&data, 64, bytes) != 0) throw std::bad_alloc();
    return static_cast<char*>(data);
  }

  char* data_ = nullptr;
  char* own_ = nullptr;
};

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
inline int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

}  // namespace kvq
