// Device memory that was asked for and not there. Python sees torch.OutOfMemoryError.
#pragma once

#include "common/out_of_memory.h"

#include <stdexcept>

// pybind11, through which torch's ops are called, finds exceptions of this name by name, in whatever library they were
// thrown, and lets them choose their Python type. libtorch's stable ABI has no way of its own to choose one. Declared
// here as pybind11 declares it; tests/native/test_memory_errors.py throws one through torch. A pybind11 that knew no such
// class would take it for what it also is, a std::runtime_error.
namespace pybind11 {

class builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};

}  // namespace pybind11

namespace gnnsys::cuda {

class OutOfDeviceMemory : public pybind11::builtin_exception, public MemoryRequest {
 public:
  // free and total: the device's bytes, -1 where not known. torch_said: torch's own words, or null.
  OutOfDeviceMemory(int64_t bytes, int device, int64_t free, int64_t total, const char* torch_said);

  const char* what() const noexcept override { return message(); }
  void set_error() const override;

 private:
  void write(char* message, size_t size) const noexcept override;

  int device_;
  int64_t free_;
  int64_t total_;
  char torch_said_[448] = "";
};

}  // namespace gnnsys::cuda
