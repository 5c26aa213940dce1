// A worker dies at every moment of a backward pass: before, while and after each message of it is sent, and
// during each worker's own computation. The live workers end the pass at once with the same error, and
// release it.
#include <cstdio>
#include <map>
#include <set>

#include "tests/parity/autograd_slow.h"
#include "tests/parity/rpc_faults.h"

namespace torchspan::autograd_deaths {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::PassMode;
using std::chrono::microseconds;

constexpr int kWorkers = 5;         // worker 0 only serves the store
constexpr std::uint32_t kRoot = 1;  // the worker that computes the loss
constexpr Duration kLatency = microseconds(50);
constexpr Duration kWork = microseconds(400);

at::Tensor hop(Worker& worker, const at::Tensor& x, std::int64_t more);
constexpr Function<hop> kHop{"hop"};
at::Tensor hop(Worker& worker, const at::Tensor& x, std::int64_t more) {
  const at::Tensor here = sleeps_in_backward(x.sin(), worker.runtime(), kWork);
  return more == 0 ? here : worker.rpc_sync(worker.rank() + 1, kHop, here, more - 1) + x;
}

/// A pass of this worker in its caller's context.
at::Tensor differentiate_here(Worker& worker, const at::Tensor& x) {
  const at::Tensor far = worker.rpc_sync(worker.rank() + 1, kHop, x, 1);
  const at::Tensor near =
      sleeps_in_backward(far, worker.runtime(), kWork);  // its marks arrive long before its gradients
  autograd::current(worker).backward(near.sum());
  return x;
}
constexpr Function<differentiate_here> kDifferentiateHere{"differentiate_here"};
std::int64_t passes_of(Worker& worker) { return static_cast<std::int64_t>(counts_of(worker).passes); }
constexpr Function<passes_of> kPassesOf{"passes_of"};

/// A moment of a pass: shortly before or after the sending or arrival of a message, or during a worker's own
/// computation.
struct Moment {
  Duration after{0};  ///< since the start of backward()
  std::string phase;
};

std::string phase_of(const wire::FrameHeader& header) {
  static const std::map<std::uint16_t, std::string> kPhases{
      {0x0101, "propagate"}, {0x0102, "abort"}, {0x0103, "release"}, {0x0104, "mark"}, {0x0105, "final"}};
  const auto found = kPhases.find(static_cast<std::uint16_t>(header.type));
  return found == kPhases.end() ? std::string() : found->second;
}

/// A world in which worker 1 differentiates a loss computed by 1 -> 2 -> 3 and 1 -> 4, and in SMART mode made
/// a call to worker 3 whose result it does not use.
ClusterOptions deadly_world() {
  ClusterOptions options = autograd_world(kWorkers, FunctionTable().add(kHop, kDifferentiateHere, kPassesOf));
  options.graceful = false;
  options.network.latency = kLatency;
  return options;
}

class Trial {
 public:
  explicit Trial(PassMode mode) : mode_(mode), cluster_(deadly_world()) {}

  /// Runs it undisturbed; returns the moments.
  std::vector<Moment> watch() {
    std::vector<Moment> moments;
    Mutex mutex;
    cluster_.network().observe([&](const net::SimMessage& message) {
      MutexLock lock(mutex);
      if (!began_ || message.from.ends_with(".membership") || !message.from.starts_with("sim:worker")) return;
      const auto frame = wire::decode_frame(message.header);
      const std::string phase = phase_of(frame.header);
      if (!phase.empty()) moments.push_back({cluster_.executor().now() - *began_, phase});
    });
    run(-1, {});
    EXPECT_TRUE(succeeded_);
    return moments;
  }

  /// Kills `victim` at that moment. Returns true if the pass got its gradients nevertheless.
  bool kill(int victim, const Moment& moment) {
    run(victim, moment);
    return succeeded_;
  }

 private:
  void run(int victim, const Moment& moment) {
    cluster_.run([&](Worker& worker) {
      std::optional<Thread> killer;
      if (worker.rank() == kRoot) {
        differentiate(worker, victim, moment, killer);
      }
      nap(worker, seconds(4));
      const int rank = static_cast<int>(worker.rank());
      if (rank == victim) return nap(worker, seconds(2));
      EXPECT_EQ(counts_of(worker).passes, 0U) << "worker" << rank << " is in the pass still";
      EXPECT_EQ(counts_of(worker).contexts, 0U) << "worker" << rank << " has the context still";
      nap(worker, seconds(2));
    });
  }

  void differentiate(Worker& worker, int victim, const Moment& moment, std::optional<Thread>& killer) {
    const at::Tensor a = Kind(false).make(1), b = Kind(false).make(2);
    Context context(worker);
    at::Tensor loss =
        worker.rpc_sync("worker2", kHop, a, 1).sum() + worker.rpc_sync("worker4", kHop, b, 0).sum();
    if (mode_ == PassMode::kSmart) worker.rpc_sync("worker3", kHop, a, 0);
    began_ = now(worker);
    if (victim >= 0) {
      killer = worker.runtime().executor.spawn("killer", [this, victim, moment] {
        cluster_.executor().sleep(moment.after);
        cluster_.kill(victim);
      });
    }
    try {
      context.backward(loss, {.mode = mode_});
      succeeded_ = true;
    } catch (const Error& error) {
      if (victim == static_cast<int>(kRoot)) return;
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
      EXPECT_THAT(error.message(), AllOf(HasSubstr("'worker" + std::to_string(victim) + "'"),
                                         HasSubstr("'hop'"), HasSubstr("autograd_deaths.cpp:")));
      EXPECT_LT(now(worker) - *began_, moment.after + seconds(1));
      return;
    }
    EXPECT_TRUE(at::allclose(context.gradient(a), (a.sin().cos() * a.cos() + 1).detach() * 1.0)) << "hop";
    EXPECT_TRUE(at::allclose(context.gradient(b), b.cos().detach()));
  }

