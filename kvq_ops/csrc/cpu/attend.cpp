// Cuts an attend call into units of work, runs them on any thread in any order, and merges each row in a fixed order.
//
// A sequence is split by its own length alone, so a row's result is the same whatever the threads, the capacity and
// the rest of the batch. Splits are few (32 for one query token), so partial results do not grow with the cache.
#include <cmath>
#include <cstring>

#include "schedule.h"

namespace kvq {

namespace {

constexpr int64_t kMaxSplits = 32;
constexpr int64_t kSplitBlocks = 8;  // a split holds at least this many blocks of kBlockTokens tokens
// A thread is worth waking for about this many bytes of cache, less where many query rows share them.
constexpr int64_t kBytesPerThread = 192 << 10;

struct Sequence {
  int64_t splits, split_tokens;
  int64_t first_unit;  // of the call
  int64_t first_row;   // of partials and accumulators: [sequence][head][split][row]
};

struct Job {
  const AttendParams& p;
  const Kernels& kernels;
  const LanePlan &key_plan, &value_plan;
  int64_t rows = p.rows();  // query rows of one head of the cache
  int64_t row_parts = 1;    // units that share the rows of one split
  int64_t units = 0, prepare_workers = 1;
  Sequence* sequences = nullptr;
  Queries queries = {};
  Partial* partials = nullptr;
  float* acc = nullptr;
  int32_t* done = nullptr;  // units finished of each [batch, head, row part]
  int64_t next_unit = 0;

  int64_t part_row(int64_t part) const { return rows * part / row_parts; }

  void prepare(int64_t worker) const {
    const int64_t all = p.batch * p.heads_kv * rows;
    for (int64_t i = all * worker / prepare_workers; i < all * (worker + 1) / prepare_workers; ++i) {
      const int64_t bh = i / rows;
      kernels.prepare_query(p, key_plan, bh / p.heads_kv, bh % p.heads_kv, i % rows, queries, i);
    }
  }

  void run_unit(int64_t index) const {
    int64_t b = 0;
    for (int64_t end = p.batch; end - b > 1;) {  // the last sequence that starts at or before this unit
      const int64_t middle = (b + end) / 2;
      (sequences[middle].first_unit <= index ? b : end) = middle;
    }
    const Sequence& sequence = sequences[b];
    const int64_t within = index - sequence.first_unit;
    const int64_t part = within % row_parts, split = within / row_parts % sequence.splits;
    const int64_t h = within / row_parts / sequence.splits;
    Unit unit;
    unit.b = b;
    unit.h = h;
    unit.first_row = part_row(part);
    unit.rows = part_row(part + 1) - unit.first_row;
    unit.first_token = p.format.sinks + split * sequence.split_tokens;
    unit.last_token = smaller(p.lengths[b], unit.first_token + sequence.split_tokens);
    unit.sinks = split == 0 && p.format.sinks > 0;
    const int64_t head_row = sequence.first_row + h * sequence.splits * rows;
    const int64_t row = head_row + split * rows + unit.first_row;
    unit.partial = partials + row;
    unit.acc = acc + row * value_plan.width;
    kernels.attend_unit(p, key_plan, value_plan, queries, unit);

    int32_t* done_here = done + (b * p.heads_kv + h) * row_parts + part;
    if (__atomic_add_fetch(done_here, 1, __ATOMIC_ACQ_REL) != sequence.splits) return;
    for (int64_t r = unit.first_row; r < unit.first_row + unit.rows; ++r) {
      kernels.merge_row(p, value_plan, b, h, r, sequence.splits, partials + head_row + r, rows,
                        acc + (head_row + r) * value_plan.width, rows * value_plan.width);
    }
  }
};

void fill_empty(const AttendParams& p, int64_t b) {
  const int64_t rows = p.heads_q * p.tokens, bytes = rows * p.head_dim * item_bytes(p.query.dtype);
  std::memset(static_cast<char*>(p.out) + b * bytes, 0, static_cast<size_t>(bytes));
  if (!p.lse) return;
  for (int64_t i = 0; i < rows; ++i) p.lse[b * rows + i] = -HUGE_VALF;
}

// Hands out pieces of one buffer; with no buffer it only counts.
struct Carve {
  char* base;
  size_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (static_cast<size_t>(count) * sizeof(T) + 63) & ~size_t{63};
    return piece;
  }
};

void carve(Job* job, int64_t partial_rows, Carve* from) {
  const int64_t rows = job->p.batch * job->p.heads_kv * job->rows;
  job->queries.codes = from->take<int16_t>(rows * job->key_plan.width);
  job->queries.scales = from->take<float>(rows);
  job->queries.sums = from->take<int32_t>(rows);
  if (job->p.float_queries()) job->queries.floats = from->take<float>(rows * float_width(job->p.head_dim));
  job->partials = from->take<Partial>(partial_rows);
  job->acc = from->take<float>(partial_rows * job->value_plan.width);
  job->done = from->take<int32_t>(job->p.batch * job->p.heads_kv * job->row_parts);
  job->sequences = from->take<Sequence>(job->p.batch);
}

Sequence split_sequence(int64_t length, int64_t sinks, int64_t tokens) {
  if (length == 0) return Sequence{0, 0, 0, 0};
  // Of sinks alone one empty block, to which the sinks belong.
  const int64_t blocks = larger(1, ceil_div(length - sinks, kBlockTokens)), most = larger(1, kMaxSplits / tokens);
  const int64_t wanted = smaller(most, ceil_div(blocks, kSplitBlocks));
  const int64_t split_blocks = ceil_div(blocks, wanted);
  return Sequence{ceil_div(blocks, split_blocks), split_blocks * kBlockTokens, 0, 0};
}

}  // namespace

