// Pipelines with features combined at random, against the same training in one process by LibTorch.
#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include <torch/nn.h>
#include <torch/optim.h>

#include <torchspan/checkpoint.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/pipeline.h>

#include "sharded/memory_state.h"
#include "tests/combinations/choices.h"
#include "tests/combinations/processes.h"
#include "tests/combinations/training_model.h"
#include "tests/support/cluster_main.h"
#include "tests/support/in_process_group.h"
#include "tests/support/pipeline_world.h"

namespace torchspan::combinations::pipeline_test {
namespace {

using pipeline::ActivationCheckpoint;
using pipeline::Layers;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Schedule;
using sharded::testing::MemoryState;
using testing::InProcessWorld;
using testing::SimCluster;
using Tensors = std::vector<at::Tensor>;

enum class Fault : std::uint8_t { kNone, kForward, kBackward, kLoss };

/// How the layers and batches are on workers.
struct Phase {
  int workers = 1;  ///< of one pipeline and replica
  int ranges = 1;   ///< layer ranges of a worker
  int replicas = 1, tensor = 1, steps = 1, micro_batches = 1;
  Schedule schedule = Schedule::k1F1B;
  ActivationCheckpoint checkpoint = ActivationCheckpoint::kNever;
  int staleness = 0, in_flight = 0;
  bool some_layers = false;  ///< only every other layer recomputes
  bool no_sync = false, apart = false, infers = false, pipe_clips = false;
  int extra = 0;  ///< the stage with the layers that are left over

  int ranks() const { return workers * replicas * tensor; }
  int stages() const { return workers * ranges; }
  int worker_of(int stage) const {
    if (schedule != Schedule::kZBV && schedule != Schedule::kDualPipeV) return stage % workers;
    return stage < workers ? stage : 2 * workers - 1 - stage;
  }
  int rank_of(int replica, int worker, int part) const {
    return (replica * workers + worker) * tensor + part;
  }
  bool interleaved() const { return ranges > 1; }
};

struct Case {
  explicit Case(Choices& choices);
  const char* excluded() const;
  int layers() const { return static_cast<int>(blocks.size()) + 1; }
  int rows(int replica, int step, int pass) const { return 2 + (3 * step + 5 * replica + pass) % 6; }
  double rate(int group, int step) const {
    return (group == 0 ? 0.05 : 0.02) * (schedule ? 1.0 / (1 + step) : 1);
  }
  double norm_type() const { return clip == 2 ? 1 : clip == 3 ? std::numeric_limits<double>::infinity() : 2; }

