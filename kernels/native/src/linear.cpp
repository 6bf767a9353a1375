// Linears over rows: bf16 with the request's part in fp32, and int8 with scales by row and by output channel.
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>

#include "gemm.h"
#include "parallel.h"

namespace rankmesh {
namespace {

__m512 load_row(const float* x, long column, long width) {
  return _mm512_maskz_loadu_ps(first_lanes(width - column), x + column);
}

void store_row(void* out, bool is_fp32, long at, long column, long width, __m512 v) {
  const __mmask16 lanes = first_lanes(width - column);
  if (is_fp32) {
    _mm512_mask_storeu_ps(static_cast<float*>(out) + at + column, lanes, v);
  } else if (lanes == 0xffff) {
    store_bf16(static_cast<bf16*>(out) + at + column, v);  // a masked store of halves takes several times as long
  } else {
    _mm256_mask_storeu_epi16(static_cast<bf16*>(out) + at + column, lanes, (__m256i)_mm512_cvtneps_pbh(v));
  }
}

// This order of operands keeps a NaN.
__m512 relu(__m512 v) { return _mm512_max_ps(_mm512_setzero_ps(), v); }

// x [rows][width] of fp32 or bf16, 16 elements from `column` on; 0 behind the end.
struct Rows {
  const void* data;
  long width;
  bool is_fp32;

  __m512 load(long row, long column) const {
    const __mmask16 lanes = first_lanes(width - column);
    const long at = row * width + column;
    if (is_fp32) return _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(data) + at);
    const __m256i raw = _mm256_maskz_loadu_epi16(lanes, static_cast<const bf16*>(data) + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
};

// Quantizes one row to 8 bits around `zero` and returns its scale. With a gain the row is RMS-normalised first: the
// normalising factor is the same for the whole row, so it goes into the scale and the row is read only twice.
float quantize_row(const Rows& x, long row, const float* gain, float epsilon, std::int32_t zero, std::uint8_t* out) {
  __m512 top = _mm512_setzero_ps();
  __m512 squares = _mm512_setzero_ps();
  __mmask16 is_nan = 0;
  for (long column = 0; column < x.width; column += 16) {
    __m512 v = x.load(row, column);
    if (gain != nullptr) {
      squares = _mm512_fmadd_ps(v, v, squares);
      v = _mm512_mul_ps(v, load_row(gain, column, x.width));
    }
    is_nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    top = _mm512_max_ps(top, _mm512_abs_ps(v));
  }
  const float largest = _mm512_reduce_max_ps(top);
  const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
  for (long column = 0; column < x.width; column += 16) {
    __m512 v = x.load(row, column);
    if (gain != nullptr) v = _mm512_mul_ps(v, load_row(gain, column, x.width));
    // A row with an infinity has inverse 0 and a scale of infinity: the answer is not finite, as it should be.
    const __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(v, inverse)), _mm512_set1_epi32(zero));
    _mm_mask_storeu_epi8(out + column, first_lanes(x.width - column), _mm512_cvtepi32_epi8(q));
  }
  float scale = largest / 127.0f;
  if (gain != nullptr) scale /= std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(x.width) + epsilon);
  return is_nan != 0 ? NAN : scale;
}

// int8 tile: like `tile` of gemm.h, four consecutive k an element, exact int32 sums.
template <int MR, int NZ, class Store>
__attribute__((always_inline)) inline void tile_int8(const std::uint8_t* a, long a_row, const std::int32_t* b, long b_step,
                                                     long num_quads, Store&& store) {
  // Not __m512i: GCC 12 then keeps the array in memory, because the intrinsic reads it as another vector type, and every
  // product waits for a store (0.95 instead of 1.9 times the bf16 rate).
  using Lanes = std::int32_t __attribute__((vector_size(64)));
  Lanes acc[MR][NZ];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) acc[i][z] = Lanes{};
  }
  for (long k = 0; k < num_quads; ++k) {
    __m512i column[NZ];
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) column[z] = _mm512_loadu_si512(b + k * b_step + 16 * z);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      std::int32_t four;
      std::memcpy(&four, a + i * a_row + 4 * k, sizeof(four));
      const __m512i row = _mm512_set1_epi32(four);
#pragma GCC unroll 4
      for (int z = 0; z < NZ; ++z) acc[i][z] = (Lanes)_mm512_dpbusd_epi32((__m512i)acc[i][z], row, column[z]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int z = 0; z < NZ; ++z) store(i, z, (__m512i)acc[i][z]);
  }
}

