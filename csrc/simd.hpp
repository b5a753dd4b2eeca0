// Lets the compiler build a loop for wider vectors too and choose when the module is loaded.
#pragma once

// Resolvers run before a sanitizer is ready, and clang before 14 lacks the attribute.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(SPINDLE_NO_CLONES)
#define SPINDLE_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define SPINDLE_WIDE
#endif
