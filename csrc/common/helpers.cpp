// Threads that help one calling thread with its loops, on machines that others use too.
//
// Nobody waits for a helper that has not come: the caller opens a gate, works itself, and closes the gate when no work
// is left. A helper that comes late finds it closed. The caller waits only for helpers inside, each of which has a piece
// of work in hand.
//
// A helper gives way to others that want its core every kTurn, between two pieces: so the kernel has little reason to
// take the core away while it has a piece in hand.
//
// Waiting is passive. A helper looks for the next loop for kSpin after the last one, and only as long as its core has
// nothing else to do: `sched_yield` then returns at once. After that it sleeps.
//
// Every calling thread has helpers of its own. They start when they are first wanted, keep the affinity of their caller,
// and end with it. A process that was forked has none and starts its own.
//
// torch's OpenMP threads spin for milliseconds after each of its loops. Where they are what keeps helpers from a core,
// they are the better helpers: `LoopPolicy` gives them the loops of that caller. OpenMP's loops end when all of its
// threads have had a core, though: where that takes long, helpers come back.
#include "common/helpers.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(_OPENMP) && !defined(__SANITIZE_THREAD__)  // which cannot see how OpenMP's threads synchronize
#include <omp.h>
#define GNNSYS_OPENMP true
#else
#define GNNSYS_OPENMP false
#endif

namespace gnnsys {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr Clock::duration kSpin = microseconds(50);
constexpr Clock::duration kTurn = microseconds(500);

const pid_t loaded_by = getpid();  // OpenMP's threads do not come along to a process that is forked from it

inline void relax_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Whether nothing else wanted this core: it had its turn now if so.
bool is_core_free() {
  constexpr Clock::duration kFree = microseconds(5);  // a yield to another thread takes longer
  const Clock::time_point before = Clock::now();
  sched_yield();
  return Clock::now() - before < kFree;
}

int this_core() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// Waits until ready() for kSpin, as long as may_go_on(). Returns ready().
template <typename Ready, typename MayGoOn>
bool spin_until(const Ready& ready, const MayGoOn& may_go_on) {
  constexpr int kLooks = 16;
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) {
        return true;
      }
      relax_cpu();
    }
  } while (may_go_on() && Clock::now() < end);
  return ready();
}

// What the threads of a loop threw: an exception that left its thread would end the process.
class Errors {
 public:
  template <typename Body>
  void guard(const Body& body) noexcept {
    try {
      body();
    } catch (...) {
      if (!any_.exchange(true)) {
        first_ = std::current_exception();
      }
    }
  }

  // Once all threads are done.
  void rethrow() const {
    if (first_) {
      std::rethrow_exception(first_);
    }
  }

 private:
  std::atomic<bool> any_{false};
  std::exception_ptr first_;
};

