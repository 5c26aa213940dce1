// Groups beside remote calls, across real processes.
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <optional>
#include <sys/resource.h>
#include <unistd.h>

#include <torch/torch.h>

#include <torchspan/collective.h>
#include <torchspan/data_parallel.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "tests/support/cluster_main.h"
#include "tests/support/gloo.h"

namespace torchspan::groups_test {
namespace {

using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::ProcessWorld;
using testing::require;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
constexpr Function<add> kAdd{"add"};

/// Sums over all workers and over part of them, while calls go back and forth.
void sums_and_calls() {
  Session session(WorkerOptions::from_env(), FunctionTable().add(kAdd));
  {
    const auto rank = static_cast<std::int64_t>(session.rank());
    const collective::Group group = session.group();
    require(group.rank() == rank && group.size() == 3, "the group is the world");
    require(group.backend()->name() == "shm",
            "workers of one host share memory, not " + group.backend()->name());
    const collective::Group odd = group.split(rank == 1 ? 1 : 0, 0);
    const std::string next = "worker" + std::to_string((rank + 1) % 3);
    for (std::int64_t step = 0; step < 50; ++step) {
      auto call = session.worker().rpc_async(next, kAdd, rank, step);
      at::Tensor all = at::full({step % 2 == 0 ? 10 : 100000}, rank + step, at::kLong);
      at::Tensor part = at::full({7}, rank, at::kDouble);
      const auto sum = group.all_reduce(all);
      odd.all_reduce(part).wait();
      sum.wait();
      require((all == 3 * step + 3).all().item<bool>(), "a sum over all");
      require((part == (rank == 1 ? 1 : 2)).all().item<bool>(), "a sum over a part");
      require(call.wait() == rank + step, "a call");
    }
  }
  session.shutdown();
}

TEST(Groups, WorkTogetherWithCalls) {
  ProcessWorld world(3);
  world.start_all("groups.sums_and_calls");
  expect_all_end_well(world);
}

/// A group of some workers does not involve the others.
void group_of_some() {
  Session session(WorkerOptions::from_env());
  if (session.rank() != 1) {
    const collective::Group pair = session.group({.ranks = {2, 0}});
    require(pair.rank() == (session.rank() == 2 ? 0 : 1), "ranks stand in the order that was asked for");
    at::Tensor value = at::full({3}, static_cast<double>(session.rank()));
    pair.broadcast(value, 0).wait();
    require((value == 2).all().item<bool>(), "the first rank's value");
  } else {
    try {
      session.group({.ranks = {2, 0}});
      throw std::runtime_error("a worker with another secret was admitted");
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::kInvalid, error.what());
    }
  }
  session.shutdown();
}

TEST(Groups, MayContainASubsetOfTheWorkers) {
  ProcessWorld world(3);
  world.start_all("groups.group_of_some");
  expect_all_end_well(world);
}

/// Checks that `body` throws kCancelled.
void require_cancelled(const std::string& what, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return require(error.kind() == ErrorKind::kCancelled, what + ": " + error.what());
  }
  require(false, what + " succeeded without a session");
}

using Model = DistributedDataParallel<torch::nn::Linear>;

/// Objects that a program keeps longer than its session: in static objects, or in members declared in the
/// wrong order.
struct Kept {
  torch::nn::Linear net{2, 2};
  std::optional<collective::Group> group, part;
  std::optional<Model> model;
  std::optional<Future<at::Tensor>> pending;

  void train() {
    net->zero_grad();
    model->forward(at::ones({3, 2})).sum().backward();
  }
  void make(Session& session, const collective::GroupOptions& options) {
    group = session.group(options);
    part = group->split(0, group->rank());
    model.emplace(net, *group);
    for (int step = 0; step < 3; ++step) train();
  }
  /// Every use throws such an error, and no call waits.
  void require_all_cancelled() {
    if (pending && group->size() > 1) require_cancelled("what was pending", [&] { pending->wait(); });
    for (const collective::Group& one : {*group, *part}) {
      at::Tensor tensor = at::ones({4, 2});
      require_cancelled("all_reduce", [&] { one.all_reduce(tensor).wait(); });
      require_cancelled("reduce_scatter", [&] { one.reduce_scatter(at::ones({one.size(), 2})).wait(); });
      require_cancelled("all_gather", [&] { one.all_gather(tensor).wait(); });
      require_cancelled("broadcast", [&] { one.broadcast(tensor, 0).wait(); });
      require_cancelled("all_gather_bytes", [&] { one.all_gather_bytes(Bytes(3)); });
      require_cancelled("barrier", [&] { one.barrier(); });
      require_cancelled("split", [&] { one.split(0, 0); });
      require_cancelled("a continuation", [&] {
        one.all_reduce(tensor).then([](const Future<at::Tensor>& done) { done.wait(); }).wait();
      });
    }
    require_cancelled("a step", [&] { train(); });
    const at::NoGradGuard no_grad;
    model->forward(at::ones({3, 2}));  // on this worker alone
  }
};

std::vector<collective::GroupOptions> all_kinds() {
  const auto isolated = collective::Network::kIsolated;
  std::vector<collective::GroupOptions> kinds{
      {}, {.backend = collective::BackendKind::kHierarchical, .network = isolated}};
  if (testing::kHasGloo) kinds.push_back({.backend = collective::BackendKind::kC10d, .network = isolated});
  return kinds;
}