void attend(const AttendParams& p, const Kernels& kernels, const Parallel& parallel) {
  if (p.batch == 0 || p.tokens == 0 || p.heads_q == 0) return;
  static thread_local LanePlan kept_key, kept_value;
  const CacheFormat& format = p.format;
  const LanePlan& key_plan = lane_plan(&kept_key, p.head_dim, format.key, kernels.lanes);
  const LanePlan& value_plan = lane_plan(&kept_value, p.head_dim, format.value, kernels.lanes);
  Job job{p, kernels, key_plan, value_plan};

  int64_t tokens = 0, splits = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.lengths[b] == 0) fill_empty(p, b);
    tokens += p.lengths[b];
    splits += split_sequence(p.lengths[b], p.format.sinks, p.tokens).splits;
  }
  if (tokens == 0) return;
  const int64_t row_bytes = format.key.row_bytes(p.head_dim) + format.value.row_bytes(p.head_dim) + 8;
  const int64_t bytes = tokens * p.heads_kv * row_bytes * (8 + job.rows) / 9;
  const int64_t threads = smaller(parallel.threads, larger(1, bytes / kBytesPerThread));
  const int64_t whole_units = splits * p.heads_kv;
  if (threads > 1 && whole_units < 4 * threads && job.rows >= 16) {
    job.row_parts = smaller(job.rows / 8, ceil_div(4 * threads, whole_units));
  }
  job.units = whole_units * job.row_parts;

  const int64_t partial_rows = whole_units * job.rows;
  Carve count{nullptr};
  carve(&job, partial_rows, &count);
  const Scratch scratch(count.used);
  Carve from{scratch.data()};
  carve(&job, partial_rows, &from);
  std::memset(job.done, 0, static_cast<size_t>(p.batch * p.heads_kv * job.row_parts) * sizeof(int32_t));
  int64_t unit = 0, row = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    Sequence sequence = split_sequence(p.lengths[b], p.format.sinks, p.tokens);
    sequence.first_unit = unit;
    sequence.first_row = row;
    job.sequences[b] = sequence;
    unit += sequence.splits * p.heads_kv * job.row_parts;
    row += sequence.splits * p.heads_kv * job.rows;
  }

  const auto prepare = [](int64_t worker, void* context) { static_cast<const Job*>(context)->prepare(worker); };
  const int64_t query_items = p.batch * p.heads_q * p.tokens * p.head_dim;
  job.prepare_workers = query_items >= (128 << 10) ? threads : 1;
  if (job.prepare_workers == 1) {
    job.prepare(0);
  } else {
    parallel.run(job.prepare_workers, prepare, &job);
  }

  // Threads take the next unit as they finish one: a busy core then delays its own unit, not its share of the work.
  const auto work = [](int64_t, void* context) {
    Job& j = *static_cast<Job*>(context);
    for (;;) {
      const int64_t index = __atomic_fetch_add(&j.next_unit, 1, __ATOMIC_RELAXED);
      if (index >= j.units) return;
      j.run_unit(index);
    }
  };
  if (threads == 1) return work(0, &job);
  parallel.run(threads, work, &job);
}

}  // namespace kvq
