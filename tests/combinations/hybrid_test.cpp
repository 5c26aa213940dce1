// Trainers that share tables and a tower on other workers and average their own part, with features combined at random,
// against the same training in one process by LibTorch.
#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include <torch/nn.h>
#include <torch/optim.h>

#include <torchspan/checkpoint.h>
#include <torchspan/data_parallel.h>
#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/optim.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/sharded.h>

#include "sharded/memory_state.h"
#include "tests/combinations/choices.h"
#include "tests/combinations/processes.h"
#include "tests/combinations/training_model.h"
#include "tests/parity/rpc_world.h"
#include "tests/support/cluster_main.h"
#include "tests/support/in_process_group.h"

namespace torchspan::combinations::hybrid_test {
namespace {

using sharded::testing::MemoryState;
using testing::InProcessWorld;
using testing::SimCluster;
using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kRows = 7, kWidth = 4;

enum class Dense : std::uint8_t { kLocalTarget, kZero, kOwnOptimizer };
/// Where a trainer throws, in one pass of a step. All trainers then skip the step.
enum class Fault : std::uint8_t {
  kNone,
  kBeforeLookUp,
  kInLookUp,  ///< on the table's worker
  kBeforeHead,
  kInHead,
  kBeforeBackward,
  kBehindHead,   ///< in backward, before gradients leave for the table
  kBeforeModule  ///< in backward, before the head's gradients
};

struct Case {
  explicit Case(Choices& choices);
  const char* excluded() const;
  int workers() const { return trainers + servers; }
  at::Tensor rows(int trainer, int step, int pass) const {
    return (at::arange(5, at::kLong) * (trainer + 1) + step + 2 * pass).remainder(kRows - 2);  // some twice
  }
  bool drops(int trainer, int step, int pass) const { return drop && (trainer + step + pass) % 3 == 0; }
  bool skips(int trainer, int step, int pass) const { return skip && (trainer + 2 * step + pass) % 3 == 0; }
  bool faulty(int step) const { return fault != Fault::kNone && step == fault_step; }
  /// What the trainer does wrong in that pass.
  Fault fault_of(int trainer, int step, int pass) const {
    return faulty(step) && trainer == fault_trainer && pass == fault_pass ? fault : Fault::kNone;
  }
  double rate(int step) const { return 0.05 * (schedule ? 1.0 / (1 + step) : 1); }

