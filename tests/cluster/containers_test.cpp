// Containers of one machine: one kernel and one boot, but separate network namespaces. They share memory if
// they see each other's sockets; otherwise each counts as a separate host.
#include <filesystem>

#include <ATen/ATen.h>

#include <torchspan/collective.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "tests/cluster/hosts_suite.h"
#include "tests/support/gloo.h"

namespace torchspan::containers_test {
namespace {

using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::ProcessWorld;
using testing::require;
using testing::TestNetwork;

at::Tensor twice(const at::Tensor& x) { return x * 2; }
constexpr Function<twice> kTwice{"twice"};

void sum(const collective::Group& group) {
  const auto rank = static_cast<double>(group.rank());
  for (const std::int64_t size : {1, 1 << 10, 3 << 20}) {
    at::Tensor mine = at::full({size}, rank);
    group.all_reduce(mine).wait();
    require(at::equal(mine, at::full({size}, 6.0)), "a sum over all containers of " + std::to_string(size));
  }
}

std::string refusal(Session& session, const collective::GroupOptions& options) {
  try {
    session.group(options);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kUnsupported, error.what());
    return error.what();
  }
  throw std::runtime_error("a group was made");
}

std::uint64_t adopted(Session& session) {
  return session.runtime().metrics.counter("net.local.adopted").value();
}

void call_every_rank(Session& session) {
  Worker& worker = session.worker();
  for (int peer = 0; peer < session.world_size(); ++peer) {
    if (peer == session.rank()) continue;
    const at::Tensor x = at::arange(3 << 20, at::kFloat);
    require(at::equal(worker.rpc_sync(peer, kTwice, x), x * 2), "twice");
  }
  worker.barrier();
}

/// Groups of every kind, and calls to all workers; TEST_TOGETHER says whether all of them share memory.
void sums_and_calls() {
  const bool together = std::getenv("TEST_TOGETHER") != nullptr;
  Session session(WorkerOptions::from_env(), FunctionTable().add(kTwice));
  const auto isolated = collective::Network::kIsolated;
  {
    const collective::Group group = session.group({.network = isolated, .timeout = seconds(60)});
    const std::string name = group.backend()->name();
    require(name == (together ? "shm" : "hierarchical"), name);
    sum(group);
    if (testing::kHasGloo) {
      sum(session.group(
          {.backend = collective::BackendKind::kC10d, .network = isolated, .timeout = seconds(60)}));
    }
  }
  sum(session.group());
  if (!together) {
    const std::string text = refusal(session, {.backend = collective::BackendKind::kSharedMemory});
    require(text.find("a common TORCHSPAN_RUNTIME_DIR") != std::string::npos, text);
  }
  call_every_rank(
      session);  // the first tensors of a connection may be sent through its socket, before memory was passed
  const auto before = adopted(session);
  session.worker().barrier();  // no worker calls again before all have counted
  call_every_rank(session);
  const auto shared = adopted(session) - before;
  require(shared == (together ? 6U : 2U), "tensors in shared memory: " + std::to_string(shared));
  session.shutdown(seconds(30));
}

class Containers : public testing::Hosts {
 protected:
  /// Two workers in each container, whose sockets are in `near` or `far` of the world's folder.
  void start_all(ProcessWorld& world, const char* near, const char* far,
                 const std::map<std::string, std::string>& changes) {
    for (const char* folder : {near, far}) {
      std::filesystem::create_directory(world.folder() + "/" + folder);
      std::filesystem::permissions(world.folder() + "/" + folder, std::filesystem::perms::owner_all);
    }
    const bool together = std::string(near) == far;
    for (int rank = 0; rank < 4; ++rank) {
      const bool is_near = rank < 2;
      std::map<std::string, std::string> variables{
          {"MASTER_ADDR", TestNetwork::kNear},
          {"LOCAL_WORLD_SIZE", "2"},
          {"LOCAL_RANK", std::to_string(rank % 2)},
          {"TORCHSPAN_RUNTIME_DIR", world.folder() + "/" + (is_near ? near : far)}};
      variables.insert(changes.begin(), changes.end());
      const std::string hidden = together ? "" : world.folder() + "/" + (is_near ? far : near);
      variables.merge((is_near ? network_.near : network_.far).variables(hidden));
      world.start(rank, "containers.sums_and_calls", std::move(variables));
    }
  }
};

TEST_F(Containers, OfOneMachineAreSeparateHostsWithoutCommonSockets) {
  ProcessWorld world(4);
  start_all(world, "near", "far", {});
  expect_all_end_well(world);
}

TEST_F(Containers, OfOneMachineShareMemoryWhenTheyHaveAFolderInCommon) {
  ProcessWorld world(4);
  start_all(world, "common", "common", {{"TEST_TOGETHER", "1"}});
  expect_all_end_well(world);
  for (const auto& entry : std::filesystem::directory_iterator(world.folder() + "/common")) {
    EXPECT_FALSE(entry.path().filename().string().starts_with("g-")) << entry.path() << " was left behind";
  }
}

const testing::Scenarios kScenarios("containers", {{"sums_and_calls", sums_and_calls}});

}  // namespace
}  // namespace torchspan::containers_test
