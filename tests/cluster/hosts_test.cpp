// Worlds over several hosts, which are network namespaces connected by a virtual cable. Workers of one host
// share memory; between hosts they use TLS.
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/collective.h>
#include <torchspan/detail/net/secret.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "tests/cluster/hosts_suite.h"
#include "tests/support/certificates.h"

namespace torchspan::hosts_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::Hosts;
using testing::join_on_host;
using testing::Process;
using testing::ProcessWorld;
using testing::require;

at::Tensor twice(const at::Tensor& x) { return x * 2; }
/// Sleeps until no caller waits for it.
void nap(Worker& worker) {
  while (!worker.current_call()->stop.stop_requested()) worker.runtime().executor.sleep(milliseconds(20));
}
std::int64_t adopted(Worker& worker) {
  return static_cast<std::int64_t>(worker.runtime().metrics.counter("net.local.adopted").value());
}
constexpr Function<twice> kTwice{"twice"};
constexpr Function<nap> kNap{"nap"};
constexpr Function<adopted> kAdopted{"adopted"};

FunctionTable functions() { return FunctionTable().add(kTwice, kNap, kAdopted); }

/// Every worker calls every other, with small and with large tensors. With two workers per host, a neighbor
/// sends each worker a tensor without a copy and gets one back the same way.
void meet() {
  Session session = join_on_host(functions());
  Worker& worker = session.worker();
  for (int peer = 0; peer < session.world_size(); ++peer) {
    if (peer == session.rank()) continue;
    for (const std::int64_t size : {1, 1 << 10, 3 << 20}) {
      const at::Tensor x = at::arange(size, at::kFloat);
      require(at::equal(worker.rpc_sync(peer, kTwice, x), x * 2), "twice " + std::to_string(size));
    }
  }
  worker.barrier();
  require(adopted(worker) == 2, "memory is shared with one neighbor: " + std::to_string(adopted(worker)));
  session.shutdown(seconds(30));
}

/// Shared memory inside each host, connections of the group between their first workers: encrypted by default.
void sum_over_hosts() {
  Session session = join_on_host(functions());
  const auto rank = static_cast<double>(session.rank());
  const auto refuse = [&](collective::GroupOptions options) {
    try {
      session.group(std::move(options));
    } catch (const Error& error) {
      return require(error.kind() == ErrorKind::kUnsupported, error.what());
    }
    require(false, "this group must not be made over several hosts");
  };
  refuse({.backend = collective::BackendKind::kC10d});
  refuse({.network = collective::Network::kThisHostOnly});
  std::vector<collective::Network> networks{collective::Network::kEncrypted};
  if (std::getenv("TEST_ENCRYPTED_ONLY") == nullptr) networks.push_back(collective::Network::kIsolated);
  for (const auto network : networks) {
    const collective::Group group = session.group({.network = network});
    for (const std::int64_t size : {1, 1 << 10, 3 << 20}) {
      at::Tensor mine = at::full({size}, rank);
      group.all_reduce(mine).wait();
      require(at::equal(mine, at::full({size}, 6.0)), "a sum over all hosts of " + std::to_string(size));
      group.broadcast(mine.fill_(rank), 3).wait();
      require(at::equal(mine, at::full({size}, 3.0)), "the last rank's tensor");
    }
    require(group.backend()->name().find("hierarchical") != std::string::npos, group.backend()->name());
    std::vector<Future<at::Tensor>> sent;
    std::vector<Future<collective::ReceivedMessage>> received;
    for (int other = 0; other < group.size(); ++other) {
      if (other == group.rank()) continue;
      sent.push_back(group.send(at::full({1 << 20}, rank), other));
      received.push_back(group.recv(at::zeros({1 << 20}), collective::kAnySource));
    }
    for (const auto& one : received) {
      const collective::ReceivedMessage message = one.wait();
      require(at::equal(message.tensor, at::full({1 << 20}, static_cast<double>(message.source))),
              "a message from any rank");
    }
    wait_all(sent, seconds(60));
  }
  session.shutdown(seconds(30));
}

