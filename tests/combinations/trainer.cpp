#include "tests/combinations/trainer.h"

#include <cmath>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <limits>
#include <stdexcept>

#include <torchspan/optim/algorithms.h>

namespace torchspan::combinations {
namespace {

optim::OptimizerSpec spec_of(const Case& one, double lr) {
  const double decay = one.decay ? 0.1 : 0;
  switch (one.rule) {
    case Rule::kSgd:
      return optim::SGD{.lr = lr, .weight_decay = decay};
    case Rule::kMomentum:
      return optim::SGD{.lr = lr, .momentum = 0.9, .weight_decay = decay};
    case Rule::kAdam:
      return optim::Adam{.lr = lr, .weight_decay = decay};
    case Rule::kAdamW:
      return optim::AdamW{.lr = lr, .weight_decay = decay};
    case Rule::kRmsprop:
      return optim::RMSprop{.lr = lr, .weight_decay = decay};
    case Rule::kAdagrad:
      return optim::Adagrad{.lr = lr, .weight_decay = decay};
  }
  return optim::SGD{.lr = lr};
}

data_parallel::DataParallelOptions replica_options(const Case& one, const Phase& phase) {
  data_parallel::DataParallelOptions options;
  constexpr double kMegabytes[] = {25, 0.0003, 0.00001};
  options.bucket_cap_mb = kMegabytes[phase.buckets];
  options.first_bucket_mb = kMegabytes[phase.buckets];
  options.find_unused_parameters = phase.graph == 1;
  options.static_graph = phase.graph == 2;
  options.gradient_as_bucket_view = phase.views;
  options.rebuild_buckets = phase.rebuild;
  options.broadcast_buffers = one.buffer == 1;
  if (one.own) options.ignored_parameters = {"own"};
  return options;
}

sharded::FullyShardedOptions sharded_options(const Case& one, const Phase& phase) {
  constexpr std::size_t kBytes[] = {std::size_t{1} << 20, 1, 300};
  sharded::FullyShardedOptions options;
  options.reshard_after_forward = phase.reshard;
  options.prefetch = phase.prefetch;
  options.alone_bytes = kBytes[phase.alone_bytes];
  options.overlap_bytes = kBytes[phase.overlap_bytes];
  options.shard_ranks = phase.copies == 1 ? 0 : phase.data / phase.copies;
  if (one.single) options.precision = {.param_dtype = at::kFloat, .output_dtype = at::kDouble};
  return options;
}

}  // namespace

Trainer::Trainer(const Case& one, std::size_t phase, const testing::Rank& self, int first_step)
    : one_(one),
      phase_(one.phases[phase]),
      self_(self),
      first_(first_step),
      rank_(self.rank / phase_.tensor),
      net_(one, parts_group(), phase_.kind == Kind::kSharded, one.embedding == 2) {
  const collective::Group data =
      phase_.tensor == 1 ? self.group : self.group.split(self.rank % phase_.tensor, self.rank);
  if (phase_.kind == Kind::kReplicas || phase_.kind == Kind::kZero) {
    replicas_.emplace(net_, data, replica_options(one, phase_));
    if (phase_.hook) replicas_->register_comm_hook(data_parallel::all_reduce_hook(), "sum");
  }
  if (phase_.kind == Kind::kSharded) sharded_.emplace(net_, data, sharded_options(one, phase_));
  std::vector<optim::ParamGroup> groups;
  const auto named = groups_of(one, *net_);
  for (std::size_t i = 0; i < named.size(); ++i) {
    const double lr = first_ > 0 ? 7 : one.rate(static_cast<int>(i), 0);  // a checkpoint has the right one
    groups.emplace_back(named[i].tensors, spec_of(one, lr), named[i].names);
  }
  if (phase_.kind == Kind::kZero) {
    zero_ = std::make_unique<ZeroRedundancyOptimizer>(
        *replicas_, std::move(groups),
        sharded::ZeroOptions{.divide_gradients = phase_.divide_gradients,
                             .overlap_forward = phase_.overlap_forward});
  } else {
    optimizer_ = std::make_unique<optim::Optimizer>(std::move(groups));
  }
  if (one.own)
    own_ = std::make_unique<optim::Optimizer>(std::vector<at::Tensor>{net_->own}, optim::SGD{.lr = 0.03});
  if (one.scaler)
    scaler_.emplace(
        optim::GradScalerOptions{.init_scale = kInitialScale, .growth_interval = kGrowthInterval});
  if (one.schedule) {
    optim::LRTarget& target = zero_ ? static_cast<optim::LRTarget&>(*zero_) : *optimizer_;
    schedule_.emplace(target, [](std::int64_t step) { return 1.0 / static_cast<double>(1 + step); });
  }
}

void Trainer::run(const Expected& expected) {
  const auto steps = [&] {
    for (int step = 0; step < phase_.steps && one_.live(phase_, rank_, step); ++step) train(step, expected);
  };
  if (phase_.batches.empty()) {
    steps();
  } else {
    replicas_->join(steps, {.divide_by_initial_world_size = phase_.initial_divisor});
  }
  if (zero_) zero_->synchronize();
  if (schedule_) schedule_->set_steps(first_ + phase_.steps);
  const auto rank = static_cast<std::size_t>(rank_);
  if (one_.own) expect_near(net_->own, expected.own[rank], "own");
  if (one_.buffer != 0) expect_near(net_->seen, expected.seen[rank], "seen");
  // In join(), ranks without batches follow neither the scaler nor the optimizer of the others.
  if (scaler_ && phase_.batches.empty()) EXPECT_EQ(scaler_->get_scale(), expected.scale);
}

std::vector<std::pair<std::string, checkpoint::SourcePtr>> Trainer::sources() {
  std::vector<std::pair<std::string, checkpoint::SourcePtr>> all;
  all.emplace_back("model", checkpoint::source_of(net_));
  // In join(), ranks without batches follow neither the scaler nor the optimizer of the others.
  const bool even = phase_.batches.empty();
  if (zero_) all.emplace_back("optimizer", checkpoint::source_of(*zero_));
  if (!zero_ && even) all.emplace_back("optimizer", checkpoint::source_of(*optimizer_));
  if (scaler_ && even) all.emplace_back("scaler", checkpoint::source_of(*scaler_));
  if (schedule_) all.emplace_back("schedule", checkpoint::source_of(*schedule_));
  return all;
}

std::optional<collective::Group> Trainer::parts_group() const {
  if (phase_.tensor == 1) return std::nullopt;
  return self_.group.split(self_.rank / phase_.tensor, self_.rank);
}

bool Trainer::throws_here() const {
  return first_ == 0 && one_.fault != Fault::kNone && rank_ == one_.fault_rank &&
         self_.rank % phase_.tensor == one_.fault_part;
}

void Trainer::train(int step, const Expected& expected) {
  const std::string where = fmt::format("step {} of rank {}", first_ + step, self_.rank);
  if (schedule_) schedule_->set_steps(first_ + step);
  const bool fault = first_ == 0 && one_.fault != Fault::kNone && step == one_.fault_step;
  bool failed = false;
  try {
    for (int pass = 0; pass < one_.passes; ++pass)
      run_pass(step, pass, expected, fault && one_.last_pass(pass));
  } catch (const std::exception&) {
    if (!fault || one_.ends()) throw;
    failed = true;
  }
  if (!one_.ends()) EXPECT_EQ(failed, fault) << where;
  if (!failed) update(step, expected, where);
  zero_grad();
}

void Trainer::run_pass(int step, int pass, const Expected& expected, bool fails) {
  const Batch batch = batch_of(one_, rank_, first_ + step, pass);
  net_->throws = fails && throws_here() && one_.fault == Fault::kInForward;
  struct Calm {
    Net& net;
    ~Calm() { net->throws = false; }
  } calm{net_};
  if (!one_.reduced(pass) && replicas_) {
    const auto local = replicas_->no_sync();
    compute(batch, step, pass, expected, fails);
  } else if (!one_.reduced(pass) && sharded_) {
    const auto local = sharded_->no_sync();
    compute(batch, step, pass, expected, fails);
  } else {
    compute(batch, step, pass, expected, fails);
  }
}

at::Tensor Trainer::forward(const Batch& batch) {
  if (replicas_) return replicas_->forward(batch);
  return sharded_ ? sharded_->forward(batch) : net_(batch);
}

void Trainer::compute(Batch batch, int step, int pass, const Expected& expected, bool fails) {
  const Fault fault = fails && throws_here() ? one_.fault : Fault::kNone;
  const auto explode = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error(kThrown); };
  if (fault == Fault::kBehindModule) {
    batch.rows = batch.rows.clone().requires_grad_() * 1;
    batch.rows.register_hook(explode);
  }
  at::Tensor output = forward(batch);
  if (fault == Fault::kBeforeModule) {
    output = output * 1;
    output.register_hook(explode);
  }
  at::Tensor loss = loss_of(output);
  if (one_.two_forwards) loss = loss + loss_of(forward(second_of(batch)));
  if (fault == Fault::kBeforeBackward) throw std::runtime_error(kThrown);
  if (!fails) {
    const double wanted = expected.losses.at({step, pass, rank_});
    EXPECT_NEAR(loss.item<double>(), wanted, tolerance() * (1 + std::abs(wanted)))
        << "loss of step " << first_ + step << ", pass " << pass << ", rank " << self_.rank;
  }
  if (scaler_) loss = scaler_->scale(loss);
  if (first_ + step == one_.overflow_step && one_.last_pass(pass) &&
      rank_ == one_.overflow_rank % phase_.data)
    loss = loss * std::numeric_limits<double>::infinity();
  loss.backward();
}