  const PassMode mode_;
  SimCluster cluster_;
  std::optional<TimePoint> began_;
  bool succeeded_ = false;
};

/// The outcome of the deaths in one phase.
struct Tally {
  int ended = 0, had_gradients = 0;
};

void print(const std::map<std::string, Tally>& tallies) {
  for (const auto& [phase, tally] : tallies) {
    std::printf("killed %s: %d passes ended, %d had their gradients\n", phase.c_str(), tally.ended,
                tally.had_gradients);
  }
}

/// `stride` 1: at every moment; 3: at every third.
std::map<std::string, Tally> kill_at_moments(PassMode mode, std::size_t stride) {
  std::map<std::string, Tally> tallies;
  std::set<std::pair<std::int64_t, std::string>> seen;
  const auto watched = Trial(mode).watch();
  EXPECT_FALSE(watched.empty());
  for (std::size_t at = 0; at < watched.size(); at += stride) {
    const Moment& moment = watched[at];
    const Duration around[] = {moment.after - microseconds(1), moment.after + microseconds(1),
                               moment.after + kLatency + microseconds(1),
                               moment.after + kLatency + kWork / 2};
    const std::string phases[] = {"before " + moment.phase, "during " + moment.phase, "after " + moment.phase,
                                  "compute"};
    for (int i = 0; i < 4; ++i) {
      if (!seen.emplace(around[i].count(), phases[i]).second || around[i] < Duration::zero()) continue;
      for (int victim = 1; victim < kWorkers; ++victim) {
        SCOPED_TRACE(phases[i] + ", worker" + std::to_string(victim) + " killed " +
                     std::to_string(around[i] / microseconds(1)) + " us after the beginning");
        const bool well = Trial(mode).kill(victim, {around[i], phases[i]});
        Tally& tally = tallies[phases[i]];
        ++(well ? tally.had_gradients : tally.ended);
        if (::testing::Test::HasFailure()) return tallies;
      }
    }
  }
  return tallies;
}

// peer: dist_autograd_test.py (hangs) a worker dies before, during or after any message of a pass: better:
//   the pass ends within a second and leaves no state on any worker
TEST(AutogradDeaths, EndASmartPassAtEveryMoment) {
  auto tallies = kill_at_moments(PassMode::kSmart, 1);
  print(tallies);
  for (const char* phase :
       {"before mark", "during mark", "after mark", "during propagate", "after propagate", "compute"}) {
    EXPECT_GT(tallies[phase].ended, 0) << phase;
  }
  for (const char* phase : {"during final", "after final", "during release", "after release"}) {
    EXPECT_GT(tallies[phase].ended + tallies[phase].had_gradients, 0) << phase;
  }
  EXPECT_GT(tallies["after release"].had_gradients, 0) << "the pass was over by then";
}

// peer: dist_autograd_test.py (hangs) a worker dies before
TEST(AutogradDeaths, EndAFastPassAtAnyMoment) {
  auto tallies = kill_at_moments(PassMode::kFast, 3);
  print(tallies);
  for (const char* phase : {"during propagate", "after propagate", "compute"}) {
    EXPECT_GT(tallies[phase].ended, 0) << phase;
  }
  EXPECT_GT(tallies["after release"].had_gradients, 0);
}

/// The root dies, in a context that lives on; a worker that waits for its gradients gets an error.
// peer: dist_autograd_test.py (hangs) a worker dies before
TEST(AutogradDeaths, OfTheRootInAnothersContext) {
  int met = 0;
  for (Duration moment = microseconds(100); moment < milliseconds(3); moment += microseconds(200)) {
    SCOPED_TRACE(std::to_string(moment / microseconds(1)) + " us after the beginning");
    SimCluster cluster(deadly_world());
    cluster.run([&](Worker& worker) {
      if (worker.rank() != kRoot) return nap(worker, seconds(3));
      Context context(worker);
      auto differentiating = worker.rpc_async("worker2", kDifferentiateHere, Kind(false).make(1));
      nap(worker, moment);
      for (const char* name : {"worker3", "worker4"}) met += worker.rpc_sync(name, kPassesOf) != 0 ? 1 : 0;
      cluster.kill(2);
      try {
        differentiating.wait();
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
      }
      nap(worker, milliseconds(500));
      for (const char* name : {"worker3", "worker4"}) {
        EXPECT_EQ(worker.rpc_sync(name, kPassesOf), 0) << name << " is in the pass still";
      }
    });
  }
  EXPECT_GT(met, 0) << "no death met a pass";
}

}  // namespace
}  // namespace torchspan::autograd_deaths
