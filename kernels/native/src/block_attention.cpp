// Attention of positions to the last blocks of their own sequence.
//
// Queries lie in the lanes: a tile of up to 64 consecutive positions is the right-hand side of scores = keys x queries,
// so keys are read where they are, softmax runs down the lanes without sums across them, and its weights come out in the
// layout that answers = values x weights reads. Only queries and values are packed, a block at a time. Under a causal
// mask a vector of 16 queries ends at its own last position: what is computed in vain is half of a 16 x 16 triangle.
#include <cmath>
#include <cstring>

#include "attention.h"

namespace rankmesh {
namespace {

constexpr long kQueryTile = kPanel;
constexpr long kTileKeys = 128;

// Rows of a tile with NZ vectors a row: 24 accumulators.
constexpr int rows_of_tile(int vectors) { return vectors == 4 ? 6 : vectors == 3 ? 8 : vectors == 2 ? 12 : 16; }

struct TileScratch {
  pair* queries;   // [key pairs][kQueryTile]
  float* scores;   // [kTileKeys][kQueryTile]
  pair* weights;   // [kTileKeys / 2][kQueryTile]
  pair* values;    // [kTileKeys / 2][value width]
  float* answers;  // [value width][kQueryTile]
  bf16* rows;      // [kTileKeys][value width]: rows of a width that cannot be read where they are
  std::int32_t* staging;

  TileScratch(Arena& arena, long width)
      : queries(arena.take<pair>(round_up(width, 32) / 2 * kQueryTile)),
        scores(arena.take<float>(kTileKeys * kQueryTile)),
        weights(arena.take<pair>(kTileKeys / 2 * kQueryTile)),
        values(arena.take<pair>(kTileKeys / 2 * round_up(width, 16))),
        answers(arena.take<float>(round_up(width, 16) * kQueryTile)),
        rows(arena.take<bf16>(kTileKeys * round_up(width, 16))),
        staging(arena.take<std::int32_t>(kQueryTile * round_up(width, 32) / 2)) {}
};

// Rows [count][width] at `stride`, copied to [count][padded] with zeros behind each.
const bf16* copy_rows(const bf16* x, long stride, long count, long width, long padded, bf16* out) {
  for (long r = 0; r < count; ++r) {
    std::memcpy(out + r * padded, x + r * stride, 2 * width);
    std::memset(out + r * padded + width, 0, 2 * (padded - width));
  }
  return out;
}

// One tile of queries of one head; position p of its sequence is at keys + p * stride, and values alike.
struct QueryTile {
  const bf16* keys;
  const bf16* values;
  long stride;
  long width;
  long first_query;
  long first_key;
  long end_key;
  bool causal;
  float scale;
  TileScratch scratch;

  long num_pairs() const { return (width + 1) / 2; }
  long value_width() const { return round_up(width, 16); }
};

// Values of `count` positions from `begin` on, in row pairs.
void pack_values(const QueryTile& t, long begin, long count) {
  const long padded = t.value_width();
  const bf16* values = t.values + begin * t.stride;
  long stride = t.stride;
  if (t.width != padded) {
    values = copy_rows(values, stride, count, t.width, padded, t.scratch.rows);
    stride = padded;
  }
  pack_row_pairs(values, count, padded, stride, t.scratch.values);
}

// Softmax so far, a query a lane: maximum, sum, and the factor for what came before the present keys.
struct LaneState {
  __m512 max;
  __m512 sum;
  __m512 rescale;
};

// Rows of one head are far apart, so that no prefetcher of the processor follows them: asked for a few at a time, between
// tiles of arithmetic, well before they are read.
class Ahead {
 public:
  Ahead(const bf16* keys, const bf16* values, const bf16* out, const bf16* next_queries, long stride, long rows,
        long width)
      : first_{keys, values, out, next_queries}, stride_(stride), rows_(rows), width_(width) {}

