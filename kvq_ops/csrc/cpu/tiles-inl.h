// The two integer products of attend over one block of tokens, in tiles that fill the registers: query rows times keys,
// weights times values.
#pragma once

#include "codec-inl.h"

namespace kvq {
namespace KVQ_ISA {
namespace {

constexpr int kMaxRows = 6;  // query rows of one register tile

constexpr int floor_power(int x) {
  return x >= 8 ? 8 : x >= 4 ? 4 : x >= 2 ? 2 : 1;
}
// Tokens of one key tile and code vectors of one value tile that fill the accumulators beside `rows` rows.
constexpr int tile_tokens(int rows) {
  return floor_power(kAccumulators / rows);
}
constexpr int tile_vectors(int rows) {
  return floor_power(kAccumulators / 2 / rows);
}

// One block of tokens of one side: where its rows are. Rows past the last one read it again.
struct Block {
  const uint8_t* first;
  int64_t stride;
  int64_t tokens;  // 1..kBlockTokens
  int64_t row_bytes;

  const uint8_t* row(int64_t j) const { return first + (j < tokens ? j : tokens - 1) * stride; }
};

// Fetches the next block while this one is worked on, from every page of it in turn: one sequential stream does not
// reach a core's read bandwidth, since hardware prefetchers stop at the end of a page. What scales the block comes in
// between, line by line: many fetches at once would wait for each other.
class Ahead {
 public:
  // The next block lies behind this one, in both sides.
  Ahead(const Block& keys, const Block& values) : keys_(keys), values_(values) {}

  // Says that `bytes` of this block are about to be read.
  void advance(int64_t bytes) {
    for (due_ += bytes; due_ >= keys_.step + values_.step; due_ -= keys_.step + values_.step) {
      keys_.fetch();
      values_.fetch();
      if (next_ < lines_) prefetch(reinterpret_cast<const void*>(line_[next_++]));
    }
  }

  // Another `bytes` bytes to fetch. The addresses may lie past the cache.
  void also(uintptr_t address, int64_t bytes) {
    for (int64_t i = 0; i < bytes && lines_ < kMaxLines; i += 64) line_[lines_++] = address + static_cast<uintptr_t>(i);
  }

 private:
  struct Pages {
    explicit Pages(const Block& block) : next(reinterpret_cast<uintptr_t>(block.first)) {
      const int64_t bytes = block.tokens * block.stride;
      next += static_cast<uintptr_t>(bytes);
      streams = bytes >= 4 * kPage ? 4 : bytes >= 2 * kPage ? 2 : 1;
      part = bytes / streams;
      step = streams * 64;
    }
    void fetch() {
      for (int64_t i = 0; i < streams; ++i)
        prefetch(reinterpret_cast<const void*>(next + static_cast<uintptr_t>(i * part)));
      next += 64;
    }
    uintptr_t next;  // an address to fetch from, not a pointer: it may lie past the cache
    int64_t streams, part, step;
  };
  static constexpr int64_t kPage = 4096;

  static constexpr int kMaxLines = 192;

  Pages keys_, values_;
  int64_t due_ = 0;
  int next_ = 0, lines_ = 0;
  uintptr_t line_[kMaxLines];
};

// logits[r * kBlockTokens + j + t] = query row r . key row j + t, for ROWS x TOKENS.
template <class Codec, int ROWS, int TOKENS>
inline void key_tile(const Block& keys, int64_t j, const LanePlan& plan, const int16_t* query, int32_t* logits) {
  const uint8_t* row[TOKENS];
  KeySum sum[ROWS][TOKENS];
  KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) row[t] = keys.row(j + t);
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
    KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) sum[r][t] = zero_key_sum();
  }
  const int16_t* q = query;
  for (int64_t s = 0; s < plan.steps; ++s) {
    const int64_t offset = plan.offset[s];
    KeyCode bytes[TOKENS], code[TOKENS];
    KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) bytes[t] = Codec::load_key(row[t] + offset);
    KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) code[t] = Codec::template key_vector<0>(bytes[t]);
    KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
      const KeyQuery x = load_query(q + r * plan.width);
      KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) {
        sum[r][t] = dot_key(sum[r][t], code[t], x);
        pin_key(sum[r][t]);
      }
    }
    if (Codec::kVectors == 2) {
      KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) code[t] = Codec::template key_vector<1>(bytes[t]);
      KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
        const KeyQuery x = load_query(q + r * plan.width + kLanes);
        KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) {
          sum[r][t] = dot_key(sum[r][t], code[t], x);
          pin_key(sum[r][t]);
        }
      }
    }
    q += Codec::kVectors * kLanes;
  }
  if (TOKENS >= 4) {
    KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
      KVQ_UNROLL for (int t = 0; t + 3 < TOKENS; t += 4) {
        sum4_keys(sum[r][t], sum[r][t + 1], sum[r][t + 2], sum[r][t + 3], logits + r * kBlockTokens + j + t);
      }
    }
  } else {
    KVQ_UNROLL for (int r = 0; r < ROWS; r += 2) {
      const int next = r + 1 < ROWS ? r + 1 : r, last = TOKENS - 1;
      int32_t four[4];
      sum4_keys(sum[r][0], sum[r][last], sum[next][0], sum[next][last], four);
      KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) {
        logits[r * kBlockTokens + j + t] = four[t];
        logits[next * kBlockTokens + j + t] = four[next == r ? t : 2 + t];
      }
    }
  }
}

