// Built without AVX-512 flags: the process may ask which instructions the processor lacks before it may run any other
// function of this library.
#include "parallel.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

using StartTeam = void (*)(void (*)(void*), void*, unsigned, unsigned);
StartTeam start_team = nullptr;

struct Loop {
  rankmesh::TaskBody body;
  void* context;
  long num_tasks;
  std::atomic<long> next_task{0};
  std::atomic<int> next_worker{0};
};

void work(void* data) {
  auto* loop = static_cast<Loop*>(data);
  const int worker = loop->next_worker.fetch_add(1, std::memory_order_relaxed);
  for (;;) {
    const long task = loop->next_task.fetch_add(1, std::memory_order_relaxed);
    if (task >= loop->num_tasks) return;
    loop->body(loop->context, task, worker);
  }
}

struct Block {
  void* data = nullptr;
  std::size_t bytes = 0;
  ~Block() { std::free(data); }
};

}  // namespace

namespace rankmesh {

void run_tasks(long num_tasks, int num_threads, TaskBody body, void* context) {
  Loop loop{body, context, num_tasks};
  if (num_threads > num_tasks) num_threads = static_cast<int>(num_tasks);
  if (num_threads <= 1 || start_team == nullptr) {
    work(&loop);
  } else {
    start_team(work, &loop, static_cast<unsigned>(num_threads), 0);
  }
}

std::byte* workspace(std::size_t bytes, int num_workers) {
  static thread_local Block block;
  const std::size_t total = bytes * static_cast<std::size_t>(num_workers);
  if (block.bytes < total) {
    std::free(block.data);
    block.data = std::aligned_alloc(4096, (total + 4095) / 4096 * 4096);
    block.bytes = block.data == nullptr ? 0 : total;
  }
  return static_cast<std::byte*>(block.data);
}

}  // namespace rankmesh

// GOMP_parallel of the OpenMP runtime that PyTorch has loaded: one team for both, instead of two that wait for work on
// the same cores.
RANKMESH_API void rankmesh_set_team(void* gomp_parallel) { start_team = reinterpret_cast<StartTeam>(gomp_parallel); }

// One bit for each feature, in the order of kernels/native/library.py, that the processor or the system lacks.
RANKMESH_API std::uint32_t rankmesh_missing_features() {
  __builtin_cpu_init();
  std::uint32_t missing = 0;
  missing |= __builtin_cpu_supports("avx512f") ? 0u : 1u;
  missing |= __builtin_cpu_supports("avx512bw") ? 0u : 2u;
  missing |= __builtin_cpu_supports("avx512vl") ? 0u : 4u;
  missing |= __builtin_cpu_supports("avx512dq") ? 0u : 8u;
  missing |= __builtin_cpu_supports("avx512bf16") ? 0u : 16u;
  missing |= __builtin_cpu_supports("avx512vnni") ? 0u : 32u;
  return missing;
}
