// Distributed autograd over real processes: random programs compared with one process, many passes by many
// threads that must leave nothing behind, and workers that are killed while passes run.
#include <atomic>

#include <torchspan/torchspan.h>

#include "tests/support/autograd_programs.h"
#include "tests/support/cluster_main.h"
#include "tests/support/environment.h"
#include "tests/support/memory.h"

namespace torchspan::autograd_test {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using autograd::Context;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kProcesses = 4;

autograd::PassCounts counts_of(const Worker& worker) {
  return worker.extension<autograd::AutogradExtension>().counts();
}
std::vector<std::int64_t> counts(Worker& worker) {
  const auto counted = counts_of(worker);
  return {static_cast<std::int64_t>(counted.contexts), static_cast<std::int64_t>(counted.passes),
          static_cast<std::int64_t>(counted.remembered)};
}
void die() { ::kill(getpid(), SIGKILL); }
/// Repeatedly differentiates what it gets from the others, until that fails.
void work_for_ever(Worker& worker);

constexpr Function<counts> kCounts{"counts"};
constexpr Function<heap_in_use> kHeapInUse{"heap_in_use"};
constexpr Function<die> kDie{"die"};
constexpr Function<work_for_ever> kWorkForEver{"work_for_ever"};

FunctionTable functions() { return program_functions().add(kCounts, kHeapInUse, kDie, kWorkForEver); }

/// Waits until no worker of `ranks` is in a context or a pass.
void require_nothing_left(Worker& worker, const std::vector<int>& ranks) {
  Executor& executor = worker.runtime().executor;
  const Deadline deadline = executor.deadline_in(seconds(10));
  for (const int rank : ranks) {
    auto left = worker.rpc_sync(rank, kCounts);
    while ((left[0] != 0 || left[1] != 0) && !deadline.passed(executor.now())) {
      executor.sleep(milliseconds(5));
      left = worker.rpc_sync(rank, kCounts);
    }
    require(left[0] == 0 && left[1] == 0,
            fmt::format("worker {} has {} contexts and {} passes left", rank, left[0], left[1]));
  }
}

/// A loss that involves all workers: worker -> +1 -> +2 -> +3.
at::Tensor loss_over_all(Worker& worker, const at::Tensor& a) {
  std::vector<std::int64_t> stops;
  for (int hop = 1; hop < worker.world_size(); ++hop) {
    stops.push_back((worker.rank() + hop) % worker.world_size());
  }
  return worker.rpc_sync(worker.rank(), kCallChain, stops, a).sum();
}

void programs() {
  Session session(WorkerOptions::from_env(), functions());
  if (session.rank() == 0) {
    const long cases = number_from("TORCHSPAN_CASES", 80), first = number_from("TORCHSPAN_SEED", 1);
    Comparison compare;
    for (long seed = first; seed < first + cases; ++seed) {
      const Program program = make_program(static_cast<std::uint64_t>(seed), kProcesses);
      const Outcome expected = run_locally(program);
      std::string difference;
      try {
        difference = compare(run_remotely(session.worker(), program), expected);
      } catch (const Error& error) {
        difference = error.what();
      }
      if (difference.empty()) continue;
      throw std::runtime_error(
          fmt::format("{}\nTORCHSPAN_SEED={} TORCHSPAN_CASES=1: {}", difference, seed, program.text()));
    }
    require(compare.with_gradient > cases / 2 && compare.without > cases / 2, "the cases compared enough");
    require_nothing_left(session.worker(), {0, 1, 2, 3});
  }
  session.shutdown();
}

/// Threads of rank 0 make `passes` passes, each in a separate context.
void make_passes(Session& session, long passes) {
  constexpr int kThreads = 4;
  std::atomic<long> left{passes};
  std::atomic<int> wrong{0};
  std::vector<Thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.push_back(session.runtime().executor.spawn("trainer", [&, i] {
      const at::Tensor a = numbers({kRows, kWidth}, static_cast<std::uint64_t>(i)).set_requires_grad(true);
      const at::Tensor expected = (a.detach().sin().cos() * a.detach().cos()).detach();
      while (--left >= 0) {
        Context context(session.worker());
        const auto mode = left % 2 == 0 ? autograd::PassMode::kFast : autograd::PassMode::kSmart;
        const at::Tensor there = session.worker().rpc_sync(1, kSine, a);
        context.backward(session.worker().rpc_sync(2, kSine, there).sum(), {.mode = mode});
        if (!at::allclose(context.gradient(a), expected)) ++wrong;
      }
    }));
  }
  threads.clear();
  require(wrong == 0, "every gradient is right");
}

