// Loops over independent tasks on the thread team that PyTorch runs on.
#pragma once

#include <cstddef>
#include <type_traits>

namespace rankmesh {

using TaskBody = void (*)(void* context, long task, int worker);

// Runs body(context, task, worker) for every task, on at most num_threads threads; worker is in [0, num_threads).
void run_tasks(long num_tasks, int num_threads, TaskBody body, void* context);

template <class F>
void parallel_for(long num_tasks, int num_threads, F&& body) {
  run_tasks(
      num_tasks, num_threads,
      [](void* context, long task, int worker) { (*static_cast<std::remove_reference_t<F>*>(context))(task, worker); },
      &body);
}

// Memory of the calling thread that is kept between its calls and only grows; nullptr when there is none. One slice of
// `bytes` for each of num_workers, each aligned to 64.
std::byte* workspace(std::size_t bytes, int num_workers);

// Hands out consecutive, 64-byte aligned arrays; with base nullptr it only counts.
class Arena {
 public:
  explicit Arena(std::byte* base) : base_(base) {}
  template <class T>
  T* take(long count) {
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace rankmesh

#define RANKMESH_API extern "C" __attribute__((visibility("default")))
