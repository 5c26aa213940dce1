// A library with NCCL's binary interface over host memory, for tests without a GPU: ranks are threads or processes
// of one machine. Every communicator has a thread that runs its operations, so calls return "in progress" as NCCL's
// do. fake_nccl_set() makes it misbehave.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};
constexpr int kMostRanks = 8;
constexpr std::size_t kSlot = std::size_t{64} << 10;

/// Behavior that tests change.
struct Faults {
  std::atomic<int> version{22809};
  std::atomic<int> stall{0};        ///< operations do not end
  std::atomic<int> async_error{0};  ///< result of get_async_error between operations
  std::atomic<int> refuse{0};       ///< result of all_reduce
  std::atomic<int> die{0};          ///< the process ends in its n-th all_reduce from now on; 0: in none
  std::atomic<int> aborted{0};      ///< counts ncclCommAbort
  std::atomic<int> destroyed{0};    ///< counts ncclCommDestroy
};
Faults& faults() {
  static Faults the_faults;
  return the_faults;
}

/// Memory of one communicator that its ranks map.
struct Shared {
  std::atomic<std::uint32_t> arrived{0};
  std::atomic<std::uint32_t> generation{0};
  std::atomic<int> ended{0};  ///< communicators that are being destroyed, or were aborted
  std::uint64_t length[kMostRanks] = {};
  alignas(64) std::byte slot[kMostRanks][kSlot] = {};
};

struct UniqueId {
  char bytes[128];
};

struct Configuration {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

struct Aborted {};

}  // namespace

struct Communicator {
  std::string name;
  Shared* shared = nullptr;
  int rank = 0, size = 1;
  std::atomic<int> state{kInProgress};
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool ending = false;
  std::atomic<bool> stopped{false};
  bool dies = false;  ///< the process ends after the next piece that the communicator sends
  std::thread thread;

  void meet() {
    const std::uint32_t now = shared->generation.load();
    if (shared->arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(size)) {
      shared->arrived.store(0);
      shared->generation.fetch_add(1);
      return;
    }
    while (shared->generation.load() == now) {
      if (stopped.load()) throw Aborted{};
      std::this_thread::yield();
    }
  }
  void stall() {
    while (faults().stall.load() != 0 && !stopped.load()) std::this_thread::yield();
    if (stopped.load()) throw Aborted{};
  }
  void run() {
    while (true) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return ending || !work.empty(); });
        if (work.empty()) return;
        next = std::move(work.front());
        work.pop_front();
      }
      try {
        stall();
        next();
        const std::lock_guard<std::mutex> lock(mutex);
        if (work.empty()) state.store(kSuccess);
      } catch (const Aborted&) {
        state.store(kRemoteError);
        return;
      }
    }
  }
  Result enqueue(std::function<void()> job) {
    const std::lock_guard<std::mutex> lock(mutex);
    state.store(kInProgress);
    work.push_back(std::move(job));
    changed.notify_all();
    return kInProgress;
  }
  void end(bool abort) {
    if (abort) stopped.store(true);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ending = true;
      changed.notify_all();
    }
    thread.join();
    munmap(shared, sizeof(Shared));
    remove_name();
  }
  void remove_name() const {
    if (rank == 0) shm_unlink(name.c_str());
  }
  /// Waits for all ranks, which then have mapped the memory: it needs no name, which would outlive ranks that die.
  void connect() {
    meet();
    remove_name();
  }

  /// Gives `take` the bytes of every rank, in pieces: (rank, offset, data, size).
  using Take = std::function<void(int, std::size_t, const std::byte*, std::size_t)>;
  void exchange(const std::byte* mine, std::size_t bytes, const Take& take) {
    shared->length[rank] = bytes;
    meet();
    std::uint64_t longest = 0;
    for (int from = 0; from < size; ++from) longest = std::max(longest, shared->length[from]);
    const std::vector<std::uint64_t> lengths(shared->length, shared->length + size);
    for (std::size_t at = 0; at < longest; at += kSlot) {
      if (at < bytes) std::memcpy(shared->slot[rank], mine + at, std::min(kSlot, bytes - at));
      meet();
      if (dies) _exit(0);
      for (int from = 0; from < size; ++from) {
        const std::uint64_t length = lengths[static_cast<std::size_t>(from)];
        if (at < length) take(from, at, shared->slot[from], std::min<std::size_t>(kSlot, length - at));
      }
      meet();
    }
    meet();
  }
};