  void fetch(long count) {
    for (; count > 0 && at_ < 4; --count) {
      const bf16* row = first_[at_] + row_ * stride_;
      for (long c = 0; c < width_; c += 32) _mm_prefetch(row + c, _MM_HINT_T1);
      if (++row_ == rows_ || first_[at_] == nullptr) {
        row_ = 0;
        ++at_;
      }
    }
  }

 private:
  const bf16* first_[4];
  long stride_, rows_, width_;
  long at_ = 0;
  long row_ = 0;
};

// Keys of one block: `count` rows at `keys`, the first of them at position `begin`.
struct KeyBlock {
  const bf16* keys;
  long stride;
  long begin;
  long count;
};

// Scores of keys to the queries of NZ vectors; `top` takes each query's largest. On the diagonal key r is seen from lane
// r + shift of the first vector on, and its scores before that become `masked`.
template <int NZ, bool kDiagonal>
void score_keys(const bf16* keys, long stride, long num_keys, long num_pairs, const pair* queries, float* scores,
                __m512 masked, long shift, __m512* top, Ahead& ahead) {
  in_tiles<rows_of_tile(NZ)>(num_keys, [&](auto size, long first) __attribute__((always_inline)) {
    constexpr int kRows = decltype(size)::value;
    __m512 acc[kRows][NZ];
    clear(acc);
    accumulate<0>(acc, keys + first * stride, stride, 2, queries, kQueryTile, 0, num_pairs);
    float* out = scores + first * kQueryTile;
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) {
      __m512 largest = top[z];
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        __m512 v = acc[i][z];
        if (kDiagonal && z == 0) v = _mm512_mask_mov_ps(masked, static_cast<__mmask16>(0xffffu << (first + i + shift)), v);
        // This order of operands drops a NaN, which comes back when the maximum is subtracted.
        largest = _mm512_max_ps(v, largest);
        _mm512_storeu_ps(out + i * kQueryTile + 16 * z, v);
      }
      top[z] = largest;
    }
    ahead.fetch(4);
  });
}

// The keys on the diagonals of vector VEC and of those behind it, each to its vector and those behind.
template <int VEC, int NZ>
void score_diagonals(const QueryTile& t, const KeyBlock& block, __m512 masked, __m512* top, Ahead& ahead) {
  const long diagonal = t.first_query + 16 * VEC - block.begin;
  const long from = diagonal > 0 ? diagonal : 0;
  const long end = diagonal + 16 < block.count ? diagonal + 16 : block.count;
  if (from < end) {
    score_keys<NZ - VEC, true>(block.keys + from * block.stride, block.stride, end - from, t.num_pairs(),
                               t.scratch.queries + 16 * VEC, t.scratch.scores + from * kQueryTile + 16 * VEC, masked,
                               from - diagonal, top + VEC, ahead);
  }
  if constexpr (VEC + 1 < NZ) score_diagonals<VEC + 1, NZ>(t, block, masked, top, ahead);
}

// Weights of one vector of queries for its first num_keys keys of the block, in row pairs; the key that an odd number
// lacks gets 0.
template <class Weigh>
void weigh_keys(const TileScratch& scratch, long vector, long num_keys, Weigh&& weigh) {
  const float* scores = scratch.scores + 16 * vector;
  pair* weights = scratch.weights + 16 * vector;
  long r = 0;
  for (; r + 2 <= num_keys; r += 2) {
    const __m512 even = weigh(_mm512_loadu_ps(scores + r * kQueryTile));
    const __m512 odd = weigh(_mm512_loadu_ps(scores + (r + 1) * kQueryTile));
    _mm512_storeu_si512(weights + r / 2 * kQueryTile, interleave(even, odd));
  }
  if (r < num_keys) {
    const __m512 even = weigh(_mm512_loadu_ps(scores + r * kQueryTile));
    _mm512_storeu_si512(weights + r / 2 * kQueryTile, interleave(even, _mm512_setzero_ps()));
  }
}