  int trainers = 1, servers = 1, steps = 1, phases = 1;
  bool moves = false;  ///< tables are on other workers after the restore
  Dense dense = Dense::kLocalTarget;
  bool zero_after = false;  ///< Dense::kOwnOptimizer and kZero change places at the restore
  int rule = 0;             ///< 0: SGD, 1: with momentum, 2: Adagrad, 3: Adam
  bool sparse = false, tower = false, shared = false, fast = false, hogwild = false, groups = false;
  int passes = 1, threads = 1;
  bool reduce_each = false, one_pass = false;  ///< several losses in one pass
  bool drop = false, skip = false;
  int clip = 0;
  bool scaler = false, schedule = false;
  int overflow_step = -1, overflow_trainer = 0;
  Fault fault = Fault::kNone;
  int fault_step = 0, fault_pass = 0, fault_trainer = 0;
  std::uint64_t seed = 1;
};

/// Combinations that are known to fail or that programs cannot have. Delete a line to try them.
constexpr Exclusion<Case> kExcluded[] = {
    {"in FAST mode, every tensor that was sent must contribute",
     [](const Case& one) { return one.fast && one.drop; }},
    {"ZeRO refuses a second reduction before the step",
     [](const Case& one) {
       return one.reduce_each && (one.dense == Dense::kZero || (one.phases == 2 && one.zero_after));
     }},
};

Case::Case(Choices& choices) {
  trainers = 1 + choices.pick("trainers", 3, 90);
  servers = 1 + (trainers < 3 ? choices.pick("servers", 2) : 0);
  steps = 1 + choices.pick("steps", 3, 80);
  phases = 1 + choices.pick("restores", 2, 50);
  moves = phases == 2 && choices.chance("moves");
  dense = static_cast<Dense>(choices.pick("dense", 3, 60));
  zero_after = phases == 2 && dense != Dense::kLocalTarget && choices.chance("changes_zero");
  rule = choices.pick("rule", 4, 75);
  sparse = (rule == 0 || rule == 2) && choices.chance("sparse");
  tower = choices.chance("tower", 50);
  shared = choices.chance("shared", 60);
  fast = choices.chance("fast", 30);
  hogwild = choices.chance("hogwild", 20);
  groups = choices.chance("groups", 30);
  threads = 1 + choices.pick("threads", 2, 20);
  passes = 1 + choices.pick("passes", 3);
  one_pass = passes > 1 && choices.chance("one_pass", 30);
  reduce_each = passes > 1 && !one_pass && choices.chance("reduce_each", 30);
  drop = choices.chance("drop", 20);
  skip = choices.chance("skip", 20);
  clip = choices.pick("clip", 4);
  scaler = dense == Dense::kLocalTarget && choices.chance("scaler");
  schedule = choices.chance("schedule");
  if (scaler && choices.chance("overflow")) {
    overflow_step = choices.pick("overflow.step", steps * phases, 80);
    overflow_trainer = choices.pick("overflow.trainer", trainers, 80);
  }
  fault = static_cast<Fault>(choices.pick("fault", 8, 30));
  if (fault != Fault::kNone) {
    fault_step = choices.pick("fault.step", steps * phases, 70);
    fault_pass = choices.pick("fault.pass", passes, 60);
    fault_trainer = choices.pick("fault.trainer", trainers, 70);
  }
  seed = 1 + static_cast<std::uint64_t>(choices.pick("order", 1000, 100));
}

const char* Case::excluded() const {
  for (const auto& one : kExcluded) {
    if (one.applies(*this)) return one.reason;
  }
  return nullptr;
}

optim::OptimizerSpec spec_of(const Case& one, double lr) {
  if (one.rule == 2) return optim::Adagrad{.lr = lr};
  if (one.rule == 3) return optim::Adam{.lr = lr};
  return optim::SGD{.lr = lr, .momentum = one.rule == 1 ? 0.9 : 0};
}
std::unique_ptr<torch::optim::Optimizer> torch_optimizer(const Case& one, Tensors parameters) {
  const double lr = one.rate(0);
  if (one.rule == 2)
    return std::make_unique<torch::optim::Adagrad>(std::move(parameters), torch::optim::AdagradOptions(lr));
  if (one.rule == 3)
    return std::make_unique<torch::optim::Adam>(std::move(parameters), torch::optim::AdamOptions(lr));
  return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                             torch::optim::SGDOptions(lr).momentum(one.rule == 1 ? 0.9 : 0));
}
void set_rate(torch::optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) {
    auto& options = group.options();
    if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) sgd->lr(rate);
    if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) adam->lr(rate);
    if (auto* adagrad = dynamic_cast<torch::optim::AdagradOptions*>(&options)) adagrad->lr(rate);
  }
}

struct TableImpl : nn::Module {
  TableImpl(double seed, bool sparse) : sparse(sparse) {
    weight = register_parameter("weight", numbers({kRows, kWidth}, seed));
  }
  at::Tensor forward(const at::Tensor& rows) { return at::embedding(weight, rows, -1, false, sparse); }
  Tensors values() const { return {weight.detach().clone()}; }
  void assign(const Tensors& values) {
    const at::NoGradGuard no_grad;
    weight.copy_(values[0]);
  }
  at::Tensor weight;
  bool sparse;
};
TORCH_MODULE(Table);

struct TowerImpl : nn::Module {
  explicit TowerImpl(double seed) : layer(register_module("layer", filled(kWidth, kWidth, seed))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(layer(x)) + x; }
  Tensors values() const { return {layer->weight.detach().clone(), layer->bias.detach().clone()}; }
  void assign(const Tensors& values) {
    const at::NoGradGuard no_grad;
    layer->weight.copy_(values[0]);
    layer->bias.copy_(values[1]);
  }
  nn::Linear layer;
};
TORCH_MODULE(Tower);

struct HeadImpl : nn::Module {
  HeadImpl()
      : first(register_module("first", filled(kWidth, 5, 50))),
        last(register_module("last", filled(5, 1, 60))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (throws) throw std::runtime_error(kThrown);
    return last(at::tanh(first(x)));
  }
  nn::Linear first, last;
  bool throws = false;
};
TORCH_MODULE(Head);

