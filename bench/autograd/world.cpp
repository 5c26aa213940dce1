#include "bench/autograd/world.h"

#include <stdexcept>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <torchspan/autograd.h>
#include <torchspan/session.h>

namespace torchspan::bench {
namespace {

using autograd::BackwardOptions;
using autograd::Context;
using autograd::PassMode;

/// Limit of the other workers' calls in a world.
constexpr Duration kLongest = std::chrono::minutes(3);

struct Shard {
  at::Tensor weight = at::ones({4, 4}).requires_grad_();
  at::Tensor forward(const at::Tensor& x) { return weight + x; }
};

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
at::Tensor through(Worker& worker, const at::Tensor& x);
std::uint64_t bytes_sent(Worker& worker) {
  return worker.runtime().metrics.counter("rpc.bytes_sent").value();
}
std::vector<double> train(Worker& worker, const std::vector<RRef<Shard>>& shards, bool fast, double seconds);

constexpr Function<add> kAdd{"add", kInline};
constexpr Function<through> kThrough{"through"};
constexpr Function<bytes_sent> kBytesSent{"bytes_sent"};
constexpr Function<train> kTrain{"train"};
constexpr Class<Shard> kShard{"Shard"};
constexpr Function<&Shard::forward> kForward{"Shard.forward", kInline};

FunctionTable functions() {
  return FunctionTable().add(kAdd, kThrough, kBytesSent, kTrain, kShard, kForward);
}

at::Tensor through(Worker& worker, const at::Tensor& x) {
  const at::Tensor y = x * 2;
  const std::uint32_t next = worker.rank() + 1;
  return next < worker.world_size() ? worker.rpc_sync(next, kThrough, y) : y;
}

struct Mode {
  const char* name;
  PassMode mode;
};
constexpr Mode kModes[] = {{"/smart", PassMode::kSmart}, {"/fast", PassMode::kFast}};

at::Tensor small() { return at::ones({4, 4}); }

void expect_gradient(const Context& context, const at::Tensor& leaf, float value) {
  const at::Tensor gradient = context.gradient(leaf);
  if (!gradient.defined() || gradient.data_ptr<float>()[0] != value)
    throw std::runtime_error("a pass gave a wrong gradient");
}

/// A program with one leaf: its forward, and the value of each entry of the leaf's gradient.
struct Program {
  std::function<at::Tensor(const at::Tensor& leaf)> forward;
  float gradient = 1;
};

/// The worker that makes the context and runs backward.
class Root {
 public:
  Root(Worker& worker, Duration limit)
      : worker_(worker), executor_(worker.runtime().executor), limit_(limit) {}

  /// Measures forward and backward, including the context's construction and destruction.
  void steps(const std::string& figure, const Program& program, int most) {
    in_both_modes(figure, most, [this, program, leaf = small().requires_grad_()](PassMode mode) {
      return step(program, leaf, mode);
    });
  }
  /// Measures backward alone.
  void passes(const std::string& figure, const Program& program, int most) {
    in_both_modes(figure, most, [this, program, leaf = small().requires_grad_()](PassMode mode) {
      Context context(worker_);
      const at::Tensor loss = program.forward(leaf).sum();
      const TimePoint began = executor_.now();
      context.backward(loss, {.mode = mode});
      return micros(began, executor_.now());
    });
  }
  double step(const Program& program, const at::Tensor& leaf, PassMode mode) const {
    const TimePoint began = executor_.now();
    std::optional<Context> context(worker_);
    context->backward(program.forward(leaf).sum(), {.mode = mode});
    const double took = micros(began, executor_.now());
    expect_gradient(*context, leaf, program.gradient);
    const TimePoint ending = executor_.now();
    context.reset();
    return took + micros(ending, executor_.now());
  }
  /// Measures the bytes that both workers of a pair send in a pass over one call, with gradients of `bytes`
  /// in each direction.
  void wire(const std::string& figure, std::int64_t bytes) {
    for (const Mode& mode : kModes) {
      const at::Tensor leaf = at::ones({bytes / 4}).requires_grad_();
      Context context(worker_);
      const at::Tensor y = worker_.rpc_sync(1, kAdd, leaf, at::ones({bytes / 4}));
      const at::Tensor loss = (y * y).sum();
      const auto before = all_sent(), asked = all_sent();
      context.backward(loss, {.mode = mode.mode});
      executor_.sleep(std::chrono::milliseconds(10));  // the last acknowledgements
      const auto after = all_sent();
      expect_gradient(context, leaf, 4);
      samples_[figure + mode.name].push_back(static_cast<double>(after - asked - (asked - before)));
    }
  }
  Samples& samples() { return samples_; }
  Duration limit() const { return limit_; }
  Worker& worker() { return worker_; }

