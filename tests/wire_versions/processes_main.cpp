// Workers of neighboring releases across real processes: what they announce differs, over the transports of sessions.
#include <ATen/ATen.h>

#include <torchspan/autograd.h>
#include <torchspan/session.h>

#include "session/session_on_host.h"
#include "tests/cluster/hosts_suite.h"
#include "tests/support/cluster_main.h"
#include "tests/wire_versions/negation.h"

namespace torchspan {
namespace {

using std::chrono::seconds;
using testing::expect_all_end_well;
using ::testing::HasSubstr;
using testing::Hosts;
using testing::ProcessWorld;
using testing::require;
using wire_versions::kBoth;
using wire_versions::kNew;
using wire_versions::kOld;
using wire_versions::Negation;

at::Tensor scale(const at::Tensor& x, const at::Tensor& by) { return x * by; }
at::Tensor use(const RRef<at::Tensor>& x) { return x.to_here() + 1; }
constexpr Function<scale> kScale{"scale"};
constexpr Function<use> kUse{"use"};

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}
ProtocolRange range_of(const std::string& name) {
  return name == "old" ? kOld : name == "both" ? kBoth : kNew;
}

Session join(Duration limit = seconds(20)) {
  const SessionDisguise disguise{.host_mark = variable("TEST_HOST"),
                                 .wire = range_of(variable("TEST_WIRE")),
                                 .store = range_of(variable("TEST_STORE"))};
  std::vector<std::unique_ptr<rpc::Extension>> extensions;
  extensions.push_back(std::make_unique<Negation>());
  WorkerOptions options = WorkerOptions::from_env();
  options.environment.join_timeout = limit;
  return make_session(disguise, std::move(options), FunctionTable().add(kScale, kUse),
                      detail::with_defaults(std::move(extensions)));
}

/// Calls, references, a backward pass and a group over all workers.
void neighbors() {
  Session session = join();
  Worker& worker = session.worker();
  const at::Tensor by = at::tensor({2, 3}, at::kLong);
  if (worker.rank() == 0) {
    for (int rank = 1; rank < worker.world_size(); ++rank) {
      const std::string to = "worker" + std::to_string(rank);
      require(at::equal(worker.rpc_sync(to, kScale, by, by), by * by), "a call");
      require(at::equal(worker.rpc_sync(to, kUse, worker.remote(to, kScale, by, by)), by * by + 1),
              "a reference");
      const at::Tensor x = at::tensor({1.5, 2.5}, at::kDouble).requires_grad_();
      autograd::Context context(worker);
      context.backward(worker.rpc_sync(to, kScale, x, by).sum());
      require(at::equal(context.gradient(x), by.to(at::kDouble)), "a backward pass");
    }
    const bool negates = worker.extension<Negation>().sent() > 0;
    require(negates == (variable("TEST_FEATURE") == "used"),
            "the feature is used if both have it, and only then");
  }
  at::Tensor sum = at::ones({3}) * (worker.rank() + 1);
  session.group().all_reduce(sum).wait();
  require(at::equal(sum, at::ones({3}) * worker.world_size() * (worker.world_size() + 1) / 2), "a group");
  session.shutdown(seconds(30));
}

/// No common version: the error is the output of this process. Rank 0 waits for the other until its limit.
void strangers() {
  try {
    join(seconds(6));
  } catch (const Error& error) {
    std::printf("%s: %s\n", std::string(to_string(error.kind())).c_str(), error.what());
    return;
  }
  throw std::runtime_error("it joined");
}

/// What each rank announces.
struct Announced {
  std::string wire = "both", store = "both", host = "";
};

void start_all(ProcessWorld& world, const std::string& scenario, const std::vector<Announced>& ranks,
               const std::string& feature = "") {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    world.start(static_cast<int>(rank), scenario,
                {{"TEST_WIRE", ranks[rank].wire},
                 {"TEST_STORE", ranks[rank].store},
                 {"TEST_HOST", ranks[rank].host},
                 {"TEST_FEATURE", feature}});
  }
}