void many_passes() {
  Session session(WorkerOptions::from_env(), functions());
  if (session.rank() == 0) {
    const long passes = number_from("TORCHSPAN_PASSES", 1'000);
    make_passes(session, 500);
    require_nothing_left(session.worker(), {0, 1, 2});
    std::vector<std::int64_t> before, remembered;
    for (int rank = 0; rank < 3; ++rank) {
      before.push_back(session.worker().rpc_sync(rank, kHeapInUse));
      remembered.push_back(session.worker().rpc_sync(rank, kCounts)[2]);
    }
    make_passes(session, passes);
    require_nothing_left(session.worker(), {0, 1, 2});
    for (std::size_t rank = 0; rank < 3; ++rank) {
      const auto grown = session.worker().rpc_sync(rank, kHeapInUse) - before[rank];
      const auto now = session.worker().rpc_sync(rank, kCounts)[2];
      const auto ids = now - remembered[rank];
      std::printf("worker %zu: %+ld bytes and %+ld remembered ids after %ld passes\n", rank, grown, ids,
                  passes);
      require(grown < (512 << 10) + 128 * ids, fmt::format("worker {} grew by {} bytes", rank, grown));
      require(now <= 1 << 16, fmt::format("worker {} remembers {} contexts", rank, now));
    }
  }
  session.shutdown();
}

/// Four products, of which worker 1 makes three; then backward, and the gradients of one process.
void hammer(Worker& worker, std::uint64_t seed) {
  const at::Tensor a = numbers({kRows, kWidth}, seed).set_requires_grad(true);
  const at::Tensor b = numbers({kRows, kWidth}, seed + 1000).set_requires_grad(true);
  const std::vector<at::Tensor> copies{a.detach().clone().set_requires_grad(true),
                                       b.detach().clone().set_requires_grad(true)};
  ((copies[0] * copies[1]).sin() * copies[0] * copies[1]).sum().backward();
  Context context(worker);
  const at::Tensor sines = worker.rpc_sync(1, kSine, worker.rpc_sync(1, kMultiply, a, b));
  context.backward((worker.rpc_sync(1, kMultiply, sines, a) * b).sum());
  require(context.gradients().size() == 2, "two gradients");
  require(at::allclose(context.gradient(a), copies[0].grad()), "a's gradient is that of one process");
  require(at::allclose(context.gradient(b), copies[1].grad()), "b's gradient is that of one process");
}

/// Sixty threads of three workers, each with separate contexts, call one worker at the same time.
void many_threads() {
  Session session(WorkerOptions::from_env(), functions());
  constexpr std::uint64_t kThreads = 20, kSteps = 10;
  if (session.rank() != 1) {
    std::atomic<std::uint64_t> right{0};
    std::vector<Thread> threads;
    for (std::uint64_t i = 0; i < kThreads; ++i) {
      threads.push_back(session.runtime().executor.spawn("trainer", [&, i] {
        for (std::uint64_t step = 0; step < kSteps; ++step) {
          try {
            hammer(session.worker(), 10'000 * session.rank() + 10 * i + step);
            ++right;
          } catch (const std::exception& error) {
            std::fprintf(stderr, "thread %lu: %s\n", i, error.what());
          }
        }
      }));
    }
    threads.clear();
    require(right == kThreads * kSteps, "every step of every thread is right");
  }
  session.worker().barrier();
  if (session.rank() == 0) require_nothing_left(session.worker(), {0, 1, 2, 3});
  session.shutdown();
}

void work_for_ever(Worker& worker) {
  const at::Tensor a = numbers({kRows, kWidth}, worker.rank()).set_requires_grad(true);
  // Usually the death happens during a pass.
  while (true) {
    Context context(worker);
    const at::Tensor loss = loss_over_all(worker, a);
    for (int pass = 0; pass < 50; ++pass) context.backward(loss, {.retain_graph = true, .threads = 2});
  }
}

/// Rank 0 differentiates repeatedly while another worker kills itself.
void another_is_killed() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  Executor& executor = session.runtime().executor;
  const int victim = static_cast<int>(number_from("TORCHSPAN_VICTIM", 1));
  if (session.rank() != 0) return executor.sleep(seconds(30));  // killed at the end
  std::optional<TimePoint> killed;
  Thread killer = executor.spawn("killer", [&] {
    executor.sleep(milliseconds(number_from("TORCHSPAN_MOMENT", 10)));
    killed = executor.now();
    try {
      worker.rpc_sync(victim, kDie);
    } catch (const Error&) {
    }
  });
  try {
    work_for_ever(worker);
  } catch (const Error& error) {
    killer.join();
    const std::string text = error.what();
    std::printf("%s\n", text.c_str());
    require(executor.now() - *killed < seconds(4), "at once, not after a silence of 5 s");
    // The death interrupted a pass, or the forward pass's longest call.
    const bool in_forward = text.find("'call_chain' threw") != std::string::npos;
    require(error.kind() == (in_forward ? ErrorKind::kRemoteFailure : ErrorKind::kDisconnected), text);
    require(text.find(fmt::format("worker{}", victim)) != std::string::npos, text);
    require(text.find("call_chain") != std::string::npos, text);
  }
  std::vector<int> survivors;
  for (int rank = 0; rank < kProcesses; ++rank) {
    if (rank != victim) survivors.push_back(rank);
  }
  require_nothing_left(worker, survivors);
}

/// FAST passes; the root queries their progress while they end.
void short_stalls() {
  Session session(WorkerOptions::from_env(), functions());
  if (session.rank() == 0) {
    const at::Tensor a = numbers({kRows, kWidth}, 1).set_requires_grad(true);
    const at::Tensor large = numbers({512, 1024}, 1).set_requires_grad(true);
    Executor& executor = session.runtime().executor;
    const Deadline end = executor.deadline_in(seconds(3));
    for (int pass = 0; !end.passed(executor.now()); ++pass) {
      Context context(session.worker());
      const at::Tensor there = session.worker().rpc_sync(1, kSine, pass % 2 == 0 ? a : large);
      context.backward(
          session.worker().rpc_sync(2, kSine, there).sum(),
          {.mode = autograd::PassMode::kFast, .stall = std::chrono::microseconds(60 + pass % 300)});
    }
  }
  session.shutdown();
}

TEST(ClusterAutograd, APassThatEndsDuringASurveySucceeds) {
  ProcessWorld world(3);
  world.start_all("autograd.short_stalls");
  expect_all_end_well(world, seconds(60));
}

/// The worker whose passes run is the one that dies.
void root_is_killed() {
  Session session(WorkerOptions::from_env(), functions());
  Worker& worker = session.worker();
  Executor& executor = session.runtime().executor;
  if (session.rank() != 0) return executor.sleep(seconds(30));
  auto working = worker.rpc_async(1, kWorkForEver);
  executor.sleep(milliseconds(number_from("TORCHSPAN_MOMENT", 10)));
  auto dying = worker.rpc_async(1, kDie);
  for (auto* call : {&working, &dying}) {
    try {
      call->wait();
      throw std::runtime_error("nothing was thrown");
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::kDisconnected, error.what());
    }
  }
  require_nothing_left(worker, {0, 2, 3});
}

