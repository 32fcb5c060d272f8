// Runs every test, one line each; the exit status is 1 where one failed.
#include "native_test.h"

int main() {
  for (const native_test::Test& test : native_test::all_tests()) {
    const int before = native_test::failures;
    test.run();
    std::printf("%s: %s\n", native_test::failures == before ? "ok" : "FAILED", test.sentence);
    std::fflush(stdout);
  }
  std::printf("%zu tests, %d failed\n", native_test::all_tests().size(), native_test::failures);
  return native_test::failures == 0 ? 0 : 1;
}
