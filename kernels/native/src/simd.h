// AVX-512 building blocks: bf16 conversion, interleaving of row pairs, exp2, small transposes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace rankmesh {

using bf16 = std::uint16_t;
using pair = std::uint32_t;  // two bf16 of consecutive k: the low half is the even one

constexpr long round_up(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

inline __m512 load_bf16(const bf16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

inline void store_bf16(bf16* p, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}

inline __mmask16 first_lanes(long count) {
  return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1);
}

// Rounds two rows to bf16 and interleaves them: lane c is (even[c], odd[c]).
inline __m512i interleave(__m512 even, __m512 odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

// Packs `rows` rows of `width` bf16 (width a multiple of 16) into row pairs [ceil(rows / 2)][width]; the missing row of
// an odd count is zero, so that whatever lies behind the last row cannot enter a product.
inline void pack_row_pairs(const bf16* x, long rows, long width, long stride, pair* out) {
  const __m512i kFirstPairs =
      _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34,
                       2, 33, 1, 32, 0);
  const __m512i kLastPairs = _mm512_add_epi16(kFirstPairs, _mm512_set1_epi16(16));
  for (long r = 0; r < rows; r += 2) {
    const bf16* even = x + r * stride;
    const bool has_odd = r + 1 < rows;
    long c = 0;
    for (; c + 32 <= width; c += 32) {
      const __m512i low = _mm512_loadu_si512(even + c);
      const __m512i high = has_odd ? _mm512_loadu_si512(even + stride + c) : _mm512_setzero_si512();
      _mm512_storeu_si512(out + (r / 2) * width + c, _mm512_permutex2var_epi16(low, kFirstPairs, high));
      _mm512_storeu_si512(out + (r / 2) * width + c + 16, _mm512_permutex2var_epi16(low, kLastPairs, high));
    }
    for (; c < width; c += 16) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + c)));
      __m512i high = _mm512_setzero_si512();
      if (has_odd) {
        high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + stride + c)));
      }
      _mm512_storeu_si512(out + (r / 2) * width + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

// 2^x for x <= 0; exactly 0 from -256 down (and so for -inf), NaN for NaN. Relative error 7.5e-5 (degree 3, minimax on
// [-0.5, 0.5]), a twenty-sixth of the 2^-9 of the bf16 that the result is rounded to.
inline __m512 exp2_nonpositive(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-256.0f), x);  // this order of operands keeps a NaN
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(5.517166722e-02f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.426111221e-01f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.932609858e-01f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.999280736e-01f));
  return _mm512_scalef_ps(p, whole);
}

// Transposes 16 rows of 16 32-bit elements; rows of `in` begin in_bytes apart, those of `out` out_stride elements.
inline void transpose_16x16(const void* in, long in_bytes, void* out, long out_stride) {
  const auto* from = static_cast<const char*>(in);
  auto* to = static_cast<pair*>(out);
  __m512i r[16];
  __m512i t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * in_bytes);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    _mm512_storeu_si512(to + i * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(to + (i + 8) * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
  }
}

}  // namespace rankmesh
