// The kernels without torch: append and attend over many shapes, checked against plain loops in double precision.
// It runs under sanitizers and, built for another instruction set, in an emulator.
//
//   KVQ_CPU_ISA=<name> kvq_harness [--quick]
//
// Exits 1 at the first code that differs or error above its bound.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/params.h"

namespace {

using kvq::CacheFormat;

struct Shape {
  int64_t batch, heads_q, heads_kv, tokens, head_dim, max_tokens;
  int key_bits, value_bits;
  std::vector<int32_t> lengths;

  std::string text() const {
    std::string out = "int" + std::to_string(key_bits) + "/int" + std::to_string(value_bits) + " b" +
                      std::to_string(batch) + " q" + std::to_string(heads_q) + "kv" + std::to_string(heads_kv) + " t" +
                      std::to_string(tokens) + " d" + std::to_string(head_dim) + " lengths";
    for (const int32_t length : lengths) out += " " + std::to_string(length);
    return out;
  }
};

void run_threads(int64_t workers, void (*body)(int64_t, void*), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < workers; ++i) threads.emplace_back(body, i, context);
  body(0, context);
  for (std::thread& thread : threads) thread.join();
}

// One side of a cache in exactly as many bytes as its format says: a sanitizer sees any access past them.
struct SideData {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  int64_t row_bytes, max_tokens, heads;
  int bits;

  SideData(const Shape& s, int bits_)
      : codes(static_cast<size_t>(s.batch * s.heads_kv * s.max_tokens * s.head_dim * bits_ / 8), 0xa5),
        scales(static_cast<size_t>(s.batch * s.heads_kv * s.max_tokens), -1.0f),
        row_bytes(s.head_dim * bits_ / 8),
        max_tokens(s.max_tokens),
        heads(s.heads_kv),
        bits(bits_) {}

  template <class Byte, class Float>
  kvq::SideT<Byte, Float> side() {
    return {codes.data(),
            heads * max_tokens * row_bytes,
            max_tokens * row_bytes,
            row_bytes,
            scales.data(),
            heads * max_tokens,
            max_tokens,
            1};
  }
  int code(int64_t row, int64_t channel, int64_t head_dim) const {
    const uint8_t* bytes = codes.data() + row * row_bytes;
    if (bits == 8) return static_cast<int8_t>(bytes[channel]);
    const int64_t first = channel / 64 * 64, half = std::min<int64_t>(head_dim - first, 64) / 2;
    const int64_t within = channel - first;
    const uint8_t byte = bytes[first / 2 + within % half];
    return (within < half ? byte & 15 : byte >> 4) - 8;
  }
  double value(int64_t row, int64_t channel, int64_t head_dim) const {
    return code(row, channel, head_dim) * static_cast<double>(scales[static_cast<size_t>(row)]);
  }
};

[[noreturn]] void fail(const Shape& shape, const std::string& what) {
  std::printf("%s: %s: %s\n", kvq::kernels().name, shape.text().c_str(), what.c_str());
  std::exit(1);
}

std::vector<float> noise(std::mt19937* random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(count));
  for (float& item : x) item = normal(*random);
  return x;
}

kvq::Rows rows_of(const std::vector<float>& x, int64_t heads, int64_t tokens, int64_t head_dim) {
  return {x.data(), kvq::Dtype::kFloat32, heads * tokens * head_dim, tokens * head_dim, head_dim, 1};
}

