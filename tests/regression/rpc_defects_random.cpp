// Random programs with references: creations that fail, depend on each other or arrive too late, messages
// with several references, connections that break and full queues. In every case each call ends without a
// timeout, and in the end all tables are empty.
#include <random>

#include "tests/regression/rpc_defects.h"
#include "tests/support/environment.h"

namespace torchspan::rpc_defects_random {
namespace {

using namespace defects;  // NOLINT(google-build-using-namespace)
using Number = RRef<std::int64_t>;

std::int64_t seven() { return 7; }
std::int64_t raise() { throw std::domain_error("Expected error"); }
std::int64_t late_seven(Worker& worker) {
  sleep_ms(worker, 20);
  return 7;
}
std::int64_t next(const Number& number) { return number.to_here() + 1; }
std::int64_t how_many(const std::vector<Number>& all) { return static_cast<std::int64_t>(all.size()); }
std::vector<Number> same(const std::vector<Number>& all) { return all; }

constexpr Function<seven> kSeven{"seven"};
constexpr Function<raise> kRaise{"raise"};
constexpr Function<late_seven> kLateSeven{"late_seven"};
constexpr Function<next> kNext{"next"};
constexpr Function<how_many> kHowMany{"how_many"};
constexpr Function<same> kSame{"same"};

constexpr std::uint32_t kWorkers = 4;

/// One worker's program.
class Program {
 public:
  Program(Worker& worker, SimCluster& cluster, std::uint64_t seed)
      : worker_(worker), cluster_(cluster), random_(seed * kWorkers + worker.rank()) {}

  void run() {
    for (int i = 0; i < 40; ++i) {
      try {
        step();
      } catch (const Error&) {  // refused at once
      }
    }
    nap(worker_, seconds(60));
    for (const auto& end : ends_) EXPECT_TRUE(end()) << "a call never ended:\n" << worker_.debug().str();
    ends_.clear();
    held_.clear();
    nap(worker_, seconds(60));
    const auto left = worker_.debug().references;
    EXPECT_EQ(left.owners + left.forks + left.pending_users + left.pending_children, 0u)
        << worker_.debug().str();
  }

 private:
  std::uint32_t draw(std::uint32_t below) { return static_cast<std::uint32_t>(random_() % below); }
  /// Some of the calls are cancelled early.
  Caller caller() {
    return worker_.with({.timeout = draw(4) == 0 ? milliseconds(1 + draw(30)) : milliseconds(0)});
  }
  void hold(const Number& number) {
    held_.push_back(number);
    keep([created = number.creation()] { return created.done(); });
  }
  std::vector<Number> some() {
    std::vector<Number> some;
    for (std::uint32_t i = 0; i < 3 && !held_.empty(); ++i) some.push_back(held_[draw(held_.size())]);
    return some;
  }
  void keep(std::function<bool()> done) { ends_.push_back(std::move(done)); }
  void step() {
    const std::uint32_t to = draw(kWorkers);
    switch (draw(9)) {
      case 0:
        return hold(caller().remote(to, kSeven));
      case 1:
        return hold(caller().remote(to, kRaise));
      case 2:
        return hold(caller().remote(to, kLateSeven));
      case 3:
        if (!held_.empty()) hold(caller().remote(to, kNext, held_[draw(held_.size())]));
        return;
      case 4:
        return keep([call = caller().rpc_async(to, kHowMany, some())] { return call.done(); });
      case 5:
        return keep([call = caller().rpc_async(to, kSame, some())] { return call.done(); });
      case 6:
        if (!held_.empty()) held_.erase(held_.begin() + draw(held_.size()));
        return;
      case 7:
        if (draw(4) == 0) cluster_.network().sever(SimCluster::name(draw(kWorkers)), SimCluster::name(to));
        return;
      default:
        nap(worker_, milliseconds(draw(8)));
    }
  }

  Worker& worker_;
  SimCluster& cluster_;
  std::mt19937_64 random_;
  std::vector<Number> held_;
  std::vector<std::function<bool()>> ends_;
};

TEST(RpcDefects, RandomProgramsEndAllCallsAndLeaveNoReference) {
  const auto seeds = testing::number_from("TORCHSPAN_CASES", std::uint64_t{24});
  for (std::uint64_t seed = 1; seed <= seeds && !HasFailure(); ++seed) {
    Marks marks;
    ClusterOptions options = world(marks, kWorkers);
    options.functions.add(kSeven, kRaise, kLateSeven, kNext, kHowMany, kSame);
    options.seed = seed;
    options.default_timeout = Duration::zero();
    options.network.latency = milliseconds(2);
    options.network.jitter = milliseconds(2);
    if (seed % 4 == 0) options.max_unsent = 1500;
    SimCluster cluster(options);
    try {
      cluster.run([&](Worker& worker) { Program(worker, cluster, seed).run(); });
    } catch (const std::exception& failure) {
      ADD_FAILURE() << failure.what();
    }
    if (HasFailure()) ADD_FAILURE() << "seed " << seed;
  }
}

}  // namespace
}  // namespace torchspan::rpc_defects_random
