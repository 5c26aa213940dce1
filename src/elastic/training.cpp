#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/data.h>
#include <torchspan/detail/elastic/training.h>

#include "core/api/throw_invalid.h"
#include "data/api/sampler.h"
#include "elastic/failed_generations.h"
#include "elastic/team.h"
#include "elastic/tracked_state.h"
#include "quorum/api/generation.h"
#include "quorum/api/generation_client.h"

namespace torchspan {

void ElasticOptions::validate() const {
  const auto check = [](bool right, const char* field, auto value, const char* expected) {
    if (right) return;
    throw_invalid("ElasticOptions::{} is {}; expected {}", field, value, expected);
  };
  check(samples > 0, "samples", samples, "the size of the data set, 1 or more");
  check(batch > 0, "batch", batch, "1 or more samples");
  check(min_ranks > 0, "min_ranks", min_ranks, "1 or more");
  check(too_few_limit > Duration::zero(), "too_few_limit", to_seconds(too_few_limit), "more than 0 seconds");
  check(step_timeout > Duration::zero(), "step_timeout", to_seconds(step_timeout), "more than 0 seconds");
  check(start.step >= 0 && start.epoch >= 0, "start", start.step, "a step and an epoch of 0 or more");
  check(start.next >= 0 && start.next < samples, "start.next", start.next, "0 or more, less than `samples`");
  check(group.ranks.empty(), "group.ranks", group.ranks.size(), "no ranks: all workers take part");
  data_parallel.validate();
}

}  // namespace torchspan

namespace torchspan::elastic {
namespace {

/// The position of one rank, and the step that it has begun there.
class StepCursor {
 public:
  explicit StepCursor(const ElasticOptions& options)
      : sampler_({.samples = options.samples,
                  .batch = options.batch,
                  .batch_per_rank = options.batch_per_rank,
                  .seed = options.seed}),
        position_(options.start) {}

  const ElasticPosition& position() const { return position_; }
  void move_to(const ElasticPosition& position) { position_ = position; }
  /// Begins a step in a group; replaces one that was begun before.
  const ElasticStep& begin(int rank, int size, std::uint64_t generation) {
    step_ = ElasticStep{sampler_.step(position_, rank, size), generation};
    after_ = sampler_.after(position_, size);
    return *step_;
  }
  /// The step that was begun.
  const ElasticStep& step() const { return *step_; }
  /// The step that was begun is applied.
  void advance() { position_ = after_; }

 private:
  data::Sampler sampler_;
  ElasticPosition position_, after_;
  std::optional<ElasticStep> step_;
};

/// Copies of a module's buffers, such as running statistics, which forward changes: a void step must not leave traces.
class BufferCopies {
 public:
  explicit BufferCopies(const torch::nn::Module& module) : buffers_(module.buffers()) {}
  const std::vector<at::Tensor>& buffers() const { return buffers_; }

  void take() {
    const at::NoGradGuard no_grad;
    taken_ = true;
    copies_.resize(buffers_.size());
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      if (copies_[i].defined()) {
        copies_[i].copy_(buffers_[i]);
      } else {
        copies_[i] = buffers_[i].detach().clone();
      }
    }
  }

  /// Undoes changes since take(), if there was one.
  void restore() {
    const at::NoGradGuard no_grad;
    if (!std::exchange(taken_, false)) return;
    for (std::size_t i = 0; i < copies_.size(); ++i) buffers_[i].copy_(copies_[i]);
  }

  /// Keeps what changed since take().
  void forget() { taken_ = false; }

 private:
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> copies_;
  bool taken_ = false;
};

/// How often a step may fail on another rank's report while no rank ends.
constexpr int kMostRemoteFailures = 3;

std::shared_ptr<torch::nn::Module> checked(std::shared_ptr<torch::nn::Module> module,
                                           const ElasticOptions& options) {
  options.validate();
  if (!module) throw_invalid("the module of the elastic trainer is null");
  return module;
}

bool is_remote_failure(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error.kind() == ErrorKind::kRemoteFailure;
  } catch (...) {
    return false;
  }
}

}  // namespace

