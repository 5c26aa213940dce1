#include "tests/combinations/training_oracle.h"

#include <memory>
#include <optional>

#include <torch/nn.h>
#include <torch/optim.h>

#include "tests/combinations/training_model.h"

namespace torchspan::combinations {
namespace {

template <class Options>
std::unique_ptr<torch::optim::OptimizerOptions> with(Options options) {
  return std::make_unique<Options>(options);
}

std::unique_ptr<torch::optim::OptimizerOptions> options_of(const Case& one, double lr) {
  const double decay = one.decay ? 0.1 : 0;
  switch (one.rule) {
    case Rule::kSgd:
      return with(torch::optim::SGDOptions(lr).weight_decay(decay));
    case Rule::kMomentum:
      return with(torch::optim::SGDOptions(lr).momentum(0.9).weight_decay(decay));
    case Rule::kAdam:
      return with(torch::optim::AdamOptions(lr).weight_decay(decay));
    case Rule::kAdamW:
      return with(torch::optim::AdamWOptions(lr).weight_decay(decay));
    case Rule::kRmsprop:
      return with(torch::optim::RMSpropOptions(lr).weight_decay(decay));
    case Rule::kAdagrad:
      return with(torch::optim::AdagradOptions(lr).weight_decay(decay));
  }
  return nullptr;
}

template <class O, class Options>
std::unique_ptr<torch::optim::Optimizer> made(std::vector<torch::optim::OptimizerParamGroup> groups,
                                              const torch::optim::OptimizerOptions& defaults) {
  return std::make_unique<O>(std::move(groups), static_cast<const Options&>(defaults));
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const Case& one,
                                                      const std::vector<NamedParameters>& all) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (std::size_t i = 0; i < all.size(); ++i)
    groups.emplace_back(all[i].tensors, options_of(one, one.rate(static_cast<int>(i), 0)));
  const auto defaults = options_of(one, 0.05);
  switch (one.rule) {
    case Rule::kSgd:
    case Rule::kMomentum:
      return made<torch::optim::SGD, torch::optim::SGDOptions>(std::move(groups), *defaults);
    case Rule::kAdam:
      return made<torch::optim::Adam, torch::optim::AdamOptions>(std::move(groups), *defaults);
    case Rule::kAdamW:
      return made<torch::optim::AdamW, torch::optim::AdamWOptions>(std::move(groups), *defaults);
    case Rule::kRmsprop:
      return made<torch::optim::RMSprop, torch::optim::RMSpropOptions>(std::move(groups), *defaults);
    case Rule::kAdagrad:
      return made<torch::optim::Adagrad, torch::optim::AdagradOptions>(std::move(groups), *defaults);
  }
  return nullptr;
}

bool finite(const std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined() && !gradient.isfinite().all().item<bool>()) return false;
  }
  return true;
}

/// One model, whose gradients and own values are exchanged for those of the rank that it computes for.
class Oracle {
 public:
  explicit Oracle(const Case& one)
      : one_(one),
        net_(one, std::nullopt, false, false),
        groups_(groups_of(one, *net_)),
        optimizer_(optimizer_of(one, groups_)) {
    for (const auto& group : groups_)
      parameters_.insert(parameters_.end(), group.tensors.begin(), group.tensors.end());
    used_.resize(parameters_.size());
    if (one.own) first_own_ = net_->own.detach().clone();
    if (one.buffer != 0) first_seen_ = net_->seen.clone();
  }

  Expected run(const Phase& phase) {
    enter(phase);
    Expected expected;
    for (int step = 0; step < phase.steps; ++step) train(step, expected);
    if (!phase.batches.empty()) leave_join();
    first_ += phase.steps;
    for (const auto& item : net_->named_parameters())
      expected.model[item.key()] = item.value().detach().clone();
    for (const Rank& rank : ranks_) {
      expected.own.push_back(rank.own.defined() ? rank.own.clone() : rank.own);
      expected.seen.push_back(rank.seen.defined() ? rank.seen.clone() : rank.seen);
    }
    expected.scale = scale_;
    return expected;
  }

 private:
  struct Rank {
    std::vector<at::Tensor> gradients;
    at::Tensor own, own_gradient, seen;
  };
  std::size_t size() const { return ranks_.size(); }
  bool live(std::size_t rank, int step) const { return one_.live(*phase_, static_cast<int>(rank), step); }
  std::size_t first_live(int step) const {
    std::size_t rank = 0;
    while (!live(rank, step)) ++rank;
    return rank;
  }