namespace {

struct Half {
  static float widen(std::uint16_t bits, bool brain) {
    if (brain) {
      const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
      float value = 0;
      std::memcpy(&value, &wide, 4);
      return value;
    }
    const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const float size = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                       : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                       : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    return (bits & 0x8000) != 0 ? -size : size;
  }
  static std::uint16_t narrow(float value, bool brain) {
    if (brain) {
      std::uint32_t wide = 0;
      std::memcpy(&wide, &value, 4);
      return static_cast<std::uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
    }
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (std::isnan(size)) return static_cast<std::uint16_t>(sign | 0x7E00);
    if (size == 0) return static_cast<std::uint16_t>(sign);
    if (size >= 65520) return static_cast<std::uint16_t>(sign | 0x7C00);
    int exponent = 0;
    std::frexp(size, &exponent);
    // The value of the last bit is 2^unit. Rounds to even.
    const int unit = std::max(exponent - 11, -24);
    const int whole = static_cast<int>(std::nearbyint(std::ldexp(size, -unit)));
    return static_cast<std::uint16_t>(sign | (((unit + 24) << 10) + whole));
  }
};

template <class T>
T combine(T a, T b, int op) {
  switch (op) {
    case 1:
      return static_cast<T>(a * b);
    case 2:
      return std::max(a, b);
    case 3:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

template <class T>
void reduce(const std::vector<std::byte>& all, std::size_t bytes, int ranks, int op, std::byte* to) {
  for (std::size_t i = 0; i < bytes / sizeof(T); ++i) {
    T value{};
    for (int rank = 0; rank < ranks; ++rank) {
      T next;
      std::memcpy(&next, all.data() + static_cast<std::size_t>(rank) * bytes + i * sizeof(T), sizeof(T));
      value = rank == 0 ? next : combine(value, next, op);
    }
    if (op == 4) value = static_cast<T>(value / static_cast<T>(ranks));
    std::memcpy(to + i * sizeof(T), &value, sizeof(T));
  }
}

void reduce_halves(const std::vector<std::byte>& all, std::size_t bytes, int ranks, int op, bool brain,
                   std::byte* to) {
  for (std::size_t i = 0; i < bytes; i += 2) {
    float value = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, all.data() + static_cast<std::size_t>(rank) * bytes + i, 2);
      const float next = Half::widen(bits, brain);
      value = rank == 0 ? next : combine(value, next, op);
    }
    const std::uint16_t bits = Half::narrow(op == 4 ? value / static_cast<float>(ranks) : value, brain);
    std::memcpy(to + i, &bits, 2);
  }
}

std::size_t bytes_of(int type) {
  constexpr std::size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[type];
}

void reduce_any(const std::vector<std::byte>& all, std::size_t bytes, int ranks, int type, int op,
                std::byte* to) {
  switch (type) {
    case 0:
      return reduce<std::int8_t>(all, bytes, ranks, op, to);
    case 1:
      return reduce<std::uint8_t>(all, bytes, ranks, op, to);
    case 2:
      return reduce<std::int32_t>(all, bytes, ranks, op, to);
    case 4:
      return reduce<std::int64_t>(all, bytes, ranks, op, to);
    case 7:
      return reduce<float>(all, bytes, ranks, op, to);
    case 8:
      return reduce<double>(all, bytes, ranks, op, to);
    default:
      return reduce_halves(all, bytes, ranks, op, type == 9, to);
  }
}

/// Every rank's bytes, one after the other.
std::vector<std::byte> everything(Communicator& communicator, const std::byte* mine, std::size_t bytes) {
  std::vector<std::byte> all(bytes * static_cast<std::size_t>(communicator.size));
  communicator.exchange(mine, bytes, [&](int from, std::size_t at, const std::byte* data, std::size_t size) {
    std::memcpy(all.data() + static_cast<std::size_t>(from) * bytes + at, data, size);
  });
  return all;
}

/// The calls between ncclGroupStart and ncclGroupEnd of a thread.
struct GroupCalls {
  struct Message {
    bool sends;
    std::byte* data;
    std::size_t bytes;
    int peer;
  };
  int depth = 0;
  Communicator* communicator = nullptr;
  std::vector<std::function<void()>> jobs;
  std::vector<Message> messages;
};
GroupCalls& group_calls() {
  thread_local GroupCalls calls;
  return calls;
}

Result submit(Communicator* communicator, std::function<void()> job) {
  GroupCalls& group = group_calls();
  if (group.depth == 0) return communicator->enqueue(std::move(job));
  group.communicator = communicator;
  group.jobs.push_back(std::move(job));
  return kInProgress;
}

/// All messages of a group: as many rounds as there are distances between ranks.
void deliver(Communicator& communicator, const std::vector<GroupCalls::Message>& messages) {
  for (int distance = 0; distance < communicator.size; ++distance) {
    const int to = (communicator.rank + distance) % communicator.size;
    const int from = (communicator.rank + communicator.size - distance) % communicator.size;
    const GroupCalls::Message *sent = nullptr, *received = nullptr;
    for (const auto& message : messages) {
      if (message.sends && message.peer == to) sent = &message;
      if (!message.sends && message.peer == from) received = &message;
    }
    communicator.exchange(sent == nullptr ? nullptr : sent->data, sent == nullptr ? 0 : sent->bytes,
                          [&](int rank, std::size_t at, const std::byte* data, std::size_t size) {
                            if (rank == from && received != nullptr && at + size <= received->bytes)
                              std::memcpy(received->data + at, data, size);
                          });
  }
}

Shared* map(const std::string& name, bool create) {
  const int file = shm_open(name.c_str(), create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
  if (file < 0) return nullptr;
  if (create && ftruncate(file, sizeof(Shared)) != 0) return nullptr;
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<Shared*>(memory);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void fake_nccl_set(const char* fault, int value) {
  const std::string name = fault;
  if (name == "version") faults().version = value;
  if (name == "stall") faults().stall = value;
  if (name == "async_error") faults().async_error = value;
  if (name == "refuse") faults().refuse = value;
  if (name == "die") faults().die = value;
}
EXPORT int fake_nccl_aborted() { return faults().aborted; }
EXPORT int fake_nccl_destroyed() { return faults().destroyed; }

EXPORT Result ncclGetVersion(int* version) {
  *version = faults().version;
  return kSuccess;
}

#if !defined(FAKE_NCCL_OLD)
EXPORT Result ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> next{0};
  const std::string name = "/torchspan-fake-nccl-" + std::to_string(getpid()) + "-" + std::to_string(++next);
  *id = {};
  std::copy(name.begin(), name.end(), id->bytes);
  Shared* shared = map(name, true);
  if (shared == nullptr) return kSystemError;
  munmap(shared, sizeof(Shared));
  return kSuccess;
}

EXPORT Result ncclCommInitRankConfig(Communicator** made, int ranks, UniqueId id, int rank,
                                     Configuration* configuration) {
  if (configuration->magic != 0xcafebeef || configuration->size < 20 || configuration->blocking != 0)
    return kInvalidArgument;
  Shared* shared = map(id.bytes, false);
  if (shared == nullptr) return kInvalidUsage;
  auto* communicator = new Communicator();
  communicator->name = id.bytes;
  communicator->shared = shared;
  communicator->rank = rank;
  communicator->size = ranks;
  communicator->thread = std::thread([communicator] { communicator->run(); });
  *made = communicator;
  return communicator->enqueue([communicator] { communicator->connect(); });
}

EXPORT Result ncclCommFinalize(Communicator* communicator) {
  return communicator->enqueue([] {});
}
/// Waits for all ranks, as NCCL does for those of one host.
EXPORT Result ncclCommDestroy(Communicator* communicator) {
  ++faults().destroyed;
  ++communicator->shared->ended;
  while (communicator->shared->ended.load() < communicator->size) std::this_thread::yield();
  communicator->end(false);
  delete communicator;
  return kSuccess;
}
EXPORT Result ncclCommAbort(Communicator* communicator) {
  ++faults().aborted;
  ++communicator->shared->ended;
  communicator->end(true);
  delete communicator;
  return kSuccess;
}
EXPORT Result ncclCommGetAsyncError(Communicator* communicator, Result* state) {
  *state = static_cast<Result>(communicator->state.load());
  if (*state == kSuccess && faults().async_error != 0)
    *state = static_cast<Result>(faults().async_error.load());
  return kSuccess;
}
EXPORT const char* ncclGetErrorString(Result result) {
  switch (result) {
    case kSystemError:
      return "unhandled system error";
    case kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "an error of the fake NCCL";
  }
}
EXPORT const char* ncclGetLastError(Communicator*) { return ""; }

EXPORT Result ncclAllReduce(const void* from, void* to, std::size_t count, int type, int op,
                            Communicator* communicator, void*) {
  if (faults().refuse != 0) return static_cast<Result>(faults().refuse.load());
  return submit(communicator, [=] {
    const std::size_t bytes = count * bytes_of(type);
    communicator->dies = faults().die.load() != 0 && faults().die.fetch_sub(1) == 1;
    const auto all = everything(*communicator, static_cast<const std::byte*>(from), bytes);
    reduce_any(all, bytes, communicator->size, type, op, static_cast<std::byte*>(to));
  });
}
EXPORT Result ncclReduceScatter(const void* from, void* to, std::size_t received, int type, int op,
                                Communicator* communicator, void*) {
  return submit(communicator, [=] {
    const std::size_t bytes = received * bytes_of(type),
                      whole = bytes * static_cast<std::size_t>(communicator->size);
    const auto all = everything(*communicator, static_cast<const std::byte*>(from), whole);
    std::vector<std::byte> result(whole);
    reduce_any(all, whole, communicator->size, type, op, result.data());
    std::memcpy(to, result.data() + static_cast<std::size_t>(communicator->rank) * bytes, bytes);
  });
}
EXPORT Result ncclBroadcast(const void* from, void* to, std::size_t count, int type, int root,
                            Communicator* communicator, void*) {
  return submit(communicator, [=] {
    const std::size_t bytes = count * bytes_of(type);
    communicator->exchange(static_cast<const std::byte*>(from), communicator->rank == root ? bytes : 0,
                           [&](int, std::size_t at, const std::byte* data, std::size_t size) {
                             if (communicator->rank != root)
                               std::memcpy(static_cast<std::byte*>(to) + at, data, size);
                           });
  });
}
EXPORT Result ncclSend(const void* data, std::size_t count, int type, int peer, Communicator* communicator,
                       void*) {
  GroupCalls& group = group_calls();
  group.communicator = communicator;
  auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));
  group.messages.push_back({true, bytes, count * bytes_of(type), peer});
  return group.depth > 0 ? kInProgress : kInvalidUsage;
}
EXPORT Result ncclRecv(void* data, std::size_t count, int type, int peer, Communicator* communicator, void*) {
  GroupCalls& group = group_calls();
  group.communicator = communicator;
  group.messages.push_back({false, static_cast<std::byte*>(data), count * bytes_of(type), peer});
  return group.depth > 0 ? kInProgress : kInvalidUsage;
}
EXPORT Result ncclGroupStart() {
  ++group_calls().depth;
  return kSuccess;
}
EXPORT Result ncclGroupEnd() {
  GroupCalls& group = group_calls();
  if (--group.depth > 0) return kSuccess;
  Communicator* communicator = std::exchange(group.communicator, nullptr);
  auto jobs = std::exchange(group.jobs, {});
  auto messages = std::exchange(group.messages, {});
  if (communicator == nullptr) return kSuccess;
  return communicator->enqueue([communicator, jobs = std::move(jobs), messages = std::move(messages)] {
    for (const auto& job : jobs) job();
    if (!messages.empty()) deliver(*communicator, messages);
  });
}
#endif