/// References that the first trainer gives the others.
struct Shared {
  std::optional<RRef<Table>> table;
  std::optional<RRef<Tower>> tower;
};
RRef<Table> shared_table(Worker& worker) { return *testing::state_of<Shared>(worker).table; }
RRef<Tower> shared_tower(Worker& worker) { return *testing::state_of<Shared>(worker).tower; }

constexpr Function<shared_table> kSharedTable{"shared_table"};
constexpr Function<shared_tower> kSharedTower{"shared_tower"};
constexpr Class<Table, double, bool> kTable{"Table"};
constexpr Class<Tower, double> kTower{"Tower"};
constexpr Function<&TableImpl::forward> kLookUp{"Table.forward"};
constexpr Function<&TowerImpl::forward> kTowerForward{"Tower.forward"};
constexpr Function<&TableImpl::values> kTableValues{"Table.values"};
constexpr Function<&TowerImpl::values> kTowerValues{"Tower.values"};
constexpr Function<&TableImpl::assign> kTableAssign{"Table.assign"};
constexpr Function<&TowerImpl::assign> kTowerAssign{"Tower.assign"};

double table_seed(const Case& one, int trainer) { return one.shared ? 3 : 3 + 5 * trainer; }

struct Expected {
  std::map<std::vector<int>, double> losses;              ///< by (step, pass, trainer)
  std::map<std::vector<int>, double> norms, dense_norms;  ///< by (step)
  std::vector<Tensors> tables, towers;                    ///< by trainer
  std::map<std::string, at::Tensor> head;
};

/// The same in one process. Each trainer has optimizers of its own for the tables and the tower.
class Oracle {
 public:
  explicit Oracle(const Case& one) : one_(one) {
    head_optimizer_ = torch_optimizer(one, head_->parameters());
    for (int trainer = 0; trainer < one.trainers; ++trainer) {
      const bool first = trainer == 0 || !one.shared;
      tables_.push_back(first ? Table(table_seed(one, trainer), false) : tables_[0]);
      towers_.push_back(first ? Tower(20 + table_seed(one, trainer)) : towers_[0]);
      Tensors remote = tables_.back()->parameters();
      if (one.tower) {
        for (const at::Tensor& parameter : towers_.back()->parameters()) remote.push_back(parameter);
      }
      remote_.push_back(remote);
      optimizers_.push_back(torch_optimizer(one, remote));
    }
  }

  Expected run() {
    Expected expected;
    for (int end = step_ + one_.steps; step_ < end; ++step_) train(expected);
    for (int trainer = 0; trainer < one_.trainers; ++trainer) {
      expected.tables.push_back(tables_[at(trainer)]->values());
      expected.towers.push_back(towers_[at(trainer)]->values());
    }
    for (const auto& item : head_->named_parameters())
      expected.head[item.key()] = item.value().detach().clone();
    return expected;
  }

 private:
  static std::size_t at(int trainer) { return static_cast<std::size_t>(trainer); }

  void train(Expected& expected) {
    std::vector<Tensors> remote(at(one_.trainers)), own(at(one_.trainers));
    for (int trainer = 0; trainer < one_.trainers; ++trainer) compute(trainer, expected, remote, own);
    if (one_.faulty(step_)) return;
    Tensors averages;
    for (std::size_t p = 0; p < head_->parameters().size(); ++p) {
      at::Tensor sum = own[0][p];
      for (std::size_t other = 1; other < own.size(); ++other) sum = sum + own[other][p];
      averages.push_back(sum / one_.trainers);
    }
    double norm = 0;
    for (int trainer = 0; trainer < one_.trainers; ++trainer) {
      Tensors all = remote[at(trainer)];
      if (one_.dense == Dense::kLocalTarget) all.insert(all.end(), averages.begin(), averages.end());
      norm = std::fmax(norm, optim_norm(all));
      for (const at::Tensor& gradient : all) {
        if (gradient.defined() && !gradient.isfinite().all().item<bool>()) return;
      }
    }
    double dense_norm = optim_norm(averages);
    expected.norms[{step_}] = norm;
    expected.dense_norms[{step_}] = dense_norm;
    const auto factor = [&](double of) { return one_.clip == 0 ? 1 : std::min(1.0, kMaxNorm / (of + 1e-6)); };
    for (int trainer = 0; trainer < one_.trainers; ++trainer)
      step(*optimizers_[at(trainer)], remote_[at(trainer)], remote[at(trainer)], factor(norm));
    step(*head_optimizer_, head_->parameters(), averages,
         factor(one_.dense == Dense::kLocalTarget ? norm : dense_norm));
  }

