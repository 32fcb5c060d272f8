#include <Python.h>

#include "cuda/out_of_memory.h"

#include <cstdio>

namespace gnnsys::cuda {

OutOfDeviceMemory::OutOfDeviceMemory(int64_t bytes, int device, int64_t free, int64_t total, const char* torch_said)
    : builtin_exception(""), MemoryRequest(bytes), device_(device), free_(free), total_(total) {
  if (torch_said != nullptr) {
    std::snprintf(torch_said_, sizeof(torch_said_), " torch says: %s", torch_said);
  }
  set_op("an op of gnnsys");
}

void OutOfDeviceMemory::write(char* message, size_t size) const noexcept {
  size_t at = static_cast<size_t>(std::snprintf(message, size, "CUDA out of memory: "));
  at += static_cast<size_t>(write_request(message + at, size - at));
  if (total_ >= 0) {
    at += static_cast<size_t>(std::snprintf(message + at, size - at, " on cuda:%d, where %lld of %lld bytes are free.",
                                            device_, static_cast<long long>(free_), static_cast<long long>(total_)));
  } else {
    at += static_cast<size_t>(std::snprintf(message + at, size - at, " on cuda:%d.", device_));
  }
  std::snprintf(message + at, size - at, "%s", torch_said_);
}

// pybind11 calls it with the GIL; to ask for it again costs nothing.
void OutOfDeviceMemory::set_error() const {
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject* const torch = PyImport_ImportModule("torch");
  PyObject* const type = torch != nullptr ? PyObject_GetAttrString(torch, "OutOfMemoryError") : nullptr;
  if (type == nullptr) {
    PyErr_Clear();
  }
  PyErr_SetString(type != nullptr ? type : PyExc_MemoryError, what());
  Py_XDECREF(type);
  Py_XDECREF(torch);
  PyGILState_Release(gil);
}

}  // namespace gnnsys::cuda
