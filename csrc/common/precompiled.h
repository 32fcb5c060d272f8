// What nearly every source includes, compiled once per build (setup.py): torch's headers are half of a small source's
// compilation. It is included before the first line of every source of the CPU library, which names its own includes
// all the same: without this file the library builds too, only more slowly.

#include "common/check.h"
#include "common/id_range.h"
#include "common/parallel.h"
#include "common/register.h"
#include "common/tensors.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>