  void compute(int trainer, Expected& expected, std::vector<Tensors>& remote, std::vector<Tensors>& own) {
    Tensors all = remote_[at(trainer)];
    for (const at::Tensor& parameter : head_->parameters()) all.push_back(parameter);
    for (at::Tensor& parameter : all) parameter.mutable_grad() = at::Tensor();
    for (int pass = 0; pass < one_.passes; ++pass) {
      at::Tensor x = tables_[at(trainer)](one_.rows(trainer, step_, pass));
      if (one_.tower && !one_.skips(trainer, step_, pass)) x = towers_[at(trainer)](x);
      at::Tensor loss = loss_of(head_(x));
      expected.losses[{step_, pass, trainer}] = loss.item<double>();
      if (step_ == one_.overflow_step && trainer == one_.overflow_trainer && pass == 0)
        loss = loss * std::numeric_limits<double>::infinity();
      loss.backward();
    }
    for (const at::Tensor& parameter : remote_[at(trainer)]) remote[at(trainer)].push_back(parameter.grad());
    for (const at::Tensor& parameter : head_->parameters()) own[at(trainer)].push_back(parameter.grad());
  }

  static double optim_norm_type(int clip) {
    return clip == 2 ? 1 : clip == 3 ? std::numeric_limits<double>::infinity() : 2;
  }
  double optim_norm(const Tensors& gradients) const {
    Tensors defined;
    for (const at::Tensor& gradient : gradients) {
      if (gradient.defined()) defined.push_back(gradient.flatten());
    }
    return at::norm(at::cat(defined), optim_norm_type(one_.clip)).item<double>();
  }
  void step(torch::optim::Optimizer& optimizer, const Tensors& parameters, const Tensors& gradients,
            double factor) {
    set_rate(optimizer, one_.rate(step_));
    for (std::size_t p = 0; p < parameters.size(); ++p)
      at::Tensor(parameters[p]).mutable_grad() =
          gradients[p].defined() ? gradients[p] * factor : at::Tensor();
    optimizer.step();
  }

  const Case& one_;
  Head head_;
  std::vector<Table> tables_;
  std::vector<Tower> towers_;
  std::vector<Tensors> remote_;
  std::unique_ptr<torch::optim::Optimizer> head_optimizer_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  int step_ = 0;
};

/// What a phase leaves for the next one.
struct Saved {
  explicit Saved(int trainers)
      : remote(static_cast<std::size_t>(trainers)), head(remote.size()), optimizer(remote.size()) {}
  Expected expected;
  std::vector<optim::StateDict> remote;  ///< by trainer
  std::vector<checkpoint::StateWriter> head, optimizer;
};

class Trainer {
 public:
  Trainer(const Case& one, int phase, Worker& worker, const collective::Group& group, Shared& shared)
      : one_(one), phase_(phase), worker_(worker), group_(group), shared_(shared), me_(worker.rank()) {
    const bool creates = me_ == 0 || !one.shared;
    const int turn = phase == 1 && one.moves ? 1 : 0;
    const auto server = [&](int number) { return one.trainers + (number + turn) % one.servers; };
    if (creates) {
      table_.emplace(worker.remote(server(0), kTable, table_seed(one, me_), one.sparse));
      tower_.emplace(worker.remote(server(1), kTower, 20 + table_seed(one, me_)));
    }
    if (one.shared) {
      if (me_ == 0) shared_ = {table_, tower_};
      group_.barrier();
      if (me_ != 0) {
        table_ = worker.rpc_sync(0, kSharedTable);
        tower_ = worker.rpc_sync(0, kSharedTower);
      }
      group_.barrier();
      shared_ = {};
    }
    ddp_.emplace(head_, group_);
    const double lr = phase == 0 ? one.rate(0) : 7;  // the saved state has the right one
    std::vector<optim::DistributedParamGroup> groups{{{*table_}, spec_of(one, lr), one.hogwild}};
    std::vector<optim::Target> others;
    if (one.tower) others.emplace_back(*tower_);
    if (one.dense == Dense::kLocalTarget) others.emplace_back(head_);
    if (!others.empty() && one.groups)
      groups.push_back({others, spec_of(one, lr), one.hogwild});
    else
      groups[0].targets.insert(groups[0].targets.end(), others.begin(), others.end());
    remote_.emplace(worker, groups);
    const bool zero = (one.dense == Dense::kZero) != (phase == 1 && one.zero_after);
    if (one.dense != Dense::kLocalTarget && zero)
      zero_ = std::make_unique<ZeroRedundancyOptimizer>(*ddp_, spec_of(one, lr));
    if (one.dense != Dense::kLocalTarget && !zero)
      own_ = std::make_unique<optim::Optimizer>(*head_, spec_of(one, lr));
    if (one.scaler)
      scaler_.emplace(optim::GradScalerOptions{
          .init_scale = kInitialScale, .growth_interval = kGrowthInterval, .replicas = replicas()});
  }