void softmax_keys(const TileScratch& scratch, long vector, long num_keys, __m512 top, float log2_scale,
                  LaneState& state) {
  const __m512 scale = _mm512_set1_ps(log2_scale);
  const __m512 none = _mm512_set1_ps(-INFINITY);
  const __m512 max = _mm512_max_ps(top, state.max);
  // With nothing seen yet every score is -inf: subtract 0, so that the weights are 0 and not NaN.
  const __m512 base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(max, none, _CMP_NEQ_OQ), max);
  // Exactly 1 where the maximum stays: then keys that a query does not see change nothing.
  const __mmask16 grows = _mm512_cmp_ps_mask(max, state.max, _CMP_NEQ_OQ);
  state.rescale = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), grows,
                                     exp2_nonpositive(_mm512_mul_ps(_mm512_sub_ps(state.max, base), scale)));
  state.max = max;
  __m512 sum = _mm512_setzero_ps();
  weigh_keys(scratch, vector, num_keys, [&](__m512 score) __attribute__((always_inline)) {
    // Not fused: the difference must not round above 0, which it would for scores of more than 2^24.
    const __m512 weight = exp2_nonpositive(_mm512_mul_ps(_mm512_sub_ps(score, base), scale));
    sum = _mm512_add_ps(sum, weight);
    return weight;
  });
  state.sum = _mm512_fmadd_ps(state.sum, state.rescale, sum);
}

// answers[channel] = answers[channel] * rescale + values[channel] * weights, where vector z reads its first pairs[z] pairs
// of keys; pairs ascend.
template <int NZ>
void add_values(const QueryTile& t, const long* pairs, const LaneState* state, bool is_first, Ahead& ahead) {
  const long step = 2 * t.value_width();
  in_tiles<rows_of_tile(NZ)>(t.width, [&](auto size, long channel) __attribute__((always_inline)) {
    constexpr int kRows = decltype(size)::value;
    const auto* a = reinterpret_cast<const bf16*>(t.scratch.values + channel);
    const pair* weights = t.scratch.weights;
    __m512 acc[kRows][NZ];
    clear(acc);
    accumulate<0>(acc, a, 2, step, weights, kQueryTile, 0, pairs[0]);
    if constexpr (NZ > 1) accumulate<1>(acc, a, 2, step, weights, kQueryTile, pairs[0], pairs[1]);
    if constexpr (NZ > 2) accumulate<2>(acc, a, 2, step, weights, kQueryTile, pairs[1], pairs[2]);
    if constexpr (NZ > 3) accumulate<3>(acc, a, 2, step, weights, kQueryTile, pairs[2], pairs[3]);
    float* out = t.scratch.answers + channel * kQueryTile;
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) {
      const __m512 rescale = state[z].rescale;
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        float* at = out + i * kQueryTile + 16 * z;
        const __m512 v = is_first ? acc[i][z] : _mm512_fmadd_ps(_mm512_loadu_ps(at), rescale, acc[i][z]);
        _mm512_storeu_ps(at, v);
      }
    }
    ahead.fetch(8);
  });
}

// Answers [channels][queries] times each query's factor, to bf16 rows: pairs of channels are turned as one element.
template <int NZ>
void store_answers(const QueryTile& t, long rows, const __m512* factors, bf16* out) {
  alignas(64) pair packed[16 * 16];
  alignas(64) pair turned[16 * 16];
  for (long channel = 0; channel < t.width; channel += 32) {
    const long left = t.width - channel < 32 ? t.width - channel : 32;
    for (long z = 0; z < NZ; ++z) {
      const long count = rows - 16 * z < 16 ? rows - 16 * z : 16;
      const auto load = [&](long c) {
        return c < left ? _mm512_mul_ps(
                              _mm512_loadu_ps(t.scratch.answers + (channel + c) * kQueryTile + 16 * z), factors[z])
                        : _mm512_setzero_ps();
      };
      for (long c = 0; c < 16; ++c) _mm512_store_si512(packed + 16 * c, interleave(load(2 * c), load(2 * c + 1)));
      transpose_16x16(packed, 64, turned, 16);
      for (long r = 0; r < count; ++r) {
        bf16* to = out + (16 * z + r) * t.stride + channel;
        if (left == 32) {
          _mm512_storeu_si512(to, _mm512_load_si512(turned + 16 * r));
        } else {
          std::memcpy(to, turned + 16 * r, 2 * left);
        }
      }
    }
  }
}

