// Which level is used: chosen once, when the library is loaded.
#include "common/check.h"
#include "common/register.h"
#include "cpu/vectors/kernels.h"

#include <cstdlib>
#include <string>
#include <vector>

namespace gnnsys {
namespace baseline {
extern const Kernels all_kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels all_kernels;
}
namespace avx512 {
extern const Kernels all_kernels;
}
#endif

namespace {

struct Level {
  const char* name;
  int64_t bytes;
  const Kernels* kernels;
};

// What this processor has, the widest last.
std::vector<Level> levels() {
#if defined(__x86_64__)
  std::vector<Level> found{{"sse2", 16, &baseline::all_kernels}};
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    found.push_back({"avx2", 32, &avx2::all_kernels});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      found.push_back({"avx512", 64, &avx512::all_kernels});
    }
  }
  return found;
#else
  return {{"neon", 16, &baseline::all_kernels}};
#endif
}

// What GNNSYS_SIMD names; the widest where it is not set, or names none (which simd_bytes tells).
Level choose() {
  const std::vector<Level> found = levels();
  const char* const wanted = std::getenv("GNNSYS_SIMD");
  for (const Level& level : found) {
    if (wanted != nullptr && std::string(wanted) == level.name) {
      return level;
    }
  }
  return found.back();
}

const Level chosen = choose();

// Bytes of a vector. ValueError where GNNSYS_SIMD names a level that this processor has not.
int64_t simd_bytes() {
  const char* const wanted = std::getenv("GNNSYS_SIMD");
  if (wanted != nullptr && *wanted != '\0' && std::string(wanted) != chosen.name) {
    std::string names;
    for (const Level& level : levels()) {
      names += (names.empty() ? "" : ", ") + std::string(level.name);
    }
    throw_argument("GNNSYS_SIMD is ", wanted, "; this processor has ", names, ": set it before gnnsys is imported");
  }
  return chosen.bytes;
}

}  // namespace

const Kernels* const kernels = chosen.kernels;

STABLE_TORCH_LIBRARY_IMPL(gnnsys, CompositeExplicitAutograd, m) { REGISTER_OP(m, "simd_bytes", &simd_bytes); }

}  // namespace gnnsys
