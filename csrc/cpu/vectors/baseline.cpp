// What every processor of the kind has: sixteen bytes, NEON on Arm and SSE2 on x86-64.
#include "cpu/vectors/includes.h"

#define GNNSYS_LEVEL baseline
#define GNNSYS_VECTOR_BYTES 16
#include "cpu/vectors/level.h"
