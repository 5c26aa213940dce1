#pragma once
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/runtime/local_pipeline.h"

namespace torchspan::pipeline {

/// What a worker waits for. Every wait makes one, so it refers to a text that lives as long as the pipeline.
struct Awaited {
  std::string_view name;  ///< begins with "wait for "
  int micro_batch = -1;   ///< -1: not for one
  friend bool operator==(const Awaited&, const Awaited&) = default;
};

/// Records the actions that this worker runs in a step, and the passes whose activations it holds.
class StepRecord {
 public:
  StepRecord(const LocalPipeline& local, const StepBegin& begin)
      : local_(local), id_(begin.id), start_(begin.arrived) {}

  void pass_began() { peak_ = std::max(peak_, ++live_); }
  void pass_ended() { --live_; }
  /// Passes whose activations the worker holds.
  int live() const { return live_; }
  /// An action begins; the worker's spans show it until add().
  void begin(const schedule::Action& action) {
    shown_.emplace(local_.worker.runtime().spans, SpanKind::kPipeline, schedule::to_string(action),
                   SpanLink{.id = id_.step, .part = action.micro_batch});
    awaited_ = {};
  }
  /// A wait begins, or continues if it is for the same; the worker's spans show it until end_wait() or begin().
  void begin_wait(const Awaited& awaited) {
    if (shown_ && awaited == awaited_) return;
    shown_.emplace(local_.worker.runtime().spans, SpanKind::kPipeline, awaited.name,
                   SpanLink{.id = id_.step, .part = awaited.micro_batch});
    awaited_ = awaited;
  }
  void end_wait() { shown_.reset(); }
  /// Records an action that ends now.
  void add(const schedule::Action& action, TimePoint begin) {
    const TimePoint end = local_.executor().now();
    ran_.push_back({action.kind, action.stage, action.micro_batch, (begin - start_).count(),
                    (end - start_).count(), live_});
    shown_.reset();
  }
  PartDone part(double loss) const { return {id_, local_.me, loss, peak_, ran_}; }

 private:
  const LocalPipeline& local_;
  const StepId id_;
  const TimePoint start_;
  int live_ = 0;  ///< passes between their forward and their end
  int peak_ = 0;
  std::vector<RanAction> ran_;
  std::optional<SpanScope> shown_;
  Awaited awaited_;
};

}  // namespace torchspan::pipeline
