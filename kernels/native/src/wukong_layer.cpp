// The candidate side of a stack of interaction layers, fused: a chunk of candidates goes through all layers before the
// next chunk begins, so that its activations stay in the L2 cache and only the packed weights stream past.
//
// Tokens are candidate-major: [C][tokens][width] bf16. Within a chunk every candidate has a slot of slot_rows rows of
// `padded` width: its n tokens, then what its queries saw. Everything that is computed for a candidate depends on its own
// slot and its request alone, in an order that does not depend on the chunk.
#include <cmath>
#include <cstring>

#include "attention.h"

namespace rankmesh {
namespace {

// Sizes and packed weights of one layer. Matrices on the token axis are plain bf16 rows padded with zero to an even
// length; `mixtures` is its transpose in row pairs [pairs of seen tokens][padded mixtures].
struct Layer {
  std::int32_t num_tokens, num_queries, num_mixtures, num_mlp_tokens, num_linear_tokens, num_residual_tokens;
  float product_epsilon;
  const bf16* query_tokens;       // [num_queries][even num_tokens]
  PackedMatrix query;             // [heads * head columns, padded width]
  PackedMatrix attention_out;     // [padded width, heads * head columns]
  const pair* mixtures;           // [seen pairs][padded mixtures]
  const float* product_gain;      // [product_stride]
  PackedMatrix up;                // [padded hidden, num_seen * num_mixtures]
  PackedMatrix down;              // [num_mlp_tokens * padded width, padded hidden]
  const bf16* linear;             // [num_linear_tokens][even num_seen]
  const bf16* residual;           // [num_out][even num_tokens], nullptr: identity
  const float* gain;              // [padded width]

  long num_seen() const { return num_tokens + num_queries; }
  long num_out() const { return num_mlp_tokens + num_linear_tokens + num_residual_tokens; }
  long padded_mixtures() const { return round_up(num_mixtures, 16); }
  long num_products() const { return num_seen() * num_mixtures; }
  long product_stride() const { return round_up(num_products(), 32); }
};

// What the requests give to one layer, fp32; `keys` is not read by a layer without queries.
struct Given {
  const float* queries;   // [B][num_queries][heads * head columns]
  const float* mixtures;  // [B][padded width][padded mixtures], the transpose
  const float* linear;    // [B][num_linear_tokens][padded width]
  const float* hidden;    // [B][padded hidden]
  PackedKeys keys;
};

struct Stack {
  const bf16* tokens;
  bf16* out;
  const std::int64_t* order;     // [C], candidates sorted by request
  const std::int32_t* requests;  // [C], request of each candidate (not sorted)
  const Layer* layers;
  const Given* given;
  std::int64_t num_candidates;
  std::int64_t chunk;
  std::int32_t num_layers;
  std::int32_t width;
};

constexpr float kEpsilon = 1e-6f;

struct Buffers {
  bf16 *slots, *mapped, *queries, *answers, *products, *hidden;
  float* mlp;
  pair *token_pairs, *mixture_pairs;
  float *product_row, *rows;
  std::int32_t* requests;

  Buffers(Arena& arena, const Stack& s) {
    long slot = 0, query = 0, head = 0, product = 0, hide = 0, mlp_columns = 0, seen = 0, mix = 0, product_fp32 = 0, outs = 0;
    const long padded = round_up(s.width, 16);
    const auto raise = [](long& to, long value) { to = value > to ? value : to; };
    for (int l = 0; l < s.num_layers; ++l) {
      const Layer& layer = s.layers[l];
      raise(slot, layer.num_seen() > layer.num_out() ? layer.num_seen() : layer.num_out());
      raise(query, layer.num_queries * padded);
      raise(head, static_cast<long>(layer.num_queries) * layer.query.columns);
      raise(product, layer.product_stride());
      raise(hide, layer.up.columns);
      raise(mlp_columns, layer.down.columns);
      raise(seen, round_up(layer.num_seen(), 2) / 2 * padded);
      raise(mix, padded / 2 * layer.padded_mixtures());
      raise(product_fp32, layer.product_stride() + 16);
      raise(outs, layer.num_out() * padded);
    }
    slots = arena.take<bf16>(s.chunk * slot * padded);
    mapped = arena.take<bf16>(s.chunk * query);
    queries = arena.take<bf16>(s.chunk * head);
    answers = arena.take<bf16>(s.chunk * head);
    products = arena.take<bf16>(s.chunk * product);
    hidden = arena.take<bf16>(s.chunk * hide);
    mlp = arena.take<float>(s.chunk * mlp_columns);
    token_pairs = arena.take<pair>(seen);
    mixture_pairs = arena.take<pair>(mix);
    product_row = arena.take<float>(product_fp32);
    rows = arena.take<float>(outs);
    requests = arena.take<std::int32_t>(s.chunk);
    slot_elements = slot * padded;
  }