class Training::Impl {
 public:
  Impl(const Worker& worker, MakeGroup make_group, std::shared_ptr<torch::nn::Module> module,
       ElasticOptions options)
      : worker_(worker),
        make_group_(std::move(make_group)),
        module_(checked(std::move(module), options)),
        options_(std::move(options)),
        client_(worker, options_.name),
        participant_(options_.start.step),
        cursor_(options_),
        buffers_(*module_) {}

  void add(std::string name, checkpoint::SourcePtr source) { state_.add(std::move(name), std::move(source)); }
  const ElasticPosition& position() const { return cursor_.position(); }

  bool run(std::int64_t steps, Replica replica) {
    replica_ = std::move(replica);
    try {
      for (;;) {
        const bool finished = participant_.holds_state() && position().step >= steps;
        if (team_ && !finished) {
          run_step();
          continue;
        }
        // The other ranks are in a later run(), which this rank's program reaches next.
        if (team_ && finished && members_.target > position().step) return true;
        if (const auto complete = regroup(steps)) {
          end_team();
          replica_ = {};
          return *complete;
        }
      }
    } catch (...) {
      give_up(std::current_exception());
      throw;
    }
  }

 private:
  /// Enters the next generation. Returns whether this rank has the final state, if training is complete.
  std::optional<bool> regroup(std::int64_t steps) {
    quorum::Report report = participant_.report();
    report.target = steps;
    report.min_ranks = options_.min_ranks;
    report.late_limit = late_limit(options_.step_timeout);
    report.too_few_limit = options_.too_few_limit;
    quorum::Generation generation = client_.next(report);
    const std::uint64_t departures = client_.departures(generation);
    const int rank = worker_.rank();
    const bool included = std::binary_search(generation.ranks.begin(), generation.ranks.end(), rank);
    if (generation.complete && !included) return false;
    adopt(generation, rank);
    if (generation.complete) return true;
    // Most deaths are known by now, also those that other ranks knew first.
    failed_.settle(client_.departures(members_));
    end_team();
    try {
      begin_team(generation, departures);
    } catch (...) {
      if (!is_of_group() && !is_late(std::current_exception())) throw;
      fail_generation(std::current_exception());
    }
    return std::nullopt;
  }

  /// Settles the interrupted step. Its gradients are in the memory of the old group, which still exists.
  void adopt(const quorum::Generation& generation, int rank) {
    switch (participant_.adopt(generation, rank)) {
      case quorum::Participant::Adoption::kApply:
        apply();
        break;
      case quorum::Participant::Adoption::kDiscard:
      case quorum::Participant::Adoption::kCopy:
        buffers_.restore();
        break;
    }
    buffers_.forget();
    log(generation);
  }

  void log(const quorum::Generation& generation) {
    Log& log = worker_.runtime().log;
    if (!log.enabled(LogLevel::kInfo)) return;
    log.info(fmt::format("generation {} of '{}': ranks {} after step {}, {} of them with its state",
                         generation.number, options_.name, fmt::join(generation.ranks, ", "), generation.step,
                         generation.holders.size()));
  }

  /// Makes the group and brings all members to one state. Without effect if the generation has ended before all members
  /// were there; this rank then reports again.
  void begin_team(const quorum::Generation& generation, std::uint64_t departures) {
    members_ = generation;
    failed_.begin(members_, departures);
    if (!client_.await_members(members_, options_.step_timeout)) {
      worker_.runtime().log.info(fmt::format(
          "generation {} of '{}' ended before all of its ranks had joined: another rank needs the next one",
          members_.number, options_.name));
      return;
    }
    team_ = std::make_unique<Team>(make_group_, options_, generation);
    ElasticPosition position = cursor_.position();
    team_->copy_state(state_, position);
    cursor_.move_to(position);
    team_->compare(*module_, buffers_.buffers(), position);
    replica_.wrap(team_->group());
    participant_.copied();
  }