  std::vector<Phase> phases;
  std::vector<Block> blocks;  ///< distinct ones
  std::vector<int> tied;      ///< whether the block's up.weight is the first block's
  bool reuses = false;        ///< the first block once more at the end
  int rule = 0, passes = 1, clip = 0;
  bool groups = false, scaler = false, schedule = false, mean = false;
  int overflow_step = -1, overflow_replica = 0;
  Fault fault = Fault::kNone;
  int fault_step = 0, fault_layer = 0, fault_replica = 0;
  std::uint64_t seed = 1;
};

/// Combinations that are known to fail or that programs cannot have. Delete a line to try them.
constexpr Exclusion<Phase> kExcludedPhases[] = {
    {"layers that communicate need an order that does not depend on when messages arrive (docs/pipeline.md)",
     [](const Phase& one) {
       return one.tensor > 1 && one.workers * one.replicas > 1 &&
              (one.staleness == 1 || one.schedule == Schedule::kArrival);
     }},
    {"steps that overlap are not in the order of arrival",
     [](const Phase& one) { return one.staleness == 1 && one.schedule == Schedule::kArrival; }},
};

Phase phase_of(Choices& choices, const std::string& at) {
  const auto name = [&](const char* what) { return at + what; };
  constexpr Schedule kPlain[] = {Schedule::k1F1B, Schedule::kGPipe, Schedule::kArrival, Schedule::kZBH1,
                                 Schedule::kZBH2};
  constexpr Schedule kSeveral[] = {Schedule::kInterleaved, Schedule::kZB1P,  Schedule::kZBV,
                                   Schedule::kDualPipeV,   Schedule::kGPipe, Schedule::k1F1B};
  constexpr ActivationCheckpoint kCheckpoints[] = {
      ActivationCheckpoint::kNever, ActivationCheckpoint::kExceptLast, ActivationCheckpoint::kAlways};
  Phase phase;
  phase.tensor = 1 + choices.pick(name("tensor"), 2, 35);
  phase.workers = 1 + choices.pick(name("workers"), phase.tensor == 1 ? 4 : 2, 90);
  phase.replicas = 1 + choices.pick(name("replicas"), 4 / (phase.tensor * phase.workers), 50);
  phase.ranges = 1 + choices.pick(name("ranges"), 2, 45);
  phase.schedule = phase.ranges == 1 ? kPlain[choices.pick(name("schedule"), 5, 70)]
                                     : kSeveral[choices.pick(name("order"), 6, 80)];
  phase.steps = 1 + choices.pick(name("steps"), 3, 80);
  phase.micro_batches = 1 + choices.pick(name("micro_batches"), 6, 85);
  phase.checkpoint = kCheckpoints[choices.pick(name("checkpoint"), 3, 60)];
  phase.some_layers =
      phase.checkpoint != ActivationCheckpoint::kNever && choices.chance(name("some_layers"), 30);
  phase.staleness = choices.pick(name("staleness"), 2, 20);
  if (phase.schedule == Schedule::k1F1B || phase.schedule == Schedule::kArrival)
    phase.in_flight = choices.pick(name("in_flight"), 4, 20);
  phase.no_sync = phase.staleness == 0 && choices.chance(name("no_sync"));
  phase.apart = phase.staleness == 0 && phase.replicas == 1 && choices.chance(name("apart"), 15);
  phase.infers = phase.staleness == 0 && choices.chance(name("infers"), 25);
  phase.pipe_clips = choices.chance(name("pipe_clips"), 50);
  phase.extra = choices.pick(name("extra"), phase.stages(), 60);
  return phase;
}

Case::Case(Choices& choices) {
  phases.push_back(phase_of(choices, ""));
  if (choices.chance("restores", 50)) phases.push_back(phase_of(choices, "then."));
  int stages = 2;
  for (const Phase& phase : phases) stages = std::max(stages, phase.stages());
  const int count = stages - 1 + choices.pick("more_blocks", 3);
  for (int i = 0; i < count; ++i) {
    Block block;
    block.frozen_bias = choices.chance(fmt::format("block{}.frozen_bias", i), 15);
    block.frozen = choices.chance(fmt::format("block{}.frozen", i), 10);
    tied.push_back(i > 0 && choices.chance(fmt::format("block{}.tied", i), 20) ? 1 : 0);
    blocks.push_back(block);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {  // tied tensors are trained alike
    if (tied[i] != 0) blocks[i].frozen = blocks[0].frozen;
  }
  const auto every = [&](bool (*condition)(const Phase&)) {
    return std::all_of(phases.begin(), phases.end(), condition);
  };
  const bool on_time = every([](const Phase& one) { return one.staleness == 0; });
  const bool takes_any_plan = every([](const Phase& one) {
    return one.schedule == Schedule::k1F1B || one.schedule == Schedule::kGPipe ||
           one.schedule == Schedule::kArrival;
  });
  reuses = takes_any_plan && choices.chance("reuses", 30);
  rule = choices.pick("rule", 3, 70);
  passes = 1 + choices.pick("passes", 3, 35);
  mean = on_time && passes > 1 && choices.chance("mean");
  clip = choices.pick("clip", 4, 50);
  groups = choices.chance("groups");
  schedule = choices.chance("schedule_rates");
  scaler = on_time && every([](const Phase& one) { return !one.apart; }) && choices.chance("scaler");
  int steps = 0;
  for (const Phase& phase : phases) steps += phase.steps;
  if (scaler && choices.chance("overflow")) {
    overflow_step = choices.pick("overflow.step", steps, 80);
    overflow_replica = choices.pick("overflow.replica", phases[0].replicas, 80);
  }
  if (on_time && every([](const Phase& one) { return one.tensor == 1 && !one.apart; })) {
    fault = static_cast<Fault>(choices.pick("fault", 4, 30));
    fault_step = choices.pick("fault.step", phases[0].steps, 80);
    fault_layer = choices.pick("fault.layer", count, 80);
    fault_replica = choices.pick("fault.replica", phases[0].replicas, 80);
    const auto last = blocks.begin() + fault_layer + 1;
    const bool trains = std::any_of(blocks.begin(), last, [](const Block& block) { return !block.frozen; });
    if (fault == Fault::kBackward && !trains) fault = Fault::kForward;  // there is no backward
  }
  seed = 1 + static_cast<std::uint64_t>(choices.pick("seed", 1000, 100));
}

const char* Case::excluded() const {
  for (const Phase& phase : phases) {
    for (const auto& one : kExcludedPhases) {
      if (one.applies(phase)) return one.reason;
    }
  }
  return nullptr;
}

/// What fails on this worker, by layer.
struct Failing {
  int layer = -1;
  Fault kind = Fault::kNone;
};
using FailingPtr = std::shared_ptr<Failing>;

template <class Mlp>
struct FragileImpl : Mlp {
  template <class... Arguments>
  FragileImpl(int layer, FailingPtr failing, Arguments... arguments)
      : Mlp(arguments...), layer(layer), failing(std::move(failing)) {}
  at::Tensor forward(const at::Tensor& x) {
    const bool fails = failing->layer == layer;
    if (fails && failing->kind == Fault::kForward) throw std::runtime_error("the layer failed");
    at::Tensor y = Mlp::forward(x);
    if (fails && failing->kind == Fault::kBackward && y.requires_grad()) {
      y.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the gradient failed"); });
    }
    return y;
  }
  int layer;
  FailingPtr failing;
};
struct OutImpl : nn::Module {
  OutImpl() : out(register_module("out", filled(6, 1, 30))) {}
  at::Tensor forward(const at::Tensor& x) { return out(x); }
  nn::Linear out;
};

template <class Impl, class... Arguments>
void add_blocks(const Case& one, Layers& layers, const FailingPtr& failing, Arguments... group) {
  std::vector<pipeline::Use<FragileImpl<Impl>>> uses;
  for (std::size_t i = 0; i < one.blocks.size(); ++i) {
    uses.push_back(layers.add<FragileImpl<Impl>>(static_cast<int>(i), failing, 10.0 * static_cast<double>(i),
                                                 one.blocks[i], group...));
    uses.back().named(fmt::format("block{}", i));
  }
  std::vector<pipeline::TiedParameter> tied;
  for (std::size_t i = 0; i < one.blocks.size(); ++i) {
    if (one.tied[i] != 0) tied.emplace_back(uses[i], "up.weight");
  }
  if (!tied.empty()) {
    tied.insert(tied.begin(), pipeline::TiedParameter(uses[0], "up.weight"));
    layers.tie(tied);
  }
  if (one.reuses) layers.reuse(uses[0]);
  layers.add<OutImpl>();
}

at::Tensor input_of(const Case& one, int replica, int step, int pass) {
  return numbers({one.rows(replica, step, pass), 6}, 0.7 * replica + 1.3 * step + 0.2 * pass);
}
at::Tensor target_of(const Case& one, int replica, int step, int pass) {
  return numbers({one.rows(replica, step, pass), 1}, 5 + 0.5 * replica + 0.3 * step + 0.1 * pass);
}
at::Tensor plain_loss(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).log1p().mean();
}

struct Expected {
  std::map<std::vector<int>, double> losses, norms;  ///< by (step, pass), by (step)
  std::map<std::vector<int>, at::Tensor> outputs;    ///< of infer(), by (step, replica)
  std::map<std::string, at::Tensor> model;
  double scale = 0;
};

class Oracle {
 public:
  explicit Oracle(const Case& one) : one_(one) {
    for (std::size_t i = 0; i < one.blocks.size(); ++i) {
      blocks_.emplace_back(10.0 * static_cast<double>(i), one.blocks[i]);
      if (one.tied[i] != 0) blocks_[i]->up->weight = blocks_[0]->up->weight;
      for (const auto& item : blocks_[i]->named_parameters()) {
        if (one.tied[i] != 0 && item.key() == "up.weight") continue;
        add(fmt::format("layers.{}.{}", i, item.key()), item.value());
      }
    }
    for (const auto& item : out_.named_parameters())
      add(fmt::format("layers.{}.{}", one.blocks.size(), item.key()), item.value());
    std::vector<Tensors> groups(one.groups ? 2 : 1);
    for (std::size_t p = 0; p < names_.size(); ++p)
      groups[one.groups && names_[p].find("weight") == std::string::npos ? 1 : 0].push_back(parameters_[p]);
    std::vector<torch::optim::OptimizerParamGroup> all;
    for (std::size_t i = 0; i < groups.size(); ++i)
      all.emplace_back(groups[i], options_of(one.rate(static_cast<int>(i), 0)));
    if (one.rule == 2)
      optimizer_ = std::make_unique<torch::optim::Adam>(all, torch::optim::AdamOptions(0.1));
    else
      optimizer_ = std::make_unique<torch::optim::SGD>(all, torch::optim::SGDOptions(0.1));
  }

