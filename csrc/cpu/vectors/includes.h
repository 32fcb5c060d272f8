// What the sources of all levels include before level.h.
#pragma once

#include "common/prefetch.h"
#include "cpu/vectors/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
