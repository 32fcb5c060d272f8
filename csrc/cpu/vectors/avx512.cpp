// Sixty-four bytes: x86-64 servers since 2017.
#if defined(__x86_64__)
#include "cpu/vectors/includes.h"

#define GNNSYS_LEVEL avx512
#define GNNSYS_VECTOR_BYTES 64
#define GNNSYS_F16C
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#include "cpu/vectors/level.h"
#pragma clang attribute pop
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#include "cpu/vectors/level.h"
#pragma GCC pop_options
#endif
#endif
