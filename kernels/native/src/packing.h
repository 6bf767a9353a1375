// Rows turned into columns of a right-hand side.
#pragma once

#include <cstring>

#include "simd.h"

namespace rankmesh {

constexpr long kPanel = 64;

// Packs up to 64 rows of `width` bf16 as the columns of a right-hand side, [ceil(width / 2)][64] pairs; rows from `rows`
// on are zero. staging: [64][width / 2 rounded up to 16].
inline void pack_columns(const bf16* x, long stride, long rows, long width, pair* out, std::int32_t* staging) {
  const long pairs = (width + 1) / 2;
  if (rows == kPanel && width % 32 == 0) {
    for (long r = 0; r < kPanel; r += 16) {
      for (long p = 0; p < pairs; p += 16) {
        transpose_16x16(x + r * stride + 2 * p, 2 * stride, out + p * kPanel + r, kPanel);
      }
    }
    return;
  }
  const long padded_pairs = round_up(pairs, 16);
  std::memset(staging, 0, sizeof(std::int32_t) * kPanel * padded_pairs);
  for (long r = 0; r < rows; ++r) std::memcpy(staging + r * padded_pairs, x + r * stride, 2 * width);
  alignas(64) std::int32_t block[16 * 16];
  for (long r = 0; r < kPanel; r += 16) {
    for (long p = 0; p < pairs; p += 16) {
      transpose_16x16(staging + r * padded_pairs + p, 4 * padded_pairs, block, 16);
      const long width = pairs - p < 16 ? pairs - p : 16;
      for (long i = 0; i < width; ++i) {
        _mm512_storeu_si512(out + (p + i) * kPanel + r, _mm512_load_si512(block + 16 * i));
      }
    }
  }
}

}  // namespace rankmesh
