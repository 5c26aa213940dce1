#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fmt/format.h>
#include <optional>
#include <unistd.h>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

#include <torchspan/checkpoint.h>
#include <torchspan/collective.h>
#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>
#include <torchspan/elastic.h>

#include "core/api/saturated_time.h"
#include "elastic/peer_copies.h"
#include "rendezvous/api/process_stat.h"

namespace torchspan::elastic {
namespace {

/// The processes of all ranks when a try to train began. Used by one thread.
class RankProcesses {
 public:
  struct Process {
    int rank = 0;
    std::int64_t pid = 0;
    std::uint64_t start_ticks = 0;  ///< tells it from a later process with this id
    friend bool operator==(const Process&, const Process&) = default;
  };

  /// Exchanges the processes of all ranks. Returns `number` of rank 0. Collective.
  std::uint64_t exchange(const collective::Group& group, std::uint64_t number) {
    const std::int64_t pid = ::getpid();
    const auto stat = rendezvous::read_process_stat(pid);
    ByteWriter mine;
    mine.put(number);
    mine.put(pid);
    mine.put(stat ? stat->start_ticks : std::uint64_t{0});
    const std::vector<Bytes> all = group.all_gather_bytes(mine.bytes());
    std::vector<Process> processes;
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      ByteReader in(all[rank]);
      const auto theirs = in.get<std::uint64_t>();
      if (group.ranks()[rank] == 0) number = theirs;
      Process& process = processes.emplace_back();
      process.rank = group.ranks()[rank];
      process.pid = in.get<std::int64_t>();
      process.start_ticks = in.get<std::uint64_t>();
    }
    changed_ = processes != processes_;
    processes_ = std::move(processes);
    return number;
  }

  /// Whether the last exchange found another process of a rank than the one before.
  bool changed() const { return changed_; }

  /// One that a signal or a debugger has stopped. Finds only processes of this host: those of other hosts die when they
  /// are silent.
  std::optional<Process> stopped() const {
    for (const Process& process : processes_) {
      const auto stat = rendezvous::read_process_stat(process.pid);
      if (stat && stat->start_ticks == process.start_ticks && stat->stopped()) return process;
    }
    return std::nullopt;
  }

 private:
  std::vector<Process> processes_;
  bool changed_ = false;
};

}  // namespace

}  // namespace torchspan::elastic

