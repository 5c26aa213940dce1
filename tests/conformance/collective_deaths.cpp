// Ranks as processes that are killed or stopped in the middle of a collective.
#include <atomic>
#include <csignal>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <set>
#include <sys/socket.h>

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include "core/api/descriptor.h"
#include "device/api/torch_version.h"
#include "tests/conformance/collective_every_operation.h"
#include "tests/conformance/collective_process.h"
#include "tests/support/errors.h"

namespace torchspan::testing::collective_deaths {
namespace {

using namespace collective;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

std::string folder_of_run() { return std::getenv("TORCHSPAN_RUNTIME_DIR"); }

/// Dies before a call that the others make, and after these have completed the earlier ones.
void dies_between_calls(const GroupOptions& options) {
  with_group(options, [](Group& group, Executor& executor) {
    for (int i = 0; i < 5; ++i) group.all_reduce(at::ones({100})).wait();
    const auto done = [](int rank) { return folder_of_run() + "/done" + std::to_string(rank); };
    std::ofstream(done(group.rank())) << "now";
    for (const int rank : {0, 2}) {
      while (group.rank() == kVictim && !std::filesystem::exists(done(rank))) executor.sleep(milliseconds(5));
    }
    if (group.rank() == kVictim) kill(getpid(), SIGKILL);
    expect_error(ErrorKind::kDisconnected, {"worker1", "rank 1", "all_reduce(Float [100], sum)", "call 6"},
                 [&] { group.all_reduce(at::ones({100})).wait(); });
    expect_error(ErrorKind::kDisconnected, {"worker1"}, [&] { group.barrier(); });
  });
}

/// The end of a survivor must not be the death that the other one sees first.
void wait_for_other_survivor(const Group& group, Executor& executor) {
  const auto seen = [](int rank) { return folder_of_run() + "/seen" + std::to_string(rank); };
  std::ofstream(seen(group.rank())) << "now";
  const Deadline deadline = executor.deadline_in(seconds(30));
  while (!std::filesystem::exists(seen(2 - group.rank())) && !deadline.passed(executor.now())) {
    executor.sleep(milliseconds(5));
  }
}

/// Is killed from outside, at a random time, while large and small tensors are being sent.
void dies_at_any_time(const GroupOptions& options) {
  with_group(options, [](Group& group, Executor& executor) {
    at::Tensor bucket = group.allocate({1 << 20}, at::kFloat), mine = at::ones({1 << 20});
    if (group.rank() == kVictim) std::ofstream(folder_of_run() + "/ready") << "now";
    expect_error(ErrorKind::kDisconnected, {"worker1 (rank 1, pid"}, [&] {
      while (true) {
        group.all_reduce(bucket, kMax).wait();
        group.all_reduce(mine, kMax).wait();
        for (int i = 0; i < 20; ++i) group.all_reduce(bucket[i], kMax).wait();
      }
    });
    wait_for_other_survivor(group, executor);
  });
}

/// The same, while each rank sends to each other one.
void dies_at_any_time_in_all_to_all(const GroupOptions& options) {
  with_group(options, [](Group& group, Executor& executor) {
    const std::vector<at::Tensor> sent(3, at::ones({1 << 21}));
    if (group.rank() == kVictim) std::ofstream(folder_of_run() + "/ready") << "now";
    expect_error(ErrorKind::kDisconnected, {"worker1 (rank 1, pid"}, [&] {
      for (;;) static_cast<void>(group.all_to_all(sent).wait());
    });
    wait_for_other_survivor(group, executor);
  });
}

/// Dies while the others wait for its messages, or send to it.
void dies_between_messages(const GroupOptions& options) {
  with_group(options, [](Group& group, Executor& executor) {
    if (group.rank() == kVictim) {
      for (const int peer : {0, 2}) group.send(at::ones({100}), peer).wait();
      kill(getpid(), SIGKILL);
    }
    group.recv(at::zeros({100}), kVictim).wait();
    expect_error(ErrorKind::kDisconnected, {"worker1", "rank 1"}, [&] {
      while (true) {
        if (group.rank() == 0) group.recv(at::zeros({300000}), kVictim).wait();
        if (group.rank() == 2) group.send(at::zeros({300000}), kVictim).wait();
      }
    });
    expect_error(ErrorKind::kDisconnected, {"worker1"}, [&] { group.barrier(); });
    wait_for_other_survivor(group, executor);
  });
}

/// Dies while the others wait for a message from any rank, which each of them could still send.
void dies_while_others_receive(const GroupOptions& options) {
  with_group(options, [](Group& group, Executor& executor) {
    if (group.rank() == kVictim) {
      for (const int peer : {0, 2}) group.send(at::ones({100}), peer).wait();
      kill(getpid(), SIGKILL);
    }
    require(group.recv(at::zeros({100}), kAnySource).wait().source == kVictim, "the victim's message");
    expect_error(ErrorKind::kDisconnected, {"worker1", "rank 1", "recv(Float [300000] from any rank, tag 0)"},
                 [&] { static_cast<void>(group.recv(at::zeros({300000}), kAnySource).wait()); });
    expect_error(ErrorKind::kDisconnected, {"worker1"},
                 [&] { static_cast<void>(group.recv(at::zeros({1}), kAnySource).wait()); });
    expect_error(ErrorKind::kDisconnected, {"worker1"}, [&] { group.barrier(); });
    wait_for_other_survivor(group, executor);
  });
}

/// Is killed from outside, at a random time, while it sends to receivers from any rank.
void dies_at_any_time_between_messages(const GroupOptions& options) {
  with_group(options, [](Group& group, Executor& executor) {
    if (group.rank() == kVictim) std::ofstream(folder_of_run() + "/ready") << "now";
    expect_error(ErrorKind::kDisconnected, {"worker1 (rank 1, pid"}, [&] {
      for (;;) {
        std::vector<Future<at::Tensor>> sent;
        std::vector<Future<ReceivedMessage>> received;
        for (int other = 0; other < 3; ++other) {
          if (other == group.rank()) continue;
          sent.push_back(group.send(at::ones({300000}), other));
          received.push_back(group.recv(at::zeros({300000}), kAnySource));
        }
        for (const auto& message : received) static_cast<void>(message.wait());
        for (const auto& message : sent) message.wait();
      }
    });
    wait_for_other_survivor(group, executor);
  });
}

/// Is stopped: it is late, not dead.
void stops() {
  GroupOptions options = shared_memory();
  options.timeout = seconds(4);
  with_group(options, [](Group& group, Executor&) {
    group.barrier();
    if (group.rank() == kVictim) kill(getpid(), SIGSTOP);
    expect_error(ErrorKind::kTimedOut, {"worker1", "all_gather(Float [300000])", "waited"},
                 [&] { group.all_gather(at::ones({300000})).wait(); });
  });
}

void expect_survivors(const std::string& scene) {
  ProcessWorld world(3);
  world.start_all(scene);
  for (const int rank : {0, 2}) {
    ASSERT_TRUE(world.process(rank).wait(world.executor(), seconds(60))) << "rank " << rank << " still runs";
    EXPECT_EQ(world.process(rank).exit_code(), 0) << world.process(rank).output();
  }
}

// peer: c10d testSIGKILLException: better: in every phase of an operation, and the rank is named
TEST(CollectiveDeaths, ARankThatDiedIsNamedWithTheCallItMissed) { expect_survivors("dies_between_calls"); }

TEST(CollectiveDeaths, ARankThatDiedIsNamedByGroupsOnDevices) {
  expect_survivors("dies_between_calls_of_nccl");
  expect_survivors("dies_between_calls_of_cuda_ipc");
}

/// A line of /proc/self/task/<thread>/status.
[[maybe_unused]] std::string field_of_thread(const std::string& thread, const std::string& field) {
  std::ifstream status("/proc/self/task/" + thread + "/status");
  for (std::string word; status >> word;) {
    if (word == field && status >> word) return word;
  }
  return {};
}

/// Below the time-outs of the groups.
constexpr Duration kNoticed = seconds(30);

void expect_survivors_at_any_time(const std::string& scene, int times) {
  for (int time = 0; time < times; ++time) {
    ProcessWorld world(3);
    world.start_all(scene);
    const Deadline deadline = world.executor().deadline_in(seconds(60));
    while (!std::filesystem::exists(world.folder() + "/ready")) {
      ASSERT_FALSE(deadline.passed(world.executor().now()));
      world.executor().sleep(milliseconds(5));
    }
    world.executor().sleep(milliseconds(3 + 37 * time));
    world.process(kVictim).kill(SIGKILL);
    for (const int rank : {0, 2}) {
      ASSERT_TRUE(world.process(rank).wait(world.executor(), kNoticed)) << "rank " << rank << " still runs";
      EXPECT_EQ(world.process(rank).exit_code(), 0) << world.process(rank).output();
    }
  }
}

// peer: c10d testSIGKILLException
TEST(CollectiveDeaths, ARankMayDieWhileItWritesToAllRanks) {
  expect_survivors_at_any_time("dies_at_any_time", 3);
}

TEST(CollectiveDeaths, ARankMayDieAtAnyTimeInGroupsOnDevices) {
  expect_survivors_at_any_time("dies_at_any_time_of_nccl", 3);
  expect_survivors_at_any_time("dies_at_any_time_of_cuda_ipc", 3);
}

TEST(CollectiveDeaths, ARankThatDiedIsNamedOverTheNetwork) {
  expect_survivors("dies_between_calls_of_network");
}

TEST(CollectiveDeaths, ARankThatDiedIsNamedByMessages) {
  expect_survivors("dies_between_messages");
  expect_survivors("dies_between_messages_of_network");
}

TEST(CollectiveDeaths, ARankThatDiedIsNamedByReceivesFromAnyRank) {
  expect_survivors("dies_while_others_receive");
  expect_survivors("dies_while_others_receive_of_network");
}

TEST(CollectiveDeaths, ARankMayDieAtAnyTimeWhileItSendsToReceivesFromAnyRank) {
  expect_survivors_at_any_time("dies_at_any_time_between_messages", 3);
  expect_survivors_at_any_time("dies_at_any_time_between_messages_of_network", 3);
}

TEST(CollectiveDeaths, ARankMayDieWhileItSendsOverTheNetwork) {
  expect_survivors_at_any_time("dies_at_any_time_of_network", 3);
}

#if defined(TORCHSPAN_GLOO)
TEST(CollectiveDeaths, ARankThatDiedUnderGlooIsNamedWithTheCallItMissed) {
  expect_survivors("dies_between_calls_of_gloo");
}

TEST(CollectiveDeaths, ARankMayDieWhileGlooWritesToAllRanks) {
  expect_survivors_at_any_time("dies_at_any_time_of_gloo", 3);
  expect_survivors_at_any_time("dies_at_any_time_in_all_to_all_of_gloo", 2);
}

/// A connection within this process.
struct Loop {
  Descriptor listener, dialed, accepted;