  Expected run(const Phase& phase) {
    Expected expected;
    pending_.clear();
    for (int step = 0; step < phase.steps; ++step) train(phase, step, expected);
    if (phase.staleness == 1) end_last(phase, expected);
    first_ += phase.steps;
    for (std::size_t p = 0; p < names_.size(); ++p)
      expected.model[names_[p]] = parameters_[p].detach().clone();
    for (std::size_t i = 0; i < one_.blocks.size(); ++i) {
      if (one_.tied[i] != 0)
        expected.model[fmt::format("layers.{}.up.weight", i)] = parameters_[0].detach().clone();
    }
    expected.scale = scale_;
    return expected;
  }

 private:
  struct Pass {
    double loss;
    Tensors gradients;
  };
  void add(std::string name, const at::Tensor& parameter) {
    names_.push_back(std::move(name));
    parameters_.push_back(parameter);
  }
  std::unique_ptr<torch::optim::OptimizerOptions> options_of(double lr) const {
    if (one_.rule == 2) return std::make_unique<torch::optim::AdamOptions>(lr);
    return std::make_unique<torch::optim::SGDOptions>(
        torch::optim::SGDOptions(lr).momentum(one_.rule == 1 ? 0.9 : 0));
  }
  at::Tensor forward(at::Tensor x) {
    for (WholeMlp& block : blocks_) x = block(x);
    if (one_.reuses) x = blocks_[0](x);
    return out_.forward(x);
  }

