// The kernels without torch: append and attend over many shapes and every coding, checked against the plain loops of
// plain.h. It runs under sanitizers and, built for another instruction set, in an emulator.
//
//   KVQ_CPU_ISA=<name> kvq_harness [--quick]
//
// Exits 1 at the first byte that differs or error above its bound.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "plain.h"

namespace {

using kvq::Dtype;

struct Shape {
  std::string format;
  int64_t batch, heads_q, heads_kv, tokens, head_dim;
  Dtype dtype;
  std::vector<int32_t> lengths;

  std::string text() const {
    std::string out = format + (dtype == Dtype::kFloat32 ? " fp32" : " bf16") + " b" + std::to_string(batch) + " q" +
                      std::to_string(heads_q) + "kv" + std::to_string(heads_kv) + " t" + std::to_string(tokens) + " d" +
                      std::to_string(head_dim) + " lengths";
    for (const int32_t length : lengths) out += " " + std::to_string(length);
    return out;
  }
  int64_t item() const { return dtype == Dtype::kFloat32 ? 4 : 2; }
};

void run_threads(int64_t workers, void (*body)(int64_t, void*), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < workers; ++i) threads.emplace_back(body, i, context);
  body(0, context);
  for (std::thread& thread : threads) thread.join();
}

const kvq::Parallel kPool{run_threads, 3};

[[noreturn]] void fail(const Shape& shape, const std::string& what) {
  std::printf("%s: %s: %s\n", kvq::kernels().name, shape.text().c_str(), what.c_str());
  std::exit(1);
}

// Rows [batch, heads, tokens, head_dim] of N(0, 1) in the shape's dtype.
struct Input {
  int64_t heads, tokens, head_dim, item;
  Dtype dtype;
  std::vector<uint8_t> bytes;

  Input(const Shape& s, int64_t heads_, int64_t tokens_, std::mt19937* random)
      : heads(heads_), tokens(tokens_), head_dim(s.head_dim), item(s.item()), dtype(s.dtype) {
    std::normal_distribution<float> normal;
    const int64_t count = s.batch * heads * tokens * head_dim;
    bytes.resize(static_cast<size_t>(count * item));
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = plain::bits_of_float(normal(*random));
      std::memcpy(bytes.data() + i * item, reinterpret_cast<const uint8_t*>(&bits) + (4 - item),
                  static_cast<size_t>(item));  // little-endian: the upper half is bf16
    }
  }
  // From row `first` of sequence b on.
  kvq::Rows rows(int64_t b, int64_t first) const {
    return {bytes.data() + at(b, 0, first) * item, dtype, heads * tokens * head_dim, tokens * head_dim, head_dim, 1};
  }
  std::vector<uint8_t> of(int64_t b, int64_t h, int64_t count) const {
    const uint8_t* from = bytes.data() + at(b, h, 0) * item;
    return std::vector<uint8_t>(from, from + count * head_dim * item);
  }
  float number(int64_t b, int64_t h, int64_t t, int64_t d) const {
    return plain::load(bytes.data() + (at(b, h, t) + d) * item, dtype);
  }
  int64_t at(int64_t b, int64_t h, int64_t t) const { return ((b * heads + h) * tokens + t) * head_dim; }
};

struct Cache {
  plain::Side key, value;
  std::vector<int32_t> held;  // tokens appended

  Cache(const Shape& s, const kvq::CacheFormat& format, int64_t max_tokens)
      : key(format, true, s.batch, s.heads_kv, max_tokens, s.head_dim, s.dtype),
        value(format, false, s.batch, s.heads_kv, max_tokens, s.head_dim, s.dtype),
        held(static_cast<size_t>(s.batch), 0) {}

  // `tokens` more rows to sequences first..first + batch, from each row's own place in the input.
  void append(const Shape& s, const kvq::CacheFormat& format, const kvq::Rows& k, const kvq::Rows& v, int64_t first,
              int64_t batch, int64_t tokens) {
    kvq::AppendParams p;
    p.key = key.side<uint8_t>(first);
    p.value = value.side<uint8_t>(first);
    p.key_rows = k;
    p.value_rows = v;
    p.format = format;
    p.lengths = held.data() + first;
    p.batch = batch;
    p.heads_kv = s.heads_kv;
    p.tokens = tokens;
    p.head_dim = s.head_dim;
    kvq::append(p, kvq::kernels(), kPool);
    for (int64_t b = first; b < first + batch; ++b) held[static_cast<size_t>(b)] += static_cast<int32_t>(tokens);
  }
};

