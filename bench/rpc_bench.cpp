// Section rpc: calls between two processes of this host. Prints the section's JSON; times are medians over
// rounds, in which the measurements and the machine's own limits take turns, because timings drift.
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sys/resource.h>
#include <sys/socket.h>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/rpc/worker.h>
#include <torchspan/session/session.h>

#include "bench/harness.h"
#include "tests/support/processes.h"

namespace torchspan {
namespace {

using bench::Bench;
using testing::Process;
using testing::ProcessWorld;

std::int64_t next(std::int64_t n) { return n + 1; }
at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
at::Tensor echo(const at::Tensor& x) { return x; }
/// CPU seconds of this process.
double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

constexpr Function<next> kNext{"next", kInline};
constexpr Function<add> kAdd{"add", kInline};
constexpr Function<echo> kEcho{"echo"};
constexpr Function<cpu_seconds> kCpu{"cpu_seconds"};

FunctionTable functions() { return FunctionTable().add(kNext, kAdd, kEcho, kCpu); }

/// A byte there and back between two threads over a Unix socket: what the machine charges for a wake-up.
class SocketPing {
 public:
  explicit SocketPing(Executor& executor) {
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends_) != 0) throw std::runtime_error("socketpair failed");
    echo_ = executor.spawn("echo", [this] {
      char byte;
      while (read(ends_[1], &byte, 1) == 1 && write(ends_[1], &byte, 1) == 1) {
      }
    });
  }
  ~SocketPing() {
    ::shutdown(ends_[0], SHUT_RDWR);
    echo_.join();
    close(ends_[0]);
    close(ends_[1]);
  }
  void once() {
    char byte = 1;
    if (write(ends_[0], &byte, 1) != 1 || read(ends_[0], &byte, 1) != 1)
      throw std::runtime_error("socket ping failed");
  }

 private:
  int ends_[2];
  Thread echo_;
};

void serve() {
  Session session(WorkerOptions::from_env(), functions());
  session.shutdown();
}

void measure() {
  ProcessWorld world(2);
  world.start(1, "serve");
  for (const auto& [name, value] : world.environment(0)) setenv(name.c_str(), value.c_str(), 1);
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  Executor& executor = session.runtime().executor;
  Bench bench(executor);
  SocketPing ping(executor);

  const at::Tensor small = at::ones({16});
  const at::Tensor mebibyte = at::ones({1 << 18}), bulk = at::ones({1 << 24});
  at::Tensor copy1 = at::empty_like(mebibyte), copy64 = at::empty_like(bulk);
  bench.add("limit/socket_ping", 400, [&] { ping.once(); });
  bench.add("limit/memcpy/1MiB", 50,
            [&] { std::memcpy(copy1.data_ptr(), mebibyte.data_ptr(), mebibyte.nbytes()); });
  bench.add("limit/memcpy/64MiB", 3, [&] { std::memcpy(copy64.data_ptr(), bulk.data_ptr(), bulk.nbytes()); });
  bench.add("rpc/small_call/local", 400, [&] { worker.rpc_sync(1, kNext, 1); },
            {.limit = "limit/socket_ping"});
  bench.add("rpc/add_64B/local", 400, [&] { worker.rpc_sync(1, kAdd, small, small); },
            {.limit = "limit/socket_ping"});
  bench.add("rpc/in_flight_64/local", 20, [&] {
    std::vector<Future<std::int64_t>> calls;
    for (int i = 0; i < 64; ++i) calls.push_back(worker.rpc_async(1, kNext, i));
    for (auto& call : calls) call.wait();
  });
  bench.add("rpc/echo/1MiB/local", 50, [&] { worker.rpc_sync(1, kEcho, mebibyte); },
            {.limit = "limit/memcpy/1MiB"});
  bench.add("rpc/echo/64MiB/local", 3, [&] { worker.rpc_sync(1, kEcho, bulk); },
            {.limit = "limit/memcpy/64MiB"});
  bench.run(5);

  nlohmann::json metrics = bench.metrics();
  const double before = worker.rpc_sync(1, kCpu);
  executor.sleep(std::chrono::seconds(3));
  metrics.push_back({{"name", "rpc/idle_cpu"},
                     {"unit", "percent"},
                     {"value", (worker.rpc_sync(1, kCpu) - before) / 3 * 100}});
  session.shutdown();
  world.process(0).wait(executor, std::chrono::seconds(10));
  bench::print_section(metrics);
}

}  // namespace
}  // namespace torchspan

int main() {
  try {
    if (std::getenv("TORCHSPAN_TEST_SCENARIO") != nullptr) {
      torchspan::serve();
    } else {
      torchspan::measure();
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
