// Attention of query rows to packed keys and values of one head: one pass over the keys in blocks, scores in fp32.
#pragma once

#include <cmath>

#include "gemm.h"
#include "packing.h"
#include "parallel.h"

namespace rankmesh {

// Keys and values of B sequences, packed a head at a time; lengths are padded to kKeyPanel with zeros.
//   keys of (sequence, head):   [padded / 64][key_pairs][64] pairs, at (start * heads + head * padded) * key_pairs
//   values of (sequence, head): [padded / 2][value_width] pairs, at (start * heads + head * padded) / 2 * value_width
struct PackedKeys {
  const pair* keys;
  const pair* values;
  const std::int64_t* starts;   // [B + 1], padded positions
  const std::int64_t* lengths;  // [B]
  std::int32_t num_heads;
  std::int32_t head_width;

  long key_pairs() const { return (head_width + 1) / 2; }
  long value_width() const { return round_up(head_width, 16); }
};

constexpr long kKeyPanel = kPanel;
constexpr long kKeyBlock = 256;  // scores of twelve rows then take 12 KiB, a third of L1
constexpr int kRowGroup = 12;

// Keys and values of one (sequence, head).
struct Head {
  const pair* keys;
  const pair* values;
  long key_pairs;
  long value_width;
};

inline Head head_of(const PackedKeys& packed, long sequence, long head) {
  const long start = packed.starts[sequence];
  const long padded = packed.starts[sequence + 1] - start;
  const long at = start * packed.num_heads + head * padded;
  return {packed.keys + at * packed.key_pairs(), packed.values + at / 2 * packed.value_width(), packed.key_pairs(),
          packed.value_width()};
}

// Sequence of each of many consecutive items, given ascending ends: a bisection.
inline long find_sequence(const std::int64_t* ends, long count, long item) {
  long low = 0;
  long high = count;
  while (low < high) {
    const long middle = (low + high) / 2;
    if (ends[middle] <= item) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

struct AttentionScratch {
  float* scores;   // [kRowGroup][kKeyBlock]
  bf16* weights;   // [kRowGroup][kKeyBlock]
  float* answers;  // [kRowGroup][value_width]

  AttentionScratch(Arena& arena, long value_width)
      : scores(arena.take<float>(kRowGroup * kKeyBlock)),
        weights(arena.take<bf16>(kRowGroup * kKeyBlock)),
        answers(arena.take<float>(kRowGroup * value_width)) {}
};

enum class Activation { kSoftmax = 0, kSilu = 1 };

// Whole vectors with a mask: single elements would make the loads that follow wait for them.
inline void fill_scores(float* scores, long begin, long end, float value) {
  for (long j = begin / 16 * 16; j < end; j += 16) {
    const __mmask16 lanes = first_lanes(end - j) & static_cast<__mmask16>(~first_lanes(begin - j));
    _mm512_mask_storeu_ps(scores + j, lanes, _mm512_set1_ps(value));
  }
}

// softmax numerators of one row and one block: max so far, sum so far (a vector of lanes), factor for what came before.
struct RowState {
  float max;
  __m512 sum;
  float rescale;
};

inline void softmax_block(const float* scores, bf16* weights, long count, float log2_scale, RowState& state) {
  __m512 top = _mm512_loadu_ps(scores);
  __m512 top2 = _mm512_loadu_ps(scores + 16);
  for (long j = 32; j < count; j += 32) {
    top = _mm512_max_ps(top, _mm512_loadu_ps(scores + j));
    top2 = _mm512_max_ps(top2, _mm512_loadu_ps(scores + j + 16));
  }
  const float block_max = _mm512_reduce_max_ps(_mm512_max_ps(top, top2));
  const float max = block_max > state.max ? block_max : state.max;
  // With nothing seen yet every score is -inf: subtract 0, so that the weights are 0 and not NaN.
  const float base = max == -INFINITY ? 0.0f : max;
  // Before the first key there is nothing to rescale.
  state.rescale = 0.0f;
  if (state.max != -INFINITY) {
    state.rescale = _mm512_cvtss_f32(exp2_nonpositive(_mm512_set1_ps((state.max - base) * log2_scale)));
  }
  state.max = max;
  const __m512 scale = _mm512_set1_ps(log2_scale);
  const __m512 shift = _mm512_set1_ps(base);
  __m512 sum = _mm512_setzero_ps();
  __m512 sum2 = _mm512_setzero_ps();
  for (long j = 0; j < count; j += 32) {
    // Not fused: the difference must not round above 0, which it would for scores of more than 2^24.
    const __m512 low = exp2_nonpositive(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + j), shift), scale));
    const __m512 high = exp2_nonpositive(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + j + 16), shift), scale));
    sum = _mm512_add_ps(sum, low);
    sum2 = _mm512_add_ps(sum2, high);
    _mm512_storeu_si512(weights + j, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  state.sum = _mm512_fmadd_ps(state.sum, _mm512_set1_ps(state.rescale), _mm512_add_ps(sum, sum2));
}

// silu(x) = x / (1 + 2^(-x log2 e)); 2^y for either sign is 2^-|y| or its inverse, so it never overflows.
inline __m512 silu(__m512 x) {
  const __m512 magnitude = _mm512_abs_ps(x);
  const __m512 e = exp2_nonpositive(_mm512_mul_ps(magnitude, _mm512_set1_ps(-1.44269504f)));
  const __m512 denominator = _mm512_add_ps(_mm512_set1_ps(1.0f), e);
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 numerator = _mm512_mask_mul_ps(x, negative, x, e);
  return _mm512_div_ps(numerator, denominator);
}