  bool passes_a_byte() const {
    char byte = 'x';
    return ::send(dialed.get(), &byte, 1, MSG_NOSIGNAL) == 1 && ::recv(accepted.get(), &byte, 1, 0) == 1;
  }
};

/// Connections at the ports of this process at which nothing listens any more.
std::vector<Loop> connect_at_used_ports() {
  std::set<in_port_t> ports;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    sockaddr_in own{}, peer{};
    socklen_t own_size = sizeof own, peer_size = sizeof peer;
    const int socket = std::stoi(entry.path().filename());
    if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
        ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
        own.sin_family == AF_INET)
      ports.insert(own.sin_port);
  }
  std::vector<Loop> loops;
  for (const in_port_t port : ports) {
    const sockaddr_in address{AF_INET, port, {htonl(INADDR_LOOPBACK)}, {}};
    const auto* const at = reinterpret_cast<const sockaddr*>(&address);
    const auto make = [] { return Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); };
    Loop loop{make(), make(), {}};
    const int on = 1;
    ::setsockopt(loop.listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(loop.listener.get(), at, sizeof address) != 0 || ::listen(loop.listener.get(), 1) != 0 ||
        ::connect(loop.dialed.get(), at, sizeof address) != 0)
      continue;
    loop.accepted.reset(::accept(loop.listener.get(), nullptr, nullptr));
    loops.push_back(std::move(loop));
  }
  return loops;
}

