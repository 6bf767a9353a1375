// bf16 matrix products with fp32 accumulation.
//
// B operands are packed in pairs of consecutive k: element (k / 2, column) holds both bf16. Every output element is one
// chain of VDPBF16PS over k in ascending order, whatever the tile it falls into: results do not depend on how rows are
// grouped, so neither on the batch nor on the number of threads.
#pragma once

#include <cstring>
#include <type_traits>

#include "simd.h"

namespace rankmesh {

// acc += a x b for pairs [begin, end) of k and columns from 16 * FROM on, in ascending order of k. `a` advances by a_row a
// row and by a_step a pair of k; `b` by b_step pairs a pair of k.
template <int FROM, int MR, int NZ>
__attribute__((always_inline)) inline void accumulate(__m512 (&acc)[MR][NZ], const bf16* a, long a_row, long a_step,
                                                      const pair* b, long b_step, long begin, long end) {
  for (long k = begin; k < end; ++k) {
    __m512bh column[NZ];
#pragma GCC unroll 4
    for (int z = FROM; z < NZ; ++z) column[z] = (__m512bh)_mm512_loadu_si512(b + k * b_step + 16 * z);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      std::int32_t both;
      std::memcpy(&both, a + i * a_row + k * a_step, sizeof(both));
      const __m512bh row = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
      for (int z = FROM; z < NZ; ++z) acc[i][z] = _mm512_dpbf16_ps(acc[i][z], row, column[z]);
    }
  }
}

template <int MR, int NZ>
__attribute__((always_inline)) inline void clear(__m512 (&acc)[MR][NZ]) {
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) acc[i][z] = _mm512_setzero_ps();
  }
}

// One MR x (16 * NZ) tile. init(i, z) gives the accumulators' start, store(i, z, v) takes the result; both are inlined,
// v stays in registers.
template <int MR, int NZ, class Init, class Store>
__attribute__((always_inline)) inline void tile(const bf16* a, long a_row, long a_step, const pair* b, long b_step,
                                                long num_pairs, Init&& init, Store&& store) {
  __m512 acc[MR][NZ];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) acc[i][z] = init(i, z);
  }
  accumulate<0>(acc, a, a_row, a_step, b, b_step, 0, num_pairs);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) store(i, z, acc[i][z]);
  }
}

inline constexpr auto zero_init = [](long, long) { return _mm512_setzero_ps(); };

// Cuts rows into tiles of MAX, then 4, 2 and 1: run(size, first row), the size a compile-time constant.
template <int MAX, class Run>
__attribute__((always_inline)) inline void in_tiles(long rows, Run&& run) {
  long r = 0;
  for (; r + MAX <= rows; r += MAX) run(std::integral_constant<int, MAX>{}, r);
  for (; r + 4 <= rows; r += 4) run(std::integral_constant<int, 4>{}, r);
  for (; r + 2 <= rows; r += 2) run(std::integral_constant<int, 2>{}, r);
  if (r < rows) run(std::integral_constant<int, 1>{}, r);
}

// All rows of one group of 16 * NZ columns. init(row, z) and store(row, z, v) get absolute rows.
template <int NZ, int MAX = 6, class Init, class Store>
inline void tile_rows(const bf16* a, long a_row, long a_step, long rows, const pair* b, long b_step, long num_pairs,
                      Init&& init, Store&& store) {
  in_tiles<MAX>(rows, [&](auto size, long r) __attribute__((always_inline)) {
    tile<decltype(size)::value, NZ>(
        a + r * a_row, a_row, a_step, b, b_step, num_pairs,
        [&](int i, int z) __attribute__((always_inline)) { return init(r + i, static_cast<long>(z)); },
        [&](int i, int z, __m512 v) __attribute__((always_inline)) { store(r + i, static_cast<long>(z), v); });
  });
}

// A weight matrix [columns, 2 * num_pairs], packed in panels of 64 columns (the last one narrower, a multiple of 16):
// panel p is [num_pairs][its columns] pairs.
struct PackedMatrix {
  const pair* data;
  std::int32_t num_pairs;
  std::int32_t columns;  // a multiple of 16; padding columns are zero

  // The columns from `first` on, a multiple of 64, to `end` or the last.
  PackedMatrix columns_of(long first, long end) const {
    return {data + first * num_pairs, num_pairs, static_cast<std::int32_t>((end < columns ? end : columns) - first)};
  }
};

// rows x columns product of `a` [rows, 2 * num_pairs] with a packed matrix; init(row, column), store(row, column, v). Full
// panels are done in tiles of MAX rows and 16 * NZ columns.
template <int NZ = 4, int MAX = 6, class Init, class Store>
inline void gemm(const bf16* a, long a_stride, long rows, const PackedMatrix& w, Init&& init, Store&& store) {
  for (long column = 0; column < w.columns; column += 64) {
    const pair* panel = w.data + column * w.num_pairs;
    const long width = w.columns - column < 64 ? w.columns - column : 64;
    const auto run = [&](auto zmms, auto most, long from) __attribute__((always_inline)) {
      constexpr int kZ = decltype(zmms)::value;
      tile_rows<kZ, decltype(most)::value>(
          a, a_stride, 2, rows, panel + from, width, w.num_pairs,
          [&](long r, long z) __attribute__((always_inline)) { return init(r, column + from + 16 * z); },
          [&](long r, long z, __m512 v) __attribute__((always_inline)) { store(r, column + from + 16 * z, v); });
    };
    const std::integral_constant<int, MAX> most;
    if (width == 64) {
      for (long from = 0; from < 64; from += 16 * NZ) run(std::integral_constant<int, NZ>{}, most, from);
      continue;
    }
    const std::integral_constant<int, 6> few;
    if (width >= 32) run(std::integral_constant<int, 2>{}, few, 0);
    if (width % 32) run(std::integral_constant<int, 1>{}, few, width - 16);
  }
}

// Up to this depth half a panel stays in the first-level cache, and tiles of 12 x 32 read it from there; deeper ones come
// from the second level anyway, and 6 x 64 has fewer loads a product.
constexpr long kShallowPairs = 160;

}  // namespace rankmesh
