// New events of one user, behind those that are encoded, through all layers of the history encoder in one call.
//
// Rows are few, so everything stays in the first two caches but the packed weights; what belongs to the user (hidden keys
// and values, the window of earlier events) is packed here, once a call. Every number of an event is one chain in an order
// that does not depend on the other events of the call.
#include <cmath>
#include <cstring>

#include "attention.h"

namespace rankmesh {
namespace {

// Weights of one layer; a part that a layer lacks has no gain.
struct Layer {
  const float* feed_forward_gain;  // [padded width]
  const float* attention_gain;     // [padded width]
  const float* gain;               // [padded width]
  PackedMatrix query_key_value;    // [3 * width]
  PackedMatrix attention_out;      // [width]
  PackedMatrix key_value;          // [2 * width]
};

// What one layer has of the user, and what it writes: rows of `width`, one behind the other.
struct Given {
  const bf16* hidden_keys;    // [hidden]
  const bf16* hidden_values;  // [hidden]
  const bf16* keys_before;    // [num_before], turned
  const bf16* values_before;  // [num_before]
  bf16* window_keys;          // [num_before + num_events]
  bf16* window_values;        // [num_before + num_events]
  bf16* keys;                 // [num_events]
  bf16* values;               // [num_events]
  std::int64_t hidden;
};

struct Stack {
  const bf16* tokens;         // [num_events][width]
  const double* clock;        // [num_events]
  const double* by_position;  // [num_position], radians an event
  const double* by_time;      // [num_time], radians a unit of the clock
  const Layer* layers;
  const Given* given;
  std::int64_t num_events;
  std::int64_t first_position;  // of the first new event
  std::int64_t num_before;      // rows of the windows, which begin with a block
  std::int64_t block;
  std::int64_t window_blocks;
  std::int32_t num_layers;
  std::int32_t width;
  std::int32_t num_heads;
  std::int32_t num_position;
  std::int32_t num_time;

  long padded() const { return round_up(width, 16); }
  long pairs() const { return (width + 1) / 2; }
  long num_seen() const { return num_before + num_events; }
  bool has_attention() const {
    for (int l = 0; l < num_layers; ++l) {
      if (layers[l].attention_gain != nullptr) return true;
    }
    return false;
  }
};

constexpr float kEpsilon = 1e-6f;
constexpr double kCircle = 6.283185307179586476925286766559;

struct Buffers {
  bf16 *tokens, *normed, *queries, *answers, *hidden, *weights, *staging_rows;
  float *wide, *cosines, *sines, *scores, *sums;
  pair *columns, *row_pairs;
  std::int32_t* staging_columns;