// Gloo cannot cancel an operation, so its connections are shut down; the system may have given their ports to others.
TEST(CollectiveDeaths, AnAbortUnderGlooLeavesOtherConnectionsAtItsPorts) {
  CollectiveWorld world(2);
  world.run(
      [](Group& group) {
        std::vector<Loop> loops;
        if (group.rank() == 0) {
          loops = connect_at_used_ports();
          EXPECT_FALSE(loops.empty());
        }
        group.barrier();
        group.abort(Error(ErrorKind::kCancelled, "enough"));
        for (const Loop& loop : loops) EXPECT_TRUE(loop.passes_a_byte());
      },
      {.backend = BackendKind::kC10d});
}

/// Gloo's threads write to sockets of the dead rank; the resulting SIGPIPE would end this process, too.
TEST(CollectiveDeaths, NoThreadOfGlooTakesTheSignalOfABrokenPipe) {
  CollectiveWorld world(2);
  world.run(
      [](Group& group) {
        // They have a name of newer LibTorch versions, or the name of the thread that made the group.
        const auto mine = std::to_string(gettid()), name = field_of_thread(mine, "Name:");
        int threads = 0;
        for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
          const std::string id = thread.path().filename(), called = field_of_thread(id, "Name:");
          if (id == mine || (called != name && !called.starts_with("pt_gloo"))) continue;
          ++threads;
          const std::string blocked = field_of_thread(id, "SigBlk:");
          ASSERT_FALSE(blocked.empty()) << called;
          EXPECT_NE(std::stoull(blocked, nullptr, 16) & (1ULL << (SIGPIPE - 1)), 0U)
              << "thread " << threads << ", called " << called;
        }
        EXPECT_GE(threads, 3) << "one that reads and writes, two that compute";
        group.barrier();
      },
      {.backend = BackendKind::kC10d});
}