// Each sequence by itself in pieces, then all together: the newest rows of all lie at the end of the input.
void fill(const Shape& s, const kvq::CacheFormat& format, int64_t longest, int64_t together, const Input& k,
          const Input& v, Cache* cache, std::mt19937* random) {
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t alone = std::max<int64_t>(0, s.lengths[static_cast<size_t>(b)] - together);
    const int64_t start = longest - together - alone;
    for (int64_t done = 0; done < alone;) {
      const int64_t most = std::min<int64_t>(alone - done, 90);
      const int64_t piece = 1 + static_cast<int64_t>((*random)() % static_cast<uint32_t>(most));
      cache->append(s, format, k.rows(b, start + done), v.rows(b, start + done), b, 1, piece);
      done += piece;
    }
  }
  cache->append(s, format, k.rows(0, longest - together), v.rows(0, longest - together), 0, s.batch, together);
}

void check_bytes(const Shape& s, const plain::Side& got, const plain::Side& want) {
  const std::string side = got.key ? "key " : "value ";
  if (got.codes.bytes != want.codes.bytes) fail(s, side + "codes differ");
  if (got.scales.bytes != want.scales.bytes) fail(s, side + "scales differ");
  if (got.zeros.bytes != want.zeros.bytes) fail(s, side + "zeros differ");
  if (got.full.bytes != want.full.bytes) fail(s, side + "rows in full precision differ");
}

// Attention of one query row in double precision; returns the log-sum-exp.
double plain_row(const std::vector<std::vector<double>>& key, const std::vector<std::vector<double>>& value,
                 const std::vector<double>& query, int64_t visible, std::vector<double>* out) {
  std::vector<double> logits;
  double most = -HUGE_VAL, sum = 0.0;
  for (int64_t j = 0; j < visible; ++j) {
    double dot = 0.0;
    for (size_t d = 0; d < query.size(); ++d) dot += query[d] * key[static_cast<size_t>(j)][d];
    logits.push_back(dot / std::sqrt(static_cast<double>(query.size())));
    most = std::fmax(most, logits.back());
  }
  out->assign(query.size(), 0.0);
  for (int64_t j = 0; j < visible; ++j) {
    const double weight = std::exp(logits[static_cast<size_t>(j)] - most);
    sum += weight;
    for (size_t d = 0; d < query.size(); ++d) (*out)[d] += weight * value[static_cast<size_t>(j)][d];
  }
  for (double& x : *out) x /= sum;
  return most + std::log(sum);
}

struct Result {
  std::vector<uint8_t> out;
  std::vector<float> lse;
};

Result attend(const Shape& s, const kvq::CacheFormat& format, const Input& query, Cache* cache) {
  Result result;
  result.out.assign(query.bytes.size(), 0xff);  // NaN
  result.lse.assign(static_cast<size_t>(s.batch * s.heads_q * s.tokens), NAN);
  kvq::AttendParams p;
  p.query = query.rows(0, 0);
  p.key = cache->key.side<const uint8_t>(0);
  p.value = cache->value.side<const uint8_t>(0);
  p.format = format;
  p.full_dtype = s.dtype;
  p.lengths = s.lengths.data();
  p.batch = s.batch;
  p.heads_q = s.heads_q;
  p.heads_kv = s.heads_kv;
  p.tokens = s.tokens;
  p.head_dim = s.head_dim;
  p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.head_dim)));
  p.out = result.out.data();
  p.lse = result.lse.data();
  kvq::attend(p, kvq::kernels(), kPool);
  return result;
}

void check_empty(const Shape& s, const Result& result, int64_t row) {
  for (int64_t i = 0; i < s.head_dim * s.item(); ++i) {
    if (result.out[static_cast<size_t>(row * s.head_dim * s.item() + i)] != 0) {
      fail(s, "an empty sequence does not give zeros");
    }
  }
  if (result.lse[static_cast<size_t>(row)] != -HUGE_VALF) fail(s, "an empty sequence does not give lse -inf");
}

// Weights have 15 bits, 14 over codes in groups; 4-bit offsets are taken by the least of a row, three times as far from
// it as its mean. Queries over keys in groups keep fewer bits, see kvq_ops/csrc/cpu/kernels-inl.h.
double bound(const Shape& s, const kvq::CacheFormat& format) {
  const kvq::SideFormat& value = format.value;
  const bool token = value.coding == kvq::Coding::kToken, group = value.coding == kvq::Coding::kGroup;
  const double values = token && value.bits == 4 ? 1e-3 : group ? 5e-4 : 3e-4;
  const double exact = format.key.coding == kvq::Coding::kGroup ? std::hypot(values, 5e-4) : values;
  return s.dtype == Dtype::kFloat32 ? exact : exact + 2e-3;
}

