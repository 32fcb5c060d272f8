// Threads that help one calling thread with its loops; see helpers.cpp.
#pragma once

#include <cstdint>

namespace gnnsys {

// A function that lives elsewhere, for the time of a call.
template <typename Signature>
class FunctionRef;

template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <typename Function>
  FunctionRef(const Function& function)
      : call_([](const void* it, Arguments... arguments) -> Result {
          return (*static_cast<const Function*>(it))(arguments...);
        }),
        function_(&function) {}

  Result operator()(Arguments... arguments) const { return call_(function_, arguments...); }

 private:
  Result (*call_)(const void*, Arguments...);
  const void* function_;
};

// Whether this thread runs a part of a loop: loops inside it stay on their thread.
bool& inside_loop();

// Runs caller() on this thread. While it runs, up to num_threads - 1 others that have a core call helper() until it
// returns false; each call is a piece of the work. Nobody waits for a helper that has not come: caller() must be able to
// do everything alone. Returns when all pieces are done, and throws one of the errors that were thrown.
void run_with_helpers(int num_threads, int max_threads, FunctionRef<void()> caller, FunctionRef<bool()> helper);

// body(piece) for every piece in [0, num_pieces), handed out in order. After an error no more are begun.
void run_pieces(int64_t num_pieces, int num_threads, int max_threads, FunctionRef<void(int64_t)> body);

}  // namespace gnnsys