  /// The batch of all replicas, with the parameters of now.
  Pass compute(const Phase& phase, int step, int pass) {
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
    Tensors inputs, targets;
    for (int replica = 0; replica < phase.replicas; ++replica) {
      inputs.push_back(input_of(one_, replica, first_ + step, pass));
      targets.push_back(target_of(one_, replica, first_ + step, pass));
    }
    at::Tensor loss = plain_loss(forward(at::cat(inputs)), at::cat(targets));
    if (one_.scaler) loss = loss * scale_;
    if (first_ + step == one_.overflow_step && pass + 1 == one_.passes)
      loss = loss * std::numeric_limits<double>::infinity();
    if (loss.requires_grad()) (loss * (one_.mean ? 1.0 / one_.passes : 1)).backward();
    Pass done{loss.item<double>(), {}};
    for (const at::Tensor& parameter : parameters_) done.gradients.push_back(parameter.grad());
    return done;
  }

  void train(const Phase& phase, int step, Expected& expected) {
    const bool fault = one_.fault != Fault::kNone && first_ == 0 && step == one_.fault_step;
    Tensors sums(parameters_.size());
    for (int pass = 0; pass < one_.passes; ++pass) {
      if (fault && pass + 1 == one_.passes) break;
      Pass now = compute(phase, step, pass);
      if (phase.staleness == 1) {
        pending_.push_back(std::move(now));
        if (pending_.size() == 1) {
          expected.losses[{step, pass}] = std::nan("");
          continue;
        }
        now = pending_.front();
        pending_.erase(pending_.begin());
      }
      expected.losses[{step, pass}] = now.loss;
      accumulate(sums, now);
    }
    if (!fault) update(phase, step, sums, expected);
    if (phase.infers) {
      const at::NoGradGuard no_grad;
      for (int replica = 0; replica < phase.replicas; ++replica)
        expected.outputs[{step, replica}] = forward(input_of(one_, replica, first_ + step, 7));
    }
  }
  void end_last(const Phase& phase, Expected& expected) {
    expected.losses[{phase.steps, 0}] = pending_.front().loss;
    Tensors sums(parameters_.size());
    accumulate(sums, pending_.front());
    pending_.clear();
    update(phase, phase.steps, sums, expected);
  }
  static void accumulate(Tensors& sums, const Pass& pass) {
    for (std::size_t p = 0; p < sums.size(); ++p) {
      if (pass.gradients[p].defined())
        sums[p] = sums[p].defined() ? sums[p] + pass.gradients[p] : pass.gradients[p];
    }
  }