void check_codes(const Shape& s, const SideData& data, const std::vector<float>& x, int64_t appended) {
  const float limit = data.bits == 8 ? 127.0f : 7.0f;
  for (int64_t bh = 0; bh < s.batch * s.heads_kv; ++bh) {
    for (int64_t t = 0; t < appended; ++t) {
      const float* row = x.data() + (bh * appended + t) * s.head_dim;
      float most = 0.0f;
      for (int64_t d = 0; d < s.head_dim; ++d) most = std::fmax(most, std::fabs(row[d]));
      const float scale = most / limit;
      const int64_t at = bh * s.max_tokens + t;
      if (data.scales[static_cast<size_t>(at)] != scale) fail(s, "a scale differs");
      for (int64_t d = 0; d < s.head_dim; ++d) {
        if (data.code(at, d, s.head_dim) != static_cast<int>(std::nearbyint(row[d] / scale))) fail(s, "a code differs");
      }
    }
    for (int64_t t = appended; t < s.max_tokens; ++t) {
      const int64_t at = bh * s.max_tokens + t;
      if (data.scales[static_cast<size_t>(at)] != -1.0f) fail(s, "a scale past the appended rows was written");
      for (int64_t i = 0; i < data.row_bytes; ++i) {
        if (data.codes[static_cast<size_t>(at * data.row_bytes + i)] != 0xa5) fail(s, "a byte past them was written");
      }
    }
  }
}

// Attention of one query row in double precision; returns the log-sum-exp.
double plain_row(const Shape& s, const SideData& key, const SideData& value, const float* query, int64_t bh,
                 int64_t visible, std::vector<double>* out) {
  std::vector<double> logits(static_cast<size_t>(visible));
  double most = -HUGE_VAL, sum = 0.0;
  for (int64_t j = 0; j < visible; ++j) {
    double dot = 0.0;
    for (int64_t d = 0; d < s.head_dim; ++d) dot += query[d] * key.value(bh * s.max_tokens + j, d, s.head_dim);
    logits[static_cast<size_t>(j)] = dot / std::sqrt(static_cast<double>(s.head_dim));
    most = std::fmax(most, logits[static_cast<size_t>(j)]);
  }
  out->assign(static_cast<size_t>(s.head_dim), 0.0);
  for (int64_t j = 0; j < visible; ++j) {
    const double weight = std::exp(logits[static_cast<size_t>(j)] - most);
    sum += weight;
    for (int64_t d = 0; d < s.head_dim; ++d) {
      (*out)[static_cast<size_t>(d)] += weight * value.value(bh * s.max_tokens + j, d, s.head_dim);
    }
  }
  for (double& x : *out) x /= sum;
  return most + std::log(sum);
}

double check_attention(const Shape& s, const SideData& key, const SideData& value, const std::vector<float>& query,
                       const std::vector<float>& out, const std::vector<float>& lse) {
  double error = 0.0, norm = 0.0;
  std::vector<double> want;
  for (int64_t row = 0; row < s.batch * s.heads_q * s.tokens; ++row) {
    const int64_t t = row % s.tokens, b = row / s.tokens / s.heads_q, head = row / s.tokens % s.heads_q;
    const int64_t length = s.lengths[static_cast<size_t>(b)], bh = b * s.heads_kv + head / (s.heads_q / s.heads_kv);
    const float* got = out.data() + row * s.head_dim;
    if (length == 0) {
      for (int64_t d = 0; d < s.head_dim; ++d) {
        if (got[d] != 0.0f) fail(s, "an empty sequence does not give zeros");
      }
      if (lse[static_cast<size_t>(row)] != -HUGE_VALF) fail(s, "an empty sequence does not give lse -inf");
      continue;
    }
    const double want_lse =
        plain_row(s, key, value, query.data() + row * s.head_dim, bh, length - s.tokens + 1 + t, &want);
    if (!(std::fabs(lse[static_cast<size_t>(row)] - want_lse) < 1e-3)) fail(s, "lse differs");
    for (int64_t d = 0; d < s.head_dim; ++d) {
      error += std::pow(got[d] - want[static_cast<size_t>(d)], 2);
      norm += std::pow(want[static_cast<size_t>(d)], 2);
    }
  }
  const double relative = norm > 0.0 ? std::sqrt(error / norm) : 0.0;
  const double bound = s.key_bits == 8 && s.value_bits == 8 ? 2e-4 : 8e-3;
  if (!(relative <= bound)) fail(s, "relative error " + std::to_string(relative));
  return relative;
}