template <int NZ, class Store>
inline void tile_rows_int8(const std::uint8_t* a, long a_row, long rows, const std::int32_t* b, long b_step,
                           long num_quads, Store&& store) {
  in_tiles<6>(rows, [&](auto size, long r) __attribute__((always_inline)) {
    tile_int8<decltype(size)::value, NZ>(
        a + r * a_row, a_row, b, b_step, num_quads,
        [&](int i, int z, __m512i v) __attribute__((always_inline)) { store(r + i, z, v); });
  });
}

// Cuts rows and columns (in panels of 64) into tasks: row chunks first, columns only where there are too few of them.
struct Grid {
  long rows, chunk, panels, column_groups;

  Grid(long num_rows, long chunk_rows, long columns, int num_threads) : rows(num_rows), chunk(chunk_rows) {
    panels = (columns + 63) / 64;
    column_groups = num_chunks() >= num_threads ? 1 : num_threads;
    if (column_groups > panels) column_groups = panels;
  }
  long num_chunks() const { return (rows + chunk - 1) / chunk; }
  long num_tasks() const { return num_chunks() * column_groups; }
  long first_row(long task) const { return task / column_groups * chunk; }
  long num_rows(long task) const { return rows - first_row(task) < chunk ? rows - first_row(task) : chunk; }
  long first_panel(long task) const { return task % column_groups * panels / column_groups; }
  long end_panel(long task) const { return (task % column_groups + 1) * panels / column_groups; }
};

}  // namespace
}  // namespace rankmesh

using namespace rankmesh;

// act(x W^T + part of the row's request). The parts are given, or computed first from the requests' own inputs.
struct BroadcastLinearArguments {
  const bf16* x;                 // [C][2 * weight.num_pairs]
  float* request_part;           // [B][outputs], nullptr: zero
  const std::int32_t* requests;  // [C], nullptr: all of request 0
  void* out;                     // [C][outputs]
  const bf16* request_x;         // [B][2 * request_weight.num_pairs], nullptr: request_part is given
  PackedMatrix weight;
  PackedMatrix request_weight;
  std::int64_t num_rows;
  std::int64_t num_requests;
  std::int64_t chunk;
  std::int64_t outputs;
  std::int32_t relu;
  std::int32_t out_is_fp32;
};

namespace {

// One panel of the requests' parts.
void request_panel(const BroadcastLinearArguments& a, long panel) {
  const long column0 = panel * 64;
  const long x_stride = 2L * a.request_weight.num_pairs;
  gemm(
      a.request_x, x_stride, a.num_requests, a.request_weight.columns_of(column0, column0 + 64), zero_init,
      [&](long r, long column, __m512 v) __attribute__((always_inline)) {
        store_row(a.request_part, true, r * a.outputs, column0 + column, a.outputs, v);
      });
}

template <int NZ, int MAX>
__attribute__((noinline)) void linear_tiles(const BroadcastLinearArguments& a, long first, long rows, long column0, long end) {
  const long x_stride = 2L * a.weight.num_pairs;
  const long outputs = a.outputs;
  const float* part = a.request_part == nullptr ? nullptr : a.request_part + column0;
  const std::int32_t* requests = a.requests == nullptr ? nullptr : a.requests + first;
  const __m512 floor = _mm512_set1_ps(a.relu != 0 ? 0.0f : -INFINITY);
  const bf16* x = a.x + first * x_stride;
  const PackedMatrix weight = a.weight.columns_of(column0, end);
  // By value: what is stored could otherwise be any of these, and each of them would be read again for each vector.
  if (part != nullptr && requests == nullptr && a.out_is_fp32 == 0 && column0 + weight.columns <= outputs) {
    // The common case without a question a vector: with few inputs those would weigh as much as a tenth of the product.
    bf16* const out = static_cast<bf16*>(a.out) + first * outputs + column0;
    gemm<NZ, MAX>(
        x, x_stride, rows, weight,
        [=](long, long column) __attribute__((always_inline)) { return _mm512_loadu_ps(part + column); },
        [=](long r, long column, __m512 v) __attribute__((always_inline)) {
          store_bf16(out + r * outputs + column, _mm512_max_ps(floor, v));
        });
    return;
  }
  void* const out = a.out;
  const bool is_fp32 = a.out_is_fp32 != 0;
  gemm<NZ, MAX>(
      x, x_stride, rows, weight,
      [=](long r, long column) __attribute__((always_inline)) {
        if (part == nullptr) return _mm512_setzero_ps();
        const long request = requests == nullptr ? 0 : requests[r];
        return load_row(part + request * outputs, column, outputs - column0);
      },
      [=](long r, long column, __m512 v) __attribute__((always_inline)) {
        // This order of operands keeps a NaN.
        store_row(out, is_fp32, (first + r) * outputs, column0 + column, outputs, _mm512_max_ps(floor, v));
      });
}

void linear_chunk(const BroadcastLinearArguments& a, long first, long rows, long column0, long end) {
  if (a.weight.num_pairs <= kShallowPairs) {
    linear_tiles<2, 12>(a, first, rows, column0, end);
  } else {
    linear_tiles<4, 6>(a, first, rows, column0, end);
  }
}

// Both halves panel by panel: the requests' parts of a panel, then the rows, in groups of about kGroupRows. As many panels
// as there are threads are under way at once, all first groups before the second ones, so that hardly a thread waits for the
// parts that another one computes, and what is left over at the end is one group.
struct PanelsOfBoth {
  static constexpr long kGroupRows = 384;
  static constexpr long kTileRows = 12;

