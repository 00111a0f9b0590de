// The instruction sets that the processor has and the operating system supports.
#pragma once
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace maxjax {

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
  const bool more = a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d);
  return {avx2, avx512, avx512 && more && has(a, 5), wide_vnni, avx2 && more && has(a, 4), false};
#elif defined(__aarch64__) && defined(__linux__)
  return {false, false, false, false, false, (getauxval(AT_HWCAP) >> 20 & 1) != 0};  // HWCAP_ASIMDDP
#elif defined(__aarch64__) && defined(__APPLE__)
  return {false, false, false, false, false, true};
#else
  return {};
#endif
}

}  // namespace maxjax
