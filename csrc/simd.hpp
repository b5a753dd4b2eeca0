// Wider vectors where the processor has them, decided when the code runs: one binary serves every x86-64.
//
// SPINDLE_WIDE: the compiler builds a plain loop twice and picks when the module is loaded.
// SPINDLE_AVX2: marks a function written with AVX2 intrinsics; call it only when has_avx2().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define SPINDLE_AVX2 __attribute__((target("avx2")))
namespace spindle {
inline bool has_avx2() { return __builtin_cpu_supports("avx2"); }
}  // namespace spindle
#endif

// Resolvers run before a sanitizer is ready, and clang before 14 lacks the attribute.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define SPINDLE_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define SPINDLE_WIDE
#endif
