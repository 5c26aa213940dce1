// Limits of the machine: a round trip between two processes, and copying on one core.
#include <atomic>
#include <cstring>
#include <new>
#include <signal.h>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torchspan/detail/core/buffer.h>

#include "bench/encryption.h"
#include "bench/rpc/rows.h"

namespace torchspan::bench {
namespace {

/// A forked copy of this process that runs `serve`; killed with this object or with this process.
class Fork {
 public:
  explicit Fork(const std::function<void()>& serve) {
    pid_ = fork();
    if (pid_ < 0) throw std::runtime_error("cannot fork");
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      serve();
      _exit(0);
    }
  }
  ~Fork() {
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Fork(const Fork&) = delete;

 private:
  pid_t pid_;
};

/// Two slots of 64 bytes, one for each direction, each with the number of its content.
struct Slots {
  struct alignas(64) Number {
    std::atomic<std::uint64_t> value{0};
  };
  Number there, back;
  std::byte asked[64] = {}, answered[64] = {};
};

void spin_until(const std::atomic<std::uint64_t>& number, std::uint64_t value) {
  for (std::uint64_t turns = 0; number.load(std::memory_order_acquire) != value; ++turns) {
    if (turns > std::uint64_t{10'000'000'000}) throw std::runtime_error("the other process is gone");
    __builtin_ia32_pause();
  }
}

std::vector<double> ring_ping(const Meter& meter) {
  void* memory = mmap(nullptr, sizeof(Slots), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no shared memory");
  auto& slots = *new (memory) Slots;
  Fork echo([&] {
    for (std::uint64_t turn = 1;; ++turn) {
      spin_until(slots.there.value, turn);
      std::memcpy(slots.answered, slots.asked, sizeof slots.asked);
      slots.back.value.store(turn, std::memory_order_release);
    }
  });
  std::byte bytes[64] = {};
  std::uint64_t turn = 0;
  constexpr int kTurns = 100;
  return meter.times(
      1000,
      [&] {
        for (int i = 0; i < kTurns; ++i) {
          std::memcpy(slots.asked, bytes, sizeof bytes);
          slots.there.value.store(++turn, std::memory_order_release);
          spin_until(slots.back.value, turn);
          std::memcpy(bytes, slots.answered, sizeof bytes);
        }
      },
      kTurns);
}

std::vector<double> socket_ping(const Meter& meter) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::runtime_error("no socket pair");
  Fork echo([&] {
    char bytes[64];
    while (read(ends[1], bytes, sizeof bytes) == sizeof bytes &&
           write(ends[1], bytes, sizeof bytes) == sizeof bytes) {
    }
  });
  char bytes[64] = {};
  auto samples = meter.times(2000, [&] {
    if (write(ends[0], bytes, sizeof bytes) != sizeof bytes ||
        read(ends[0], bytes, sizeof bytes) != sizeof bytes) {
      throw std::runtime_error("the socket pair broke");
    }
  });
  close(ends[0]);
  close(ends[1]);
  return samples;
}

Limit copying(const std::string& name, std::size_t bytes, int repeats) {
  return {"limit/memcpy/" + name, [=](const Meter& meter) {
            const Buffer from = allocate_buffer(bytes), to = allocate_buffer(bytes);
            std::memset(from.data, 1, bytes);
            std::memset(to.data, 2, bytes);
            return meter.times(repeats, [&] { std::memcpy(to.data, from.data, bytes); });
          }};
}

/// Encrypts and decrypts `bytes` as a connection does, without sending them, and reports half of the time: two
/// processes do one each at the same time.
Limit encryption(const std::string& name, std::size_t bytes, int repeats) {
  return {"limit/encryption/" + name, [=](const Meter& meter) {
            Encryption work(bytes);
            auto samples = meter.times(repeats, [&] { work.once(); });
            for (double& sample : samples) sample /= 2;
            return samples;
          }};
}

}  // namespace

std::vector<Limit> rpc_limits() {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  return {{"limit/ring_ping", ring_ping},    {"limit/socket_ping", socket_ping},
          copying("4KiB", 4096, 1000),       copying("64KiB", 65536, 1000),
          copying("1MiB", kMiB, 500),        copying("16MiB", 16 * kMiB, 50),
          copying("64MiB", 64 * kMiB, 20),   copying("256MiB", 256 * kMiB, 8),
          encryption("4KiB", 4096, 1000),    encryption("64KiB", 65536, 500),
          encryption("1MiB", kMiB, 200),     encryption("16MiB", 16 * kMiB, 20),
          encryption("64MiB", 64 * kMiB, 8), encryption("256MiB", 256 * kMiB, 4)};
}

}  // namespace torchspan::bench