TEST(ClusterAutograd, RandomProgramsHaveTheGradientsOfOneProcess) {
  ProcessWorld world(kProcesses);
  world.start_all("autograd.programs");
  expect_all_end_well(world, seconds(250));
}

/// TORCHSPAN_PASSES makes more.
TEST(ClusterAutograd, LeavesNothingBehindAfterManyPasses) {
  ProcessWorld world(3);
  world.start_all("autograd.many_passes");
  expect_all_end_well(world, seconds(250));
  std::fputs(world.process(0).output().c_str(), stdout);
}

/// The peer's test of many threads at one worker, with threads that really run in parallel.
// peer: dist_autograd_test.py async_dist_autograd
TEST(ClusterAutograd, AsyncDistAutograd) {
  ProcessWorld world(kProcesses);
  world.start_all("autograd.many_threads");
  expect_all_end_well(world, seconds(120));
}

void expect_rank_0_ends_well(ProcessWorld& world) {
  ASSERT_TRUE(world.process(0).wait(world.executor(), seconds(30))) << "rank 0 still runs";
  EXPECT_EQ(world.process(0).exit_code(), 0) << world.process(0).output();
}

TEST(ClusterAutograd, EndsPassesAtOnceWhenAWorkerIsKilled) {
  std::mt19937 random(7);
  for (int round = 0; round < 6 && !HasFailure(); ++round) {
    const auto moment = std::to_string(random() % 60), victim = std::to_string(1 + round % 3);
    SCOPED_TRACE("worker" + victim + " after " + moment + " ms");
    ProcessWorld world(kProcesses);
    for (int rank = 0; rank < kProcesses; ++rank) {
      world.start(rank, "autograd.another_is_killed",
                  {{"TORCHSPAN_MOMENT", moment}, {"TORCHSPAN_VICTIM", victim}});
    }
    expect_rank_0_ends_well(world);
  }
}

TEST(ClusterAutograd, ForgetsPassesWhoseRootIsKilled) {
  std::mt19937 random(8);
  for (int round = 0; round < 4 && !HasFailure(); ++round) {
    const auto moment = std::to_string(random() % 60);
    SCOPED_TRACE("after " + moment + " ms");
    ProcessWorld world(kProcesses);
    for (int rank = 0; rank < kProcesses; ++rank) {
      world.start(rank, "autograd.root_is_killed", {{"TORCHSPAN_MOMENT", moment}});
    }
    expect_rank_0_ends_well(world);
  }
}

const testing::Scenarios kScenarios("autograd", {{"programs", programs},
                                                 {"many_passes", many_passes},
                                                 {"many_threads", many_threads},
                                                 {"another_is_killed", another_is_killed},
                                                 {"short_stalls", short_stalls},
                                                 {"root_is_killed", root_is_killed}});

}  // namespace
}  // namespace torchspan::autograd_test