// What the softmax of a block hands to the value product, for the rows of a tile. Codings without groups have one.
struct Weights {
  static constexpr int64_t kGroup = kMaxRows * kBlockTokens;
  alignas(64) int16_t code[kMaxGroups * kGroup];  // [group, row, token], 0 past the last token
  float scale[kMaxRows];                          // of a code, a power of two
  float correction[kMaxRows];                     // by which earlier sums shrink
  int32_t sum[kMaxRows];                          // of the codes, for the offset of unsigned value codes
  float bias[kMaxRows * kMaxGroups];              // what a group's channels add
};

// Sums of ROWS query rows over the channels of code vectors FIRST to FIRST + VECTORS - 1 of STEPS steps. With GROUPS
// each vector has its own weights.
template <class Codec, int FIRST, int VECTORS, int ROWS, int STEPS, bool GROUPS>
struct ValueSums {
  static constexpr int kCount = STEPS * VECTORS;
  I32 sum[ROWS][kCount][2];
  const int16_t* weights[kCount];

  template <int I>
  void add_vector(I16 even, I16 odd, int64_t j) {
    I16 first, second;
    interleave(even, odd, &first, &second);
    KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
      const I16 w = pair_i16(weights[GROUPS ? I : 0] + r * kBlockTokens + j);
      sum[r][I][0] = dot(sum[r][I][0], first, w);
      pin(sum[r][I][0]);
      sum[r][I][1] = dot(sum[r][I][1], second, w);
      pin(sum[r][I][1]);
    }
  }

  // Adds value rows j and j + 1.
  template <int K = 0>
  void add_pair(const uint8_t* even, const uint8_t* odd, const int32_t* offset, int64_t j) {
    const auto a = Codec::load(even + offset[K]), b = Codec::load(odd + offset[K]);
    add_vector<K * VECTORS>(Codec::template vector<FIRST>(a), Codec::template vector<FIRST>(b), j);
    if constexpr (VECTORS == 2) {
      add_vector<K * VECTORS + 1>(Codec::template vector<1>(a), Codec::template vector<1>(b), j);
    }
    if constexpr (K + 1 < STEPS) add_pair<K + 1>(even, odd, offset, j);
  }
};

// Adds the weighted rows of a block to acc: channels of STEPS steps from step s on.
template <class Codec, int FIRST, int VECTORS, int ROWS, int STEPS, bool GROUPS>
inline void value_tile(const Block& values, int64_t s, const LanePlan& plan, const Weights& weights, float* acc,
                       Ahead* ahead) {
  constexpr int64_t kRun = 16;  // tokens between prefetches, which would take registers from the inner loop
  ValueSums<Codec, FIRST, VECTORS, ROWS, STEPS, GROUPS> sums;
  const auto vector = [s](int i) { return (s + i / VECTORS) * Codec::kVectors + FIRST + i % VECTORS; };
  KVQ_UNROLL for (int i = 0; i < sums.kCount; ++i) {
    KVQ_UNROLL for (int r = 0; r < ROWS; ++r) sums.sum[r][i][0] = sums.sum[r][i][1] = zero_i32();
    sums.weights[i] = weights.code + plan.group[vector(i)] * Weights::kGroup;
  }
  const int32_t* offset = plan.offset + s;
  const uint8_t* row = values.first;
  const int64_t stride = values.stride;
  int64_t j = 0;
  while (j + 1 < values.tokens) {
    if (FIRST == 0) ahead->advance(kRun * STEPS * kLanes);
    const int64_t end = j + kRun < values.tokens ? j + kRun : values.tokens - 1;
    for (; j < end; j += 2, row += 2 * stride) sums.add_pair(row, row + stride, offset, j);
  }
  if (j < values.tokens) sums.add_pair(row, row, offset, j);  // the weight past the last token is 0
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
    const F32 scale = set_f32(weights.scale[r]), correction = set_f32(weights.correction[r]);
    const I32 zero_point = set_i32(Codec::kOffset * weights.sum[r]);
    KVQ_UNROLL for (int i = 0; i < sums.kCount; ++i) {
      const F32 bias = set_f32(weights.bias[r * kMaxGroups + plan.group[vector(i)]]);
      I32 part[2];
      natural_order(sums.sum[r][i][0], sums.sum[r][i][1], &part[0], &part[1]);
      float* to = acc + r * plan.width + vector(i) * kLanes;
      KVQ_UNROLL for (int h = 0; h < 2; ++h) {
        const I32 exact = Codec::kOffset ? sub_i32(part[h], zero_point) : part[h];
        const F32 before = fma(load_f32(to + h * kFloats), correction, bias);
        store_f32(to + h * kFloats, fma(to_f32(exact), scale, before));
      }
    }
  }
}

