#include <algorithm>
#include <fmt/format.h>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>

#include <torchspan/checkpoint/checkpoint.h>
#include <torchspan/core/error.h>
#include <torchspan/elastic/recovering_trainer.h>

#include "elastic/recovery/peer_copies.h"

namespace torchspan {
namespace {

/// Between two attempts while a dead rank has no replacement yet.
constexpr Duration kNextAttempt = std::chrono::milliseconds(50);

const RecoveryOptions& checked_recovery(const RecoveryOptions& options) {
  options.validate();
  return options;
}

/// Step of the newest checkpoint whose files look right; -1 if there is none. Nothing is read but headers.
std::int64_t newest_step_in(const std::string& directory) {
  try {
    for (const std::string& folder : Checkpoint::list(directory)) {
      try {
        return Checkpoint(folder).step();
      } catch (const Error&) {
        continue;  // damaged: restore() says so
      }
    }
  } catch (const Error&) {
    return -1;  // there is no directory yet
  }
  return -1;
}

}  // namespace

void RecoveryOptions::validate() const {
  const auto refuse = [](const std::string& why) { throw_invalid("RecoveryOptions::" + why); };
  if (checkpoint.directory.empty()) refuse("checkpoint.directory is empty; name a folder");
  if (!checkpoint.participants.empty())
    refuse("checkpoint.participants names workers; leave it empty, because all ranks take part");
  if (steps_per_checkpoint < 1)
    refuse(fmt::format("steps_per_checkpoint is {}; it must be 1 or more", steps_per_checkpoint));
  if (steps_per_copy < 0)
    refuse(fmt::format("steps_per_copy is {}; it must be 0 (no copies) or more", steps_per_copy));
  if (replacement_limit <= Duration::zero()) refuse("replacement_limit must be more than zero");
}

class RecoveringTrainer::Impl {
 public:
  Impl(const Worker& worker, MakeGroup make_group, RecoveryOptions options)
      : worker_(worker), make_group_(std::move(make_group)), options_(checked_recovery(options)) {}

  const RecoveryReport& report() const { return report_; }

  void run(std::int64_t steps, const MakeStep& make) {
    Deadline patience = patience_from_now();
    for (;;) {
      const std::int64_t before = furthest_;
      await_replacements(patience);
      try {
        return attempt(steps, make);
      } catch (...) {
        const Error error = to_error(std::current_exception());
        const bool death = is_death(error);
        group_.reset();
        if (!death) throw;
        if (furthest_ > before) patience = patience_from_now();
        check_hope(error.message(), patience);
        if (!interrupted_)
          worker_.runtime().log.warning(
              fmt::format("training begins again after a death: {}", error.message()));
        interrupted_ = true;
      }
      executor().sleep(kNextAttempt);
    }
  }

 private:
  Executor& executor() const { return worker_.runtime().executor; }
  Deadline patience_from_now() const { return executor().deadline_in(options_.replacement_limit); }

  /// The first worker that has died or left and was not replaced.
  std::optional<WorkerInfo> missing() const {
    for (const WorkerInfo& one : worker_.workers()) {
      const bool self = static_cast<int>(one.rank) == worker_.rank();
      if (!self && !worker_.endpoint()->is_present(one.rank)) return one;
    }
    return std::nullopt;
  }

  void await_replacements(Deadline patience) const {
    while (const auto one = missing()) {
      check_hope(fmt::format("{} (rank {}) has died or left", one->name, one->rank), patience);
      executor().sleep(kNextAttempt);
    }
  }

  /// Whether an error is due to the death of a rank, and not to the program.
  bool is_death(const Error& error) const {
    if (error.kind() == ErrorKind::kDisconnected) return !worker_.endpoint()->is_stopping();
    const auto failure = group_ ? group_->backend()->failure() : std::nullopt;
    return (failure && failure->kind() == ErrorKind::kDisconnected) || missing().has_value();
  }

  /// Throws if it is of no use to try again.
  void check_hope(const std::string& why, Deadline patience) const {
    if (worker_.rank() != 0 && !worker_.endpoint()->is_present(0)) {
      throw Error(
          ErrorKind::kDisconnected,
          fmt::format(
              "rank 0, which has the list of workers, is gone and cannot be replaced ({}): restart the "
              "job, which resumes from its last checkpoint",
              why))
          .with_worker(worker_.name());
    }
    if (!patience.passed(executor().now())) return;
    throw Error(
        ErrorKind::kTimedOut,
        fmt::format("training could not go on within RecoveryOptions::replacement_limit ({:.0f} s) after a "
                    "death; start a replacement (torchspan run --max-replacements), or restart the job: {}",
                    to_seconds(options_.replacement_limit), why))
        .with_worker(worker_.name());
  }

