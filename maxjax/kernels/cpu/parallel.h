// A parallel loop on XLA's own thread pool.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace maxjax {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls work(i) for every i below count, on at most `threads` threads.
//
// Each free thread, the caller included, takes the next index. The caller waits only for indices
// that a running thread has taken, never for a task that has not started: handlers that occupy the
// whole pool cannot deadlock.
template <class Work>
void parallel(xla::ffi::ThreadPool& pool, int64_t count, int64_t threads, const Work& work) {
  threads = threads < count ? threads : count;
  if (threads <= 1) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  // Owned by the tasks: one that starts after all work is done finds no index left, and does not
  // touch `work`, which belongs to the caller.
  struct Shared {
    const Work* work;
    int64_t count;
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
    void take() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        (*work)(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->work = &work;
  shared->count = count;
  for (int64_t t = 1; t < threads; t++) pool.Schedule([shared] { shared->take(); });
  shared->take();
  // With more threads than cores the thread that is waited for may need this core.
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; spins++) {
    if (spins < 4096) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace maxjax