  Buffers(Arena& arena, const Stack& s) {
    long most_hidden = 0;
    for (int l = 0; l < s.num_layers; ++l) {
      if (s.layers[l].feed_forward_gain != nullptr && s.given[l].hidden > most_hidden) most_hidden = s.given[l].hidden;
    }
    const long n = s.num_events;
    const long padded = s.padded();
    const long hidden_columns = round_up(most_hidden, kPanel);
    const long seen = s.has_attention() ? round_up(s.num_seen(), kPanel) : 0;
    const long most = hidden_columns > seen ? hidden_columns : seen;
    tokens = arena.take<bf16>(n * padded);
    normed = arena.take<bf16>(n * padded);
    queries = arena.take<bf16>(n * padded);
    answers = arena.take<bf16>(n * padded + 16);
    hidden = arena.take<bf16>(n * hidden_columns);
    weights = arena.take<bf16>(n * seen);
    staging_rows = arena.take<bf16>(2 * padded);
    wide = arena.take<float>(n * round_up(3 * s.width, 16));
    cosines = arena.take<float>(n * padded);
    sines = arena.take<float>(n * padded);
    scores = arena.take<float>(n * seen);
    sums = arena.take<float>(n);
    columns = arena.take<pair>(most * s.pairs());
    row_pairs = arena.take<pair>(round_up(most, 2) / 2 * padded + 16);  // a head's last vector may end behind its row
    staging_columns = arena.take<std::int32_t>(kPanel * round_up(s.pairs(), 16));
  }
};

// rows x columns product of `a` with row pairs [num_pairs][b_stride], columns a multiple of 16.
template <class Init, class Store>
inline void row_product(const bf16* a, long a_stride, long rows, const pair* b, long b_stride, long num_pairs,
                        long columns, Init&& init, Store&& store) {
  long column = 0;
  for (; column + 32 <= columns; column += 32) {
    tile_rows<2, 8>(
        a, a_stride, 2, rows, b + column, b_stride, num_pairs,
        [&](long r, long z) __attribute__((always_inline)) { return init(r, column + 16 * z); },
        [&](long r, long z, __m512 v) __attribute__((always_inline)) { store(r, column + 16 * z, v); });
  }
  if (column < columns) {
    tile_rows<1, 12>(
        a, a_stride, 2, rows, b + column, b_stride, num_pairs,
        [&](long r, long) __attribute__((always_inline)) { return init(r, column); },
        [&](long r, long, __m512 v) __attribute__((always_inline)) { store(r, column, v); });
  }
}

// Rounds `count` values to bf16; nothing behind them is written.
inline void narrow(const float* from, long count, bf16* to) {
  long i = 0;
  for (; i + 16 <= count; i += 16) store_bf16(to + i, _mm512_loadu_ps(from + i));
  if (i < count) {
    const __mmask16 lanes = first_lanes(count - i);
    _mm256_mask_storeu_epi16(to + i, lanes, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes, from + i)));
  }
}

struct Call {
  const Stack& s;
  const Buffers& b;
  long n;
  long padded;

  void load() const {
    for (long r = 0; r < n; ++r) {
      std::memcpy(b.tokens + r * padded, s.tokens + r * s.width, 2 * s.width);
      std::memset(b.tokens + r * padded + s.width, 0, 2 * (padded - s.width));
    }
  }

  // By how much each pair of channels is turned, all heads alike: cosines twice, sines as (-, +).
  void turn() const {
    const long pairs = s.num_position + s.num_time;
    for (long r = 0; r < n; ++r) {
      float* cosines = b.cosines + r * padded;
      float* sines = b.sines + r * padded;
      for (long p = 0; p < pairs; ++p) {
        const double angle = p < s.num_position ? static_cast<double>(s.first_position + r) * s.by_position[p]
                                                : s.clock[r] * s.by_time[p - s.num_position];
        const float within = static_cast<float>(std::fmod(angle, kCircle));
        cosines[2 * p] = cosines[2 * p + 1] = std::cos(within);
        sines[2 * p + 1] = std::sin(within);
        sines[2 * p] = -sines[2 * p + 1];
      }
      for (long h = 1; h < s.num_heads; ++h) {
        std::memcpy(cosines + h * 2 * pairs, cosines, 8 * pairs);
        std::memcpy(sines + h * 2 * pairs, sines, 8 * pairs);
      }
    }
  }