  long slot_elements;
};

// One worker's pass over one chunk.
struct Chunk {
  const Stack& stack;
  const Buffers& b;
  const AttentionScratch& attention;
  long first;
  long count;
  long padded;

  bf16* slot(long c) const { return b.slots + c * b.slot_elements; }

  void load(long num_tokens) const {
    const long width = stack.width;
    for (long c = 0; c < count; ++c) {
      const long candidate = stack.order[first + c];
      b.requests[c] = stack.requests[candidate];
      const bf16* from = stack.tokens + candidate * num_tokens * width;
      if (width == padded) {
        std::memcpy(slot(c), from, 2 * num_tokens * width);
        continue;
      }
      for (long r = 0; r < num_tokens; ++r) {
        std::memcpy(slot(c) + r * padded, from + r * width, 2 * width);
        std::memset(slot(c) + r * padded + width, 0, 2 * (padded - width));
      }
    }
  }

  void store(long num_tokens) const {
    const long width = stack.width;
    for (long c = 0; c < count; ++c) {
      bf16* to = stack.out + stack.order[first + c] * num_tokens * width;
      for (long r = 0; r < num_tokens; ++r) std::memcpy(to + r * width, slot(c) + r * padded, 2 * width);
    }
  }

  // rows [num_rows][padded] += or = weights [num_rows][weight_stride] x token pairs [num_pairs][padded].
  template <class Init, class Store>
  void map_tokens(const bf16* weights, long weight_stride, long num_rows, long num_pairs, Init&& init,
                  Store&& store) const {
    for (long column = 0; column < padded; column += 64) {
      const auto run = [&](auto zmms, long from) __attribute__((always_inline)) {
        constexpr int kZ = decltype(zmms)::value;
        tile_rows<kZ>(
            weights, weight_stride, 2, num_rows, b.token_pairs + from, padded, num_pairs,
            [&](long r, long z) __attribute__((always_inline)) { return init(r, from + 16 * z); },
            [&](long r, long z, __m512 v) __attribute__((always_inline)) { store(r, from + 16 * z, v); });
      };
      const long width = padded - column;
      if (width >= 64) {
        run(std::integral_constant<int, 4>{}, column);
        continue;
      }
      if (width >= 32) run(std::integral_constant<int, 2>{}, column);
      if (width % 32) run(std::integral_constant<int, 1>{}, column + width - 16);
    }
  }

  // Queries of the chunk, their attention to the history, and attention_out: fills the rows behind each slot's tokens.
  void see(const Layer& layer, const Given& given) const {
    const long n = layer.num_tokens;
    const long nq = layer.num_queries;
    const long query_width = layer.query.columns;
    for (long c = 0; c < count; ++c) {
      pack_row_pairs(slot(c), n, padded, padded, b.token_pairs);
      bf16* mapped = b.mapped + c * nq * padded;
      map_tokens(layer.query_tokens, round_up(n, 2), nq, round_up(n, 2) / 2, zero_init,
                 [&](long r, long column, __m512 v) __attribute__((always_inline)) {
                   store_bf16(mapped + r * padded + column, v);
                 });
    }
    gemm(
        b.mapped, padded, count * nq, layer.query,
        [&](long r, long column) __attribute__((always_inline)) {
          const long at = (b.requests[r / nq] * nq + r % nq) * query_width + column;
          return _mm512_loadu_ps(given.queries + at);
        },
        [&](long r, long column, __m512 v) __attribute__((always_inline)) {
          store_bf16(b.queries + r * query_width + column, v);
        });
    for (long begin = 0; begin < count;) {
      long end = begin + 1;
      while (end < count && b.requests[end] == b.requests[begin]) ++end;
      attend_run(given.keys, b.requests[begin], begin * nq, (end - begin) * nq, query_width);
      begin = end;
    }
    gemm(b.answers, query_width, count * nq, layer.attention_out, zero_init,
         [&](long r, long column, __m512 v) __attribute__((always_inline)) {
           store_bf16(slot(r / nq) + (n + r % nq) * padded + column, v);
         });
  }