/// Prints "ready" when a call to the far host is pending, and "lost" when its failure is reported.
void watch_far_host() {
  Session session = join_on_host(functions());
  Worker& worker = session.worker();
  auto lost = worker.with({.timeout = seconds(60)}).rpc_async("worker2", kNap);
  worker.rpc_sync("worker2", kTwice, at::ones({4}));
  std::printf("ready\n");
  std::fflush(stdout);
  bool is_named = false;
  try {
    lost.wait();
  } catch (const Error& error) {
    is_named = error.kind() == ErrorKind::kDisconnected && error.worker() == "worker2";
    std::printf("lost: %s\n", error.what());
    std::fflush(stdout);
  }
  require(is_named, "worker2 is named as lost");
  for (int i = 0; i < 100; ++i) {
    const at::Tensor x = at::ones({1 << 18});
    require(at::equal(worker.rpc_sync(1 - session.rank(), kTwice, x), x * 2),
            "the neighbor is not concerned");
  }
  worker.barrier({"worker0", "worker1"});
}

/// Serves until the world breaks; a worker on the far host that learns of it ends without an error.
void serve_far_host() {
  Session session = join_on_host(functions());
  try {
    session.shutdown(seconds(60));
  } catch (const Error& error) {
    std::printf("lost: %s\n", error.what());
    return;
  }
  require(false, "the world broke");
}

TEST_F(Hosts, WorkersOfTwoHostsConnectAndCallEachOther) {
  ProcessWorld world(4);
  for (int rank = 0; rank < 4; ++rank)
    start(world, rank, rank < 2 ? network_.near : network_.far, "hosts.meet");
  expect_all_end_well(world);
}

TEST_F(Hosts, GroupsSumOverTwoHosts) {
  ProcessWorld world(4);
  for (int rank = 0; rank < 4; ++rank) {
    start(world, rank, rank < 2 ? network_.near : network_.far, "hosts.sum_over_hosts");
  }
  expect_all_end_well(world);
}

TEST_F(Hosts, WorkersConnectByCertificatesWithoutACommonSecret) {
  ProcessWorld world(4);
  testing::TestAuthority authority(world.folder(), "ours");
  authority.issue("worker", "IP:10.77.0.1,IP:10.77.0.2");
  for (int rank = 0; rank < 4; ++rank) {
    const bool near = rank < 2;
    const std::string home = world.folder() + (near ? "/near" : "/far");
    std::filesystem::create_directory(home);
    start(world, rank, near ? network_.near : network_.far, "hosts.meet",
          {{"TORCHSPAN_SECRET_FILE", ""},
           {"HOME", home},
           {"TORCHSPAN_CERTIFICATE_FILE", authority.certificate_file("worker")},
           {"TORCHSPAN_KEY_FILE", authority.key_file("worker")},
           {"TORCHSPAN_AUTHORITY_FILE", authority.authority_file()}});
  }
  expect_all_end_well(world);
}

TEST_F(Hosts, WorkersConnectOverUcxWhenTheNetworkIsDeclaredIsolated) {
  ProcessWorld world(4);
  for (int rank = 0; rank < 4; ++rank) {
    start(world, rank, rank < 2 ? network_.near : network_.far, "hosts.meet",
          {{"TORCHSPAN_NETWORK", "ucx-isolated"}});
  }
  world.process(0).wait(world.executor(), seconds(60));
  if (world.process(0).output().find("built without UCX") != std::string::npos) GTEST_SKIP() << "no UCX";
  expect_all_end_well(world);
}

TEST_F(Hosts, WorkersConnectWithoutEncryptionWhenAllDeclareTheNetworkIsolated) {
  ProcessWorld world(4);
  for (int rank = 0; rank < 4; ++rank) {
    start(world, rank, rank < 2 ? network_.near : network_.far, "hosts.meet",
          {{"TORCHSPAN_NETWORK", "tcp-isolated"}});
  }
  expect_all_end_well(world);
}