  void run_step() {
    const collective::Group& group = team_->group();
    const ElasticStep& step = cursor_.begin(group.rank(), group.size(), members_.number);
    drop_gradients();
    buffers_.take();
    std::exception_ptr failure;
    try {
      replica_.body(step);
    } catch (...) {
      failure = std::current_exception();
      if (is_of_group()) return fail_generation(failure);
      // The other ranks may wait for this one's forward, in the group of the wrapped module: they cannot vote. After a failed
      // call, which most likely failed on all of them, they do.
      if (!is_remote_failure(failure)) throw;
    }
    Team::Vote vote{
        .failed = failure != nullptr, .regroup = client_.is_awaited(members_), .step = position().step};
    if (!failure) participant_.prepare();
    try {
      vote = team_->vote(vote);
    } catch (...) {
      if (!is_of_group()) throw;
      return fail_generation(std::current_exception());
    }
    vote.failed ? fail_step(failure) : commit();
    if (vote.failed || vote.regroup) leave_team();
  }

  void commit() {
    remote_failures_ = 0;
    participant_.commit();
    apply();
    buffers_.forget();
  }

  /// Runs once for each committed step.
  void apply() {
    failed_.committed();
    replica_.apply(cursor_.step());
    cursor_.advance();
  }

  /// The group works, but calls of this rank or another one failed: the step is void. A rank on which they keep failing leaves.
  void fail_step(const std::exception_ptr& failure) {
    participant_.reject();
    if (!failure) return;
    if (++remote_failures_ > kMostRemoteFailures) std::rethrow_exception(failure);
  }

  /// Whether a failure is due to the group: one of its ranks ended or was late, or another rank has broken it.
  bool is_of_group() {
    if (client_.has_ended(members_)) return true;
    if (team_ && team_->group().backend()->failure()) return true;
    const collective::Group* wrapped = replica_.group ? replica_.group() : nullptr;
    return wrapped != nullptr && wrapped->backend()->failure().has_value();
  }

  /// Whether groups could not be made because a rank ended or was late.
  static bool is_late(const std::exception_ptr& failure) {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kTimedOut || error.kind() == ErrorKind::kDisconnected;
    } catch (...) {
    }
    return false;
  }

  /// The generation has ended for this rank; the next one may be formed of the same ranks.
  void fail_generation(const std::exception_ptr& failure) {
    if (!client_.has_ended(members_)) failed_.failed(to_error(failure));
    break_team(left_generation(worker_.rank(), members_.number, failure));
  }

  /// Notifies the other ranks, which may wait for this one.
  void break_team(const Error& cause) {
    worker_.runtime().log.info(cause.message());
    if (const collective::Group* wrapped = replica_.group ? replica_.group() : nullptr) wrapped->abort(cause);
    if (team_) team_->group().abort(cause);
    leave_team();
  }

  /// The old group is kept until the outcome of its last step is known.
  void leave_team() {
    if (team_) former_ = std::move(team_);
    team_.reset();
  }

  void end_team() {
    if (replica_.unwrap) replica_.unwrap();
    drop_gradients();
    former_.reset();
    team_.reset();
  }

  void drop_gradients() {
    for (const at::Tensor& parameter : module_->parameters()) parameter.mutable_grad().reset();
  }

  void give_up(const std::exception_ptr& failure) noexcept {
    try {
      break_team(left_training(worker_.rank(), members_.number, failure));
      end_team();
      client_.withdraw(describe(failure).text);
      buffers_.restore();
    } catch (...) {  // the caller gets the first failure
    }
    replica_ = {};
  }

  const Worker worker_;
  const MakeGroup make_group_;
  const std::shared_ptr<torch::nn::Module> module_;
  const ElasticOptions options_;
  quorum::GenerationClient client_;
  quorum::Participant participant_;
  StepCursor cursor_;
  BufferCopies buffers_;
  TrackedState state_;
  Replica replica_;
  quorum::Generation members_;
  FailedGenerations failed_{worker_.runtime().log, options_};
  std::unique_ptr<Team> team_, former_;
  int remote_failures_ = 0;
};

Training::Training(const Worker& worker, MakeGroup make_group, std::shared_ptr<torch::nn::Module> module,
                   ElasticOptions options)
    : impl_(std::make_unique<Impl>(worker, std::move(make_group), std::move(module), std::move(options))) {}
Training::~Training() = default;

void Training::add(std::string name, checkpoint::SourcePtr source) {
  impl_->add(std::move(name), std::move(source));
}
bool Training::run(std::int64_t steps, Replica replica) { return impl_->run(steps, std::move(replica)); }
const ElasticPosition& Training::position() const { return impl_->position(); }

}  // namespace torchspan::elastic