bool is_thread_of_gloo(const std::string& name_of_maker) {
  const std::string called = field_of_thread(std::to_string(gettid()), "Name:");
  return called == name_of_maker || called.starts_with("pt_gloo");
}

/// Counts what is freed by threads of Gloo while they handle an exception.
class CountsFreesOfFailures final : public c10::Allocator {
 public:
  /// `name`: of the thread that makes the group.
  explicit CountsFreesOfFailures(std::string name) : name_(std::move(name)) {}
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 3)
  c10::DataPtr allocate(std::size_t bytes) override { return make(bytes); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
#else
  c10::DataPtr allocate(std::size_t bytes) const override { return make(bytes); }
#endif
  int frees() const { return frees_.load(); }

 private:
  struct Block {
    std::vector<std::byte> bytes;
    const CountsFreesOfFailures& allocator;
  };
  c10::DataPtr make(std::size_t bytes) const {
    auto* const block = new Block{std::vector<std::byte>(bytes), *this};
    return {block->bytes.data(), block, &free, c10::Device(c10::kCPU)};
  }
  static void free(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    const CountsFreesOfFailures& self = block->allocator;
    if (std::uncaught_exceptions() > 0 && is_thread_of_gloo(self.name_)) ++self.frees_;
  }

  const std::string name_;
  mutable std::atomic<int> frees_{0};
};

