// Mistakes made on purpose, one of each kind that `make sanitize` is there to find: `make sanitize-selftest` compiles
// them as the core is compiled and fails where one is not found.
#include "common/parallel.h"

#include <cstdint>

extern "C" {

// Reads one value past the end of an array.
int64_t planted_overflow(const int64_t* data, int64_t size) { return data[size]; }

// Adds beyond the largest value there is.
int64_t planted_undefined(int64_t value) { return value + 1; }

// Two Python threads that call this with one address write it both.
void planted_race(int64_t* value) {
  for (int i = 0; i < 5000000; ++i) {
    *value += 1;
  }
}

// The threads of one loop write what only one of them owns.
void planted_loop_race(int64_t* value) {
  gnnsys::threads_of_tests = 4;
  for (int turn = 0; turn < 50; ++turn) {  // in some of which several threads find a core
    gnnsys::parallel_for(1 << 16, 1, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        *value += i;
      }
    });
  }
}
}
