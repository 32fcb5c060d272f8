// What a pull of few rows does to bytes: split_ids, gather_bytes, place_bytes. Called by Python as plain functions,
// with addresses: for a hundred rows torch's dispatcher, and the tensors that it wants, take longer than the work.
//
// Each does the whole work or none of it: None says that the ordinary way (bucket_ids, move_rows) must say why not.
// Ids that came in a message lie at any address, so they are read by memcpy.
#include "cpu/store/small_pull.h"

#include "cpu/owners.h"
#include "cpu/row_copy.h"
#include "cpu/store/versions.h"

#include <array>
#include <chrono>
#include <cstring>
#include <exception>
#include <vector>

namespace gnnsys {
namespace {

constexpr std::chrono::milliseconds kShortPatience{1};

// The arguments of a call, all of them addresses and sizes; false with a Python error where they are not.
template <size_t kCount>
bool read_numbers(PyObject* const* args, Py_ssize_t num_args, std::array<int64_t, kCount>& out) {
  if (num_args != static_cast<Py_ssize_t>(kCount)) {
    PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return false;
  }
  for (size_t i = 0; i < kCount; ++i) {
    out[i] = static_cast<int64_t>(PyLong_AsLongLong(args[i]));
    if (out[i] < 0) {
      if (PyErr_Occurred() == nullptr) {
        PyErr_SetString(PyExc_ValueError, "addresses and sizes are not below zero");
      }
      return false;
    }
  }
  return true;
}

template <typename T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

int64_t load_id(const char* ids, int64_t id_bytes, int64_t i) {
  if (id_bytes == 4) {
    int32_t id;
    std::memcpy(&id, ids + 4 * i, 4);
    return id;
  }
  int64_t id;
  std::memcpy(&id, ids + 8 * i, 8);
  return id;
}

void store_id(char* ids, int64_t id_bytes, int64_t i, int64_t id) {
  if (id_bytes == 4) {
    const auto narrow = static_cast<int32_t>(id);
    std::memcpy(ids + 4 * i, &narrow, 4);
  } else {
    std::memcpy(ids + 8 * i, &id, 8);
  }
}

// split_ids(ids, id_bytes, size, bounds, num_parts, local_bytes) -> (counts, order, local), or None for an id out of
// range: as bucket_ids, with `counts` a tuple, `order` (int64) and `local` bytearrays. Without order where all ids are
// of one part.
PyObject* split_ids(PyObject* const* args, Py_ssize_t num_args) {
  std::array<int64_t, 6> given;
  if (!read_numbers(args, num_args, given)) {
    return nullptr;
  }
  const auto [address, id_bytes, size, bounds_address, num_parts, local_bytes] = given;
  const char* const ids = pointer<const char>(address);
  const auto* const bounds = pointer<const int64_t>(bounds_address);
  std::vector<int64_t> next(static_cast<size_t>(num_parts + 1), 0);
  std::vector<int32_t> part(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    const int64_t id = load_id(ids, id_bytes, i);
    if (id < 0 || id >= bounds[num_parts]) {
      return none();
    }
    const int64_t found = std::upper_bound(bounds, bounds + num_parts + 1, id) - bounds - 1;
    part[static_cast<size_t>(i)] = static_cast<int32_t>(found);
    ++next[static_cast<size_t>(found + 1)];
  }
  bool is_one = false;
  PyObject* const counts = PyTuple_New(num_parts);
  for (int64_t p = 0; p < num_parts && counts != nullptr; ++p) {
    const int64_t count = next[static_cast<size_t>(p + 1)];
    is_one = is_one || count == size;
    PyObject* const number = PyLong_FromLongLong(count);
    if (number == nullptr || PyTuple_SetItem(counts, p, number) != 0) {
      Py_DECREF(counts);
      return nullptr;
    }
  }
  PyObject* const local = PyByteArray_FromStringAndSize(nullptr, size * local_bytes);
  PyObject* const order = is_one ? none() : PyByteArray_FromStringAndSize(nullptr, size * 8);
  if (counts == nullptr || local == nullptr || order == nullptr) {
    Py_XDECREF(counts);
    Py_XDECREF(local);
    Py_XDECREF(order);
    return nullptr;
  }
  char* const local_out = PyByteArray_AsString(local);
  char* const order_out = is_one ? nullptr : PyByteArray_AsString(order);
  for (int64_t p = 0; p < num_parts; ++p) {
    next[static_cast<size_t>(p + 1)] += next[static_cast<size_t>(p)];
  }
  for (int64_t i = 0; i < size; ++i) {
    const auto p = static_cast<size_t>(part[static_cast<size_t>(i)]);
    const int64_t at = next[p]++;
    store_id(local_out, local_bytes, at, load_id(ids, id_bytes, i) - bounds[p]);
    if (order_out != nullptr) {
      store_id(order_out, 8, at, i);
    }
  }
  PyObject* const result = PyTuple_Pack(3, counts, order, local);
  Py_DECREF(counts);
  Py_DECREF(order);
  Py_DECREF(local);
  return result;
}

// gather_bytes(rows, num_rows, row_bytes, versions, ids, id_bytes, size, room) -> bytearray of `room` bytes, which the
// caller fills, and the rows of the ids behind them; None for an id out of range, or a row that is being written.
PyObject* gather_bytes(PyObject* const* args, Py_ssize_t num_args) {
  std::array<int64_t, 8> given;
  if (!read_numbers(args, num_args, given)) {
    return nullptr;
  }
  const auto [rows_address, num_rows, row_bytes, versions_address, ids_address, id_bytes, size, room] = given;
  PyObject* const result = PyByteArray_FromStringAndSize(nullptr, room + size * row_bytes);
  if (result == nullptr) {
    return nullptr;
  }
  char* const out = PyByteArray_AsString(result) + room;
  const char* const rows = pointer<const char>(rows_address);
  const char* const ids = pointer<const char>(ids_address);
  const Versions versions(pointer<uint32_t>(versions_address), kShortPatience);
  const CopyBytes copy{row_bytes};
  const int64_t ahead = rows_ahead(row_bytes);
  bool is_whole = true;
  Py_BEGIN_ALLOW_THREADS;  // rows of a file may have to be read first
  for (int64_t i = 0; i < size && is_whole; ++i) {
    const int64_t id = load_id(ids, id_bytes, i);
    is_whole = id >= 0 && id < num_rows;
  }
  for (int64_t i = 0; i < size && is_whole; ++i) {
    if (i + ahead < size) {
      prefetch_read(rows + load_id(ids, id_bytes, i + ahead) * row_bytes, row_bytes, kPrefetchStride);
    }
    const int64_t id = load_id(ids, id_bytes, i);
    if (!versions) {
      copy(out, i, rows, id);
    } else {
      is_whole = versions.read(id, [&] { copy(out, i, rows, id); });
    }
  }
  Py_END_ALLOW_THREADS;
  if (!is_whole) {
    Py_DECREF(result);
    return none();
  }
  return result;
}

// place_bytes(from, size, row_bytes, order, out, num_out): row i goes to row order[i] of `out`, or to row i where order
// is 0. True, or None for an order out of range.
PyObject* place_bytes(PyObject* const* args, Py_ssize_t num_args) {
  std::array<int64_t, 6> given;
  if (!read_numbers(args, num_args, given)) {
    return nullptr;
  }
  const auto [from_address, size, row_bytes, order_address, out_address, num_out] = given;
  const char* const from = pointer<const char>(from_address);
  const char* const order = pointer<const char>(order_address);
  char* const out = pointer<char>(out_address);
  if (size > num_out) {
    return none();
  }
  if (order == nullptr) {
    std::memcpy(out, from, static_cast<size_t>(size * row_bytes));
  } else {
    for (int64_t i = 0; i < size; ++i) {
      const int64_t to = load_id(order, 8, i);
      if (to < 0 || to >= num_out) {
        return none();
      }
    }
    const CopyBytes copy{row_bytes};
    for (int64_t i = 0; i < size; ++i) {
      copy(out, load_id(order, 8, i), from, i);
    }
  }
  Py_INCREF(Py_True);
  return Py_True;
}

using Function = PyObject*(PyObject* const* args, Py_ssize_t num_args);

// Nothing is thrown into Python: what there is no memory for is a MemoryError.
template <Function* kFunction>
PyObject* guarded(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  try {
    return kFunction(args, num_args);
  } catch (const std::exception&) {
    return PyErr_NoMemory();
  }
}

template <Function* kFunction>
PyCFunction as_method() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&guarded<kFunction>));
}

}  // namespace

PyMethodDef kSmallPullMethods[] = {
    {"split_ids", as_method<&split_ids>(), METH_FASTCALL, nullptr},
    {"gather_bytes", as_method<&gather_bytes>(), METH_FASTCALL, nullptr},
    {"place_bytes", as_method<&place_bytes>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace gnnsys