  // Query rows [first_row, first_row + rows), all of one request.
  void attend_run(const PackedKeys& keys, long request, long first_row, long rows, long query_width) const {
    const float scale = 1.0f / std::sqrt(static_cast<float>(keys.head_width));
    const long head_columns = keys.value_width();
    for (long h = 0; h < keys.num_heads; ++h) {
      bf16* answers = b.answers + first_row * query_width + h * head_columns;
      attend<Activation::kSoftmax>(b.queries + first_row * query_width + h * head_columns, query_width, rows,
                                   head_of(keys, request, h), keys.lengths[request], scale, attention,
                                   [&](long r, long column, __m512 v) __attribute__((always_inline)) {
                                     store_bf16(answers + r * query_width + column, v);
                                   });
    }
  }

  // X^T Y of one candidate, plus the request's half: row pairs over the width, [padded / 2][padded mixtures].
  template <int MR, int NZ>
  void mix_columns(const Layer& layer, const float* given, long pairs, long j) const {
    const long km = layer.padded_mixtures();
    for (long t = 0; t < padded; t += MR) {
      __m512 even[NZ];
      tile<MR, NZ>(
          reinterpret_cast<const bf16*>(b.token_pairs + t), 2, 2 * padded, layer.mixtures + j, km, pairs,
          [&](int i, int z) __attribute__((always_inline)) { return _mm512_loadu_ps(given + (t + i) * km + j + 16 * z); },
          [&](int i, int z, __m512 v) __attribute__((always_inline)) {
            if (i % 2 == 0) {
              even[z] = v;
            } else {
              _mm512_storeu_si512(b.mixture_pairs + (t + i) / 2 * km + j + 16 * z, interleave(even[z], v));
            }
          });
    }
  }

