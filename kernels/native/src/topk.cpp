// The k best of each segment by radix selection: three passes over ever fewer elements, whatever the values are.
#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "simd.h"

namespace rankmesh {
namespace {

constexpr int kLevels = 3;
constexpr int kShifts[kLevels] = {21, 10, 0};
constexpr int kBits[kLevels] = {11, 11, 10};
constexpr long kBuckets = 1 << 11;
constexpr long kShortSegment = 512;  // below it clearing the histograms costs more than a partial sort
constexpr long kManyRecords = 256;  // below it three passes over the counts cost more than comparing

struct Record {
  std::int64_t tie;
  std::uint32_t key;
  std::uint32_t index;
};

// Larger key first, then the smaller tie key, then the smaller index.
bool is_before(const Record& a, const Record& b) {
  if (a.key != b.key) return a.key > b.key;
  if (a.tie != b.tie) return a.tie < b.tie;
  return a.index < b.index;
}

// Larger for larger values; the same for both zeros; 0, which no number has, for NaN.
std::uint32_t key_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0;
  if (magnitude == 0) bits = 0;
  return bits ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 31) | 0x80000000u);
}

__m512i keys_of(__m512i bits) {
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  const __mmask16 is_zero = _mm512_testn_epi32_mask(magnitude, magnitude);
  bits = _mm512_mask_mov_epi32(bits, is_zero, _mm512_setzero_si512());
  const __m512i flip = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(INT32_MIN));
  return _mm512_mask_mov_epi32(_mm512_xor_si512(bits, flip), is_nan, _mm512_setzero_si512());
}

struct Segment {
  const float* values;
  const std::int64_t* ties;  // nullptr: all equal
  long size;

  Record record(std::uint32_t index) const { return record(index, key_of(values[index])); }
  Record record(std::uint32_t index, std::uint32_t key) const {
    return {ties == nullptr ? 0 : ties[index], key, index};
  }
};

// Four histograms side by side, so that runs of equal buckets do not wait for their own stores.
struct Histogram {
  std::uint32_t counts[4][kBuckets];

  void clear() { std::memset(counts, 0, sizeof(counts)); }

  // The bucket that holds the num_wanted-th best, and how many are in better buckets.
  long find(long num_wanted, long num_buckets, long& num_better) const {
    num_better = 0;
    for (long b = num_buckets - 1;; --b) {
      const long here = static_cast<long>(counts[0][b]) + counts[1][b] + counts[2][b] + counts[3][b];
      if (num_better + here >= num_wanted) return b;
      num_better += here;
    }
  }
};

// First pass: everything in a better bucket is a winner; returns how many indices of the boundary bucket it collected.
long first_pass(const Segment& segment, long& num_wanted, Histogram& histogram, std::uint32_t* boundary, Record*& winners) {
  histogram.clear();
  const auto* bits = reinterpret_cast<const std::int32_t*>(segment.values);
  alignas(64) std::uint32_t keys[16];
  long i = 0;
  for (; i + 16 <= segment.size; i += 16) {
    _mm512_store_si512(keys, _mm512_srli_epi32(keys_of(_mm512_loadu_si512(bits + i)), kShifts[0]));
    for (int j = 0; j < 16; ++j) ++histogram.counts[j % 4][keys[j]];
  }
  for (; i < segment.size; ++i) ++histogram.counts[0][key_of(segment.values[i]) >> kShifts[0]];
  long num_better = 0;
  const auto bucket = static_cast<std::uint32_t>(histogram.find(num_wanted, kBuckets, num_better));
  num_wanted -= num_better;
  const std::uint32_t low = bucket << kShifts[0];
  const std::uint32_t high = low + ((1u << kShifts[0]) - 1);
  long count = 0;
  const auto take = [&](long index, std::uint32_t key) {
    if (key > high) {
      *winners++ = segment.record(static_cast<std::uint32_t>(index), key);
    } else {
      boundary[count++] = static_cast<std::uint32_t>(index);
    }
  };
  for (i = 0; i + 16 <= segment.size; i += 16) {
    const __m512i vkeys = keys_of(_mm512_loadu_si512(bits + i));
    __mmask16 mask = _mm512_cmpge_epu32_mask(vkeys, _mm512_set1_epi32(static_cast<std::int32_t>(low)));
    if (mask == 0) continue;
    _mm512_store_si512(keys, vkeys);
    for (unsigned left = mask; left != 0; left &= left - 1) {
      const int j = __builtin_ctz(left);
      take(i + j, keys[j]);
    }
  }
  for (; i < segment.size; ++i) {
    const std::uint32_t key = key_of(segment.values[i]);
    if (key >= low) take(i, key);
  }
  return count;
}

