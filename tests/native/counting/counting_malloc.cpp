// malloc and its kin, counted: loaded before all others (LD_PRELOAD) it says how much a process held at most.
#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

static std::atomic<int64_t> held{0};
static std::atomic<int64_t> most{0};

static void* counted(void* p) {
  if (p != nullptr) {
    const int64_t now = held += static_cast<int64_t>(malloc_usable_size(p));
    int64_t before = most.load();
    while (now > before && !most.compare_exchange_weak(before, now)) {
    }
  }
  return p;
}

static void forget(void* p) {
  if (p != nullptr) {
    held -= static_cast<int64_t>(malloc_usable_size(p));
  }
}

void* malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }
void* calloc(size_t count, size_t bytes) { return counted(__libc_calloc(count, bytes)); }
void* memalign(size_t alignment, size_t bytes) { return counted(__libc_memalign(alignment, bytes)); }
void* aligned_alloc(size_t alignment, size_t bytes) { return counted(__libc_memalign(alignment, bytes)); }

void* realloc(void* p, size_t bytes) {
  forget(p);
  return counted(__libc_realloc(p, bytes));
}

int posix_memalign(void** p, size_t alignment, size_t bytes) {
  *p = counted(__libc_memalign(alignment, bytes));
  return *p == nullptr ? ENOMEM : 0;
}

void free(void* p) {
  forget(p);
  __libc_free(p);
}

// Begins to look for the most that is held from now on, above what is held now.
int64_t counting_start() {
  most = held.load();
  return most;
}

int64_t counting_most() { return most; }
}
