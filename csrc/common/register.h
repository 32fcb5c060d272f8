// How a kernel is registered: REGISTER_OP(m, "spmm", &spmm) inside STABLE_TORCH_LIBRARY_IMPL.
//
// What leaves an op for want of memory says which op it was. Other errors pass.
#pragma once

#include "common/shim.h"

#include "common/out_of_memory.h"

#include <cstdint>
#include <new>
#include <stdexcept>

namespace gnnsys {

using BoxedKernel = void (*)(StableIValue*, uint64_t, uint64_t);

inline void run_op(const char* op, BoxedKernel kernel, StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  try {
    kernel(stack, num_args, num_outputs);
  } catch (MemoryRequest& request) {
    request.set_op(op);
    throw;
  } catch (const std::bad_alloc&) {
    OutOfHostMemory error(kBytesUnknown);
    error.set_op(op);
    throw error;
  } catch (const std::length_error&) {  // of a std::vector that no memory could hold
    OutOfHostMemory error(kBytesOverflow);
    error.set_op(op);
    throw error;
  }
}

}  // namespace gnnsys

#define REGISTER_OP(m, name, kernel)                                                          \
  (m).impl(name, [](StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {           \
    ::gnnsys::run_op("gnnsys::" name, TORCH_BOX(kernel), stack, num_args, num_outputs);       \
  })