Clock::duration processor_time(clockid_t of) {
  timespec time{};
  clock_gettime(of, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// What other threads of this process have computed.
Clock::duration time_of_others() {
  return processor_time(CLOCK_PROCESS_CPUTIME_ID) - processor_time(CLOCK_THREAD_CPUTIME_ID);
}

// What helpers did in a loop.
struct Help {
  std::atomic<int64_t> computed{0};  // microseconds of processor time
  std::atomic<bool> lost_core{false};

  // Takes pieces on this thread, for a turn or until none is left. Returns whether there may be more.
  bool run(FunctionRef<bool()> take, Clock::duration turn) {
    const int64_t losses = lost_cores();
    // Not by getrusage: the kernel brings its times up to date with each tick, so that shorter loops took none.
    const Clock::duration before = processor_time(CLOCK_THREAD_CPUTIME_ID);
    const Clock::time_point end = Clock::now() + turn;
    bool more = true;
    while (more && Clock::now() < end) {
      more = take();
    }
    const Clock::duration took = processor_time(CLOCK_THREAD_CPUTIME_ID) - before;
    computed.fetch_add(std::chrono::duration_cast<microseconds>(took).count(), std::memory_order_relaxed);
    if (lost_cores() != losses) {
      lost_core.store(true, std::memory_order_relaxed);
    }
    return more;
  }

  void clear() {
    computed.store(0, std::memory_order_relaxed);
    lost_core.store(false, std::memory_order_relaxed);
  }

 private:
  // How often this thread's core was taken away.
  static int64_t lost_cores() {
#ifdef RUSAGE_THREAD
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
#else
    return 0;
#endif
  }
};

enum class Way { kAlone, kHelpers, kOpenmp };

// How a caller's next loop runs, from what it gained and lost in the last ones. Losses cost a ninth of the time at most.
class LoopPolicy {
 public:
  Way choose(Clock::time_point now) const {
    if (now < rest_until_) {
      return Way::kAlone;
    }
    return now < openmp_until_ ? Way::kOpenmp : Way::kHelpers;
  }

  // Whether to watch the next loop: helpers had no cores lately.
  bool watches() const { return GNNSYS_OPENMP && absent_ > kAbsent; }

  // After a loop on helpers: it took `took`, at the end of which the caller waited for `waited`. Where the loop was
  // watched, threads that are no helpers computed for `others`.
  void add_helpers(int count, const Help& help, Clock::duration took, Clock::duration waited, Clock::duration others) {
    const Clock::duration computed = microseconds(help.computed.load(std::memory_order_relaxed));
    // A helper that kept its core had a long piece, or waited for memory or a disk: the caller had waited too.
    const bool lost = help.lost_core.load(std::memory_order_relaxed);
    const Clock::duration gain = computed - (lost ? waited : Clock::duration::zero());
    since_rest_ += gain;
    credit_ = std::min(credit_ + gain, kSlice);
    if (credit_ < -kSlice) {
      rest_per_loss_ = since_rest_.count() < 0 ? std::min(2 * rest_per_loss_, kMostRest) : kLeastRest;
      rest_until_ = Clock::now() + std::min<Clock::duration>(rest_per_loss_ * -credit_, kLongestRest);
      credit_ = since_rest_ = Clock::duration::zero();
    }
    if (took < kLong) {
      return;
    }
    const Clock::time_point now = Clock::now();
    const bool absent = 2 * computed < count * took;
    if (absent && 2 * (others - computed) > took && now > no_openmp_until_ && getpid() == loaded_by) {
      openmp_until_ = now + kOpenmpTurn;
    }
    absent_ = absent && !watches() ? absent_ + took : Clock::duration::zero();
  }

  // After a loop on OpenMP's threads.
  void add_openmp(const Help& help, Clock::duration waited) {
    const Clock::duration lost = waited - microseconds(help.computed.load(std::memory_order_relaxed));
    openmp_lost_ = std::max(openmp_lost_ + lost, Clock::duration::zero());
    if (openmp_lost_ <= kAbsent) {
      return;
    }
    const Clock::time_point now = Clock::now();
    openmp_pause_ = std::min(std::max(2 * openmp_pause_, kPausePerLoss * openmp_lost_), kMostPause);
    no_openmp_until_ = now + openmp_pause_;
    openmp_until_ = now;
    openmp_lost_ = Clock::duration::zero();
  }

 private:
  static constexpr Clock::duration kSlice = milliseconds(2);       // about what another process keeps a core
  static constexpr int kLeastRest = 8, kMostRest = 64;             // times the loss
  static constexpr Clock::duration kLongestRest = std::chrono::seconds(10);  // the process may be stopped for hours
  static constexpr Clock::duration kLong = microseconds(200);      // a loop in which every helper has time to come
  static constexpr Clock::duration kAbsent = milliseconds(1);
  static constexpr Clock::duration kOpenmpTurn = milliseconds(200);
  static constexpr int kPausePerLoss = 16;
  static constexpr Clock::duration kMostPause = std::chrono::seconds(2);

  int rest_per_loss_ = kLeastRest;
  Clock::duration credit_{0}, since_rest_{0}, absent_{0}, openmp_lost_{0}, openmp_pause_{0};
  Clock::time_point rest_until_{}, openmp_until_{}, no_openmp_until_{};
};

// What a caller and its helpers share.
class Gate {
 public:
  Help help;

  void open(int most, const FunctionRef<bool()>* take) {
    take_ = take;
    help.clear();
    number_ = (number_ + 1) & 0xffffffff;
    state_.store(number_ << 32 | kOpen | static_cast<uint64_t>(most) << kLimitShift);
    wake();
  }

  // Returns how long it waited for those inside.
  Clock::duration close() {
    if ((state_.fetch_and(~kOpen) & kCount) == 0) {
      return Clock::duration::zero();
    }
    const Clock::time_point began = Clock::now();
    const auto is_empty = [this] { return (state_.load() & kCount) == 0; };
    // A caller that yields may lose its core for longer than it waits. But it must not keep a helper from a core.
    const auto is_core_its_own = [this] {
      const int core = core_.load(std::memory_order_relaxed);
      return core < 0 || core != this_core();
    };
    if (!spin_until(is_empty, is_core_its_own)) {
      std::unique_lock<std::mutex> lock(mutex_);
      caller_sleeps_.store(true);
      left_.wait(lock, is_empty);
      caller_sleeps_.store(false);
    }
    return Clock::now() - began;
  }

  void end() {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_.store(kEnd);
    opened_.notify_all();
  }

  // A helper's life.
  void serve() {
    inside_loop() = true;
    uint64_t last = 0;
    const auto is_wanted = [&] {
      const uint64_t state = state_.load();
      return (state & kEnd) != 0 || (state >> 32 != last && may_enter(state));
    };
    while (true) {
      if (!spin_until(is_wanted, is_core_free)) {
        std::unique_lock<std::mutex> lock(mutex_);
        num_asleep_.fetch_add(1);
        opened_.wait(lock, is_wanted);
        num_asleep_.fetch_sub(1);
      }
      uint64_t state = state_.load();
      if ((state & kEnd) != 0) {
        return;
      }
      if (state >> 32 != last && may_enter(state) && state_.compare_exchange_strong(state, state + 1 + kCame)) {
        last = state >> 32;
        wake();
        bool more = true;
        do {
          core_.store(this_core(), std::memory_order_relaxed);
          more = help.run(*take_, kTurn);
          leave();
        } while (more && sched_yield() == 0 && enter_again(last));
      }
    }
  }

 private:
  // The state: the loop's number in the high half; below it whether helpers end, whether the gate is open, how many may
  // come, how many came, and how many are inside.
  static constexpr uint64_t kCount = 0x3ff;
  static constexpr int kCameShift = 10;
  static constexpr uint64_t kCame = uint64_t{1} << kCameShift;
  static constexpr int kLimitShift = 20;
  static constexpr uint64_t kOpen = uint64_t{1} << 30;
  static constexpr uint64_t kEnd = uint64_t{1} << 31;

  static int64_t num_missing(uint64_t state) {
    return static_cast<int64_t>(state >> kLimitShift & kCount) - static_cast<int64_t>(state >> kCameShift & kCount);
  }
  static bool may_enter(uint64_t state) { return (state & kOpen) != 0 && num_missing(state) > 0; }

  // Two of those that sleep, as far as they are wanted. They wake more.
  void wake() {
    const uint64_t state = state_.load();
    if (num_asleep_.load() == 0 || !may_enter(state)) {
      return;
    }
    meet_sleepers();
    opened_.notify_one();
    if (num_missing(state) > 1) {
      opened_.notify_one();
    }
  }

  bool enter_again(uint64_t number) {
    uint64_t state = state_.load();
    while (state >> 32 == number && (state & kOpen) != 0) {
      if (state_.compare_exchange_weak(state, state + 1)) {
        return true;
      }
    }
    return false;
  }

  void leave() {
    const uint64_t before = state_.fetch_sub(1);
    if ((before & kCount) == 1 && (before & kOpen) == 0 && caller_sleeps_.load()) {
      meet_sleepers();
      left_.notify_one();
    }
  }

  // Whoever has seen the state of before, under the lock, sleeps now.
  void meet_sleepers() { const std::lock_guard<std::mutex> lock(mutex_); }

  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::atomic<int> core_{-1};  // of the helper that came last
  std::atomic<bool> caller_sleeps_{false};
  const FunctionRef<bool()>* take_ = nullptr;
  uint64_t number_ = 0;
  std::mutex mutex_;
  std::condition_variable opened_, left_;
};

class Helpers {
 public:
  Helpers() = default;
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  ~Helpers() {
    forget_after_fork();
    if (gate_ != nullptr) {
      gate_->end();
      for (std::thread& thread : threads_) {
        thread.join();
      }
    }
  }

  void run(int num_threads, int max_threads, FunctionRef<void()> caller, FunctionRef<bool()> helper) {
    forget_after_fork();
    const Clock::time_point began = Clock::now();
    switch (policy_.choose(began)) {
      case Way::kAlone:
        caller();
        break;
      case Way::kHelpers: {
        const int count = std::min(num_threads - 1, kMostHelpers);
        start(count);
        if (threads_.empty()) {
          caller();
          break;
        }
        const bool watches = policy_.watches();
        const Clock::duration before = watches ? time_of_others() : Clock::duration::zero();
        gate_->open(count, &helper);
        caller();
        const Clock::duration waited = gate_->close();
        const Clock::duration others = watches ? time_of_others() - before : Clock::duration::zero();
        policy_.add_helpers(count, gate_->help, Clock::now() - began, waited, others);
        break;
      }
      case Way::kOpenmp:
        run_openmp(num_threads, max_threads, caller, helper);
        break;
    }
  }

 private:
  static constexpr int kMostHelpers = 1000;

  // Starts what is missing of `count` helpers; fewer where the system has no more threads, or no memory for them.
  void start(int count) {
    if (static_cast<int>(threads_.size()) >= count) {
      return;
    }
    sigset_t blocked, before;
    sigfillset(&blocked);  // signals are for the program's own threads, except those for what the thread itself did
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) {
      sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    try {
      if (gate_ == nullptr) {
        gate_ = std::make_unique<Gate>();
      }
      while (static_cast<int>(threads_.size()) < count) {
        threads_.emplace_back(&Gate::serve, gate_.get());
      }
    } catch (const std::exception&) {  // system_error, bad_alloc
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // OpenMP is asked for all its threads, as torch asks: it ends those that a smaller loop leaves over.
  void run_openmp([[maybe_unused]] int num_threads, [[maybe_unused]] int max_threads, FunctionRef<void()> caller,
                  [[maybe_unused]] FunctionRef<bool()> helper) {
#if GNNSYS_OPENMP
    Help help;
    Clock::time_point worked;
#pragma omp parallel num_threads(max_threads)
    {
      const int t = omp_get_thread_num();
      if (t == 0) {
        caller();
        worked = Clock::now();
      } else if (t < num_threads) {
        const bool before = std::exchange(inside_loop(), true);
        help.run(helper, Clock::duration::max() / 2);
        inside_loop() = before;
      }
    }
    policy_.add_openmp(help, Clock::now() - worked);
#else
    caller();
#endif
  }

  // Helpers did not come along, and the lock may be held for ever: they are left as they are.
  void forget_after_fork() {
    const pid_t now = getpid();
    if (std::exchange(process_, now) != now && gate_ != nullptr) {
      gate_.release();
      new std::vector<std::thread>(std::move(threads_));
      threads_.clear();
      policy_ = LoopPolicy();
    }
  }

  std::unique_ptr<Gate> gate_;
  std::vector<std::thread> threads_;
  pid_t process_ = getpid();
  LoopPolicy policy_;
};

}  // namespace

bool& inside_loop() {
  static thread_local bool inside = false;
  return inside;
}

void run_with_helpers(int num_threads, int max_threads, FunctionRef<void()> caller, FunctionRef<bool()> helper) {
  static thread_local Helpers helpers;
  Errors errors;
  const auto guarded_caller = [&] { errors.guard([&] { caller(); }); };
  const auto guarded_helper = [&] {
    bool more = false;
    errors.guard([&] { more = helper(); });
    return more;
  };
  inside_loop() = true;
  helpers.run(num_threads, max_threads, guarded_caller, guarded_helper);
  inside_loop() = false;
  errors.rethrow();
}

void run_pieces(int64_t num_pieces, int num_threads, int max_threads, FunctionRef<void(int64_t)> body) {
  std::atomic<int64_t> next{0};
  const auto take = [&] {
    const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
    if (piece >= num_pieces) {
      return false;
    }
    try {
      body(piece);
    } catch (...) {
      next.store(num_pieces, std::memory_order_relaxed);
      throw;
    }
    return true;
  };
  const auto take_all = [&] {
    while (take()) {
    }
  };
  run_with_helpers(num_threads, max_threads, take_all, take);
}

}  // namespace gnnsys
