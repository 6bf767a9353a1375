// Packing of keys and values, attention of candidates to their request's history, block attention within sequences.
#include "attention.h"

#include <cstring>

namespace rankmesh {
namespace {

// Packs 64 values [64][stride] into row pairs [32][value_width].
void pack_value_panel(const bf16* v, long stride, long rows, long head_width, pair* out, bf16* staging) {
  const long width = round_up(head_width, 16);
  if (rows == kKeyPanel && head_width == width) {
    pack_row_pairs(v, kKeyPanel, width, stride, out);
    return;
  }
  std::memset(staging, 0, sizeof(bf16) * kKeyPanel * width);
  for (long r = 0; r < rows; ++r) std::memcpy(staging + r * width, v + r * stride, 2 * head_width);
  pack_row_pairs(staging, kKeyPanel, width, width, out);
}

struct KeySource {
  const bf16* keys;    // position p, head h at keys + (p * num_heads + h) * head_width
  const bf16* values;
  const std::int64_t* offsets;    // [B + 1] positions
  const std::int64_t* positions;  // [offsets[B]] which row of keys a position reads, or nullptr for itself
};

long pack_bytes(long head_width) { return 4 * kKeyPanel * round_up(head_width, 32) + 64; }

// One panel of 64 positions of one sequence, all heads.
void pack_panel(const KeySource& source, const PackedKeys& to, long sequence, long panel, std::byte* scratch) {
  const long heads = to.num_heads;
  const long width = to.head_width;
  const long begin = source.offsets[sequence] + panel * kKeyPanel;
  const long left = source.offsets[sequence + 1] - begin;
  const long rows = left < kKeyPanel ? left : kKeyPanel;
  auto* gathered_keys = reinterpret_cast<bf16*>(scratch);
  bf16* gathered_values = gathered_keys + kKeyPanel * heads * width;
  auto* staging = scratch + round_up(4 * kKeyPanel * heads * width, 64);
  const bf16* k = source.keys + begin * heads * width;
  const bf16* v = source.values + begin * heads * width;
  if (source.positions != nullptr) {
    for (long r = 0; r < rows; ++r) {
      const long from = source.positions[begin + r] * heads * width;
      std::memcpy(gathered_keys + r * heads * width, source.keys + from, 2 * heads * width);
      std::memcpy(gathered_values + r * heads * width, source.values + from, 2 * heads * width);
    }
    k = gathered_keys;
    v = gathered_values;
  }
  for (long h = 0; h < heads; ++h) {
    const Head head = head_of(to, sequence, h);
    auto* keys = const_cast<pair*>(head.keys) + panel * kKeyPanel * head.key_pairs;
    auto* values = const_cast<pair*>(head.values) + panel * kKeyPanel / 2 * head.value_width;
    pack_columns(k + h * width, heads * width, rows, width, keys, reinterpret_cast<std::int32_t*>(staging));
    pack_value_panel(v + h * width, heads * width, rows, width, values, reinterpret_cast<bf16*>(staging));
  }
}

// Queries of one head, rows of `width` bf16 at `stride`, copied to [rows][padded] with a zero behind an odd width.
void gather_queries(const bf16* q, long stride, long rows, long width, long padded, bf16* out) {
  for (long r = 0; r < rows; ++r) {
    std::memcpy(out + r * padded, q + r * stride, 2 * width);
    if (padded > width) out[r * padded + width] = 0;
  }
}

void store_answer(void* out, bool is_fp32, long at, long count, __m512 v) {
  const __mmask16 lanes = first_lanes(count);
  if (!is_fp32 && lanes == 0xffff) {
    store_bf16(static_cast<bf16*>(out) + at, v);  // a masked store of halves takes several times as long
  } else if (is_fp32) {
    _mm512_mask_storeu_ps(static_cast<float*>(out) + at, lanes, v);
  } else {
    _mm256_mask_storeu_epi16(static_cast<bf16*>(out) + at, lanes, (__m256i)_mm512_cvtneps_pbh(v));
  }
}

}  // namespace
}  // namespace rankmesh

using namespace rankmesh;

// Packs B sequences. keys, values: [positions][heads][head_width].
RANKMESH_API int rankmesh_pack_keys(const KeySource* source, const PackedKeys* to, long num_sequences, int num_threads) {
  const long heads = to->num_heads;
  const long width = to->head_width;
  const long bytes = round_up(4 * kKeyPanel * heads * width, 64) + round_up(pack_bytes(width), 64);
  std::byte* memory = workspace(bytes, num_threads);
  if (memory == nullptr) return 1;
  const long num_panels = to->starts[num_sequences] / kKeyPanel;
  parallel_for(num_panels, num_threads, [&](long task, int worker) {
    const long position = task * kKeyPanel;
    const long sequence = find_sequence(to->starts + 1, num_sequences, position);
    pack_panel(*source, *to, sequence, (position - to->starts[sequence]) / kKeyPanel, memory + worker * bytes);
  });
  return 0;
}

// Candidates to the keys of their requests. order: candidates sorted by request.
// q [C][num_queries][heads][head_width], out of the same shape. One task: one head of up to rows_max query rows.
struct BroadcastArguments {
  const bf16* q;
  void* out;
  const std::int64_t* order;
  const std::int64_t* tasks;  // [num_tasks][3]: request, first and last place in order
  std::int64_t num_tasks;
  std::int64_t rows_max;
  std::int32_t num_queries;
  std::int32_t activation;
  std::int32_t out_is_fp32;
  float scale;
};

RANKMESH_API int rankmesh_broadcast_attention(const BroadcastArguments* given, const PackedKeys* packed,
                                              int num_threads) {
  const BroadcastArguments& a = *given;
  const long heads = packed->num_heads;
  const long width = packed->head_width;
  const long padded = 2 * packed->key_pairs();
  Arena size(nullptr);
  size.take<bf16>(a.rows_max * padded);
  AttentionScratch unused(size, packed->value_width());
  std::byte* memory = workspace(size.used(), num_threads);
  if (memory == nullptr) return 1;
  parallel_for(a.num_tasks * heads, num_threads, [&](long item, int worker) {
    Arena arena(memory + worker * size.used());
    bf16* q = arena.take<bf16>(a.rows_max * padded);
    const AttentionScratch scratch(arena, packed->value_width());
    const std::int64_t* task = a.tasks + item / heads * 3;
    const long h = item % heads;
    const long per_candidate = a.num_queries * heads * width;
    for (long c = task[1]; c < task[2]; ++c) {
      gather_queries(a.q + a.order[c] * per_candidate + h * width, heads * width, a.num_queries, width, padded,
                     q + (c - task[1]) * a.num_queries * padded);
    }
    const auto emit = [&](long row, long column, __m512 v) {
      const long candidate = a.order[task[1] + row / a.num_queries];
      const long at = candidate * per_candidate + (row % a.num_queries * heads + h) * width + column;
      store_answer(a.out, a.out_is_fp32 != 0, at, width - column, v);
    };
    const long num_keys = packed->lengths[task[0]];
    const long rows = (task[2] - task[1]) * a.num_queries;
    if (a.activation == static_cast<int>(Activation::kSoftmax)) {
      attend<Activation::kSoftmax>(q, padded, rows, head_of(*packed, task[0], h), num_keys, a.scale, scratch, emit);
    } else {
      attend<Activation::kSilu>(q, padded, rows, head_of(*packed, task[0], h), num_keys, a.scale, scratch, emit);
    }
  });
  return 0;
}