inline void silu_block(const float* scores, bf16* weights, long count, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (long j = 0; j < count; j += 32) {
    const __m512 low = silu(_mm512_mul_ps(_mm512_loadu_ps(scores + j), factor));
    const __m512 high = silu(_mm512_mul_ps(_mm512_loadu_ps(scores + j + 16), factor));
    _mm512_storeu_si512(weights + j, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// Rows of one tile with four accumulators a row: twelve rows are two tiles of six, eight are two of four.
constexpr int tile_height(int rows) { return rows % 6 == 0 ? 6 : 4; }

// answers[i] = answers[i] * rescale[i] + weights[i] * values, for 16 * NZ columns.
template <int R, int NZ>
inline void add_values(const AttentionScratch& scratch, const pair* values, long value_width, long column, long num_pairs,
                       const RowState* state, bool is_first) {
  constexpr int kRows = NZ <= 2 ? R : tile_height(R);
  float* out = scratch.answers + column;
  tile_rows<NZ, kRows>(
      scratch.weights, kKeyBlock, 2, R, values + column, value_width, num_pairs, zero_init,
      [&](long i, long z, __m512 v) __attribute__((always_inline)) {
        float* at = out + i * value_width + 16 * z;
        if (!is_first) v = _mm512_fmadd_ps(_mm512_loadu_ps(at), _mm512_set1_ps(state[i].rescale), v);
        _mm512_storeu_ps(at, v);
      });
}

// R rows of queries q [R][q_stride] (bf16, head_width padded with zero to an even width) to the first num_keys keys of one
// head.
// emit(i, column, v) takes 16 columns of the answer; columns are padded to a multiple of 16.
template <int R, Activation kActivation, class Emit>
inline void attend_rows(const bf16* q, long q_stride, const Head& head, long num_keys, float scale,
                        const AttentionScratch& scratch, Emit&& emit) {
  // Scores behind the last key become weights of exactly 0 in both activations.
  const float masked = kActivation == Activation::kSoftmax ? -INFINITY : 0.0f;
  const float log2_scale = scale * 1.44269504f;
  RowState state[R];
  for (int i = 0; i < R; ++i) state[i] = {-INFINITY, _mm512_setzero_ps(), 1.0f};
  for (long block = 0; block < num_keys; block += kKeyBlock) {
    const long left = num_keys - block;
    const long count = left < kKeyBlock ? round_up(left, kKeyPanel / 2) : kKeyBlock;
    for (long j = 0; j < count; j += kKeyPanel) {
      const pair* panel = head.keys + (block + j) * head.key_pairs;
      const auto put = [&](long i, long z, __m512 v) __attribute__((always_inline)) {
        _mm512_storeu_ps(scratch.scores + i * kKeyBlock + j + 16 * z, v);
      };
      if (count - j >= kKeyPanel) {
        tile_rows<4, tile_height(R)>(q, q_stride, 2, R, panel, kKeyPanel, head.key_pairs, zero_init, put);
      } else {
        tile_rows<2, R>(q, q_stride, 2, R, panel, kKeyPanel, head.key_pairs, zero_init, put);
      }
    }
    for (int i = 0; i < R; ++i) {
      float* scores = scratch.scores + i * kKeyBlock;
      if (left < count) fill_scores(scores, left, count, masked);
      bf16* weights = scratch.weights + i * kKeyBlock;
      if constexpr (kActivation == Activation::kSoftmax) {
        softmax_block(scores, weights, count, log2_scale, state[i]);
      } else {
        silu_block(scores, weights, count, scale);
      }
    }
    const pair* values = head.values + block / 2 * head.value_width;
    for (long column = 0; column < head.value_width; column += 64) {
      const long zmms = (head.value_width - column) / 16;
      if (zmms >= 4) {
        add_values<R, 4>(scratch, values, head.value_width, column, count / 2, state, block == 0);
        continue;
      }
      if (zmms >= 2) add_values<R, 2>(scratch, values, head.value_width, column, count / 2, state, block == 0);
      if (zmms % 2) {
        add_values<R, 1>(scratch, values, head.value_width, column + (zmms - 1) * 16, count / 2, state, block == 0);
      }
    }
  }
  for (int i = 0; i < R; ++i) {
    float factor = 1.0f;
    if constexpr (kActivation == Activation::kSoftmax) {
      const float sum = _mm512_reduce_add_ps(state[i].sum);
      factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    }
    const __m512 vfactor = _mm512_set1_ps(factor);
    for (long column = 0; column < head.value_width; column += 16) {
      // Without a key nothing was written to the scratch: the answer is 0.
      const __m512 v = num_keys > 0 ? _mm512_loadu_ps(scratch.answers + i * head.value_width + column)
                                    : _mm512_setzero_ps();
      emit(static_cast<long>(i), column, _mm512_mul_ps(v, vfactor));
    }
  }
}

// Any number of rows, in groups; emit gets absolute rows.
template <Activation kActivation, class Emit>
inline void attend(const bf16* q, long q_stride, long rows, const Head& head, long num_keys, float scale,
                   const AttentionScratch& scratch, Emit&& emit) {
  long r = 0;
  const auto run = [&](auto size) {
    constexpr int kRows = decltype(size)::value;
    attend_rows<kRows, kActivation>(q + r * q_stride, q_stride, head, num_keys, scale, scratch,
                                    [&](long i, long column, __m512 v) { emit(r + i, column, v); });
    r += kRows;
  };
  while (r + kRowGroup <= rows) run(std::integral_constant<int, kRowGroup>{});
  if (r + 8 <= rows) run(std::integral_constant<int, 8>{});
  if (r + 4 <= rows) run(std::integral_constant<int, 4>{});
  if (r + 2 <= rows) run(std::integral_constant<int, 2>{});
  if (r < rows) run(std::integral_constant<int, 1>{});
}

}  // namespace rankmesh
