// Weighted sums of chunks, compiled once for all ops that have them: accumulate.h declares them.
#include "cpu/accumulate.h"

namespace gnnsys {

GNNSYS_WEIGHTED_CHUNKS(, float)
GNNSYS_WEIGHTED_CHUNKS(, double)
GNNSYS_WEIGHTED_CHUNKS(, c10::BFloat16)
GNNSYS_WEIGHTED_CHUNKS(, c10::Half)

}  // namespace gnnsys