  const BroadcastLinearArguments& a;
  long num_panels, at_once, num_groups, group_rows;
  std::unique_ptr<std::atomic<bool>[]> is_ready;  // by panel: the requests' parts are there

  PanelsOfBoth(const BroadcastLinearArguments& given, long panels, long num_threads)
      : a(given), num_panels(panels), at_once(num_threads), is_ready(new std::atomic<bool>[panels] {}) {
    num_groups = a.num_rows < 2 * kGroupRows ? 1 : (a.num_rows + kGroupRows / 2) / kGroupRows;
    group_rows = round_up((a.num_rows + num_groups - 1) / num_groups, kTileRows);
  }

  long num_tasks() const { return num_panels * num_groups; }

  void run(long task) const {
    const long block = task / (at_once * num_groups) * at_once;
    const long width = num_panels - block < at_once ? num_panels - block : at_once;
    task -= block * num_groups;
    const long panel = block + task % width;
    const long first = task / width * group_rows;
    if (first == 0) {
      request_panel(a, panel);
      is_ready[panel].store(true, std::memory_order_release);
    }
    // Tasks are handed out in order, so somebody has begun the panel, and a first group waits for nobody.
    while (!is_ready[panel].load(std::memory_order_acquire)) _mm_pause();
    const long rows = a.num_rows - first < group_rows ? a.num_rows - first : group_rows;
    if (rows > 0) rows_of(panel, first, rows);
  }

  // Between the rows a later panel of the requests' weight is fetched: a single request's row is bound by reading that
  // weight, the rows by arithmetic, so each hides the other.
  void rows_of(long panel, long first, long rows) const {
    constexpr long kRows = 4 * kTileRows;
    constexpr long kLine = 64;
    const long bytes = 64L * a.request_weight.num_pairs * static_cast<long>(sizeof(pair));
    const char* next = reinterpret_cast<const char*>(a.request_weight.data) + (panel + at_once) * bytes;
    const long next_bytes = (panel + at_once + 1) * 64 <= a.request_weight.columns ? bytes : 0;
    for (long r = first; r < first + rows; r += kRows) {
      const long count = first + rows - r < kRows ? first + rows - r : kRows;
      linear_chunk(a, r, count, panel * 64, panel * 64 + 64);
      const long end = next_bytes * (r + count) / a.num_rows;
      for (long at = round_up(next_bytes * r / a.num_rows, kLine); at < end; at += kLine) {
        _mm_prefetch(next + at, _MM_HINT_T1);
      }
    }
  }
};

}  // namespace

RANKMESH_API int rankmesh_broadcast_linear(const BroadcastLinearArguments* given, int num_threads) {
  const BroadcastLinearArguments& a = *given;
  const long num_panels = (a.weight.columns + 63) / 64;
  if (a.request_x != nullptr && num_panels >= 4L * num_threads) {
    const PanelsOfBoth panels(a, num_panels, num_threads);
    parallel_for(panels.num_tasks(), num_threads, [&](long task, int) { panels.run(task); });
    return 0;
  }
  const Grid grid(a.num_rows, a.chunk, a.weight.columns, num_threads);
  const long first_task = a.request_x == nullptr ? 0 : num_panels;
  std::atomic<long> panels_done{0};
  parallel_for(first_task + grid.num_tasks(), num_threads, [&](long task, int) {
    if (task < first_task) {
      request_panel(a, task);
      panels_done.fetch_add(1, std::memory_order_release);
      return;
    }
    // Tasks are handed out in order: whoever comes here waits for panels that others have begun, and those wait for none.
    while (panels_done.load(std::memory_order_acquire) < first_task) _mm_pause();
    task -= first_task;
    linear_chunk(a, grid.first_row(task), grid.num_rows(task), grid.first_panel(task) * 64, grid.end_panel(task) * 64);
  });
  return 0;
}

struct QuantizeArguments {
  const void* x;  // [rows][width]
  const float* gain;  // [width] or nullptr
  std::uint8_t* out;  // [rows][width], signed
  float* scales;      // [rows]
  std::int64_t num_rows;
  std::int64_t width;
  std::int32_t is_fp32;
  float epsilon;
};

