#include "data_parallel/passes/pass_reducer.h"

#include <chrono>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

/// How long a reducer that is destroyed waits for the other ranks to begin a pass that was given up here.
constexpr Duration kLeaveLimit = std::chrono::seconds(1);
constexpr const char* kDiscarded =
    "an exception discarded the outputs of its forward before their backward pass";

/// In a layer of a pipeline, other ranks may reduce another micro-batch, whose operations are not those that this rank gives
/// up: aborts the group.
void abort_in_layer(const collective::Group& group, const StepPart& part, const std::string& reason) {
  if (part.kind == StepPart::Kind::kNone) return;
  group.abort(
      Error(ErrorKind::kCancelled,
            fmt::format("rank {} gave up its backward pass{}: {}. A DistributedDataParallel in a layer of a "
                        "pipeline cannot continue after that: make the pipeline and its layers again, on all "
                        "ranks",
                        group.ranks()[group.rank()], describe(part), reason)));
}

}  // namespace

PassReducer::PassReducer(std::shared_ptr<ReducerParts> parts)
    : parts_(std::move(parts)), empty_(*parts_), local_(parts_->slots.size()), graph_(parts_->slots.size()) {}

void PassReducer::close() {
  parts_->hooks.detach();
  if (const RoundPtr round = current()) give_up(round, "the reducer was destroyed during a reduction");
  if (!empty_.settle_for(kLeaveLimit)) {  // they wait for this rank elsewhere
    const collective::Group& group = parts_->group;
    group.abort(Error(
        ErrorKind::kCancelled,
        fmt::format("rank {} destroyed its DistributedDataParallel or Reducer after it gave up a backward "
                    "pass that the other ranks had not begun: {}",
                    group.ranks()[group.rank()], empty_.reason())));
  }
  settle();
  parts_->holds.wait();
}

PassReducer::RoundPtr PassReducer::current() const {
  MutexLock lock(mutex_);
  return round_;
}

std::optional<Error> PassReducer::settle() {
  // The program may know already that the pass failed, for example because a worker was lost.
  const RoundPtr round = current();
  if (round && round->is_concluded()) round->over().wait();
  return empty_.settle();
}

void PassReducer::announce(const ForwardLog::Record& record) {
  if (record->synchronize && !current()) parts_->forwards.announce(record);
}

void PassReducer::refuse_unfinished_round() {
  const RoundPtr round = current();
  if (!round || round->is_concluded() || round->sink() != nullptr) return;
  const std::string text = "the backward passes of the previous forward left parameters without gradients: " +
                           parts_->hooks.describe_missing(round->gradients().missing()) +
                           "; finish them before the next forward";
  give_up(round, text);
  settle();
  throw Error(ErrorKind::kInvalid, text);
}

RoundOptions PassReducer::round_options(const ForwardOptions& options) const {
  MutexLock lock(mutex_);
  return {.divisor = options.divisor,
          .leader = options.leader,
          .delayed = parts_->options.static_graph && !graph_.is_known()};
}

void PassReducer::shadow(const ForwardOptions& options) {
  settle();
  refuse_unfinished_round();
  empty_.shadow(round_options(options));
}

void PassReducer::refuse(const ForwardOptions& options, const std::string& reason) {
  abort_in_layer(parts_->group, StepPartScope::current(), reason);
  settle();
  if (give_up_paused(reason)) settle();
  empty_.refuse(round_options(options), reason);
}

void PassReducer::refuse_dropped() {
  const ForwardLog::Record dropped = parts_->forwards.take_dropped();
  if (!dropped) return;
  announce(dropped);
  refuse({.divisor = dropped->divisor, .leader = dropped->leader}, kDiscarded);
}

/// Runs while an exception propagates, so it must not throw. In join(), the next forward announces the round.
void PassReducer::mark_dropped(const std::shared_ptr<ForwardRecord>& record, std::size_t mark) {
  try {
    if (parts_->forwards.has_passed(record, mark)) return;
    if (record->part.kind != StepPart::Kind::kNone) {
      if (record->synchronize) abort_in_layer(parts_->group, record->part, kDiscarded);
      return;
    }
    const RoundPtr round = current();
    if (round && !record->announce && round->reduces(record) && give_up_paused(kDiscarded)) return;
    parts_->forwards.note_dropped(record);
    if (!record->announce && !current()) refuse_dropped();
  } catch (...) {
    const collective::Group& group = parts_->group;
    group.abort(Error(ErrorKind::kCancelled,
                      fmt::format("rank {} could not report that {}: {}", group.ranks()[group.rank()],
                                  kDiscarded, describe(std::current_exception()).text)));
  }
}

