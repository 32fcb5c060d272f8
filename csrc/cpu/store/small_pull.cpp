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

// Writes the beginning of a message into `out`: `front`, with a number of rows at `count_at` and, where `twice`, in its
// last eight bytes.
void put_front(char* out, const char* front, int64_t size, int64_t count_at, int64_t count, bool twice) {
  std::memcpy(out, front, static_cast<size_t>(size));
  store_id(out + count_at, 8, 0, count);
  if (twice) {
    store_id(out + size - 8, 8, 0, count);
  }
}

// The bytes of a message's beginning that has room for `count_at`; false with a Python error where it is none.
bool read_front(PyObject* given, int64_t count_at, char** front, int64_t* size) {
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(given, front, &length) != 0) {
    return false;
  }
  *size = length;
  if (length != 0 && count_at + 8 > length) {
    PyErr_SetString(PyExc_ValueError, "no room for the number of rows");
    return false;
  }
  return true;
}

// The ids of one part: where they begin among those grouped by part, and how many there are.
PyObject* make_run(int64_t part, int64_t first, int64_t count, PyObject* message) {
  return message == nullptr ? nullptr
                            : Py_BuildValue("(LLLN)", static_cast<long long>(part), static_cast<long long>(first),
                                            static_cast<long long>(count), message);
}

// split_ids(ids, id_bytes, size, bounds, num_parts, local_bytes, count_at, fronts) -> (runs, order), or None for an id
// out of range. As bucket_ids, for parts that have some: (part, first, count, message), where the message is the part's
// entry of `fronts` (bytes), with the count at count_at, and the ids behind it; of an empty entry the ids alone. `order`
// is a bytearray of int64, or None where all ids are of one part.
PyObject* split_ids(PyObject* const* args, Py_ssize_t num_args) {
  std::array<int64_t, 7> given;
  if (!read_numbers(args, num_args - 1, given)) {
    return nullptr;
  }
  const auto [address, id_bytes, size, bounds_address, num_parts, local_bytes, count_at] = given;
  PyObject* const fronts = args[given.size()];
  const char* const ids = pointer<const char>(address);
  const auto* const bounds = pointer<const int64_t>(bounds_address);
  if (!PyTuple_Check(fronts) || PyTuple_Size(fronts) != num_parts) {
    PyErr_SetString(PyExc_TypeError, "fronts must be a tuple with an entry for each part");
    return nullptr;
  }
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
  std::vector<char*> local(static_cast<size_t>(num_parts), nullptr);  // where a part's next id goes
  PyObject* const runs = PyList_New(0);
  bool is_made = runs != nullptr;
  for (int64_t p = 0; p < num_parts && is_made; ++p) {
    const auto at = static_cast<size_t>(p);
    const int64_t count = next[at + 1];
    if (count != 0) {
      char* front = nullptr;
      int64_t front_bytes = 0;
      is_made = read_front(PyTuple_GetItem(fronts, p), count_at, &front, &front_bytes);
      PyObject* const message =
          is_made ? PyByteArray_FromStringAndSize(nullptr, front_bytes + count * local_bytes) : nullptr;
      if (message != nullptr) {
        local[at] = PyByteArray_AsString(message) + front_bytes;
        if (front_bytes != 0) {
          put_front(local[at] - front_bytes, front, front_bytes, count_at, count, /*twice=*/false);
        }
      }
      PyObject* const run = make_run(p, next[at], count, message);
      is_made = run != nullptr && PyList_Append(runs, run) == 0;
      Py_XDECREF(run);
    }
    next[at + 1] += next[at];
  }
  const bool is_one = is_made && PyList_Size(runs) <= 1;
  PyObject* const order = !is_made ? nullptr : is_one ? none() : PyByteArray_FromStringAndSize(nullptr, size * 8);
  if (order == nullptr) {
    Py_XDECREF(runs);
    return nullptr;
  }
  char* const order_out = is_one ? nullptr : PyByteArray_AsString(order);
  for (int64_t i = 0; i < size; ++i) {
    const auto p = static_cast<size_t>(part[static_cast<size_t>(i)]);
    store_id(local[p], local_bytes, 0, load_id(ids, id_bytes, i) - bounds[p]);
    local[p] += local_bytes;
    if (order_out != nullptr) {
      store_id(order_out, 8, next[p]++, i);
    }
  }
  return Py_BuildValue("(NN)", runs, order);
}

