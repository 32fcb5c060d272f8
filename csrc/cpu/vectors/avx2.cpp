// Thirty-two bytes: x86-64 since 2013.
#if defined(__x86_64__)
#include "cpu/vectors/includes.h"

#define GNNSYS_LEVEL avx2
#define GNNSYS_VECTOR_BYTES 32
#define GNNSYS_F16C
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#include "cpu/vectors/level.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#include "cpu/vectors/level.h"
#pragma GCC pop_options
#endif
#endif