  /// The state of the trainers' own part.
  std::map<std::string, checkpoint::SourcePtr> sources() {
    std::map<std::string, checkpoint::SourcePtr> sources;
    sources["head"] = checkpoint::source_of(head_);
    if (zero_) sources["optimizer"] = checkpoint::source_of(*zero_);
    if (own_) sources["optimizer"] = checkpoint::source_of(*own_);
    return sources;
  }
  optim::StateDict remote_state() { return remote_->state_dict(); }
  /// The tables and towers of a phase that ended with `before`.
  void load_remote(const Expected& before, const optim::StateDict& optimizer) {
    const auto me = static_cast<std::size_t>(me_);
    if (me_ == 0 || !one_.shared) {
      table_->rpc_sync(kTableAssign, before.tables[me]);
      tower_->rpc_sync(kTowerAssign, before.towers[me]);
    }
    remote_->load_state_dict(optimizer);
    group_.barrier();
  }

  void load(const Saved& saved, const MemoryState& head, const MemoryState& optimizer) {
    load_remote(saved.expected, saved.remote[static_cast<std::size_t>(me_)]);
    for (const auto& [name, source] : sources()) source->load(name == "head" ? head : optimizer);
    group_.barrier();
  }
  void save(Saved& saved) {
    const auto me = static_cast<std::size_t>(me_);
    saved.remote[me] = remote_state();
    for (const auto& [name, source] : sources())
      source->save((name == "head" ? saved.head : saved.optimizer)[me]);
    group_.barrier();
  }

  void run(const Expected& expected) {
    for (int i = 0; i < one_.steps; ++i) train(phase_ * one_.steps + i, expected);
    const auto me = static_cast<std::size_t>(me_);
    expect_near(table_->rpc_sync(kTableValues), expected.tables[me], "table");
    expect_near(tower_->rpc_sync(kTowerValues), expected.towers[me], "tower");
    for (const auto& item : head_->named_parameters())
      expect_near({item.value()}, {expected.head.at(item.key())}, item.key());
  }