/// TEST_ENDING: how the session ends before the objects made from it.
void outlives_its_session() {
  const std::string ending = std::getenv("TEST_ENDING");
  static Kept last;  // destroyed after main()
  WorkerOptions options = WorkerOptions::from_env();
  options.leave_timeout = seconds(1);  // rank 0 leaves while the other one stays
  std::optional<Session> session(std::in_place, std::move(options));
  std::vector<std::unique_ptr<Kept>> kept;
  for (const auto& options : all_kinds()) {
    kept.push_back(std::make_unique<Kept>());
    kept.back()->make(*session, options);
  }
  last.make(*session, {});
  const std::string over = std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/over";
  if (ending == "shutdown") {
    session->shutdown(seconds(30));
    kept.front()->require_all_cancelled();
  } else if (session->rank() == 0) {
    for (const auto& one : kept) one->pending = one->group->all_reduce(at::ones({100}));
  } else {  // this rank never joins, and sees the end of rank 0
    while (!std::filesystem::exists(over)) session->runtime().executor.sleep(std::chrono::milliseconds(10));
    return session.reset();
  }
  session.reset();
  std::ofstream(over) << "now";
  for (const auto& one : kept) one->require_all_cancelled();
  last.require_all_cancelled();
}

class GroupsThatOutliveTheirSession : public ::testing::TestWithParam<std::tuple<int, std::string>> {};
INSTANTIATE_TEST_SUITE_P(Endings, GroupsThatOutliveTheirSession,
                         ::testing::Combine(::testing::Values(1, 2),
                                            ::testing::Values("shutdown", "destruction")),
                         [](const auto& info) {
                           return std::get<1>(info.param) + "_" + std::to_string(std::get<0>(info.param));
                         });

TEST_P(GroupsThatOutliveTheirSession, FailWithCancelled) {
  const auto& [ranks, ending] = GetParam();
  ProcessWorld world(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    world.start(rank, "groups.outlives_its_session", {{"TEST_ENDING", ending}});
  }
  expect_all_end_well(world);
}

/// Rank 1 leaves out one group, as after an exception.
void makes_groups_of_different_names() {
  Session session(WorkerOptions::from_env());
  if (session.rank() != 1) {
    try {
      session.group({.name = "validation", .timeout = seconds(1)});
      throw std::runtime_error("made a group without rank 1");
    } catch (const Error& error) {
      const std::string text = error.what();
      require(error.kind() == ErrorKind::kTimedOut && text.find("worker1") != std::string::npos &&
                  text.find("waits in 'torchspan.group:training'") != std::string::npos,
              text);
    }
  }
  const collective::Group group = session.group({.name = "training"});
  at::Tensor ones = at::ones({2});
  group.all_reduce(ones).wait();
  require((ones == 3).all().item<bool>(), "the sum of all ranks");
  try {
    session.group({.name = "two words"});
    throw std::runtime_error("made a group with a space in its name");
  } catch (const Error& error) {
    require(std::string(error.what()).find("GroupOptions::name") != std::string::npos, error.what());
  }
  session.shutdown();
}

TEST(Groups, WithNamesWaitOnlyForRanksThatMakeTheSameOne) {
  ProcessWorld world(3);
  world.start_all("groups.makes_groups_of_different_names");
  expect_all_end_well(world);
}

/// Whether a group is made while rank 1 may open `spare` more descriptors. If not, all ranks fail at once with its reason.
bool makes_group(Session& session, collective::BackendKind backend, rlim_t spare) {
  rlimit limit{};
  require(::getrlimit(RLIMIT_NOFILE, &limit) == 0, "the limit");
  const rlimit before = limit;
  const int next = ::dup(0);
  ::close(next);
  limit.rlim_cur = static_cast<rlim_t>(next) + spare;
  if (session.rank() == 1) ::setrlimit(RLIMIT_NOFILE, &limit);
  std::optional<Error> failure;
  try {
    session.group({.backend = backend, .timeout = seconds(20)});
  } catch (const Error& error) {
    failure = error;
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
  if (!failure) return true;
  const std::string text = failure->what();
  require(failure->kind() == ErrorKind::kOverloaded && text.find("ulimit -n") != std::string::npos &&
              text.find("worker1") != std::string::npos && text.find("containers") == std::string::npos,
          fmt::format("with {} more descriptors: {}", spare, text));
  return false;
}

/// Rank 1 has no descriptor left when it begins to make its part of a group, or later.
void lacks_descriptors() {
  Session session(WorkerOptions::from_env());
  for (const auto backend : {collective::BackendKind::kNetwork, collective::BackendKind::kSharedMemory}) {
    // Over the network, a rank that can listen and not accept is only noticed when the others have waited for it.
    const rlim_t most = backend == collective::BackendKind::kNetwork ? 2 : 100;
    rlim_t spare = 0;
    while (spare <= most && !makes_group(session, backend, spare)) ++spare;
    require(spare > 2 && spare < 20, fmt::format("a group is made with {} descriptors", spare));
    at::Tensor ones = at::ones({2});
    session.group({.backend = backend}).all_reduce(ones).wait();
    require((ones == 3).all().item<bool>(), "the next group works");
  }
  session.shutdown();
}

TEST(Groups, FailOnAllRanksAtOnceIfOneOfThemHasNoDescriptors) {
  ProcessWorld world(3);
  world.start_all("groups.lacks_descriptors");
  expect_all_end_well(world);
}

TEST(Groups, AWorldOfOneHasAGroupToo) {
  Session session(WorkerOptions{});
  const collective::Group group = session.group();
  EXPECT_EQ(group.size(), 1);
  EXPECT_EQ(group.all_reduce(at::ones({2})).wait().sum().item<int>(), 2);
}

const testing::Scenarios kScenarios("groups",
                                    {{"sums_and_calls", sums_and_calls},
                                     {"group_of_some", group_of_some},
                                     {"makes_groups_of_different_names", makes_groups_of_different_names},
                                     {"lacks_descriptors", lacks_descriptors},
                                     {"outlives_its_session", outlives_its_session}});

}  // namespace
}  // namespace torchspan::groups_test
