#include <cstring>

#include "schedule.h"

namespace kvq {

namespace {

// A thread is worth waking for about 128 KiB of input.
constexpr int64_t kBytesPerThread = 128 << 10;

struct Job {
  const AppendParams& p;
  const Kernels& kernels;
  int64_t workers;

  int64_t heads() const { return p.batch * p.heads_kv; }
  int64_t first_block(int64_t b) const { return blocks(p.lengths[b]); }
  int64_t end_block(int64_t b) const { return blocks(p.lengths[b] + p.tokens); }

  // Rows first..last of all [batch, heads_kv, tokens].
  void append_rows(int64_t first, int64_t last) const {
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = i % p.tokens, bh = i / p.tokens;
      kernels.append_row(p, bh / p.heads_kv, bh % p.heads_kv, t);
    }
  }

  // Blocks first..last of those that this append fills, counted over sequences and heads.
  void freeze_blocks(int64_t first, int64_t last) const {
    int64_t i = 0;
    for (int64_t b = 0; b < p.batch && i < last; ++b) {
      const int64_t begin = first_block(b), count = end_block(b) - begin;
      for (int64_t h = 0; h < p.heads_kv && i < last; ++h, i += count) {
        const int64_t from = larger(first - i, 0), to = smaller(last - i, count);
        for (int64_t k = from; k < to; ++k) kernels.freeze_block(p, b, h, begin + k);
      }
    }
  }

  int64_t blocks_to_freeze() const {
    int64_t count = 0;
    for (int64_t b = 0; b < p.batch; ++b) count += end_block(b) - first_block(b);
    return count * p.heads_kv;
  }

  // The newest keys of heads first..last to their slots: after the freezing, which reads what they overwrite.
  void keep_keys(int64_t first, int64_t last) const {
    const int64_t ring = 2 * p.format.key.key_block;
    for (int64_t i = first; i < last; ++i) {
      const int64_t b = i / p.heads_kv, h = i % p.heads_kv, start = p.lengths[b], end = start + p.tokens;
      for (int64_t token = larger(larger(start, p.format.sinks), end - ring); token < end; ++token) {
        copy_row(p.key_rows, b, h, token - start, p.head_dim, p.key.full.row(b, h, p.format.slot(token)));
      }
    }
  }

 private:
  int64_t blocks(int64_t length) const { return larger(0, length - p.format.sinks) / p.format.key.key_block; }
};

// Runs `step` over 0..count, cut among the workers.
template <void (Job::*step)(int64_t, int64_t) const>
void spread(Job* job, int64_t count, const Parallel& parallel) {
  if (count == 0) return;
  if (job->workers == 1) return (job->*step)(0, count);
  struct Share {
    const Job& job;
    int64_t count;
  } share{*job, count};
  parallel.run(
      job->workers,
      [](int64_t worker, void* context) {
        const Share& s = *static_cast<const Share*>(context);
        (s.job.*step)(s.count * worker / s.job.workers, s.count * (worker + 1) / s.job.workers);
      },
      &share);
}

}  // namespace

void append(const AppendParams& p, const Kernels& kernels, const Parallel& parallel) {
  const int64_t rows = p.batch * p.heads_kv * p.tokens;
  const int64_t bytes = 2 * rows * p.head_dim * item_bytes(p.key_rows.dtype);
  Job job{p, kernels, smaller(parallel.threads, larger(1, bytes / kBytesPerThread))};
  spread<&Job::append_rows>(&job, rows, parallel);
  if (p.format.key.coding != Coding::kChannel || rows == 0) return;
  spread<&Job::freeze_blocks>(&job, job.blocks_to_freeze(), parallel);
  spread<&Job::keep_keys>(&job, job.heads(), parallel);
}

}  // namespace kvq