// Later passes: the same among the boundary's indices, which stay ascending.
long refine(const Segment& segment, int level, long count, long& num_wanted, Histogram& histogram,
            std::uint32_t* boundary, Record*& winners) {
  histogram.clear();
  const std::uint32_t mask = (1u << kBits[level]) - 1;
  const auto bucket_of = [&](std::uint32_t index) { return key_of(segment.values[index]) >> kShifts[level] & mask; };
  for (long i = 0; i < count; ++i) ++histogram.counts[i % 4][bucket_of(boundary[i])];
  long num_better = 0;
  const auto bucket = static_cast<std::uint32_t>(histogram.find(num_wanted, mask + 1, num_better));
  num_wanted -= num_better;
  long kept = 0;
  for (long i = 0; i < count; ++i) {
    const std::uint32_t own = bucket_of(boundary[i]);
    if (own > bucket) {
      *winners++ = segment.record(boundary[i]);
    } else if (own == bucket) {
      boundary[kept++] = boundary[i];
    }
  }
  return kept;
}

// Orders records, of which equal keys are in order already, by key in three stable passes; the result is in spare. Takes
// a fifth of a comparing sort of 1,000: no branch depends on a key.
void order(Record* records, Record* spare, long size, Histogram& histogram) {
  histogram.clear();
  const auto bucket_of = [](const Record& record, int level) {
    return ~record.key >> kShifts[level] & ((1u << kBits[level]) - 1);
  };
  for (long i = 0; i < size; ++i) {
    for (int level = 0; level < kLevels; ++level) ++histogram.counts[level][bucket_of(records[i], level)];
  }
  Record* from = records;
  Record* to = spare;
  for (int level = kLevels - 1; level >= 0; --level) {
    std::uint32_t* places = histogram.counts[level];
    std::uint32_t begin = 0;
    for (long b = 0; b < 1l << kBits[level]; ++b) {
      const std::uint32_t here = places[b];
      places[b] = begin;
      begin += here;
    }
    for (long i = 0; i < size; ++i) to[places[bucket_of(from[i], level)]++] = from[i];
    std::swap(from, to);
  }
}

// Writes the num_wanted best, of equal keys the earlier first unless tie keys choose; num_wanted is in [1, size).
void select(const Segment& segment, long num_wanted, Histogram& histogram, std::uint32_t* boundary, Record* winners) {
  long count = first_pass(segment, num_wanted, histogram, boundary, winners);
  for (int level = 1; level < kLevels && num_wanted < count; ++level) {
    count = refine(segment, level, count, num_wanted, histogram, boundary, winners);
  }
  if (num_wanted < count && segment.ties != nullptr) {
    const auto first = [&](std::uint32_t a, std::uint32_t b) {
      return segment.ties[a] != segment.ties[b] ? segment.ties[a] < segment.ties[b] : a < b;
    };
    std::nth_element(boundary, boundary + num_wanted, boundary + count, first);
  }
  for (long i = 0; i < num_wanted; ++i) *winners++ = segment.record(boundary[i]);
}

}  // namespace
}  // namespace rankmesh

using namespace rankmesh;

// offsets [S + 1] into values, out_offsets [S + 1] into out: each segment gives its out_offsets[s + 1] - out_offsets[s]
// best. boundary: longest segment a thread; records: a thread twice the
// most of (results of a segment, kShortSegment).
struct TopkArguments {
  const float* values;
  const std::int64_t* ties;
  const std::int64_t* offsets;
  const std::int64_t* out_offsets;
  std::int64_t* out;
  std::uint32_t* boundary;
  void* records;
  std::int64_t num_segments;
  std::int64_t longest;
  std::int64_t most_records;
};

RANKMESH_API std::int64_t rankmesh_topk_record_bytes() { return sizeof(Record); }
RANKMESH_API std::int64_t rankmesh_topk_short_segment() { return kShortSegment; }

RANKMESH_API int rankmesh_segmented_topk(const TopkArguments* given, int num_threads) {
  const TopkArguments& a = *given;
  std::byte* memory = workspace(sizeof(Histogram), num_threads);
  if (memory == nullptr) return 1;
  parallel_for(a.num_segments, num_threads, [&](long s, int worker) {
    const long begin = a.offsets[s];
    const Segment segment{a.values + begin, a.ties == nullptr ? nullptr : a.ties + begin, a.offsets[s + 1] - begin};
    const long wanted = a.out_offsets[s + 1] - a.out_offsets[s];
    if (wanted == 0) return;
    auto* records = static_cast<Record*>(a.records) + 2 * worker * a.most_records;
    bool is_ordered = false;
    if (wanted == segment.size || segment.size <= kShortSegment) {
      for (long i = 0; i < segment.size; ++i) records[i] = segment.record(static_cast<std::uint32_t>(i));
      if (wanted < segment.size) std::nth_element(records, records + wanted, records + segment.size, is_before);
    } else {
      auto& histogram = *reinterpret_cast<Histogram*>(memory + worker * sizeof(Histogram));
      select(segment, wanted, histogram, a.boundary + worker * a.longest, records);
      if (a.ties == nullptr && wanted >= kManyRecords) {
        order(records, records + a.most_records, wanted, histogram);
        records += a.most_records;
        is_ordered = true;
      }
    }
    if (!is_ordered) std::sort(records, records + wanted, is_before);
    std::int64_t* out = a.out + a.out_offsets[s];
    for (long i = 0; i < wanted; ++i) out[i] = begin + records[i].index;
  });
  return 0;
}
