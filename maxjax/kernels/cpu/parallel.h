// Work over XLA's own threads.
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

// work(i) for every i below count, on at most `threads` threads.
//
// Whoever is free takes the next number, the caller too. It waits only for numbers that a
// running thread has taken, never for a task that has yet to start: handlers that fill the
// whole pool cannot wait for each other.
template <class Work>
void parallel(xla::ffi::ThreadPool& pool, int64_t count, int64_t threads, const Work& work) {
  threads = threads < count ? threads : count;
  if (threads <= 1) {
    for (int64_t i = 0; i < count; i++) work(i);
    return;
  }
  // Kept by the tasks: one that starts after the work is done finds no number left, and
  // does not touch `work`, which is the caller's.
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
  // With more threads than cores the one we wait for may need ours.
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; spins++) {
    if (spins < 4096) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace maxjax