  void enter(const Phase& phase) {
    phase_ = &phase;
    const std::vector<Rank> before = std::move(ranks_);
    ranks_ = std::vector<Rank>(static_cast<std::size_t>(phase.data));
    for (std::size_t r = 0; r < size(); ++r) {
      Rank& rank = ranks_[r];
      rank.gradients.resize(parameters_.size());
      if (one_.own) rank.own = before.empty() ? first_own_.clone() : before[r].own.clone();
      if (one_.buffer == 0) continue;
      if (before.empty())
        rank.seen = first_seen_.clone();
      else
        rank.seen = before[one_.buffer == 2 ? r : 0].seen.clone();
    }
  }

  void train(int step, Expected& expected) {
    const bool fault = first_ == 0 && one_.faulty(step);
    note_undefined();
    for (int pass = 0; pass < one_.passes; ++pass) {
      const bool fails = fault && one_.last_pass(pass);
      for (std::size_t r = 0; r < size(); ++r) {
        if (live(r, step)) run_pass(r, step, pass, expected, fails);
      }
      if (one_.reduced(pass) && !fails) {
        reduce(step);
        note_undefined();
      }
    }
    if (!fault) step_once(step, expected);
    for (Rank& rank : ranks_) {
      for (const std::size_t p : undefined_) {
        if (fault) rank.gradients[p] = at::Tensor();
      }
      clear(rank);
    }
    if (fault) used_.assign(used_.size(), false);
  }
  /// A reduction that fails leaves what was undefined before its step, or after the last reduction, undefined.
  void note_undefined() {
    undefined_.clear();
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      if (!ranks_[0].gradients[p].defined()) undefined_.push_back(p);
    }
  }

  /// A pass that fails on one rank fails on all, and leaves behind only what the forwards did to buffers.
  void run_pass(std::size_t r, int step, int pass, Expected& expected, bool fails) {
    Rank& rank = ranks_[r];
    const bool thrower = fails && static_cast<int>(r) == one_.fault_rank;
    const bool whole = phase_->kind == Kind::kReplicas || phase_->kind == Kind::kZero;
    const Batch batch = batch_of(one_, static_cast<int>(r), first_ + step, pass);
    {
      const at::NoGradGuard no_grad;
      if (one_.own) net_->own.copy_(rank.own);
    }
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
    if (one_.own) net_->own.mutable_grad() = at::Tensor();
    const bool shares = whole && one_.reduced(pass) && one_.buffer == 1;
    const auto forward = [&](const Batch& input) {
      if (shares && r != first_live(step)) rank.seen = shared_seen_.at(forward_);
      if (shares && r == first_live(step)) shared_seen_[forward_] = rank.seen.clone();
      ++forward_;
      if (rank.seen.defined()) net_->seen.set_data(rank.seen.clone());
      if (thrower && one_.fault == Fault::kInForward) return at::Tensor();
      const at::Tensor output = net_(input);
      if (rank.seen.defined()) rank.seen = net_->seen.clone();
      return output;
    };
    forward_ = 0;
    const at::Tensor output = forward(batch);
    if (!output.defined()) return;
    at::Tensor loss = loss_of(output);
    if (one_.two_forwards) loss = loss + loss_of(forward(second_of(batch)));
    if (fails) return;
    expected.losses[{step, pass, static_cast<int>(r)}] = loss.item<double>();
    if (one_.scaler) loss = loss * scale_;
    if (first_ + step == one_.overflow_step && one_.last_pass(pass) &&
        static_cast<int>(r) == one_.overflow_rank % phase_->data)
      loss = loss * std::numeric_limits<double>::infinity();
    loss.backward();
    for (std::size_t p = 0; p < parameters_.size(); ++p) add(rank.gradients[p], parameters_[p].grad(), p);
    if (one_.own) add(rank.own_gradient, net_->own.grad(), std::nullopt);
  }

  void add(at::Tensor& sum, const at::Tensor& gradient, std::optional<std::size_t> p) {
    if (!gradient.defined()) return;
    if (p) used_[*p] = true;
    sum = sum.defined() ? sum + gradient : gradient.clone();
  }

  void reduce(int step) {
    double divisor = static_cast<double>(size());
    if (!phase_->initial_divisor) {
      divisor = 0;
      for (std::size_t r = 0; r < size(); ++r) divisor += live(r, step) ? 1 : 0;
    }
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      if (!used_[p]) continue;
      at::Tensor sum = at::zeros_like(parameters_[p]);
      for (std::size_t r = 0; r < size(); ++r) {
        if (live(r, step) && ranks_[r].gradients[p].defined()) sum = sum + ranks_[r].gradients[p];
      }
      for (Rank& rank : ranks_) rank.gradients[p] = sum / divisor;
    }
    used_.assign(used_.size(), false);
  }

  void step_once(int step, Expected& expected) {
    for (std::size_t i = 0; i < groups_.size(); ++i)
      set_rate(optimizer_->param_groups()[i].options(), one_.rate(static_cast<int>(i), first_ + step));
    Rank& leader = ranks_[first_live(step)];
    for (std::size_t p = 0; p < parameters_.size(); ++p) {
      at::Tensor gradient = leader.gradients[p];
      if (gradient.defined() && one_.scaler) gradient = gradient / scale_;
      parameters_[p].mutable_grad() = gradient.defined() ? gradient.clone() : gradient;
    }
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    const bool steps = finite(gradients);
    if (one_.clip != 0)
      expected.norms[{step}] = nn::utils::clip_grad_norm_(parameters_, kMaxNorm, one_.norm_type());
    if (steps) optimizer_->step();
    // The ranks agree about their own parameters, too: an overflow is in all averages, but in one rank's own gradient.
    for (std::size_t r = 0; r < size() && one_.own && steps; ++r) {
      Rank& rank = ranks_[r];
      if (!live(r, step) || !rank.own_gradient.defined()) continue;
      rank.own = rank.own - 0.03 * (one_.scaler ? rank.own_gradient / scale_ : rank.own_gradient);
    }
    if (one_.scaler) update_scale(steps);
  }

  static void set_rate(torch::optim::OptimizerOptions& options, double rate) {
    if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) sgd->lr(rate);
    if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) adam->lr(rate);
    if (auto* adamw = dynamic_cast<torch::optim::AdamWOptions*>(&options)) adamw->lr(rate);
    if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropOptions*>(&options)) rmsprop->lr(rate);
    if (auto* adagrad = dynamic_cast<torch::optim::AdagradOptions*>(&options)) adagrad->lr(rate);
  }

  void update_scale(bool stepped) {
    if (!stepped) {
      scale_ *= 0.5;
      tracker_ = 0;
    } else if (++tracker_ == kGrowthInterval) {
      scale_ *= 2;
      tracker_ = 0;
    }
  }

  void clear(Rank& rank) {
    for (at::Tensor& gradient : rank.gradients) {
      if (!one_.in_place_zero)
        gradient = at::Tensor();
      else if (gradient.defined())
        gradient = at::zeros_like(gradient);
    }
    rank.own_gradient = at::Tensor();
  }

  void leave_join() {
    std::size_t last = 0;
    for (std::size_t r = 0; r < size(); ++r) {
      if (live(r, phase_->steps - 1)) last = r;
    }
    for (Rank& rank : ranks_) {
      if (rank.seen.defined()) rank.seen = ranks_[last].seen.clone();
    }
  }

  const Case& one_;
  Net net_;
  const std::vector<NamedParameters> groups_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<at::Tensor> parameters_;
  at::Tensor first_own_, first_seen_;
  const Phase* phase_ = nullptr;
  std::vector<Rank> ranks_;
  std::vector<bool> used_;                 ///< since the last reduction
  std::vector<std::size_t> undefined_;     ///< gradients before the step, or after the last reduction
  std::map<int, at::Tensor> shared_seen_;  ///< of the leader before its forwards
  int forward_ = 0;
  int first_ = 0;  ///< steps of earlier phases
  double scale_ = kInitialScale;
  int tracker_ = 0;
};

}  // namespace

std::vector<Expected> train_alone(const Case& one) {
  Oracle oracle(one);
  std::vector<Expected> all;
  for (const Phase& phase : one.phases) all.push_back(oracle.run(phase));
  return all;
}

}  // namespace torchspan::combinations