void PassReducer::mark_reached(engine::GradientSink& sink, const std::shared_ptr<ForwardRecord>& record,
                               Reached reached) {
  if (!parts_->hooks.pass_reaches_parameters()) return;
  if (parts_->forwards.is_skipped(record)) {
    throw Error(
        ErrorKind::kInvalid,
        "a backward pass goes through outputs of a step that the ranks skip, because agree() returned "
        "false; run the next step's forward");
  }
  settle();
  parts_->forwards.set_passed(record, reached.mark);
  announce(record);
  for (Future<void>& future : parts_->forwards.take_awaited(record)) sink.hold(std::move(future));
  if (!record->synchronize) return begin_local_pass(sink);

  const bool others_unfinished =
      parts_->options.find_unused_parameters && parts_->forwards.others_unfinished(record);
  parts_->undefined.pass_begins(sink);
  RoundPtr running, begun;
  Start start;
  {
    MutexLock lock(mutex_);
    running = round_;
    if (!running) {
      start = begin_round(sink, record, others_unfinished);
      begun = round_;
    }
  }
  if (reached.derivative && parts_->options.find_unused_parameters && !parts_->options.static_graph)
    (running ? running : begun)->defer_all();
  if (running) {
    if (!running->enter(sink, record)) return;
    MutexLock lock(mutex_);
    accepting_ = true;
    start.arrived = local_.take(sink.end());
  }
  const RoundPtr round = running ? running : begun;
  listen(sink, round);
  for (const std::size_t slot : start.arrived) gradient_ready(sink, slot);
  for (const std::size_t slot : start.unused) round->gradients().fill_unused(sink, slot);
  round->gradients().launch_full();
}

PassReducer::Start PassReducer::begin_round(engine::GradientSink& sink, const ForwardLog::Record& record,
                                            bool others_unfinished) {
  const DataParallelOptions& options = parts_->options;
  Start start;
  RoundOptions terms{.divisor = record->divisor, .leader = record->leader};
  if (options.static_graph && !graph_.is_known()) {
    terms.delayed = true;
    graph_.begin_recording();
  } else if (graph_.is_known()) {
    start.unused = graph_.begin_pass();
  } else if (options.find_unused_parameters) {
    terms.deferred = others_unfinished;
    if (!terms.deferred) start.unused = record->unused;
  }
  round_ = std::make_shared<Round>(*parts_, terms, sink, record);
  accepting_ = true;
  start.arrived = local_.take(sink.end());
  return start;
}

void PassReducer::begin_local_pass(engine::GradientSink& sink) {
  parts_->undefined.pass_begins(sink);
  {
    MutexLock lock(mutex_);
    if (round_ || !local_.begin(sink.end())) return;
  }
  forget_after(sink);
}

void PassReducer::listen(engine::GradientSink& sink, const RoundPtr& round) {
  const std::weak_ptr<PassReducer> weak = weak_from_this();
  sink.after_work([weak, round](const engine::PassStatus& status) {
    if (const auto self = weak.lock()) self->work_over(round, status);
  });
  sink.before_end([weak, round](const engine::PassStatus& status) {
    if (const auto self = weak.lock()) self->decide(round, status);
  });
  sink.after_pass([weak, round](const engine::PassStatus&) {
    if (const auto self = weak.lock()) self->pass_over(round);
  });
}

void PassReducer::forget_after(engine::GradientSink& sink) {
  sink.after_pass([weak = weak_from_this(), end = sink.end().get()](const engine::PassStatus&) {
    const auto self = weak.lock();
    if (!self) return;
    MutexLock lock(self->mutex_);
    self->local_.forget(end);
  });
}

void PassReducer::gradient_ready(engine::GradientSink& sink, std::size_t slot) {
  const at::Tensor gradient = sink.gradient(parts_->slots.tensor(slot));
  if (gradient.defined()) parts_->status.note_used(slot % parts_->slots.count());
  RoundPtr round;
  bool reduces = false;
  {
    MutexLock lock(mutex_);
    reduces = round_ && accepting_;
    if (reduces && is_complete(slot)) round = round_;
  }
  if (!reduces) return note_local(sink, slot);
  if (!round) return;
  round->gradients().accept(slot);
  round->gradients().fill(sink, slot, gradient);
  round->gradients().launch_full();
}

void PassReducer::note_local(engine::GradientSink& sink, std::size_t slot) {
  const bool expected = parts_->hooks.is_expected_elsewhere(slot, sink);
  bool first = false, stray = false;
  {
    MutexLock lock(mutex_);
    first = local_.is_idle();
    stray = local_.add(sink.end(), slot, expected);
  }
  if (stray) watch_stray(sink, slot);
  if (first) forget_after(sink);
}

bool PassReducer::is_complete(std::size_t slot) {
  if (round_->is_delayed()) {
    graph_.record(slot);
    return false;
  }
  if (!graph_.is_known()) return true;
  const StaticGraph::Arrival arrival = graph_.arrive(slot);
  if (arrival == StaticGraph::Arrival::kTooMany) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format(
            "parameter '{}' got more gradients than in the first step, but static_graph requires that "
            "every step is like the first; unset static_graph",
            parts_->slots.name(slot)));
  }
  return arrival == StaticGraph::Arrival::kLast;
}