void Trainer::update(int step, const Expected& expected, const std::string& where) {
  if (scaler_) zero_ ? scaler_->unscale_(*zero_) : scaler_->unscale_(*optimizer_);
  if (one_.clip != 0) {
    const double norm = zero_ ? zero_->clip_grad_norm(kMaxNorm, one_.norm_type())
                        : sharded_ && phase_.own_clip
                            ? sharded_->clip_grad_norm(kMaxNorm, one_.norm_type())
                            : optimizer_->clip_grad_norm(kMaxNorm, one_.norm_type());
    const double wanted = expected.norms.at({step});
    if (std::isfinite(wanted))
      EXPECT_NEAR(norm, wanted, tolerance() * (1 + wanted)) << "norm at " << where;
    else
      EXPECT_FALSE(std::isfinite(norm)) << where;
  }
  const auto step_one = [&](auto& optimizer) {
    scaler_ ? static_cast<void>(scaler_->step(optimizer)) : optimizer.step();
  };
  zero_ ? step_one(*zero_) : step_one(*optimizer_);
  if (own_) step_one(*own_);
  if (scaler_) scaler_->update();
}

void Trainer::zero_grad() {
  if (own_) own_->zero_grad();
  if (zero_) return zero_->zero_grad();
  if (sharded_) return sharded_->zero_grad();
  optimizer_->zero_grad(/*set_to_none=*/!one_.in_place_zero);
}

void Trainer::expect_near(const at::Tensor& got, const at::Tensor& wanted, const char* what) {
  EXPECT_TRUE(at::allclose(got, wanted, 1e-9, 1e-11)) << what << " of rank " << self_.rank << "\n"
                                                      << got << wanted;
}

}  // namespace torchspan::combinations