double run(const Shape& s, std::mt19937* random) {
  const kvq::Parallel pool{run_threads, 3};
  SideData key(s, s.key_bits), value(s, s.value_bits);
  const int64_t appended = s.max_tokens - 1;  // the last row stays untouched
  const std::vector<float> k = noise(random, s.batch * s.heads_kv * appended * s.head_dim);
  const std::vector<float> v = noise(random, s.batch * s.heads_kv * appended * s.head_dim);
  const std::vector<float> q = noise(random, s.batch * s.heads_q * s.tokens * s.head_dim);
  const std::vector<int32_t> empty(static_cast<size_t>(s.batch), 0);
  CacheFormat format;
  format.key.bits = s.key_bits;
  format.value.bits = s.value_bits;

  kvq::AppendParams a;
  a.key = key.side<uint8_t, float>();
  a.value = value.side<uint8_t, float>();
  a.key_rows = rows_of(k, s.heads_kv, appended, s.head_dim);
  a.value_rows = rows_of(v, s.heads_kv, appended, s.head_dim);
  a.format = format;
  a.lengths = empty.data();
  a.batch = s.batch;
  a.heads_kv = s.heads_kv;
  a.tokens = appended;
  a.head_dim = s.head_dim;
  kvq::append(a, kvq::kernels(), pool);
  check_codes(s, key, k, appended);
  check_codes(s, value, v, appended);

  std::vector<float> out(q.size(), NAN), lse(static_cast<size_t>(s.batch * s.heads_q * s.tokens), NAN);
  kvq::AttendParams p;
  p.query = rows_of(q, s.heads_q, s.tokens, s.head_dim);
  p.key = key.side<const uint8_t, const float>();
  p.value = value.side<const uint8_t, const float>();
  p.format = format;
  p.lengths = s.lengths.data();
  p.batch = s.batch;
  p.heads_q = s.heads_q;
  p.heads_kv = s.heads_kv;
  p.tokens = s.tokens;
  p.head_dim = s.head_dim;
  p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.head_dim)));
  p.out = out.data();
  p.lse = lse.data();
  kvq::attend(p, kvq::kernels(), pool);
  return check_attention(s, key, value, q, out, lse);
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  std::mt19937 random(7);
  const std::vector<int64_t> dims =
      quick ? std::vector<int64_t>{8, 30, 80, 100, 128, 514}
            : std::vector<int64_t>{8, 10, 16, 30, 34, 62, 64, 80, 96, 100, 128, 256, 514, 1024};
  const std::vector<std::pair<int64_t, int64_t>> heads = {{1, 1}, {6, 1}, {8, 2}, {7, 1}, {3, 3}, {20, 1}};
  const std::vector<std::vector<int32_t>> lengths = {{1}, {33, 0}, {64, 65, 3}, {700}, {255, 257}};
  const std::vector<std::pair<int, int>> bits = {{8, 8}, {4, 4}, {8, 4}, {4, 8}};
  int cases = 0;
  double worst = 0.0;
  for (const int64_t head_dim : dims) {
    for (const auto& head : heads) {
      for (const auto& length : lengths) {
        if (quick && length[0] > 300) continue;
        const auto& bit = bits[static_cast<size_t>(cases) % bits.size()];
        int32_t most = 0, least = INT32_MAX;
        for (const int32_t x : length) {
          most = std::max(most, x);
          if (x > 0) least = std::min(least, x);
        }
        for (const int64_t tokens : {int64_t{1}, int64_t{3}}) {
          if (tokens > least) continue;
          const Shape shape{static_cast<int64_t>(length.size()),
                            head.first,
                            head.second,
                            tokens,
                            head_dim,
                            most + 1,
                            bit.first,
                            bit.second,
                            length};
          worst = std::fmax(worst, run(shape, &random));
          ++cases;
        }
      }
    }
  }
  std::printf("%s: %d cases, worst relative error %.2e\n", kvq::kernels().name, cases, worst);
  return 0;
}
