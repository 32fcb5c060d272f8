// torch's stable headers, with checks that build no stream. Included before any other header of torch, by everything.
//
// Where this library carries a libstdc++ of its own beside torch's, the two share the locale's facet ids but not its
// facets: a stream's constructor crashes. torch's headers build one to say that a call of the C shim failed, which is
// how a process that only lacked memory ended. So their two macros are replaced, and a test looks for streams in the
// library.
#pragma once

#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <stdexcept>
#include <string>

namespace gnnsys {

[[noreturn]] inline void throw_refused(const char* call) {
  throw std::runtime_error(std::string("libtorch refused ") + call);
}

[[noreturn]] inline void throw_unmet(const char* condition) {
  throw std::runtime_error(std::string("libtorch expected ") + condition);
}

}  // namespace gnnsys

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)  \
  if ((call) != TORCH_SUCCESS) {      \
    ::gnnsys::throw_refused(#call);   \
  }

#undef STD_TORCH_CHECK
#define STD_TORCH_CHECK(condition, ...)  \
  if (!(condition)) {                    \
    ::gnnsys::throw_unmet(#condition);   \
  }

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