// NZ vectors of queries, the last of them perhaps not full; `rows` of them are stored at `out`, in rows like the keys'.
template <int NZ, Activation kActivation>
void attend_tile(const QueryTile& t, long rows, bf16* out, Ahead& ahead) {
  constexpr bool kIsSoftmax = kActivation == Activation::kSoftmax;
  const TileScratch& scratch = t.scratch;
  // Masked scores become weights of exactly 0 in both activations.
  const __m512 masked = _mm512_set1_ps(kIsSoftmax ? -INFINITY : 0.0f);
  LaneState state[NZ];
  for (int z = 0; z < NZ; ++z) state[z] = {_mm512_set1_ps(-INFINITY), _mm512_setzero_ps(), _mm512_set1_ps(1.0f)};
  for (long begin = t.first_key; begin < t.end_key; begin += kTileKeys) {
    const long count = t.end_key - begin < kTileKeys ? t.end_key - begin : kTileKeys;
    KeyBlock block{t.keys + begin * t.stride, t.stride, begin, count};
    if (t.width % 2) {
      const long padded = t.value_width();
      block.keys = copy_rows(block.keys, t.stride, count, t.width, padded, scratch.rows);
      block.stride = padded;
    }
    __m512 top[NZ];
    for (int z = 0; z < NZ; ++z) top[z] = _mm512_set1_ps(-INFINITY);
    const long before = t.causal && t.first_query - begin < count ? t.first_query - begin : count;
    if (before > 0) {
      score_keys<NZ, false>(block.keys, block.stride, before, t.num_pairs(), scratch.queries, scratch.scores, masked, 0,
                            top, ahead);
    }
    if (before < count) score_diagonals<0, NZ>(t, block, masked, top, ahead);
    long pairs[NZ];
    for (long z = 0; z < NZ; ++z) {
      const long seen = t.causal ? t.first_query + 16 * (z + 1) - begin : count;
      const long num_keys = seen < 0 ? 0 : seen < count ? seen : count;
      pairs[z] = (num_keys + 1) / 2;
      if constexpr (kIsSoftmax) {
        softmax_keys(scratch, z, num_keys, top[z], t.scale * 1.44269504f, state[z]);
      } else {
        const __m512 scale = _mm512_set1_ps(t.scale);
        weigh_keys(scratch, z, num_keys,
                   [&](__m512 score) __attribute__((always_inline)) { return silu(_mm512_mul_ps(score, scale)); });
      }
    }
    pack_values(t, begin, count);
    add_values<NZ>(t, pairs, state, begin == t.first_key, ahead);
  }
  __m512 factors[NZ];
  for (int z = 0; z < NZ; ++z) {
    factors[z] = kIsSoftmax ? _mm512_div_ps(_mm512_set1_ps(1.0f), state[z].sum) : _mm512_set1_ps(1.0f);
  }
  store_answers<NZ>(t, rows, factors, out);
}

template <Activation kActivation>
void attend_queries(const QueryTile& t, long rows, bf16* out, Ahead& ahead) {
  switch ((rows + 15) / 16) {
    case 1: return attend_tile<1, kActivation>(t, rows, out, ahead);
    case 2: return attend_tile<2, kActivation>(t, rows, out, ahead);
    case 3: return attend_tile<3, kActivation>(t, rows, out, ahead);
    default: return attend_tile<4, kActivation>(t, rows, out, ahead);
  }
}

}  // namespace
}  // namespace rankmesh

using namespace rankmesh;