  void update(const Phase&, int step, const Tensors& sums, Expected& expected) {
    for (std::size_t i = 0; i < optimizer_->param_groups().size(); ++i) {
      auto& options = optimizer_->param_groups()[i].options();
      const double rate = one_.rate(static_cast<int>(i), first_ + step);
      if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) sgd->lr(rate);
      if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) adam->lr(rate);
    }
    bool finite = true, any = false;
    for (std::size_t p = 0; p < sums.size(); ++p) {
      parameters_[p].mutable_grad() = sums[p].defined() && one_.scaler ? sums[p] / scale_ : sums[p];
      any = any || sums[p].defined();
      finite = finite && (!sums[p].defined() || sums[p].isfinite().all().item<bool>());
    }
    if (one_.clip != 0)
      expected.norms[{step}] = any ? nn::utils::clip_grad_norm_(parameters_, kMaxNorm, one_.norm_type()) : 0;
    if (finite) optimizer_->step();
    if (!one_.scaler) return;
    if (!finite) {
      scale_ *= 0.5;
      tracker_ = 0;
    } else if (++tracker_ == kGrowthInterval) {
      scale_ *= 2;
      tracker_ = 0;
    }
  }

  const Case& one_;
  std::vector<WholeMlp> blocks_;
  OutImpl out_;
  std::vector<std::string> names_;
  Tensors parameters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Pass> pending_;  ///< with staleness
  double scale_ = kInitialScale;
  int tracker_ = 0, first_ = 0;
};

struct Saved {
  explicit Saved(int ranks)
      : model(static_cast<std::size_t>(ranks)), optimizer(model.size()), scaler(model.size()) {}
  std::vector<checkpoint::StateWriter> model, optimizer, scaler;
};

PipelineOptions options_of(const Case& one, const Phase& phase, int part) {
  PipelineOptions options;
  options.balance.assign(static_cast<std::size_t>(phase.stages()), 1);
  options.balance[static_cast<std::size_t>(phase.extra)] += one.layers() - phase.stages();
  for (int replica = 0; replica < phase.replicas; ++replica) {
    for (int stage = 0; stage < phase.stages(); ++stage)
      options.workers.push_back(
          fmt::format("worker{}", phase.rank_of(replica, phase.worker_of(stage), part)));
  }
  options.replicas = phase.replicas;
  options.micro_batches = phase.micro_batches;
  options.schedule = phase.schedule;
  options.checkpoint = phase.checkpoint;
  if (phase.some_layers) {
    for (int layer = 0; layer < one.layers(); layer += 2) options.checkpoint_layers.push_back(layer);
  }
  options.staleness = phase.staleness;
  options.max_in_flight = phase.in_flight;
  options.seed = 5;
  options.name = fmt::format("part {}", part);
  return options;
}