namespace torchspan {
namespace {

/// Between two attempts while a rank is missing.
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
      await_missing(patience);
      try {
        return attempt(steps, make);
      } catch (...) {
        const Error error = to_error(std::current_exception());
        const bool missed = std::exchange(missed_, false) || misses_rank(error);
        if (group_failed_with(ErrorKind::kTimedOut)) late_after_ = furthest_;
        group_.reset();
        if (!missed) throw;
        const bool elsewhere = std::exchange(failed_at_, at_) != at_;
        if (std::exchange(replaced_, false) || elsewhere) patience = patience_from_now();
        check_hope(error.message(), patience);
        if (!interrupted_)
          worker_.runtime().log.warning(
              fmt::format("training begins again, because a rank is missing: {}", error.message()));
        interrupted_ = true;
      }
      executor().sleep(kNextAttempt);
    }
  }

 private:
  Executor& executor() const { return worker_.runtime().executor; }
  Deadline patience_from_now() const { return executor().deadline_in(options_.replacement_limit); }

  /// Which worker training cannot continue without: one that has died or left and was not replaced, or one that is
  /// stopped.
  std::optional<std::string> missing() const {
    const auto stopped = processes_.stopped();
    for (const WorkerInfo& one : worker_.workers()) {
      const int rank = static_cast<int>(one.rank);
      if (rank == worker_.rank()) continue;
      if (!worker_.backend()->is_present(one.rank))
        return fmt::format("'{}' (rank {}) has died or left", one.name, rank);
      if (stopped && stopped->rank == rank) {
        return fmt::format(
            "'{}' (rank {}, process {}) is stopped by a signal or a debugger; continue it (kill -CONT {}), "
            "or end it "
            "(kill -KILL {}) so that a replacement takes its place",
            one.name, rank, stopped->pid, stopped->pid, stopped->pid);
      }
    }
    return std::nullopt;
  }

  void await_missing(Deadline patience) const {
    std::string known;
    while (const auto why = missing()) {
      check_hope(*why, patience);
      if (known != *why) worker_.runtime().log.warning(fmt::format("training waits: {}", *why));
      known = *why;
      executor().sleep(kNextAttempt);
    }
  }

  bool group_failed_with(ErrorKind kind) const {
    const auto failure = group_ ? group_->backend()->failure() : std::nullopt;
    return failure && failure->kind() == kind;
  }

  /// Whether an error is due to a rank that has died, is stopped or was late once, and not to the program.
  bool misses_rank(const Error& error) const {
    if (error.kind() == ErrorKind::kDisconnected) return !worker_.backend()->is_stopping();
    if (group_failed_with(ErrorKind::kDisconnected)) return true;
    // The late rank itself, which continues after a stop, gets this error, too.
    if (group_failed_with(ErrorKind::kTimedOut) && furthest_ > late_after_) return true;
    if (!group_ && interrupted_ && error.kind() == ErrorKind::kTimedOut) return true;
    return missing().has_value();
  }

  /// Throws if it is of no use to try again.
  void check_hope(const std::string& why, Deadline patience) const {
    if (worker_.rank() != 0 && !worker_.backend()->is_present(0)) {
      throw Error(ErrorKind::kDisconnected, fmt::format("this worker has lost rank 0, which has the list of "
                                                        "workers and cannot be replaced ({}): if its process "
                                                        "has ended, restart the job, which resumes from its "
                                                        "last checkpoint; if it declared this worker dead, "
                                                        "restart this worker",
                                                        why))
          .with_worker(worker_.name());
    }
    if (!patience.passed(executor().now())) return;
    throw Error(
        ErrorKind::kTimedOut,
        fmt::format(
            "training could not continue within RecoveryOptions::replacement_limit ({:.0f} s) without a "
            "rank; replace it (torchspan run --max-replacements), or restart the job: {}",
            to_seconds(options_.replacement_limit), why))
        .with_worker(worker_.name());
  }

  /// A rank that died may have been replaced before this one noticed: the ranks would wait for different things.
  void check_group() const {
    if (const auto failure = group_->backend()->failure()) throw Error(*failure);
  }

  /// Runs a part of an attempt. If it fails, the other ranks may wait for this one: the kind of the error that they get
  /// says whether they can continue with a replacement.
  template <class Body>
  auto in_group(const Body& body) {
    try {
      return body();
    } catch (...) {
      const Error error = to_error(std::current_exception());
      missed_ = misses_rank(error);
      group_->abort(Error(missed_ ? ErrorKind::kDisconnected : ErrorKind::kCancelled,
                          fmt::format("rank {} stopped training: {}", worker_.rank(), error.message())));
      throw;
    }
  }

  void attempt(std::int64_t steps, const MakeStep& make) {
    group_.emplace(make_group_({.name = "recovery", .timeout = options_.checkpoint.timeout}));
    ++round_;
    // Ranks that left an earlier attempt at different places would wait for each other under names of that attempt.
    CheckpointOptions options = options_.checkpoint;
    options.name += in_group([&] { return fmt::format(".{}", processes_.exchange(*group_, round_)); });
    replaced_ = replaced_ || processes_.changed();
    Step step;  // owns the objects, which outlive what refers to them
    std::optional<elastic::PeerCopies> copies;
    CheckpointManager manager(worker_, options);
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
    in_group([&] {
      step = make(state);
      check_group();
      train(steps, step, manager, copies);
      // A death until here is handled like one during training.
      worker_.backend()->all_gather_bytes("recovered." + options.name, {}, {},
                                          executor().deadline_in(no_limit_if_zero(options.timeout)));
    });
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
      at_ = number;
      step(number++);
      furthest_ = std::max(furthest_, number);
      if (number % options_.steps_per_checkpoint == 0 || number == steps) manager.save(number);
      if (copies && number % options_.steps_per_copy == 0 && number < steps) copies->begin(number);
    }
    if (copies) copies->finish();
    manager.wait();
    check_group();
  }

  /// Returns the step whose state all ranks have now; nullopt if there is none.
  std::optional<std::int64_t> restore(CheckpointManager& manager,
                                      std::optional<elastic::PeerCopies>& copies) {
    std::optional<elastic::CopyId> chosen;
    if (copies) {
      const bool looks = worker_.rank() == 0;
      chosen = copies->exchange(looks ? newest_step_in(options_.checkpoint.directory) : -1, round_);
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
  elastic::RankProcesses processes_;
  std::optional<collective::Group> group_;
  std::uint64_t round_ = 0;
  std::int64_t furthest_ = -1;             ///< step that training has reached
  std::int64_t late_after_ = -2;           ///< the same when a rank was late last
  std::int64_t at_ = -1, failed_at_ = -1;  ///< the step that began last, and the one that failed last
  bool replaced_ = false;                  ///< whether a rank was replaced since the last failure
  RecoveryReport report_;
  bool interrupted_ = false;  ///< and no attempt has restored the state since
  bool missed_ = false;       ///< whether the attempt failed because of a rank that is missing
};

RecoveringTrainer::RecoveringTrainer(const Worker& worker, MakeGroup make_group, RecoveryOptions options)
    : impl_(std::make_unique<Impl>(worker, std::move(make_group), std::move(options))) {}
RecoveringTrainer::~RecoveringTrainer() = default;
void RecoveringTrainer::run_steps(std::int64_t steps, const MakeStep& make) { impl_->run(steps, make); }
const RecoveryReport& RecoveringTrainer::report() const { return impl_->report(); }

}  // namespace torchspan