TEST_F(Hosts, AWorkerThatDoesNotEncryptIsRejectedByAWorldThatDoes) {
  ProcessWorld world(2);
  std::map<std::string, std::string> alone{
      {"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"TORCHSPAN_JOIN_TIMEOUT", "5"}};
  Process& first = start(world, 0, network_.near, "hosts.meet", alone);
  alone["TORCHSPAN_NETWORK"] = "tcp-isolated";
  Process& other = start(world, 1, network_.far, "hosts.meet", alone);
  for (Process* process : {&other, &first}) {
    ASSERT_TRUE(process->wait(world.executor(), seconds(60))) << process->output();
    EXPECT_NE(process->exit_code(), 0);
    EXPECT_THAT(process->output(), ::testing::AllOf(::testing::HasSubstr("tcp-isolated (no encryption)"),
                                                    ::testing::HasSubstr("tls (encryption)"),
                                                    ::testing::HasSubstr("TORCHSPAN_NETWORK")));
  }
}

TEST_F(Hosts, WorkersConnectWhereOnlyIpv6Works) {
  for (const auto& [host, device, number] :
       {std::tuple(&network_.near, "near", "1"), std::tuple(&network_.far, "far", "2")}) {
    ASSERT_TRUE(host->run(std::string("ip -4 addr flush dev ") + device));
    if (!host->run(std::string("ip -6 addr add fd77::") + number + "/64 dev " + device + " nodad"))
      GTEST_SKIP() << "this system has no IPv6";
  }
  for (const char* scenario : {"hosts.meet", "hosts.sum_over_hosts"}) {
    ProcessWorld world(4);
    for (int rank = 0; rank < 4; ++rank) {
      start(world, rank, rank < 2 ? network_.near : network_.far, scenario,
            {{"MASTER_ADDR", "fd77::1"}, {"TEST_ENCRYPTED_ONLY", "1"}});
    }
    expect_all_end_well(world);
  }
}

TEST_F(Hosts, AnUnknownNetworkIsRefusedByName) {
  ProcessWorld world(2);
  Process& worker = start(world, 0, network_.near, "hosts.meet", {{"TORCHSPAN_NETWORK", "infiniband"}});
  ASSERT_TRUE(worker.wait(world.executor(), seconds(30)));
  EXPECT_EQ(worker.exit_code(), 1);
  EXPECT_THAT(worker.output(), ::testing::HasSubstr("TORCHSPAN_NETWORK is 'infiniband'"));
}

TEST_F(Hosts, AWorkerWithAnotherSecretIsRejected) {
  ProcessWorld world(2);
  std::map<std::string, std::string> alone{{"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}};
  alone["TORCHSPAN_JOIN_TIMEOUT"] = "5";
  Process& first = start(world, 0, network_.near, "hosts.meet", alone);
  const std::string secret = world.folder() + "/other";
  net::Secret::random().write_file(secret);
  alone["TORCHSPAN_SECRET_FILE"] = secret;
  Process& denied = start(world, 1, network_.far, "hosts.meet", alone);
  ASSERT_TRUE(denied.wait(world.executor(), seconds(60))) << denied.output();
  EXPECT_EQ(denied.exit_code(), 1);
  EXPECT_THAT(denied.output(), ::testing::AllOf(::testing::HasSubstr("denied"),
                                                ::testing::HasSubstr("TORCHSPAN_SECRET_FILE")));
  ASSERT_TRUE(first.wait(world.executor(), seconds(60)));
  EXPECT_THAT(first.output(),
              ::testing::AllOf(::testing::HasSubstr("rank 1"),
                               ::testing::HasSubstr("the store rejected a connection from '")));
}

TEST_F(Hosts, AHostThatDisappearsIsReportedInTimeAndTheOthersContinue) {
  ProcessWorld world(3);
  Process& first = start(world, 0, network_.near, "hosts.watch_far_host");
  Process& second = start(world, 1, network_.near, "hosts.watch_far_host");
  Process& third = start(world, 2, network_.far, "hosts.serve_far_host");
  ASSERT_TRUE(says(world, first, "ready", seconds(30))) << first.output();
  ASSERT_TRUE(says(world, second, "ready", seconds(30))) << second.output();
  const TimePoint pulled = world.executor().now();
  ASSERT_TRUE(network_.pull_cable());
  for (Process* process : {&first, &second, &third}) {
    EXPECT_TRUE(says(world, *process, "lost", seconds(30))) << process->output();
    EXPECT_LT(world.executor().now() - pulled, seconds(30)) << process->output();
  }
  expect_all_end_well(world);
}

const testing::Scenarios kScenarios("hosts", {{"meet", meet},
                                              {"sum_over_hosts", sum_over_hosts},
                                              {"watch_far_host", watch_far_host},
                                              {"serve_far_host", serve_far_host}});

}  // namespace
}  // namespace torchspan::hosts_test