  void norm(const float* gain) const {
    for (long r = 0; r < n; ++r) {
      const bf16* row = b.tokens + r * padded;
      __m512 squares = _mm512_setzero_ps();
      for (long column = 0; column < padded; column += 16) {
        const __m512 v = load_bf16(row + column);
        squares = _mm512_fmadd_ps(v, v, squares);
      }
      const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(s.width);
      const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + kEpsilon));
      for (long column = 0; column < padded; column += 16) {
        const __m512 scaled = _mm512_mul_ps(load_bf16(row + column), factor);
        store_bf16(b.normed + r * padded + column, _mm512_mul_ps(scaled, _mm512_loadu_ps(gain + column)));
      }
    }
  }

  void pack_rows(const bf16* x, long rows) const {
    if (s.width == padded) {
      pack_row_pairs(x, rows, padded, padded, b.row_pairs);
      return;
    }
    std::memset(b.staging_rows, 0, 4 * padded);
    for (long r = 0; r < rows; r += 2) {
      const long have = rows - r < 2 ? 1 : 2;
      for (long i = 0; i < have; ++i) std::memcpy(b.staging_rows + i * padded, x + (r + i) * s.width, 2 * s.width);
      pack_row_pairs(b.staging_rows, have, padded, padded, b.row_pairs + r / 2 * padded);
    }
  }

  // Rows of `width` channels as panels of 64 columns.
  void pack_panels(const bf16* x, long rows, long width) const {
    const long pairs = (width + 1) / 2;
    for (long r = 0; r < rows; r += kPanel) {
      const long left = rows - r;
      pack_columns(x + r * s.width, s.width, left < kPanel ? left : kPanel, width, b.columns + r * pairs,
                   b.staging_columns);
    }
  }

  // init and store of what is added to the tokens.
  auto add_to_tokens() const {
    return [this](long r, long column) __attribute__((always_inline)) {
      return load_bf16(b.tokens + r * padded + column);
    };
  }
  auto store_tokens() const {
    return [this](long r, long column, __m512 v) __attribute__((always_inline)) {
      store_bf16(b.tokens + r * padded + column, v);
    };
  }

  void feed_forward(const Layer& layer, const Given& given) const {
    const long columns = round_up(given.hidden, kPanel);
    norm(layer.feed_forward_gain);
    pack_panels(given.hidden_keys, given.hidden, s.width);
    const PackedMatrix keys{b.columns, static_cast<std::int32_t>(s.pairs()), static_cast<std::int32_t>(columns)};
    gemm<2, 8>(b.normed, padded, n, keys, zero_init,
               [&](long r, long column, __m512 v) __attribute__((always_inline)) {
                 // This order of operands keeps a NaN.
                 store_bf16(b.hidden + r * columns + column, _mm512_max_ps(_mm512_setzero_ps(), v));
               });
    pack_rows(given.hidden_values, given.hidden);
    row_product(b.hidden, columns, n, b.row_pairs, padded, (given.hidden + 1) / 2, padded, add_to_tokens(),
                store_tokens());
  }

  // Turns `width` channels in place.
  void rotate(float* x, long r) const {
    const float* cosines = b.cosines + r * padded;
    const float* sines = b.sines + r * padded;
    for (long i = 0; i < s.width; i += 16) {
      const __mmask16 lanes = first_lanes(s.width - i);
      const __m512 v = _mm512_maskz_loadu_ps(lanes, x + i);
      const __m512 swapped = _mm512_mul_ps(_mm512_permute_ps(v, 0xb1), _mm512_loadu_ps(sines + i));
      _mm512_mask_storeu_ps(x + i, lanes, _mm512_fmadd_ps(v, _mm512_loadu_ps(cosines + i), swapped));
    }
  }

  // Queries, and the window's keys and values with those of the new events behind.
  void make_heads(const Layer& layer, const Given& given) const {
    const long width = s.width;
    const long stride = layer.query_key_value.columns;
    norm(layer.attention_gain);
    gemm<2, 8>(b.normed, padded, n, layer.query_key_value, zero_init,
               [&](long r, long column, __m512 v) __attribute__((always_inline)) {
                 _mm512_storeu_ps(b.wide + r * stride + column, v);
               });
    std::memcpy(given.window_keys, given.keys_before, 2 * s.num_before * width);
    std::memcpy(given.window_values, given.values_before, 2 * s.num_before * width);
    for (long r = 0; r < n; ++r) {
      float* row = b.wide + r * stride;
      rotate(row, r);
      rotate(row + width, r);
      narrow(row, width, b.queries + r * padded);
      narrow(row + width, width, given.window_keys + (s.num_before + r) * width);
      narrow(row + 2 * width, width, given.window_values + (s.num_before + r) * width);
    }
  }

  // Numerators of one event's softmax over the keys that it sees; all others weigh exactly 0.
  void weigh(long r, long stride, float log2_scale) const {
    float* scores = b.scores + r * stride;
    const long place = s.num_before + r;
    const long skipped = place / s.block - s.window_blocks + 1;
    if (skipped > 0) fill_scores(scores, 0, skipped * s.block, -INFINITY);
    fill_scores(scores, place + 1, stride, -INFINITY);
    __m512 top = _mm512_loadu_ps(scores);
    for (long j = 16; j < stride; j += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + j));
    const __m512 shift = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    const __m512 scale = _mm512_set1_ps(log2_scale);
    __m512 sum = _mm512_setzero_ps();
    for (long j = 0; j < stride; j += 32) {
      const __m512 low = exp2_nonpositive(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + j), shift), scale));
      const __m512 high =
          exp2_nonpositive(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + j + 16), shift), scale));
      sum = _mm512_add_ps(_mm512_add_ps(sum, low), high);
      _mm512_storeu_si512(b.weights + r * stride + j, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    b.sums[r] = _mm512_reduce_add_ps(sum);
  }

  void attend(const Given& given) const {
    const long seen = s.num_seen();
    const long stride = round_up(seen, kPanel);
    const long head = s.width / s.num_heads;
    const float log2_scale = 1.44269504f / std::sqrt(static_cast<float>(head));
    pack_rows(given.window_values, seen);
    for (long h = 0; h < s.num_heads; ++h) {
      pack_panels(given.window_keys + h * head, seen, head);
      const PackedMatrix keys{b.columns, static_cast<std::int32_t>(head / 2), static_cast<std::int32_t>(stride)};
      gemm<2, 8>(b.queries + h * head, padded, n, keys, zero_init,
                 [&](long r, long column, __m512 v) __attribute__((always_inline)) {
                   _mm512_storeu_ps(b.scores + r * stride + column, v);
                 });
      for (long r = 0; r < n; ++r) weigh(r, stride, log2_scale);
      row_product(b.weights, stride, n, b.row_pairs + h * head, padded, (seen + 1) / 2, round_up(head, 16), zero_init,
                  [&](long r, long column, __m512 v) __attribute__((always_inline)) {
                    const __m512 scaled = _mm512_mul_ps(v, _mm512_set1_ps(1.0f / b.sums[r]));
                    const __mmask16 lanes = first_lanes(head - column);
                    bf16* to = b.answers + r * padded + h * head + column;
                    if (lanes == 0xffff) {
                      store_bf16(to, scaled);
                    } else {
                      _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(scaled));
                    }
                  });
    }
  }

  void run() const {
    load();
    if (s.has_attention()) turn();
    for (int l = 0; l < s.num_layers; ++l) {
      const Layer& layer = s.layers[l];
      const Given& given = s.given[l];
      if (layer.feed_forward_gain != nullptr) feed_forward(layer, given);
      if (layer.attention_gain != nullptr) {
        make_heads(layer, given);
        attend(given);
        gemm<2, 8>(b.answers, padded, n, layer.attention_out, add_to_tokens(), store_tokens());
      }
      norm(layer.gain);
      const long stride = layer.key_value.columns;
      gemm<2, 8>(b.normed, padded, n, layer.key_value, zero_init,
                 [&](long r, long column, __m512 v) __attribute__((always_inline)) {
                   _mm512_storeu_ps(b.wide + r * stride + column, v);
                 });
      for (long r = 0; r < n; ++r) {
        narrow(b.wide + r * stride, s.width, given.keys + r * s.width);
        narrow(b.wide + r * stride + s.width, s.width, given.values + r * s.width);
      }
    }
  }
};

}  // namespace
}  // namespace rankmesh

using namespace rankmesh;

// On the calling thread: there is too little work to share.
RANKMESH_API int rankmesh_event_layers(const Stack* given) {
  Arena size(nullptr);
  Buffers unused(size, *given);
  std::byte* memory = workspace(size.used(), 1);
  if (memory == nullptr) return 1;
  Arena arena(memory);
  const Buffers buffers(arena, *given);
  Call{*given, buffers, given->num_events, given->padded()}.run();
  return 0;
}