Layers layers_of(const Case& one, const std::optional<collective::Group>& parts, const FailingPtr& failing) {
  Layers layers;
  if (parts)
    add_blocks<ParallelMlpImpl>(one, layers, failing, *parts);
  else
    add_blocks<WholeMlpImpl>(one, layers, failing);
  return layers;
}

/// The program of one worker.
class Trainer {
 public:
  Trainer(const Case& one, std::size_t phase, Worker& worker, const std::optional<collective::Group>& parts,
          int first)
      : one_(one),
        phase_(one.phases[phase]),
        rank_(worker.rank()),
        first_(first),
        pipe_(worker, layers_of(one, parts, failing_),
              options_of(one, phase_, worker.rank() % phase_.tensor)) {
    const auto names = checkpoint::parameter_names(pipe_);
    const Tensors all = pipe_.parameters();
    std::vector<Tensors> tensors(one.groups ? 2 : 1);
    std::vector<std::vector<std::string>> groups(tensors.size());
    for (std::size_t p = 0; p < all.size(); ++p) {
      const std::size_t group = one.groups && names[p].find("weight") == std::string::npos ? 1 : 0;
      tensors[group].push_back(all[p]);
      groups[group].push_back(names[p]);
    }
    std::vector<optim::ParamGroup> made;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const double lr = first > 0 ? 7 : one.rate(static_cast<int>(i), 0);
      made.emplace_back(tensors[i],
                        one.rule == 2 ? optim::OptimizerSpec(optim::Adam{.lr = lr})
                                      : optim::SGD{.lr = lr, .momentum = one.rule == 1 ? 0.9 : 0},
                        groups[i]);
    }
    optimizer_.emplace(std::move(made));
    if (one.scaler)
      scaler_.emplace(
          optim::GradScalerOptions{.init_scale = kInitialScale, .growth_interval = kGrowthInterval});
  }

  void load(const MemoryState& model, const MemoryState& optimizer, const MemoryState& scaler) {
    checkpoint::source_of(pipe_)->load(model);
    checkpoint::source_of(*optimizer_)->load(optimizer);
    if (scaler_) checkpoint::source_of(*scaler_)->load(scaler);
  }
  void save(Saved& saved) {
    const auto rank = static_cast<std::size_t>(rank_);
    checkpoint::source_of(pipe_)->save(saved.model[rank]);
    checkpoint::source_of(*optimizer_)->save(saved.optimizer[rank]);
    if (scaler_) checkpoint::source_of(*scaler_)->save(saved.scaler[rank]);
  }

  void add_to(CheckpointManager& manager) {
    manager.add("model", pipe_);
    manager.add("optimizer", *optimizer_);
    if (scaler_) manager.add("scaler", *scaler_);
  }

  void run(const Expected& expected) {
    for (int step = 0; step < phase_.steps; ++step) train(step, expected);
    if (phase_.staleness == 1) {
      const double wanted = expected.losses.at({phase_.steps, 0});
      EXPECT_NEAR(pipe_.finish(), wanted, 1e-9) << "the last loss";
      update(phase_.steps, expected);
      optimizer_->zero_grad();
    }
    if (scaler_) EXPECT_EQ(scaler_->get_scale(), expected.scale);
    for (int layer = 0; layer < one_.layers() && phase_.tensor == 1;
         ++layer) {  // also copies that are not saved
      const auto module = pipe_.module(layer);
      if (!module) continue;
      for (const auto& item : module->named_parameters()) {
        const std::string name = fmt::format("layers.{}.{}", layer, item.key());
        EXPECT_TRUE(at::allclose(item.value(), expected.model.at(name), 1e-9, 1e-11))
            << name << " on rank " << rank_;
      }
    }
  }

 private:
  void train(int step, const Expected& expected) {
    const bool fault = one_.fault != Fault::kNone && first_ == 0 && step == one_.fault_step;
    bool failed = false;
    for (int pass = 0; pass < one_.passes && !failed; ++pass) {
      const bool fails = fault && pass + 1 == one_.passes;
      if (fails && pipe_.replica() == one_.fault_replica) *failing_ = {one_.fault_layer, one_.fault};
      try {
        compute(step, pass, expected, fails);
      } catch (const std::exception& error) {
        failed = true;
        if (!fails) throw;
      }
      *failing_ = {};
      EXPECT_EQ(failed, fails) << "step " << step;
    }
    if (!failed) update(step, expected);
    optimizer_->zero_grad();
    if (!phase_.infers) return;
    const pipeline::Batch output = pipe_.infer(input_of(one_, pipe_.replica(), first_ + step, 7));
    if (output.size() == 0) return;
    const at::Tensor wanted = expected.outputs.at({step, pipe_.replica()});
    EXPECT_TRUE(at::allclose(pipeline::BatchOf<at::Tensor>::to(output), wanted, 1e-9, 1e-11))
        << "output of step " << step;
  }

  void compute(int step, int pass, const Expected& expected, bool fails) {
    const at::Tensor x = input_of(one_, pipe_.replica(), first_ + step, pass),
                     y = target_of(one_, pipe_.replica(), first_ + step, pass);
    const double scale = scaler_ ? scaler_->get_scale() : 1;
    const double factor = first_ + step == one_.overflow_step && pass + 1 == one_.passes
                              ? std::numeric_limits<double>::infinity()
                              : 1;
    const auto loss = [failing = failing_, scale, factor](const at::Tensor& output,
                                                          const at::Tensor& target) {
      if (failing->kind == Fault::kLoss) throw std::runtime_error("no such label");
      return plain_loss(output, target) * scale * factor;
    };
    const double gradient_scale = one_.mean ? 1.0 / one_.passes : 1;
    double got = 0;
    if (phase_.apart) {
      const pipeline::Batch output = pipe_.forward(x);
      if (output.size() != 0) {
        const at::Tensor value = loss(pipeline::BatchOf<at::Tensor>::to(output), y);
        got = value.item<double>();
        (value * gradient_scale).backward();
      }
      pipe_.backward();
      if (output.size() == 0) return;
    } else {
      got = pipe_.train_step(
          x, y, loss,
          {.gradient_scale = gradient_scale, .no_sync = phase_.no_sync && pass + 1 < one_.passes});
    }
    if (fails) return;
    const double wanted = expected.losses.at({step, pass});
    if (std::isfinite(wanted))
      EXPECT_NEAR(got, wanted, 1e-9) << "loss of step " << step << ", pass " << pass << ", rank " << rank_;
    else
      EXPECT_FALSE(std::isfinite(got)) << "step " << step;
  }

  void update(int step, const Expected& expected) {
    for (std::size_t i = 0; i < optimizer_->group_count(); ++i)
      optimizer_->set_lr(i, one_.rate(static_cast<int>(i), first_ + step));
    if (scaler_) scaler_->unscale_(*optimizer_);
    if (one_.clip != 0) {
      const double norm = phase_.pipe_clips ? pipe_.clip_grad_norm(kMaxNorm, one_.norm_type())
                                            : optimizer_->clip_grad_norm(kMaxNorm, one_.norm_type());
      const double wanted = expected.norms.at({step});
      if (std::isfinite(wanted))
        EXPECT_NEAR(norm, wanted, 1e-9) << "norm of step " << step << ", rank " << rank_;
      else
        EXPECT_FALSE(std::isfinite(norm)) << "step " << step;
    }
    if (scaler_)
      scaler_->step(*optimizer_);
    else
      optimizer_->step();
    if (scaler_) scaler_->update();
  }

  const Case& one_;
  const Phase& phase_;
  const int rank_, first_;
  const FailingPtr failing_ = std::make_shared<Failing>();
  Pipeline pipe_;
  std::optional<optim::Optimizer> optimizer_;
  std::optional<optim::GradScaler> scaler_;
};