RANKMESH_API int rankmesh_quantize_rows(const QuantizeArguments* given, int num_threads) {
  const QuantizeArguments& a = *given;
  const Rows x{a.x, a.width, a.is_fp32 != 0};
  constexpr long kRows = 32;
  parallel_for((a.num_rows + kRows - 1) / kRows, num_threads, [&](long task, int) {
    const long end = (task + 1) * kRows < a.num_rows ? (task + 1) * kRows : a.num_rows;
    for (long r = task * kRows; r < end; ++r) {
      a.scales[r] = quantize_row(x, r, a.gain, a.epsilon, 0, a.out + r * a.width);
    }
  });
  return 0;
}

// Weight [outputs, 4 * num_quads] in panels of 64 columns, as PackedMatrix, four int8 of consecutive k an element.
struct Int8LinearArguments {
  const void* x;  // [rows][width]
  const float* gain;
  const std::int32_t* weight;
  const float* weight_scales;    // [columns]
  const std::int32_t* offsets;   // [columns], 128 * sum of the column: what the zero point adds
  const float* bias;             // [outputs], [rows][outputs] or nullptr
  void* out;                     // [rows][outputs]
  std::int64_t num_rows;
  std::int64_t chunk;
  std::int64_t width;
  std::int64_t outputs;
  std::int64_t columns;  // a multiple of 16
  std::int64_t num_quads;
  std::int64_t bias_stride;
  std::int32_t x_is_fp32;
  std::int32_t out_is_fp32;
  std::int32_t relu;
  float epsilon;
};

namespace {

struct QuantizedChunk {
  std::uint8_t* rows;
  float* scales;
  long stride;
};

template <int NZ>
void int8_columns(const Int8LinearArguments& a, const QuantizedChunk& q, long first, long rows, const std::int32_t* panel,
                  long panel_width, long column) {
  tile_rows_int8<NZ>(q.rows, q.stride, rows, panel, panel_width, a.num_quads,
                     [&](long r, long z, __m512i v) __attribute__((always_inline)) {
                       const long at = column + 16 * z;
                       v = _mm512_sub_epi32(v, _mm512_loadu_si512(a.offsets + at));
                       const __m512 scale =
                           _mm512_mul_ps(_mm512_set1_ps(q.scales[r]), _mm512_loadu_ps(a.weight_scales + at));
                       __m512 sum = _mm512_setzero_ps();
                       if (a.bias != nullptr) sum = load_row(a.bias + (first + r) * a.bias_stride, at, a.outputs);
                       sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(v), scale, sum);
                       store_row(a.out, a.out_is_fp32 != 0, (first + r) * a.outputs, at, a.outputs,
                                 a.relu != 0 ? relu(sum) : sum);
                     });
}

}  // namespace

RANKMESH_API int rankmesh_int8_linear(const Int8LinearArguments* given, int num_threads) {
  const Int8LinearArguments& a = *given;
  const Grid grid(a.num_rows, a.chunk, a.columns, num_threads);
  const long stride = round_up(4 * a.num_quads, 64);
  const std::size_t bytes = round_up(a.chunk * stride + 4 * a.chunk, 64);
  std::byte* memory = workspace(bytes, num_threads);
  if (memory == nullptr) return 1;
  const Rows x{a.x, a.width, a.x_is_fp32 != 0};
  parallel_for(grid.num_tasks(), num_threads, [&](long task, int worker) {
    std::byte* own = memory + worker * bytes;
    const QuantizedChunk q{reinterpret_cast<std::uint8_t*>(own), reinterpret_cast<float*>(own + a.chunk * stride), stride};
    const long first = grid.first_row(task);
    const long rows = grid.num_rows(task);
    for (long r = 0; r < rows; ++r) {
      q.scales[r] = quantize_row(x, first + r, a.gain, a.epsilon, 128, q.rows + r * stride);
      // Weights behind the row's end are 0, so what is multiplied with them does not matter, but it must be a value.
      std::memset(q.rows + r * stride + a.width, 0, 4 * a.num_quads - a.width);
    }
    for (long p = grid.first_panel(task); p < grid.end_panel(task); ++p) {
      const long column = p * 64;
      const long width = a.columns - column < 64 ? a.columns - column : 64;
      const std::int32_t* panel = a.weight + column * a.num_quads;
      if (width == 64) {
        int8_columns<4>(a, q, first, rows, panel, width, column);
        continue;
      }
      if (width >= 32) int8_columns<2>(a, q, first, rows, panel, width, column);
      if (width % 32) int8_columns<1>(a, q, first, rows, panel + width - 16, width, column + width - 16);
    }
  });
  return 0;
}