 private:
  void in_both_modes(const std::string& figure, int most, const std::function<double(PassMode)>& once) {
    std::vector<std::pair<std::string, Timed>> sides;
    for (const Mode& mode : kModes) {
      sides.emplace_back(figure + mode.name, [&once, mode] { return once(mode.mode); });
    }
    take_turns(executor_, samples_, sides, most, limit_);
  }
  std::uint64_t all_sent() const { return worker_.rpc_sync(1, kBytesSent) + bytes_sent(worker_); }

  Worker& worker_;
  Executor& executor_;
  const Duration limit_;
  Samples samples_;
};

void call_pair(Root& root) {
  auto round_trips = [&worker = root.worker(), other = small()](int count) -> Program {
    return {[&worker, other, count](const at::Tensor& leaf) {
      at::Tensor x = leaf;
      for (int i = 0; i < count; ++i) x = worker.rpc_sync(1, kAdd, x, other);
      return x;
    }};
  };
  root.steps("hop_1", round_trips(1), 2000);
  root.steps("hop_8", round_trips(8), 1000);
  root.passes("backward_1", round_trips(1), 2000);
  root.passes("backward_8", round_trips(8), 1000);
  root.wire("wire/64B", 64);
  root.wire("wire/64KiB", 64 << 10);
  root.wire("wire/16MiB", 16 << 20);
}

void call_chain(Root& root) {
  Worker& worker = root.worker();
  root.steps("chain_4", {[&](const at::Tensor& leaf) { return worker.rpc_sync(1, kThrough, leaf); }, 8},
             1000);
}

/// Runs steps for `seconds` after a warm-up; returns the microseconds of each.
std::vector<double> train(Worker& worker, const std::vector<RRef<Shard>>& shards, bool fast, double seconds) {
  Executor& executor = worker.runtime().executor;
  const Root root(worker, {});
  const at::Tensor x = small().requires_grad_();
  const Program program{[&](const at::Tensor& leaf) {
                          std::vector<Future<at::Tensor>> calls;
                          for (const auto& shard : shards) calls.push_back(shard.rpc_async(kForward, leaf));
                          at::Tensor sum = calls[0].wait();
                          for (std::size_t i = 1; i < calls.size(); ++i) sum = sum + calls[i].wait();
                          return sum;
                        },
                        static_cast<float>(kServers)};
  const auto duration = [](double amount) {
    return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(amount));
  };
  std::vector<double> steps;
  const Deadline warm = executor.deadline_in(duration(0.2 * seconds));
  const Deadline enough = executor.deadline_in(duration(1.2 * seconds));
  while (steps.empty() || !enough.passed(executor.now())) {
    const bool counts = warm.passed(executor.now());
    const double took = root.step(program, x, fast ? PassMode::kFast : PassMode::kSmart);
    if (counts) steps.push_back(took);
  }
  return steps;
}

/// Measures the duration of a step while all trainers run, and the elapsed time per step of any trainer.
void call_trainers(Root& root) {
  Worker& worker = root.worker();
  std::vector<RRef<Shard>> shards;
  for (int i = 0; i < kServers; ++i)
    shards.push_back(worker.remote(static_cast<std::uint32_t>(kTrainers + i), kShard));
  for (const auto& shard : shards) shard.creation().wait();
  const double seconds = std::chrono::duration<double>(root.limit()).count() / 2;
  std::map<std::string, double> per_second;
  for (const Mode& mode : {kModes[0], kModes[1], kModes[1], kModes[0]}) {
    const bool fast = mode.mode == PassMode::kFast;
    std::vector<Future<std::vector<double>>> others;
    for (std::uint32_t rank = 1; rank < kTrainers; ++rank)
      others.push_back(worker.rpc_async(rank, kTrain, shards, fast, seconds));
    std::vector<std::vector<double>> lists{train(worker, shards, fast, seconds)};
    for (auto& other : others) lists.push_back(other.wait());
    for (const auto& steps : lists) {
      double sum = 0;
      for (const double step : steps) sum += step;
      per_second[mode.name] += static_cast<double>(steps.size()) / sum / 2;
      auto& all = root.samples()[std::string("ps_4x3_step") + mode.name];
      all.insert(all.end(), steps.begin(), steps.end());
    }
  }
  for (const auto& [mode, speed] : per_second) root.samples()["ps_4x3" + mode].push_back(1 / speed);
}

}  // namespace

Samples take_part(const std::string& world, Duration limit) {
  at::set_num_threads(1);
  Session session(WorkerOptions::from_env(), functions());
  Root root(session.worker(), limit);
  if (session.rank() == 0) {
    if (world == "pair") call_pair(root);
    if (world == "chain") call_chain(root);
    if (world == "trainers") call_trainers(root);
  }
  session.shutdown(kLongest);
  return root.samples();
}

}  // namespace torchspan::bench