void expect_model(const Case& one, const MemoryState& state, const Expected& expected) {
  for (const auto& [name, wanted] : expected.model) {
    const auto found = state.tensors().find(name);
    if (found == state.tensors().end()) {  // tied tensors are saved once
      const bool is_copy =
          name.ends_with("up.weight") && one.tied[static_cast<std::size_t>(name[7] - '0')] != 0;
      EXPECT_TRUE(is_copy) << name << " is not saved";
      continue;
    }
    EXPECT_TRUE(at::allclose(found->second, wanted, 1e-9, 1e-11)) << name << "\n" << found->second << wanted;
  }
}

bool check(Choices& choices) {
  const Case one(choices);
  if (one.excluded() != nullptr) return false;
  Oracle oracle(one);
  std::unique_ptr<MemoryState> model, optimizer, scaler;
  int first = 0;
  for (std::size_t i = 0; i < one.phases.size(); ++i) {
    const Phase& phase = one.phases[i];
    const Expected expected = oracle.run(phase);
    Saved saved(phase.ranks());
    SimCluster cluster(testing::pipeline_cluster(phase.ranks(), one.seed));
    std::unique_ptr<InProcessWorld> groups;
    cluster.run([&](Worker& worker) {
      worker.runtime().log.set_level(LogLevel::kOff);
      if (worker.rank() == 0)
        groups =
            std::make_unique<InProcessWorld>(cluster.executor(), phase.ranks(),
                                             testing::InProcessOptions{.timeout = std::chrono::seconds(30)});
      worker.barrier();
      try {
        std::optional<collective::Group> parts;
        if (phase.tensor > 1) {
          collective::Group all = groups->group(worker.rank(), worker.runtime());
          parts = all.split(worker.rank() / phase.tensor, worker.rank());
        }
        Trainer trainer(one, i, worker, parts, first);
        if (model) trainer.load(*model, *optimizer, *scaler);
        trainer.run(expected);
        trainer.save(saved);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << worker.rank() << " threw: " << error.what();
        groups->kill(worker.rank());
      }
      worker.barrier();
      if (worker.rank() == 0) groups.reset();
    });
    model = std::make_unique<MemoryState>(saved.model);
    optimizer = std::make_unique<MemoryState>(saved.optimizer);
    scaler = std::make_unique<MemoryState>(saved.scaler);
    expect_model(one, *model, expected);
    first += phase.steps;
  }
  return true;
}

