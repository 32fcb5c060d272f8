// What the C++ tests are written with: TEST names a behaviour in a sentence, EXPECT says what holds, and a generator of
// its own gives every test its data. No torch: the binary is small enough for every sanitizer, threads included.
#pragma once

#include <cstdint>
#include <cstdio>
#include <vector>

namespace native_test {

struct Test {
  const char* sentence;
  void (*run)();
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

inline int failures = 0;  // of the whole run; EXPECT stands outside of parallel loops

struct Register {
  Register(const char* sentence, void (*run)()) { all_tests().push_back({sentence, run}); }
};

// xorshift64*: nothing that is tested here may be what makes the data.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2685821657736338717ull + 1) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 2685821657736338717ull;
  }
  int64_t below(int64_t bound) { return static_cast<int64_t>((next() >> 1) % static_cast<uint64_t>(bound)); }

 private:
  uint64_t state_;
};

}  // namespace native_test

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEST(sentence) TEST_(sentence, __COUNTER__)  // all tests are one source: lines would meet
#define TEST_(sentence, number)                                                             \
  static void JOIN(test_, number)();                                                        \
  static const native_test::Register JOIN(register_, number)(sentence, &JOIN(test_, number)); \
  static void JOIN(test_, number)()

#define EXPECT(condition)                                                              \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::printf("%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);       \
      ++native_test::failures;                                                         \
      return;                                                                          \
    }                                                                                  \
  } while (0)