// LibTorch's all-gather over Gloo frees its buffer while Gloo may still send from it: processes then end ("writev: Bad
// address"), or send what took the memory. This happens if other messages arrive between the failure and the abort.
TEST(CollectiveDeaths, NoThreadOfGlooFreesMemoryThatAFailedCallSends) {
  CollectiveWorld world(2);
  std::unique_ptr<CountsFreesOfFailures> counting;
  std::atomic<bool> failed{false};
  world.run(
      [&](Group& group) {
        group.barrier();
        if (group.rank() == 1) {
          while (!failed.load()) world.executor().sleep(milliseconds(5));
          return;
        }
        c10::Allocator* const before = c10::GetAllocator(c10::kCPU);
        counting =
            std::make_unique<CountsFreesOfFailures>(field_of_thread(std::to_string(gettid()), "Name:"));
        c10::SetAllocator(c10::kCPU, counting.get(), 1);
        error_of([&] { group.all_reduce(at::ones({100}), kMax).wait(); });
        c10::SetAllocator(c10::kCPU, before, 1);
        failed.store(true);
      },
      {.backend = BackendKind::kC10d, .timeout = seconds(1)});
  EXPECT_EQ(counting->frees(), 0);
}
#endif

// peer: c10d testSIGSTOPException: same: late, not dead
TEST(CollectiveDeaths, AStoppedRankIsLate) { expect_survivors("stops"); }

}  // namespace
}  // namespace torchspan::testing::collective_deaths

int main(int argc, char** argv) {
  using namespace torchspan::testing;
  using namespace torchspan::testing::collective_deaths;
  constexpr std::string_view kOverMpi = "--over-mpi=";
  if (argc > 1 && std::string_view(argv[1]).starts_with(kOverMpi)) {
    return run_over_mpi(std::atoi(argv[1] + kOverMpi.size()), argc - 1, argv + 1);
  }
  const torchspan::collective::GroupOptions gloo{.backend = torchspan::collective::BackendKind::kC10d,
                                                 .timeout = std::chrono::seconds(60)};
  const torchspan::collective::GroupOptions nccl{.backend = torchspan::collective::BackendKind::kNccl,
                                                 .timeout = std::chrono::seconds(60)};
  const torchspan::collective::GroupOptions ipc{.backend = torchspan::collective::BackendKind::kCudaIpc,
                                                .timeout = std::chrono::seconds(60)};
  const torchspan::collective::GroupOptions network{.backend = torchspan::collective::BackendKind::kNetwork,
                                                    .timeout = std::chrono::seconds(60)};
  std::map<std::string, Scenario> scenarios{
      {"dies_between_calls_of_network", [&] { dies_between_calls(network); }},
      {"dies_at_any_time_of_network", [&] { dies_at_any_time(network); }},
      {"dies_between_calls_of_nccl", [&] { dies_between_calls(nccl); }},
      {"dies_between_calls_of_cuda_ipc", [&] { dies_between_calls(ipc); }},
      {"dies_at_any_time_of_nccl", [&] { dies_at_any_time(nccl); }},
      {"dies_at_any_time_of_cuda_ipc", [&] { dies_at_any_time(ipc); }},
      {"dies_between_messages", [] { dies_between_messages(shared_memory()); }},
      {"dies_between_messages_of_network", [&] { dies_between_messages(network); }},
      {"dies_while_others_receive", [] { dies_while_others_receive(shared_memory()); }},
      {"dies_while_others_receive_of_network", [&] { dies_while_others_receive(network); }},
      {"dies_at_any_time_between_messages", [] { dies_at_any_time_between_messages(shared_memory()); }},
      {"dies_at_any_time_between_messages_of_network", [&] { dies_at_any_time_between_messages(network); }},
      {"dies_between_calls", [] { dies_between_calls(shared_memory()); }},
      {"dies_between_calls_of_gloo", [&] { dies_between_calls(gloo); }},
      {"dies_at_any_time", [] { dies_at_any_time(shared_memory()); }},
      {"dies_at_any_time_of_gloo", [&] { dies_at_any_time(gloo); }},
      {"dies_at_any_time_in_all_to_all_of_gloo", [&] { dies_at_any_time_in_all_to_all(gloo); }},
      {"stops", stops}};
  scenarios.merge(phase_scenarios());
  scenarios.merge(every_operation_scenarios());
  return cluster_main(argc, argv, scenarios);
}