  /// A rank that died may have been replaced before this one noticed: the ranks would wait for different things.
  void check_group() const {
    if (const auto failure = group_->backend()->failure()) throw Error(*failure);
  }

  void attempt(std::int64_t steps, const MakeStep& make) {
    group_.emplace(make_group_({.timeout = options_.checkpoint.timeout}));
    ++round_;
    Step step;  // owns the objects, which outlive what refers to them
    std::optional<elastic::PeerCopies> copies;
    CheckpointManager manager(worker_, options_.checkpoint);
    if (options_.steps_per_copy > 0 && group_->size() > 1) {
      copies.emplace(*group_, memory_, executor());
      if (options_.checkpoint.rng) copies->add("rng", checkpoint::rng_source());
    }
    RecoveryState::Copy copy;
    if (copies)
      copy = [&](const std::string& name, checkpoint::SourcePtr source) {
        copies->add(name, std::move(source));
      };
    RecoveryState state(manager, copy);
    try {
      step = make(state);
      check_group();
      train(steps, step, manager, copies);
    } catch (...) {
      // The other ranks may wait for this one. The kind says whether they can go on with a replacement.
      const Error error = to_error(std::current_exception());
      group_->abort(Error(is_death(error) ? ErrorKind::kDisconnected : ErrorKind::kCancelled,
                          fmt::format("rank {} stopped training: {}", worker_.rank(), error.message())));
      throw;
    }
  }

  void train(std::int64_t steps, const Step& step, CheckpointManager& manager,
             std::optional<elastic::PeerCopies>& copies) {
    const std::optional<std::int64_t> restored = restore(manager, copies);
    if (std::exchange(interrupted_, false)) ++report_.rebuilds;
    std::int64_t number = restored.value_or(0);
    // The first state is random: a death in the first steps must not change it.
    if (!restored) manager.save(0);
    if (copies) copies->begin(number);
    while (number < steps) {
      check_group();
      step(number++);
      furthest_ = std::max(furthest_, number);
      if (number % options_.steps_per_checkpoint == 0 || number == steps) manager.save(number);
      if (copies && number % options_.steps_per_copy == 0 && number < steps) copies->begin(number);
    }
    if (copies) copies->finish();
    manager.wait();
    check_group();
    worker_.barrier();  // a death until here is handled like one during training
  }

  /// Returns the step whose state all ranks have now; nullopt if there is none.
  std::optional<std::int64_t> restore(CheckpointManager& manager,
                                      std::optional<elastic::PeerCopies>& copies) {
    std::optional<elastic::CopyId> chosen;
    if (copies) {
      const bool looks = worker_.rank() == 0;
      chosen = copies->meet(looks ? newest_step_in(options_.checkpoint.directory) : -1, round_);
    }
    std::optional<std::int64_t> saved;
    if (!chosen || copies->newest_checkpoint() > chosen->step) saved = manager.restore();
    if (chosen && saved.value_or(-1) <= chosen->step) {
      copies->load(*chosen);
      ++report_.from_copies;
      return chosen->step;
    }
    if (saved) ++report_.from_checkpoints;
    return saved;
  }

  const Worker worker_;
  const MakeGroup make_group_;
  const RecoveryOptions options_;
  elastic::CopyMemory memory_;
  std::optional<collective::Group> group_;
  std::uint64_t round_ = 0;
  std::int64_t furthest_ = -1;  ///< step that training has reached
  RecoveryReport report_;
  bool interrupted_ = false;  ///< by a death, and no attempt has restored the state since
};

RecoveringTrainer::RecoveringTrainer(const Worker& worker, MakeGroup make_group, RecoveryOptions options)
    : impl_(std::make_unique<Impl>(worker, std::move(make_group), std::move(options))) {}
RecoveringTrainer::~RecoveringTrainer() = default;
void RecoveringTrainer::run_steps(std::int64_t steps, const MakeStep& make) { impl_->run(steps, make); }
const RecoveryReport& RecoveringTrainer::report() const { return impl_->report(); }

}  // namespace torchspan