  // X (X^T Y) of one candidate, normalised: one row of products.
  void multiply(const Layer& layer, const Given& given, long c) const {
    const long km = layer.padded_mixtures();
    const long k = layer.num_mixtures;
    const long seen = layer.num_seen();
    const long pairs = round_up(seen, 2) / 2;
    pack_row_pairs(slot(c), seen, padded, padded, b.token_pairs);
    const float* request_half = given.mixtures + b.requests[c] * padded * km;
    long j = 0;
    for (; j + 32 <= km; j += 32) mix_columns<8, 2>(layer, request_half, pairs, j);
    if (j < km) mix_columns<16, 1>(layer, request_half, pairs, j);
    float* row = b.product_row;
    __m512 squares = _mm512_setzero_ps();
    const auto put = [&](long r, long column, __m512 v) __attribute__((always_inline)) {
      squares = _mm512_fmadd_ps(v, v, squares);  // padding columns are exactly zero
      if (column + 16 <= k) {
        _mm512_storeu_ps(row + r * k + column, v);
      } else {
        _mm512_mask_storeu_ps(row + r * k + column, first_lanes(k - column), v);
      }
    };
    j = 0;
    for (; j + 32 <= km; j += 32) {
      tile_rows<2, 8>(slot(c), padded, 2, seen, b.mixture_pairs + j, km, padded / 2, zero_init,
                      [&](long r, long z, __m512 v) __attribute__((always_inline)) { put(r, j + 16 * z, v); });
    }
    if (j < km) {
      tile_rows<1, 12>(slot(c), padded, 2, seen, b.mixture_pairs + j, km, padded / 2, zero_init,
                       [&](long r, long, __m512 v) __attribute__((always_inline)) { put(r, j, v); });
    }
    const long products = layer.num_products();
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(products);
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + layer.product_epsilon));
    for (long i = products; i < layer.product_stride(); ++i) row[i] = 0.0f;
    bf16* out = b.products + c * layer.product_stride();
    for (long i = 0; i < layer.product_stride(); i += 16) {
      const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(row + i), factor);
      store_bf16(out + i, _mm512_mul_ps(scaled, _mm512_loadu_ps(layer.product_gain + i)));
    }
  }

  void feed_forward(const Layer& layer, const Given& given) const {
    const long hidden = layer.up.columns;
    gemm(
        b.products, layer.product_stride(), count, layer.up,
        [&](long r, long column) __attribute__((always_inline)) {
          return _mm512_loadu_ps(given.hidden + b.requests[r] * hidden + column);
        },
        [&](long r, long column, __m512 v) __attribute__((always_inline)) {
          // This order of operands keeps a NaN.
          store_bf16(b.hidden + r * hidden + column, _mm512_max_ps(_mm512_setzero_ps(), v));
        });
    const long columns = layer.down.columns;
    gemm(b.hidden, hidden, count, layer.down, zero_init,
         [&](long r, long column, __m512 v) __attribute__((always_inline)) {
           _mm512_storeu_ps(b.mlp + r * columns + column, v);
         });
  }

  // Linear map, residual and norm of one candidate; its slot then holds the next layer's tokens.
  void close(const Layer& layer, const Given& given, long c) const {
    const long num_mlp = layer.num_mlp_tokens;
    const long seen_even = round_up(layer.num_seen(), 2);
    pack_row_pairs(slot(c), layer.num_seen(), padded, padded, b.token_pairs);
    float* linear = b.rows + num_mlp * padded;
    const float* request_half = given.linear + b.requests[c] * layer.num_linear_tokens * padded;
    map_tokens(
        layer.linear, seen_even, layer.num_linear_tokens, seen_even / 2,
        [&](long r, long column) __attribute__((always_inline)) {
          return _mm512_loadu_ps(request_half + r * padded + column);
        },
        [&](long r, long column, __m512 v) __attribute__((always_inline)) {
          _mm512_storeu_ps(linear + r * padded + column, v);
        });
    const float* mlp = b.mlp + c * layer.down.columns;
    std::memset(b.rows + (num_mlp + layer.num_linear_tokens) * padded, 0, 4 * layer.num_residual_tokens * padded);
    const auto block = [&](long r, long column) __attribute__((always_inline)) {
      return _mm512_loadu_ps((r < num_mlp ? mlp + r * padded : b.rows + r * padded) + column);
    };
    if (layer.residual != nullptr) {
      map_tokens(layer.residual, round_up(layer.num_tokens, 2), layer.num_out(), round_up(layer.num_tokens, 2) / 2, block,
                 [&](long r, long column, __m512 v) __attribute__((always_inline)) {
                   _mm512_storeu_ps(b.rows + r * padded + column, v);
                 });
    }
    for (long r = 0; r < layer.num_out(); ++r) close_row(layer, c, r, block);
  }

  template <class Block>
  __attribute__((always_inline)) void close_row(const Layer& layer, long c, long r, Block&& block) const {
    bf16* own = slot(c) + r * padded;
    float* row = b.rows + r * padded;
    __m512 squares = _mm512_setzero_ps();
    for (long column = 0; column < padded; column += 16) {
      const __m512 v = layer.residual != nullptr ? _mm512_loadu_ps(row + column)
                                                 : _mm512_add_ps(block(r, column), load_bf16(own + column));
      squares = _mm512_fmadd_ps(v, v, squares);
      _mm512_storeu_ps(row + column, v);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(stack.width);
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + kEpsilon));
    for (long column = 0; column < padded; column += 16) {
      const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(row + column), factor);
      store_bf16(own + column, _mm512_mul_ps(scaled, _mm512_loadu_ps(layer.gain + column)));
    }
  }

  void run() const {
    load(stack.layers[0].num_tokens);
    for (int l = 0; l < stack.num_layers; ++l) {
      const Layer& layer = stack.layers[l];
      const Given& given = stack.given[l];
      if (layer.num_queries > 0) see(layer, given);
      for (long c = 0; c < count; ++c) multiply(layer, given, c);
      feed_forward(layer, given);
      for (long c = 0; c < count; ++c) close(layer, given, c);
    }
    store(stack.layers[stack.num_layers - 1].num_out());
  }
};

}  // namespace
}  // namespace rankmesh

using namespace rankmesh;

RANKMESH_API int rankmesh_wukong_layers(const Stack* given, int num_threads) {
  const Stack& stack = *given;
  long value_width = 16;
  for (int l = 0; l < stack.num_layers; ++l) {
    const long own = stack.layers[l].num_queries > 0 ? stack.given[l].keys.value_width() : 0;
    value_width = own > value_width ? own : value_width;
  }
  Arena size(nullptr);
  Buffers unused(size, stack);
  AttentionScratch unused_too(size, value_width);
  std::byte* memory = workspace(size.used(), num_threads);
  if (memory == nullptr) return 1;
  const long num_chunks = (stack.num_candidates + stack.chunk - 1) / stack.chunk;
  parallel_for(num_chunks, num_threads, [&](long task, int worker) {
    Arena arena(memory + worker * size.used());
    const Buffers buffers(arena, stack);
    const AttentionScratch scratch(arena, value_width);
    const long first = task * stack.chunk;
    const long left = stack.num_candidates - first;
    Chunk{stack, buffers, scratch, first, left < stack.chunk ? left : stack.chunk, round_up(stack.width, 16)}.run();
  });
  return 0;
}
