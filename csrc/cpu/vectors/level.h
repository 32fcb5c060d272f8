// The kernels of one level: included by its source, which has defined GNNSYS_LEVEL (a namespace), GNNSYS_VECTOR_BYTES,
// and GNNSYS_F16C where the processor converts halves. That source includes everything that this needs before it tells
// the compiler what processor to compile for: a function of the standard library that was compiled for AVX-512 might be
// the one that all other sources are linked with.

namespace gnnsys {
namespace GNNSYS_LEVEL {
namespace {

// Of a tile: half of the registers, or all of Arm's 32 that a loop can use.
#if defined(__aarch64__)
constexpr int kMostVectors = 16;
#else
constexpr int kMostVectors = 8;
#endif
// Of a row that is added up in one pass: as many as there are registers for.
constexpr int kMostWhole = kMostVectors == 16 || GNNSYS_VECTOR_BYTES == 64 ? 16 : 8;

#include "cpu/vectors/vector.h"
#include "cpu/vectors/convert.h"
#include "cpu/vectors/ahead.h"
#include "cpu/vectors/dot.h"
#include "cpu/vectors/extreme.h"
#include "cpu/vectors/step.h"
#include "cpu/vectors/sum.h"
#include "cpu/vectors/sum_rows.h"

template <typename T, typename id_t>
constexpr NeighborKernels<T, id_t> neighbor_kernels_of() {
  return {sum_rows<T, id_t>, sum_chunk<T, id_t>, extreme_chunk<false, T, id_t>, extreme_chunk<true, T, id_t>,
          dot_chunk<T, id_t>};
}

template <typename T>
constexpr RowKernels<T> row_kernels_of() {
  return {dot<T>, scale<T>, drop<T>};
}

}  // namespace

extern const Kernels all_kernels = {
    neighbor_kernels_of<float, int32_t>(),    neighbor_kernels_of<float, int64_t>(),
    neighbor_kernels_of<double, int32_t>(),   neighbor_kernels_of<double, int64_t>(),
    neighbor_kernels_of<BFloat16, int32_t>(), neighbor_kernels_of<BFloat16, int64_t>(),
    neighbor_kernels_of<Half, int32_t>(),     neighbor_kernels_of<Half, int64_t>(),
    row_kernels_of<float>(),                  row_kernels_of<double>(),
    row_kernels_of<BFloat16>(),               row_kernels_of<Half>(),
    {exp_floats},                             {exp_doubles},
    {cast<float, BFloat16>},                  {cast<float, Half>},
    {cast<BFloat16, float>},                  {cast<BFloat16, Half>},
    {cast<Half, float>},                      {cast<Half, BFloat16>},
    {adam, adagrad},                          stream,
    GNNSYS_VECTOR_BYTES,
};

}  // namespace GNNSYS_LEVEL
}  // namespace gnnsys
