// The instruction sets that the processor has and the operating system supports.
#pragma once
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace maxjax {

#if defined(__x86_64__)
// Whether the system lets this process use the tiles of AMX; Linux wants to be asked first
// (https://docs.kernel.org/arch/x86/xstate.html).
inline bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kAsk = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Uses the instructions CPUID and XGETBV (Intel's manual, volume 2), as compilers differ in the
// names that their __builtin_cpu_supports accepts.
inline Cpu this_cpu() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  const auto has = [](unsigned word, int bit) { return (word >> bit & 1) != 0; };
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return {};  // OSXSAVE
  const bool fma = has(c, 12), f16c = has(c, 29);
  unsigned kept, high;
  asm volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  const bool ymm = (kept & 0x06) == 0x06, zmm = (kept & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
  const bool avx2 = ymm && fma && f16c && has(b, 5);
  const bool avx512 = avx2 && zmm && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);
  const bool wide_vnni = avx512 && has(c, 11);
  const bool tiles = avx512 && (kept >> 17 & 3) == 3 && has(d, 22) && has(d, 24) && has(d, 25) && may_use_tiles();
  const bool more = a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d);
  return {avx2, avx512, avx512 && more && has(a, 5), wide_vnni, avx2 && more && has(a, 4), false, tiles};
#elif defined(__aarch64__) && defined(__linux__)
  return {false, false, false, false, false, (getauxval(AT_HWCAP) >> 20 & 1) != 0, false};  // HWCAP_ASIMDDP
#elif defined(__aarch64__) && defined(__APPLE__)
  return {false, false, false, false, false, true, false};
#else
  return {};
#endif
}

}  // namespace maxjax