// gather_bytes(rows, num_rows, row_bytes, versions, ids, id_bytes, size, count_at, front) -> bytearray of `front` (bytes),
// with the number of rows at count_at and at its end, and the rows of the ids behind it; None for an id out of range, or
// a row that is being written.
PyObject* gather_bytes(PyObject* const* args, Py_ssize_t num_args) {
  std::array<int64_t, 8> given;
  if (!read_numbers(args, num_args - 1, given)) {
    return nullptr;
  }
  const auto [rows_address, num_rows, row_bytes, versions_address, ids_address, id_bytes, size, count_at] = given;
  char* front = nullptr;
  int64_t front_bytes = 0;
  if (!read_front(args[given.size()], count_at, &front, &front_bytes)) {
    return nullptr;
  }
  PyObject* const result = PyByteArray_FromStringAndSize(nullptr, front_bytes + size * row_bytes);
  if (result == nullptr) {
    return nullptr;
  }
  char* const out = PyByteArray_AsString(result) + front_bytes;
  if (front_bytes != 0) {
    put_front(out - front_bytes, front, front_bytes, count_at, size, /*twice=*/true);
  }
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

// Whether `size` bytes begin as gather_bytes would write it with this front, but for the first `skipped` of them.
bool begins_with(const char* bytes, int64_t size, const char* front, int64_t front_bytes, int64_t skipped,
                 int64_t count_at, int64_t count) {
  const int64_t end = front_bytes - 8;
  const auto is_same = [=](int64_t first, int64_t last) {
    return std::memcmp(bytes + first, front + first, static_cast<size_t>(last - first)) == 0;
  };
  return size >= front_bytes && skipped <= count_at && count_at + 8 <= end && load_id(bytes + count_at, 8, 0) == count &&
         load_id(bytes + end, 8, 0) == count && is_same(skipped, count_at) && is_same(count_at + 8, end);
}

// place_bytes(message, message_bytes, rows, num_bytes, size, row_bytes, order, first, out, num_out, skipped, count_at,
// front): the message is one that gather_bytes has written with this front, whose first `skipped` bytes may be any; its
// rows are behind that or, where `rows` is not 0, there. Row i goes to row order[first + i] of `out` (int64), or to row
// i where the address of order is 0. True; None for another message or an order out of range.
PyObject* place_bytes(PyObject* const* args, Py_ssize_t num_args) {
  std::array<int64_t, 12> given;
  if (!read_numbers(args, num_args - 1, given)) {
    return nullptr;
  }
  const auto [message_address, message_bytes, rows_address, num_bytes, size, row_bytes, order_address, first,
              out_address, num_out, skipped, count_at] = given;
  char* front = nullptr;
  int64_t front_bytes = 0;
  if (!read_front(args[given.size()], count_at, &front, &front_bytes)) {
    return nullptr;
  }
  const char* const message = pointer<const char>(message_address);
  const bool is_inside = rows_address == 0;
  const char* const from = is_inside ? message + front_bytes : pointer<const char>(rows_address);
  const char* const order = pointer<const char>(order_address);
  char* const out = pointer<char>(out_address);
  const int64_t left = message_bytes - front_bytes;
  if (size > num_out || (is_inside ? left : num_bytes) != size * row_bytes || (!is_inside && left != 0) ||
      !begins_with(message, message_bytes, front, front_bytes, skipped, count_at, size)) {
    return none();
  }
  if (order == nullptr) {
    std::memcpy(out, from, static_cast<size_t>(size * row_bytes));
  } else {
    for (int64_t i = 0; i < size; ++i) {
      const int64_t to = load_id(order, 8, first + i);
      if (to < 0 || to >= num_out) {
        return none();
      }
    }
    const CopyBytes copy{row_bytes};
    for (int64_t i = 0; i < size; ++i) {
      copy(out, load_id(order, 8, first + i), from, i);
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