 private:
  std::vector<int> replicas() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < one_.trainers; ++rank) ranks.push_back(rank);
    return ranks;
  }
  at::Tensor loss(int step, int pass, const Expected& expected) {
    const Fault fault = one_.fault_of(me_, step, pass);
    const auto throw_at = [&](Fault place) {
      if (fault == place) throw std::runtime_error(kThrown);
    };
    const auto explode_at = [&](Fault place, at::Tensor tensor) {
      if (fault != place) return tensor;
      tensor = tensor * 1;
      tensor.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error(kThrown); });
      return tensor;
    };
    throw_at(Fault::kBeforeLookUp);
    at::Tensor rows = one_.rows(me_, step, pass);
    if (fault == Fault::kInLookUp) rows = rows + kRows;
    at::Tensor x = table_->rpc_sync(kLookUp, rows);
    if (one_.drops(me_, step, pass)) table_->rpc_sync(kLookUp, rows);
    if (one_.tower && !one_.skips(me_, step, pass)) x = tower_->rpc_sync(kTowerForward, x);
    throw_at(Fault::kBeforeHead);
    head_->throws = fault == Fault::kInHead;
    struct Calm {
      Head& head;
      ~Calm() { head->throws = false; }
    } calm{head_};
    at::Tensor loss = loss_of(explode_at(Fault::kBeforeModule, (*ddp_)(explode_at(Fault::kBehindHead, x))));
    throw_at(Fault::kBeforeBackward);
    const double wanted = expected.losses.at({step, pass, me_});
    EXPECT_NEAR(loss.item<double>(), wanted, 1e-9)
        << "loss of step " << step << ", pass " << pass << ", trainer " << me_;
    if (step == one_.overflow_step && me_ == one_.overflow_trainer && pass == 0)
      loss = loss * std::numeric_limits<double>::infinity();
    return scaler_ ? scaler_->scale(loss) : loss;
  }

  void train(int step, const Expected& expected) {
    remote_->set_lr(one_.rate(step));
    if (zero_) zero_->set_lr(one_.rate(step));
    if (own_) own_->set_lr(one_.rate(step));
    autograd::Context context(worker_);
    bool ok = true;
    try {
      run_passes(context, step, expected);
    } catch (const std::exception& error) {
      if (!one_.faulty(step)) throw;
      ok = false;
      const std::string text = error.what();
      EXPECT_EQ(text.find("timed out"), std::string::npos) << "trainer " << me_ << ": " << text;
    }
    if (one_.fault != Fault::kNone && !ddp_->agree(ok)) {
      EXPECT_TRUE(one_.faulty(step)) << "step " << step << " was skipped";
      if (zero_) zero_->zero_grad();
      return group_.barrier();
    }
    EXPECT_FALSE(one_.faulty(step)) << "step " << step << " was not skipped";
    group_.barrier();  // all trainers read the tables before one changes them
    update(context, step, expected);
    group_.barrier();
  }

  void run_passes(autograd::Context& context, int step, const Expected& expected) {
    const autograd::BackwardOptions options{
        .mode = one_.fast ? autograd::PassMode::kFast : autograd::PassMode::kSmart,
        .threads = static_cast<unsigned>(one_.threads)};
    std::vector<at::Tensor> losses;
    for (int pass = 0; pass < one_.passes; ++pass) {
      const bool reduced = one_.one_pass || one_.reduce_each || pass + 1 == one_.passes;
      if (reduced) {
        losses.push_back(loss(step, pass, expected));
      } else {
        const auto local = ddp_->no_sync();
        losses.push_back(loss(step, pass, expected));
      }
      if (one_.one_pass) continue;
      context.backward(losses.back(), options);
    }
    if (one_.one_pass) context.backward(losses, options);
  }

  void update(const autograd::Context& context, int step, const Expected& expected) {
    const auto gradient_of = [&](const at::Tensor& parameter) { return context.gradient(parameter); };
    const double type = one_.clip == 2 ? 1 : one_.clip == 3 ? std::numeric_limits<double>::infinity() : 2;
    const auto found = expected.norms.find({step});
    if (scaler_) scaler_->unscale_(*remote_, context);
    double factor = 1;
    if (one_.clip != 0) {
      const double norm =
          remote_->clip_grad_norm(context, {.max_norm = kMaxNorm, .norm_type = type, .replicas = replicas()});
      if (found == expected.norms.end())
        EXPECT_FALSE(std::isfinite(norm));
      else
        EXPECT_NEAR(norm, found->second, 1e-9) << "norm of step " << step;
      if (zero_)
        EXPECT_NEAR(zero_->clip_grad_norm(kMaxNorm, type, gradient_of), expected.dense_norms.at({step}),
                    1e-9);
      if (own_) factor = std::min(1.0, kMaxNorm / (expected.dense_norms.at({step}) + 1e-6));
    }
    if (scaler_) {
      EXPECT_EQ(scaler_->step(*remote_, context), found != expected.norms.end()) << "step " << step;
      scaler_->update();
    } else {
      remote_->step(context);
    }
    if (zero_) zero_->step(gradient_of);
    if (own_) own_->step([&](const at::Tensor& parameter) { return context.gradient(parameter) * factor; });
  }

  void expect_near(const Tensors& got, const Tensors& wanted, const std::string& what) const {
    for (std::size_t i = 0; i < wanted.size(); ++i)
      EXPECT_TRUE(at::allclose(got.at(i), wanted[i], 1e-9, 1e-11)) << what << " of trainer " << me_ << "\n"
                                                                   << got[i] << wanted[i];
  }

  const Case& one_;
  const int phase_;
  Worker& worker_;
  collective::Group group_;
  Shared& shared_;
  const int me_;
  Head head_;
  std::optional<RRef<Table>> table_;
  std::optional<RRef<Tower>> tower_;
  std::optional<DistributedDataParallel<Head>> ddp_;
  std::optional<optim::DistributedOptimizer> remote_;
  std::unique_ptr<ZeroRedundancyOptimizer> zero_;
  std::unique_ptr<optim::Optimizer> own_;
  std::optional<optim::GradScaler> scaler_;
};