// Positions to the positions of their own sequence: previous window_blocks - 1 whole blocks, and the own block (up to
// the position itself if causal).
struct BlockArguments {
  const bf16* q;  // [T][heads][head_width], keys, values and out alike
  const bf16* k;
  const bf16* v;
  bf16* out;
  const std::int64_t* offsets;  // [num_sequences + 1]
  std::int64_t* tile_ends;      // [num_sequences], working space: tiles of the sequences up to each
  std::int64_t num_sequences;
  std::int64_t heads;
  std::int64_t head_width;
  std::int64_t block;
  std::int64_t window_blocks;
  std::int32_t causal;
  std::int32_t activation;
  float scale;
};

namespace {

// Tiles of a block: up to kQueryTile consecutive positions each.
long tiles_of_block(const BlockArguments& a) { return (a.block + kQueryTile - 1) / kQueryTile; }

long count_tiles(const BlockArguments& a) {
  long tiles = 0;
  for (long b = 0; b < a.num_sequences; ++b) {
    const long length = a.offsets[b + 1] - a.offsets[b];
    tiles += length / a.block * tiles_of_block(a) + (length % a.block + kQueryTile - 1) / kQueryTile;
    a.tile_ends[b] = tiles;
  }
  return tiles;
}

// The queries of one tile in one head: where the first one is, and their place in a sequence of `length`.
struct Place {
  long element;
  long first;
  long rows;
  long length;
};

// Items are the tiles of one head after the other, so that a head's keys are read by neighbours.
Place place_of(const BlockArguments& a, long item, long num_tiles) {
  const long tile = item % num_tiles;
  const long sequence = find_sequence(a.tile_ends, a.num_sequences, tile);
  const long own = tile - (sequence > 0 ? a.tile_ends[sequence - 1] : 0);
  const long begin = a.offsets[sequence];
  const long length = a.offsets[sequence + 1] - begin;
  const long in_block = own % tiles_of_block(a) * kQueryTile;
  const long first = own / tiles_of_block(a) * a.block + in_block;
  long rows = a.block - in_block < kQueryTile ? a.block - in_block : kQueryTile;
  rows = rows < length - first ? rows : length - first;
  return {((begin + first) * a.heads + item / num_tiles) * a.head_width, first, rows, length};
}

}  // namespace

RANKMESH_API int rankmesh_block_attention(const BlockArguments* given, int num_threads) {
  const BlockArguments& a = *given;
  const long width = a.head_width;
  const long stride = a.heads * width;
  Arena size(nullptr);
  TileScratch unused(size, width);
  std::byte* memory = workspace(size.used(), num_threads);
  if (memory == nullptr) return 1;
  const long num_tiles = count_tiles(a);
  const long num_items = num_tiles * a.heads;
  parallel_for(num_items, num_threads, [&](long item, int worker) {
    Arena arena(memory + worker * size.used());
    const Place own = place_of(a, item, num_tiles);
    const long sequence = own.element - own.first * stride;
    const long block = own.first / a.block;
    const long window = (block - a.window_blocks + 1) * a.block;
    const long own_end = (block + 1) * a.block < own.length ? (block + 1) * a.block : own.length;
    const QueryTile tile{a.k + sequence,
                         a.v + sequence,
                         stride,
                         width,
                         own.first,
                         window > 0 ? window : 0,
                         a.causal != 0 ? own.first + own.rows : own_end,
                         a.causal != 0,
                         a.scale,
                         TileScratch(arena, width)};
    // Earlier keys are there already, from the tiles before; queries are needed at once, so those of the next task.
    const long next = item + num_threads;
    Ahead ahead(a.k + own.element, a.v + own.element, a.out + own.element,
                next < num_items ? a.q + place_of(a, next, num_tiles).element : nullptr, stride, own.rows, width);
    pack_columns(a.q + own.element, stride, own.rows, width, tile.scratch.queries, tile.scratch.staging);
    if (a.activation == static_cast<int>(Activation::kSoftmax)) {
      attend_queries<Activation::kSoftmax>(tile, own.rows, a.out + own.element, ahead);
    } else {
      attend_queries<Activation::kSilu>(tile, own.rows, a.out + own.element, ahead);
    }
  });
  return 0;
}
