#include "pipeline/runtime/overlapped_steps.h"

#include <utility>

#include "pipeline/runtime/step_failures.h"

namespace torchspan::pipeline {

/// Runs actions and takes events of the newer step for the older one.
class OverlappedSteps::Filler final : public NextStep {
 public:
  explicit Filler(OverlappedSteps& steps) : steps_(steps), entry_(*steps.newer_) {}

  bool run_one(int held) override {
    if (entry_.failure) return false;
    const auto action = entry_.step->next_early(held);
    if (!action) return false;
    try {
      const VersionScope scope(steps_.versions_, entry_.version);
      entry_.step->run_early(*action);
    } catch (...) {
      steps_.fail(entry_);
    }
    return true;
  }
  void accept(StepEvent& event) override {
    if (entry_.failure) return;
    try {
      entry_.step->accept(event);
    } catch (...) {
      steps_.fail(entry_);
    }
  }

 private:
  OverlappedSteps& steps_;
  Entry& entry_;
};

/// Keeps the current exception as the failure of a step. Reports it unless it is the report of another worker.
void OverlappedSteps::fail(Entry& entry) {
  try {
    throw;
  } catch (const EndedElsewhere& error) {
    entry.failure.emplace(error);
  } catch (...) {
    entry.failure.emplace(to_error(std::current_exception()));
    report_failure(local_, entry.id, *entry.failure);
  }
}

void OverlappedSteps::begin(std::uint64_t id, const std::function<StepWork()>& prepare) {
  // Of a step that has failed, nothing can follow: end() throws.
  if (older_ && older_->failure) return;
  newer_ = std::make_unique<Entry>();
  newer_->id = id;
  newer_->version = versions_.capture();
  try {
    newer_->step = std::make_unique<Step>(local_, prepare());
  } catch (...) {
    fail(*newer_);
  }
}

OverlappedSteps::Ended OverlappedSteps::run_older() {
  if (older_->failure) throw EndedElsewhere(*older_->failure);
  std::optional<Filler> filler;
  if (newer_) filler.emplace(*this);
  const VersionScope scope(versions_, older_->version);
  older_->step->run_to_end(filler ? &*filler : nullptr);
  return {older_->step->report(), older_->step->loss(), trains()};
}

std::optional<OverlappedSteps::Ended> OverlappedSteps::end() {
  std::optional<Ended> ended;
  if (older_) {
    try {
      ended = run_older();
    } catch (const EndedElsewhere& error) {
      drop();
      throw Error(error);
    } catch (...) {
      const Error error = to_error(std::current_exception());
      report_failure(local_, older_->id, error);
      drop();
      throw error;
    }
    versions_.add_gradients(older_->version);
  }
  older_ = std::move(newer_);
  if (older_) versions_.renew(older_->version);
  return ended;
}

/// A step that has not ended restores `.grad`, which must be its own.
void OverlappedSteps::drop(std::unique_ptr<Entry>& entry) {
  if (!entry) return;
  const VersionScope scope(versions_, entry->version);
  entry->step.reset();
}

void OverlappedSteps::drop() {
  drop(newer_);
  drop(older_);
  newer_.reset();
  older_.reset();
}

}  // namespace torchspan::pipeline