FunctionTable functions() {
  return FunctionTable().add(kTable, kTower, kSharedTable, kSharedTower, kLookUp, kTowerForward, kTableValues,
                             kTowerValues, kTableAssign, kTowerAssign);
}

testing::ClusterOptions world_of(const Case& one, Shared& shared) {
  testing::ClusterOptions options = testing::world_of(one.workers(), functions());
  options.seed = one.seed;
  options.extensions = [&shared] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<testing::StateExtension<Shared>>(shared));
    extensions.push_back(std::make_unique<autograd::AutogradExtension>());
    extensions.push_back(std::make_unique<optim::OptimExtension>());
    return extensions;
  };
  return options;
}

std::unique_ptr<Saved> run_phase(const Case& one, int phase, const Expected& expected, const Saved* before) {
  auto saved = std::make_unique<Saved>(one.trainers);
  saved->expected = expected;
  std::optional<MemoryState> head, optimizer;
  if (before != nullptr) {
    head.emplace(before->head);
    optimizer.emplace(before->optimizer);
  }
  Shared shared;
  SimCluster cluster(world_of(one, shared));
  std::unique_ptr<InProcessWorld> groups;
  cluster.run([&](Worker& worker) {
    worker.runtime().log.set_level(LogLevel::kOff);
    if (worker.rank() == 0)
      groups = std::make_unique<InProcessWorld>(
          cluster.executor(), one.trainers, testing::InProcessOptions{.timeout = std::chrono::seconds(30)});
    worker.barrier();
    if (worker.rank() < one.trainers) {
      try {
        Trainer trainer(one, phase, worker, groups->group(worker.rank(), worker.runtime()), shared);
        if (before != nullptr) trainer.load(*before, *head, *optimizer);
        trainer.run(expected);
        trainer.save(*saved);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "trainer " << worker.rank() << " threw: " << error.what();
        groups->kill(worker.rank());
      }
    }
    worker.barrier();
    if (worker.rank() == 0) groups.reset();
  });
  return saved;
}

bool check(Choices& choices) {
  const Case one(choices);
  if (one.excluded() != nullptr) return false;
  Oracle oracle(one);
  std::unique_ptr<Saved> saved;
  for (int phase = 0; phase < one.phases; ++phase) saved = run_phase(one, phase, oracle.run(), saved.get());
  return true;
}

TEST(HybridTrainings, WithSharedTablesAreThoseOfOneProcess) { run_cases(60, check); }

bool check_in_process(Session& session, Shared& shared, Choices& choices, const std::string& folder) {
  const Case one(choices);
  if (one.excluded() != nullptr || one.workers() > kProcesses) return false;
  Oracle oracle(one);
  Expected before;
  optim::StateDict remote;
  for (int phase = 0; phase < one.phases; ++phase) {
    const Expected expected = oracle.run();
    {
      const TrainingRanks self(session, one.trainers);
      if (self.trains) {
        Trainer trainer(one, phase, session.worker(), self.group, shared);
        CheckpointManager manager(session, {.directory = folder, .participants = self.names});
        for (auto& [name, source] : trainer.sources()) manager.add_source(name, std::move(source));
        if (phase > 0) {
          EXPECT_EQ(manager.restore(), phase);
          trainer.load_remote(before, remote);
        }
        trainer.run(expected);
        manager.save(phase + 1);
        manager.wait();
        remote = trainer.remote_state();
      }
    }
    before = expected;
    session.group().barrier();
  }
  return true;
}

void train_in_process() {
  Shared shared;
  Extensions extensions;
  extensions.push_back(std::make_unique<testing::StateExtension<Shared>>(shared));
  Session session(WorkerOptions::from_env(), functions(), std::move(extensions));
  const ProcessCheck check_tables = [&](Session& its_session, Choices& choices, const std::string& folder) {
    return check_in_process(its_session, shared, choices, folder);
  };
  train_in_this_process(session, check_tables, 8);
}

TEST(HybridProcesses, WithSharedTablesComputeWhatOneProcessDoes) { run_in_processes("hybrid.train"); }

const testing::Scenarios kScenarios("hybrid", {{"train", train_in_process}});

}  // namespace
}  // namespace torchspan::combinations::hybrid_test
