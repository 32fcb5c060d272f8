// Memory that was asked for and not there: an error of its own, told with the bytes and the op.
//
// A MemoryRequest is thrown where memory is asked for and learns at the op's boundary (register.h) which op that was. It
// holds its message in itself: there may be no memory for another.
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>
#include <new>

namespace gnnsys {

constexpr int64_t kBytesUnknown = -1;
constexpr int64_t kBytesOverflow = std::numeric_limits<int64_t>::max();  // more than can be counted

class MemoryRequest {
 public:
  void set_op(const char* op) noexcept {
    op_ = op;
    write(message_, sizeof(message_));
  }

 protected:
  explicit MemoryRequest(int64_t bytes) noexcept : bytes_(bytes) {}
  MemoryRequest(const MemoryRequest&) = default;
  MemoryRequest& operator=(const MemoryRequest&) = default;
  virtual ~MemoryRequest() = default;

  virtual void write(char* message, size_t size) const noexcept = 0;

  // "gnnsys::spmm asked for 4096 bytes (0.00 GiB)"
  int write_request(char* message, size_t size) const noexcept {
    if (bytes_ == kBytesUnknown) {
      return std::snprintf(message, size, "%s asked for more than there is", op_);
    }
    if (bytes_ == kBytesOverflow) {
      return std::snprintf(message, size, "%s asked for more bytes than can be addressed", op_);
    }
    constexpr double kGib = 1 << 30;
    return std::snprintf(message, size, "%s asked for %lld bytes (%.2f GiB)", op_, static_cast<long long>(bytes_),
                         static_cast<double>(bytes_) / kGib);
  }

  const char* message() const noexcept { return message_; }

 private:
  int64_t bytes_;
  const char* op_ = "an op of gnnsys";
  char message_[768] = "out of memory";
};

// Python sees MemoryError.
class OutOfHostMemory : public std::bad_alloc, public MemoryRequest {
 public:
  explicit OutOfHostMemory(int64_t bytes) noexcept : MemoryRequest(bytes) { set_op("an op of gnnsys"); }

  const char* what() const noexcept override { return message(); }

 private:
  void write(char* message, size_t size) const noexcept override {
    const int prefix = std::snprintf(message, size, "out of host memory: ");
    write_request(message + prefix, size - static_cast<size_t>(prefix));
  }
};

}  // namespace gnnsys