template <class Codec, int ROWS>
KVQ_NOINLINE void key_block(const Block& keys, const LanePlan& plan, const int16_t* query, int32_t* logits,
                            Ahead* ahead) {
  constexpr int kTokens = tile_tokens(ROWS);
  for (int64_t j = 0; j < keys.tokens; j += kTokens) {
    ahead->advance(kTokens * keys.row_bytes);
    key_tile<Codec, ROWS, kTokens>(keys, j, plan, query, logits);
  }
}

// The same for 4-bit keys in groups, whose codes become level * mantissa: too wide for byte products, so these take
// int16 ones on every ISA, and the query as it is before arrange_query.
template <int ROWS, int TOKENS>
inline void group_key_tile(const Block& keys, int64_t j, const LanePlan& plan, const int16_t* query,
                           const int16_t* mantissa, int32_t* logits) {
  const uint8_t* row[TOKENS];
  I32 sum[ROWS][TOKENS];
  KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) row[t] = keys.row(j + t);
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
    KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) sum[r][t] = zero_i32();
  }
  for (int64_t s = 0; s < plan.steps; ++s) {
    KVQ_UNROLL for (int v = 0; v < 2; ++v) {
      const int16_t* m = mantissa + plan.group[2 * s + v] * kBlockTokens + j;
      I16 code[TOKENS];
      KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) {
        const uint8_t* bytes = row[t] + plan.offset[s];
        const I16 levels = v == 0 ? low_levels(bytes) : high_levels(bytes);
        code[t] = mul_i16(levels, set_i16(m[j + t < keys.tokens ? t : 0]));
      }
      KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
        const I16 x = load_i16(query + r * plan.width + (2 * s + v) * kLanes);
        KVQ_UNROLL for (int t = 0; t < TOKENS; ++t) {
          sum[r][t] = dot(sum[r][t], code[t], x);
          pin(sum[r][t]);
        }
      }
    }
  }
  KVQ_UNROLL for (int r = 0; r < ROWS; ++r) {
    KVQ_UNROLL for (int t = 0; t < TOKENS; t += 2) {
      int32_t four[4];
      const int next = t + 1 < TOKENS ? t + 1 : t;
      sum4(sum[r][t], sum[r][next], sum[r][t], sum[r][next], four);
      logits[r * kBlockTokens + j + t] = four[0];
      logits[r * kBlockTokens + j + next] = four[next == t ? 0 : 1];
    }
  }
}

template <int ROWS>
KVQ_NOINLINE void group_key_block(const Block& keys, const LanePlan& plan, const int16_t* query,
                                  const int16_t* mantissa, int32_t* logits, Ahead* ahead) {
  constexpr int kTokens = tile_tokens(ROWS);
  for (int64_t j = 0; j < keys.tokens; j += kTokens) {
    ahead->advance(kTokens * keys.row_bytes);
    group_key_tile<ROWS, kTokens>(keys, j, plan, query, mantissa, logits);
  }
}

// Tiles of STEPS steps from step s on, then what is left in narrower ones.
template <class Codec, int FIRST, int VECTORS, int ROWS, int STEPS, bool GROUPS>
inline void value_tiles(const Block& values, int64_t s, const LanePlan& plan, const Weights& weights, float* acc,
                        Ahead* ahead) {
  for (; s + STEPS <= plan.steps; s += STEPS) {
    value_tile<Codec, FIRST, VECTORS, ROWS, STEPS, GROUPS>(values, s, plan, weights, acc, ahead);
  }
  if constexpr (STEPS > 1) {
    value_tiles<Codec, FIRST, VECTORS, ROWS, STEPS / 2, GROUPS>(values, s, plan, weights, acc, ahead);
  }
}

template <class Codec, int FIRST, int VECTORS, int ROWS, int STEPS, bool GROUPS>
KVQ_NOINLINE void value_vectors(const Block& values, const LanePlan& plan, const Weights& weights, float* acc,
                                Ahead* ahead) {
  value_tiles<Codec, FIRST, VECTORS, ROWS, STEPS, GROUPS>(values, 0, plan, weights, acc, ahead);
}

// Both vectors of a step share its loads where the registers hold the sums of both.
template <class Codec, int ROWS, bool GROUPS>
inline void value_block(const Block& values, const LanePlan& plan, const Weights& weights, float* acc, Ahead* ahead) {
  constexpr int kVectors = tile_vectors(ROWS);
  if constexpr (Codec::kVectors == 1) {
    value_vectors<Codec, 0, 1, ROWS, kVectors, GROUPS>(values, plan, weights, acc, ahead);
  } else if constexpr (kVectors > 1) {
    value_vectors<Codec, 0, 2, ROWS, kVectors / 2, GROUPS>(values, plan, weights, acc, ahead);
  } else {
    value_vectors<Codec, 0, 1, ROWS, 1, GROUPS>(values, plan, weights, acc, ahead);
    value_vectors<Codec, 1, 1, ROWS, 1, GROUPS>(values, plan, weights, acc, ahead);
  }
}

}  // namespace
}  // namespace KVQ_ISA
}  // namespace kvq