void PassReducer::gradient_failed(const std::string& text) {
  if (const RoundPtr round = current()) round->note_reason(text);
}

bool PassReducer::is_reducing() const {
  MutexLock lock(mutex_);
  return round_ && accepting_;
}

bool PassReducer::expects_gradients(const engine::GradientSink& sink) const {
  MutexLock lock(mutex_);
  return (round_ && accepting_) || local_.has_begun(sink.end().get());
}

void PassReducer::watch_stray(engine::GradientSink& sink, std::size_t slot) {
  sink.after_work([weak = weak_from_this(), slot, end = sink.end().get()](const engine::PassStatus& status) {
    const auto self = weak.lock();
    if (!self || !status.ok()) return;
    {
      MutexLock lock(self->mutex_);
      if (!self->local_.is_stray(end)) return;
    }
    self->report_stray(slot);
  });
}

void PassReducer::report_stray(std::size_t slot) {
  const Unwrapped reaction = parts_->options.unwrapped_backward;
  if (reaction == Unwrapped::kIgnore) return;
  const std::string text = fmt::format(
      "a backward pass gave parameter '{}' a gradient but did not go through an output of the wrapper, so "
      "the gradient is not averaged and the replicas diverge. Call the wrapper instead of the module inside "
      "it, or use no_sync()",
      parts_->slots.name(slot));
  if (reaction == Unwrapped::kThrow) throw Error(ErrorKind::kInvalid, text);
  {
    MutexLock lock(mutex_);
    if (std::exchange(warned_, true)) return;
  }
  parts_->runtime.log.warning(text);
}

void PassReducer::fill_recorded(Round& round) {
  std::vector<std::size_t> order, used;
  {
    MutexLock lock(mutex_);
    order = graph_.end_recording();
    for (const std::size_t slot : order) {
      if (graph_.was_used(slot)) used.push_back(slot);
    }
  }
  engine::GradientSink& sink = *round.sink();
  for (const std::size_t slot : used) round.gradients().accept(slot);
  for (const std::size_t slot : used)
    round.gradients().fill(sink, slot, sink.gradient(parts_->slots.tensor(slot)));
  for (const std::size_t slot : order) round.gradients().fill_unused(sink, slot);
  round.gradients().launch_full();
}

void PassReducer::work_over(const RoundPtr& round, const engine::PassStatus& status) {
  if (round->is_given_up() || round->is_concluded()) return;
  if (!status.ok()) return give_up(round, describe(status.error).text);
  try {
    if (round->is_delayed()) fill_recorded(*round);
    if (round->is_deferred()) {
      for (const std::size_t slot : round->unreached()) round->gradients().fill_unused(*round->sink(), slot);
      round->gradients().launch_full();
    }
  } catch (...) {
    give_up(round, describe(std::current_exception()).text);
    throw;
  }
  const std::vector<std::size_t> left = round->gradients().missing();
  if (left.empty()) return;
  if (parts_->options.partial_backward && !round->all_passed()) {
    {
      MutexLock lock(mutex_);
      accepting_ = false;
    }
    round->gradients().copy_delayed(*round->sink());
    return round->pause();
  }
  const std::string text = fmt::format(
      "this backward pass left {} of {} parameters without a gradient, so nothing can be averaged: {}. {}",
      left.size(), parts_->slots.size(), parts_->hooks.describe_missing(left),
      parts_->options.static_graph
          ? "static_graph requires that every step is like the first; unset it"
          : "If the loss does not depend on them in every step, set find_unused_parameters; if more backward "
            "passes over other outputs of this forward follow, set partial_backward");
  give_up(round, text);
  throw Error(ErrorKind::kInvalid, text);
}

void PassReducer::decide(const RoundPtr& round, const engine::PassStatus& status) {
  if (!round->is_open()) return;
  if (!status.ok()) return give_up(round, describe(status.error).text);
  round->conclude();
}

/// Runs on the thread that reaches the end of the pass. No other thread uses the pass's gradients then.
void PassReducer::pass_over(const RoundPtr& round) {
  if (current() != round || !round->is_concluded()) return;
  struct Over {
    PassReducer& self;
    ~Over() {
      RoundPtr over;
      {
        MutexLock lock(self.mutex_);
        over.swap(self.round_);
      }
      over->set_over();
    }
  } over{*this};
  round->finish_pass();
}

bool PassReducer::give_up_paused(const std::string& reason) {
  const RoundPtr round = current();
  if (!round || round->is_concluded() || round->sink() != nullptr) return false;
  give_up(round, reason);
  return true;
}

void PassReducer::give_up(const RoundPtr& round, const std::string& reason) {
  abort_in_layer(parts_->group, StepPartScope::current(), reason);
  if (!round->give_up(reason)) return;
  {
    MutexLock lock(mutex_);
    if (round_ == round) round_.reset();
  }
  empty_.finish(*round);
}

}  // namespace torchspan::data_parallel