TEST(Versions, OfNeighborsWorkTogetherAcrossProcesses) {
  for (const auto& [ranks, feature] : std::vector<std::pair<std::vector<Announced>, std::string>>{
           {{{.wire = "old"}, {.wire = "both"}}, "not used"},
           {{{.wire = "both"}, {.wire = "old"}}, "not used"},
           {{{.wire = "both"}, {.wire = "new"}}, "used"}}) {
    SCOPED_TRACE(ranks[0].wire + " and " + ranks[1].wire);
    ProcessWorld world(static_cast<int>(ranks.size()));
    start_all(world, "neighbors", ranks, feature);
    expect_all_end_well(world);
  }
}

TEST(Versions, OfTheStoreWorkTogetherAcrossProcesses) {
  for (const std::vector<Announced>& ranks : std::vector<std::vector<Announced>>{
           {{.store = "old"}, {.store = "both"}}, {{.store = "both"}, {.store = "old"}}}) {
    SCOPED_TRACE(ranks[0].store + " and " + ranks[1].store);
    ProcessWorld world(2);
    start_all(world, "neighbors", ranks, "used");
    expect_all_end_well(world);
  }
}

/// TLS, heartbeats, and groups over the network.
TEST_F(Hosts, OfNeighboringVersionsWorkTogether) {
  ProcessWorld world(2);
  const std::map<std::string, std::string> single{
      {"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"TEST_FEATURE", "not used"}};
  for (int rank = 0; rank < 2; ++rank) {
    auto changes = single;
    changes["TEST_WIRE"] = rank == 0 ? "old" : "both";
    changes["TEST_STORE"] = rank == 0 ? "both" : "old";
    start(world, rank, rank == 0 ? network_.near : network_.far, "neighbors", changes);
  }
  expect_all_end_well(world);
}

TEST(Versions, WithoutACommonOneAreRefusedOnBothSidesAcrossProcesses) {
  for (const std::vector<Announced>& ranks : std::vector<std::vector<Announced>>{
           {{.wire = "old"}, {.wire = "new"}}, {{.wire = "new"}, {.wire = "old"}}}) {
    ProcessWorld world(2);
    start_all(world, "strangers", ranks);
    expect_all_end_well(world);
    const auto version = [](const std::string& name) { return name == "old" ? "version 1" : "version 2"; };
    for (std::size_t rank = 0; rank < 2; ++rank) {
      const std::string output = world.process(rank).output();
      EXPECT_THAT(output, HasSubstr("unsupported"));
      EXPECT_THAT(output, HasSubstr("worker0 (rank 0"));
      EXPECT_THAT(output, HasSubstr(version(ranks[0].wire)));
      EXPECT_THAT(output, HasSubstr("worker1 (rank 1"));
      EXPECT_THAT(output, HasSubstr("of the wire format"));
      EXPECT_THAT(output, HasSubstr(version(ranks[1].wire)));
    }
  }
}

TEST(Versions, OfTheStoreWithoutACommonOneAreRefusedAcrossProcesses) {
  ProcessWorld world(2);
  start_all(world, "strangers", {{.store = "old"}, {.store = "new"}});
  expect_all_end_well(world);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const std::string output = world.process(rank).output();
    EXPECT_THAT(output, HasSubstr("the worker that joins speaks version 2 of the store's protocol"));
    EXPECT_THAT(output, HasSubstr("rank 0 speaks version 1"));
    EXPECT_THAT(output, HasSubstr("two neighboring ones"));
  }
}

}  // namespace
}  // namespace torchspan

int main(int argc, char** argv) {
  return torchspan::testing::cluster_main(
      argc, argv, {{"neighbors", torchspan::neighbors}, {"strangers", torchspan::strangers}});
}
