#include "schedule.h"

namespace kvq {

void append(const AppendParams& p, const Kernels& kernels, const Parallel& parallel) {
  // A thread is worth waking for about 128 KiB of input.
  constexpr int64_t kBytesPerThread = 128 << 10;
  struct Job {
    const AppendParams& p;
    const Kernels& kernels;
    int64_t rows, workers;
  } job{p, kernels, p.batch * p.heads_kv * p.tokens, 1};
  const int64_t bytes = 2 * job.rows * p.head_dim * item_bytes(p.key_rows.dtype);
  job.workers = smaller(parallel.threads, larger(1, bytes / kBytesPerThread));
  const auto body = [](int64_t worker, void* context) {
    const Job& j = *static_cast<const Job*>(context);
    const int64_t first = j.rows * worker / j.workers, last = j.rows * (worker + 1) / j.workers;
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = i % j.p.tokens, bh = i / j.p.tokens;
      j.kernels.append_row(j.p, bh / j.p.heads_kv, bh % j.p.heads_kv, t);
    }
  };
  if (job.workers == 1) return body(0, &job);
  parallel.run(job.workers, body, &job);
}

}  // namespace kvq