double check_attention(const Shape& s, const kvq::CacheFormat& format, const Cache& cache, const Input& query,
                       const Result& result) {
  double error = 0.0, norm = 0.0;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t length = s.lengths[static_cast<size_t>(b)];
    std::vector<std::vector<double>> key, value;
    for (int64_t h = 0; h < s.heads_q; ++h) {
      const int64_t group = s.heads_q / s.heads_kv, kv = h / group;
      if (h % group == 0) {
        key.clear();
        value.clear();
        for (int64_t t = 0; t < length; ++t) {
          key.push_back(cache.key.row(b, kv, t, length));
          value.push_back(cache.value.row(b, kv, t, length));
        }
      }
      for (int64_t t = 0; t < s.tokens; ++t) {
        const int64_t row = (b * s.heads_q + h) * s.tokens + t;
        if (length == 0) {
          check_empty(s, result, row);
          continue;
        }
        std::vector<double> q, want;
        for (int64_t d = 0; d < s.head_dim; ++d) q.push_back(query.number(b, h, t, d));
        const double lse = plain_row(key, value, q, length - s.tokens + 1 + t, &want);
        if (!(std::fabs(result.lse[static_cast<size_t>(row)] - lse) < 1e-3)) fail(s, "lse differs");
        for (int64_t d = 0; d < s.head_dim; ++d) {
          const float got = plain::load(result.out.data() + (row * s.head_dim + d) * s.item(), s.dtype);
          error += std::pow(got - want[static_cast<size_t>(d)], 2);
          norm += std::pow(want[static_cast<size_t>(d)], 2);
        }
      }
    }
  }
  const double relative = norm > 0.0 ? std::sqrt(error / norm) : 0.0;
  if (!(relative <= bound(s, format))) fail(s, "relative error " + std::to_string(relative));
  return s.dtype == Dtype::kFloat32 ? relative : 0.0;
}

double run(const Shape& s, std::mt19937* random) {
  kvq::CacheFormat format;
  if (!kvq::parse_format(s.format.data(), s.format.size(), &format)) fail(s, "no format");
  int32_t longest = 0, least = 70;
  for (const int32_t length : s.lengths) {
    longest = std::max(longest, length);
    if (length > 0) least = std::min(least, length);
  }
  const int64_t together = 1 + static_cast<int64_t>((*random)() % static_cast<uint32_t>(least));
  const Input k(s, s.heads_kv, longest, random), v(s, s.heads_kv, longest, random);
  const Input query(s, s.heads_q, s.tokens, random);
  Cache cache(s, format, longest + 1), want(s, format, longest + 1);  // the last row stays untouched
  fill(s, format, longest, together, k, v, &cache, random);
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t held = cache.held[static_cast<size_t>(b)];
    for (int64_t h = 0; h < s.heads_kv; ++h) {
      const auto newest = [&](const Input& x) {
        const std::vector<uint8_t> all = x.of(b, h, longest);
        return std::vector<uint8_t>(all.end() - held * s.head_dim * s.item(), all.end());
      };
      want.key.encode(b, h, held, newest(k));
      want.value.encode(b, h, held, newest(v));
    }
  }
  check_bytes(s, cache.key, want.key);
  check_bytes(s, cache.value, want.value);
  return check_attention(s, format, cache, query, attend(s, format, query, &cache));
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  std::mt19937 random(7);
  const std::vector<int64_t> dims =
      quick ? std::vector<int64_t>{8, 30, 80, 100, 128, 514}
            : std::vector<int64_t>{8, 10, 16, 30, 34, 62, 64, 80, 96, 100, 128, 256, 514, 1024};
  const std::vector<std::pair<int64_t, int64_t>> heads = {{1, 1}, {6, 1}, {8, 2}, {7, 1}, {3, 3}, {20, 1}};
  const std::vector<std::vector<int32_t>> lengths = {{1},    {33, 0},  {64, 65, 3}, {700},        {255, 257},
                                                     {5, 4}, {36, 37}, {68, 67},    {132, 35, 69}};
  // As many as no other count divides, so that each meets every shape.
  const std::vector<std::string> formats = {"int8",
                                            "int4",
                                            "int4_g32",
                                            "int4_g64",
                                            "int8_kivi",
                                            "int4_kivi",
                                            "int8_hq",
                                            "int4_hq",
                                            "k8v4",
                                            "int4/int8_hq",
                                            "int8_kivi/int4",
                                            "int4_kivi/int8",
                                            "int8/int4",
                                            "int8_hq/int8_kivi/sinks0",
                                            "int4_g32/int4_kivi",
                                            "int4_hq/sinks64",
                                            "int8/int4_g64/sinks3"};
  int cases = 0;
  double worst = 0.0;
  for (const int64_t head_dim : dims) {
    for (const auto& head : heads) {
      for (const auto& length : lengths) {
        if (quick && length[0] > 300) continue;
        int32_t least = INT32_MAX;
        for (const int32_t x : length) {
          if (x > 0) least = std::min(least, x);
        }
        for (const int64_t tokens : {int64_t{1}, int64_t{3}}) {
          if (tokens > least) continue;
          const size_t index = static_cast<size_t>(cases);
          const Shape shape{formats[index % formats.size()],
                            static_cast<int64_t>(length.size()),
                            head.first,
                            head.second,
                            tokens,
                            head_dim,
                            index / formats.size() % 3 == 2 ? Dtype::kBFloat16 : Dtype::kFloat32,
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