TEST(PipelineTrainings, AreThoseOfOneProcess) { run_cases(60, check); }

bool check_in_process(Session& session, Choices& choices, const std::string& folder) {
  const Case one(choices);
  const bool too_large = std::any_of(one.phases.begin(), one.phases.end(),
                                     [](const Phase& phase) { return phase.ranks() > kProcesses; });
  if (one.excluded() != nullptr || too_large) return false;
  Oracle oracle(one);
  int first = 0;
  for (std::size_t i = 0; i < one.phases.size(); ++i) {
    const Phase& phase = one.phases[i];
    const Expected expected = oracle.run(phase);
    {
      const TrainingRanks self(session, phase.ranks());
      std::optional<collective::Group> parts;
      if (self.trains && phase.tensor > 1)
        parts = self.group.split(session.rank() / phase.tensor, session.rank());
      if (self.trains) {
        Trainer trainer(one, i, session.worker(), parts, first);
        CheckpointManager manager(session, {.directory = folder, .participants = self.names});
        trainer.add_to(manager);
        if (i > 0) EXPECT_EQ(manager.restore(), first);
        trainer.run(expected);
        manager.save(first + phase.steps);
        manager.wait();
      }
    }
    session.group().barrier();
    first += phase.steps;
  }
  return true;
}

TEST(PipelineProcesses, ComputeWhatOneProcessDoes) { run_in_processes("pipeline_combinations.train"); }

const testing::Scenarios kScenarios("pipeline_combinations",
                                    {{"train", [] { train_in_this_process(check_in_process); }}});

// Each copy's optimizer entries were saved under the name of the first; a worker with two of them found none for the second.
TEST(PipelineTrainings, ContinueWhereCopiesOfATiedParameterComeToOneWorker) {
  for (const char* where : {"workers=2", "extra=1 more_blocks=1 tensor=1 workers=1 then.tensor=1"}) {
    Choices choices(std::string("block1.tied=1 restores=1 rule=2 steps=2 ") + where);
    EXPECT_TRUE(check(choices)) << where;
  }
}

}  // namespace
}  // namespace torchspan::combinations::pipeline_test
