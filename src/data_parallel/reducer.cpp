#include <chrono>
#include <cstdint>
#include <fmt/format.h>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/reducer.h>

#include "core/api/throw_invalid.h"
#include "core/api/timeout_notice.h"
#include "data_parallel/api/agreement.h"
#include "data_parallel/reducer_impl.h"
#include "engine/api/grad_field_sink.h"

namespace torchspan::data_parallel {
namespace {

/// How long a reducer that is destroyed waits for the other ranks to begin a pass that was given up here.
constexpr Duration kLeaveLimit = std::chrono::seconds(1);
constexpr const char* kDiscarded =
    "an exception discarded the outputs of its forward before their backward pass";

/// For ranks that take part in a backward pass which the others skip.
constexpr const char* kAgreement =
    ". If the ranks decide between forward and backward whether to skip a step, let them call agree() for it "
    "instead of a "
    "reduction of the program";

Error with_agreement(const Error& error) { return Error(error.kind(), error.message() + kAgreement); }

int this_rank(const collective::Group& group) { return group.ranks()[group.rank()]; }

/// In a layer of a pipeline, other ranks may reduce another micro-batch, whose operations are not those that this rank gives
/// up: aborts the group.
void abort_in_layer(const collective::Group& group, const StepPart& part, const std::string& reason) {
  if (part.kind == StepPart::Kind::kNone) return;
  group.abort(
      Error(ErrorKind::kCancelled,
            fmt::format("rank {} gave up its backward pass{}: {}. A DistributedDataParallel in a layer of a "
                        "pipeline cannot continue after that: make the pipeline and its layers again, on all "
                        "ranks",
                        this_rank(group), describe(part), reason)));
}

}  // namespace

Reducer::Impl::Impl(const Replicas& replicas, const collective::Group& group, DataParallelOptions options)
    : context_(replicas, group, std::move(options)),
      parent_(group),
      local_(context_.slots.size()),
      graph_(context_.slots.size()) {}

void Reducer::Impl::close() {
  context_.hooks.detach();
  if (const RoundPtr round = current()) give_up(round, "the reducer was destroyed during a reduction");
  Future<void> given_up;
  std::string reason;
  {
    MutexLock lock(context_.mutex);
    given_up = given_up_;
    reason = given_up_reason_;
  }
  const auto is_over = [&] {
    try {
      return !given_up.valid() || given_up.wait_for(kLeaveLimit);
    } catch (const Error&) {  // its host has ended
      return true;
    }
  };
  if (!is_over()) {  // they wait for this rank elsewhere
    context_.group.abort(Error(
        ErrorKind::kCancelled,
        fmt::format("rank {} destroyed its DistributedDataParallel or Reducer after it gave up a backward "
                    "pass that the other ranks had not begun: {}",
                    this_rank(context_.group), reason)));
  }
  settle();
  context_.holds.wait();
}

void Reducer::Impl::begin_forward() {
  if (c10::GradMode::is_enabled()) {
    if (const auto late = settle()) throw with_agreement(*late);
    const auto failure = context_.group.backend()->failure();
    if (failure && failure->kind() == ErrorKind::kTimedOut) throw with_agreement(*failure);
    fail_dropped();
    settle();
  }
  forward_began_ = context_.runtime.executor.now();
}

std::vector<at::Tensor> Reducer::Impl::prepare(std::vector<at::Tensor> outputs,
                                               const ForwardOptions& options) {
  if (!c10::GradMode::is_enabled()) return outputs;
  settle();
  if (options.synchronize) fail_unfinished_round();
  context_.slots.check_frozen();
  context_.hooks.attach_again(*context_.buckets);
  auto record = std::make_shared<ForwardRecord>();
  record->synchronize = options.synchronize;
  record->terms = options.terms;
  record->awaited = options.awaited;
  record->part = StepPartScope::current();
  record->announce = options.announce;
  const DataParallelOptions& wrapper = context_.options;
  if (wrapper.find_unused_parameters && !wrapper.static_graph)
    record->unused = context_.slots.unreached_from(outputs);
  outputs = mark_outputs(std::move(outputs), record,
                         {.reducer = weak_from_this(),
                          .passes = context_.hooks.passes(),
                          .together = wrapper.find_unused_parameters && !wrapper.partial_backward});
  const TimePoint now = context_.runtime.executor.now();
  std::optional<TimePoint> began;
  std::uint64_t forward = 0;
  {
    MutexLock lock(context_.mutex);
    context_.forwards.add(record);
    if (!options.synchronize) return outputs;
    context_.forward_count = (context_.forward_count + 1) % kForwardsEnd;
    forward = ++context_.stats.forwards;
    began = std::exchange(forward_began_, std::nullopt);
    if (began) context_.stats.forward = now - *began;
  }
  if (began) context_.runtime.spans.record(SpanKind::kBucket, "forward", *began, forward);
  return outputs;
}

/// A rank that does not continue takes part in the reduction of a step in which it has none, because others may be in it:
/// after the exchange, those that are not take part in it, too. All messages but the exchange are on the reducer's group,
/// whose operations do not wait for those of `parent_`.
bool Reducer::Impl::agree(bool ok, const BegunForwards& begun) {
  const std::string reason = "it does not continue the step: agree(false)";
  const std::string others_stop = "another rank does not continue the step: agree(false)";
  const auto rounds = [&] { return static_cast<std::int64_t>(context_.rounds - agreed_rounds_); };
  const auto given_up = [&] {
    MutexLock lock(context_.mutex);
    return context_.given_up;
  };
  std::int64_t forwards = begun.count;
  const auto join = [&] {
    if (begun.join) begun.join();
    ++forwards;
  };
  if (!ok && !give_up_paused(reason)) {
    ForwardPtr open;
    {
      MutexLock lock(context_.mutex);
      open = context_.forwards.unreached();
    }
    if (open) {
      fail_next_round(open->terms, reason);
    } else if (given_up() == agreed_given_up_) {  // others may be in the next forward or pass of the step
      join();
      fail_next_round({}, reason);
    }
  }
  const at::Tensor word = at::tensor({std::int64_t{ok ? 0 : 1}, rounds(), forwards}, at::kLong);
  parent_.all_reduce(word, collective::kMax).wait();
  const auto* most = word.data_ptr<std::int64_t>();
  while (rounds() < most[1] || forwards < most[2]) {
    if (forwards < most[2]) join();
    if (rounds() < most[1] && !give_up_paused(ok ? others_stop : reason)) fail_next_round({}, "");
  }
  if (most[0] != 0) give_up_paused(others_stop);
  settle();
  agreed_rounds_ = context_.rounds;
  agreed_given_up_ = given_up();
  if (most[0] == 0) return true;
  {
    ForwardPtr dropped;
    MutexLock lock(context_.mutex);
    dropped = context_.forwards.skip();
    context_.forward_count = 0;
  }
  context_.restore_undefined();
  return false;
}

std::shared_ptr<Round> Reducer::Impl::current() const {
  MutexLock lock(context_.mutex);
  return round_;
}

std::optional<Error> Reducer::Impl::settle() {
  // The program may know already that the pass failed, for example because a worker was lost.
  const RoundPtr round = current();
  if (round && round->is_concluded()) round->written_back().wait();
  Future<void> given_up;
  std::string reason;
  {
    MutexLock lock(context_.mutex);
    given_up = given_up_;
    reason = given_up_reason_;
  }
  std::optional<Error> late;
  if (!given_up.valid()) return late;
  try {
    const Duration warned = WaitWarnings().next();
    if (!given_up.wait_for(warned)) {
      context_.runtime.log.warning(
          fmt::format("rank {} gave up its backward pass, because {}, and has waited {:.0f} s for the other "
                      "ranks to begin "
                      "theirs{}",
                      this_rank(context_.group), reason, to_seconds(warned), kAgreement));
    }
    given_up.wait();
  } catch (const Error& error) {  // reported when it happened; the next operation of a broken group fails too
    if (error.kind() == ErrorKind::kTimedOut) {
      late.emplace(error.kind(),
                   fmt::format("rank {} gave up its backward pass, because {}, and other ranks did not "
                               "begin theirs: {}",
                               this_rank(context_.group), reason, error.message()));
    }
  }
  MutexLock lock(context_.mutex);
  given_up_ = {};
  return late;
}

void Reducer::Impl::announce(const ForwardPtr& record) {
  std::function<RoundTerms()> announces;
  {
    MutexLock lock(context_.mutex);
    if (record->synchronize && !round_) announces = record->announce;
  }
  if (!announces) return;
  const RoundTerms terms = announces();
  MutexLock lock(context_.mutex);
  record->terms = terms;
}

void Reducer::Impl::fail_unfinished_round() {
  const RoundPtr round = current();
  if (!round || round->is_concluded() || round->sink() != nullptr) return;
  const std::string text = "the backward passes of the previous forward left parameters without gradients: " +
                           context_.hooks.describe_missing(round->gradients().missing()) +
                           "; finish them before the next forward";
  give_up(round, text);
  settle();
  throw_invalid(text);
}

Reducer::Impl::RoundPtr Reducer::Impl::begin_empty_round(const RoundTerms& terms) {
  engine::GradFieldSink between_passes(0);
  move_out_of_buckets(context_, *context_.buckets, between_passes, /*keep_values=*/true);
  bool delayed = false;
  {
    MutexLock lock(context_.mutex);
    delayed = context_.options.static_graph && !graph_.is_known();
  }
  return std::make_shared<Round>(context_, terms, delayed);
}

void Reducer::Impl::join_with_zeros(const RoundTerms& terms) {
  settle();
  fail_unfinished_round();
  const RoundPtr round = begin_empty_round(terms);
  round->conclude_with_zeros(/*runs_forwards=*/false);
  round->reduced().wait();
  round->install_rebuilt();
}

void Reducer::Impl::fail_next_round(const RoundTerms& terms, const std::string& reason) {
  abort_in_layer(context_.group, StepPartScope::current(), reason);
  settle();
  if (give_up_paused(reason)) settle();
  const RoundPtr round = begin_empty_round(terms);
  if (!reason.empty()) round->give_up(reason);
  end_given_up(*round);
}

void Reducer::Impl::end_given_up(Round& round) {
  try {
    round.conclude_with_zeros();
  } catch (...) {
    const collective::Group& group = context_.group;
    group.abort(Error(ErrorKind::kCancelled, fmt::format("rank {} cannot continue its reduction: {}",
                                                         this_rank(group), round.reason())));
    return;
  }
  context_.restore_undefined();
  Future<void> reduced = round.reduced();
  std::string reason = round.reason();
  MutexLock lock(context_.mutex);
  ++context_.given_up;
  given_up_ = std::move(reduced);
  given_up_reason_ = std::move(reason);
}

void Reducer::Impl::fail_dropped() {
  ForwardPtr dropped;
  {
    MutexLock lock(context_.mutex);
    dropped = context_.forwards.take_dropped();
  }
  if (!dropped) return;
  announce(dropped);
  fail_next_round(dropped->terms, kDiscarded);
}

/// Runs while an exception propagates, so it must not throw. In join(), the next forward announces the round.
void Reducer::Impl::mark_dropped(const ForwardPtr& record, std::size_t mark) {
  try {
    {
      MutexLock lock(context_.mutex);
      if (record->passed[mark]) return;
    }
    if (record->part.kind != StepPart::Kind::kNone) {
      if (record->synchronize) abort_in_layer(context_.group, record->part, kDiscarded);
      return;
    }
    const RoundPtr round = current();
    if (round && !record->announce && round->reduces(record) && give_up_paused(kDiscarded)) return;
    {
      MutexLock lock(context_.mutex);
      context_.forwards.note_dropped(record);
    }
    if (!record->announce && !current()) fail_dropped();
  } catch (...) {
    const collective::Group& group = context_.group;
    group.abort(
        Error(ErrorKind::kCancelled, fmt::format("rank {} could not report that {}: {}", this_rank(group),
                                                 kDiscarded, describe(std::current_exception()).text)));
  }
}

void Reducer::Impl::mark_reached(engine::GradientSink& sink, const ForwardPtr& record, Reached reached) {
  if (!context_.hooks.pass_reaches_parameters()) return;
  bool skipped = false;
  {
    MutexLock lock(context_.mutex);
    skipped = record->skipped;
  }
  if (skipped) {
    throw_invalid(
        "a backward pass goes through outputs of a step that the ranks skip, because agree() returned false; "
        "run the next step's forward");
  }
  settle();
  {
    MutexLock lock(context_.mutex);
    record->passed[reached.mark] = true;
  }
  announce(record);
  std::vector<Future<void>> awaited;
  {
    MutexLock lock(context_.mutex);
    awaited = std::exchange(record->awaited, {});
  }
  for (Future<void>& future : awaited) sink.hold(std::move(future));
  if (!record->synchronize) return begin_local_pass(sink);

  const DataParallelOptions& options = context_.options;
  RoundPtr round;
  std::vector<std::size_t> arrived, unused;
  bool begins = false, deferred = false;
  {
    MutexLock lock(context_.mutex);
    context_.undefined.pass_begins(context_.slots, sink);
    deferred = options.find_unused_parameters && context_.forwards.others_unfinished(record);
    begins = !round_;
    if (begins) {
      unused = begin_round(sink, record, deferred);
      arrived = local_.take(sink.end());
    }
    round = round_;
  }
  if (begins && deferred && !options.static_graph) round->defer_unused(/*all=*/false);
  if (reached.derivative && options.find_unused_parameters && !options.static_graph)
    round->defer_unused(/*all=*/true);
  if (!begins) {
    if (!round->enter(sink, record)) return;
    MutexLock lock(context_.mutex);
    accepting_ = true;
    arrived = local_.take(sink.end());
  }
  listen(sink, round);
  for (const std::size_t slot : arrived) gradient_ready(sink, slot);
  for (const std::size_t slot : unused) round->gradients().put_unused(sink, slot);
}

std::vector<std::size_t> Reducer::Impl::begin_round(engine::GradientSink& sink, const ForwardPtr& record,
                                                    bool others_unfinished) {
  const DataParallelOptions& options = context_.options;
  std::vector<std::size_t> unused;
  bool delayed = false;
  if (options.static_graph && !graph_.is_known()) {
    delayed = true;
    graph_.begin_recording();
  } else if (graph_.is_known()) {
    unused = graph_.begin_pass();
  } else if (options.find_unused_parameters && !others_unfinished) {
    unused = record->unused;
  }
  round_ = std::make_shared<Round>(context_, record, sink, delayed);
  accepting_ = true;
  return unused;
}

void Reducer::Impl::begin_local_pass(engine::GradientSink& sink) {
  {
    MutexLock lock(context_.mutex);
    context_.undefined.pass_begins(context_.slots, sink);
    if (round_ || !local_.begin(sink.end())) return;
  }
  forget_after(sink);
}

void Reducer::Impl::listen(engine::GradientSink& sink, const RoundPtr& round) {
  const std::weak_ptr<Impl> weak = weak_from_this();
  sink.after_work([weak, round](const engine::PassStatus& status) {
    if (const auto self = weak.lock()) self->work_over(round, status);
  });
  sink.before_end([weak, round](const engine::PassStatus& status) {
    const auto self = weak.lock();
    if (!self || !round->is_open()) return;
    status.ok() ? round->conclude() : self->give_up(round, describe(status.error).text);
  });
  sink.after_pass([weak, round](const engine::PassStatus&) {
    if (const auto self = weak.lock()) self->pass_over(round);
  });
}

void Reducer::Impl::forget_after(engine::GradientSink& sink) {
  sink.after_pass([weak = weak_from_this(), end = sink.end().get()](const engine::PassStatus&) {
    const auto self = weak.lock();
    if (!self) return;
    MutexLock lock(self->context_.mutex);
    self->local_.forget(end);
  });
}

void Reducer::Impl::gradient_ready(engine::GradientSink& sink, std::size_t slot) {
  const at::Tensor gradient = sink.gradient(context_.slots.tensor(slot));
  RoundPtr round;
  bool reduces = false;
  {
    MutexLock lock(context_.mutex);
    if (gradient.defined() && !context_.used.empty()) context_.used[slot % context_.slots.count()] = 1;
    reduces = round_ && accepting_;
    if (reduces && is_complete(slot)) round = round_;
  }
  if (!reduces) return note_local(sink, slot);
  if (!round) return;
  round->gradients().accept(slot);
  round->gradients().put(sink, slot, gradient);
}

bool Reducer::Impl::is_complete(std::size_t slot) {
  if (round_->is_delayed()) {
    graph_.record(slot);
    return false;
  }
  if (!graph_.is_known()) return true;
  const StaticGraph::Arrival arrival = graph_.arrive(slot);
  if (arrival == StaticGraph::Arrival::kTooMany) {
    throw_invalid(
        "parameter '{}' got more gradients than in the first step, but static_graph requires that every step "
        "is like the first; unset static_graph",
        context_.slots.name(slot));
  }
  return arrival == StaticGraph::Arrival::kLast;
}

bool Reducer::Impl::is_reducing() const {
  MutexLock lock(context_.mutex);
  return round_ && accepting_;
}

bool Reducer::Impl::expects_gradients(const engine::GradientSink& sink) const {
  MutexLock lock(context_.mutex);
  return (round_ && accepting_) || local_.has_begun(sink.end().get());
}

void Reducer::Impl::note_local(engine::GradientSink& sink, std::size_t slot) {
  const bool expected = context_.hooks.is_expected_elsewhere(slot, sink);
  bool first = false, stray = false;
  {
    MutexLock lock(context_.mutex);
    first = local_.is_idle();
    stray = local_.add(sink.end(), slot, expected);
  }
  if (stray) report_stray(sink, slot);
  if (first) forget_after(sink);
}

/// At the end of the pass's work: the pass may still go through an output of the wrapper.
void Reducer::Impl::report_stray(engine::GradientSink& sink, std::size_t slot) {
  sink.after_work([weak = weak_from_this(), slot, end = sink.end().get()](const engine::PassStatus& status) {
    const auto self = weak.lock();
    if (!self || !status.ok()) return;
    ReducerContext& context = self->context_;
    const OnUnreducedBackward reaction = context.options.unwrapped_backward;
    if (reaction == OnUnreducedBackward::kIgnore) return;
    {
      MutexLock lock(self->context_.mutex);
      if (!self->local_.is_stray(end)) return;
      if (reaction == OnUnreducedBackward::kWarnOnce && std::exchange(self->warned_, true)) return;
    }
    const std::string text = fmt::format(
        "a backward pass gave parameter '{}' a gradient but did not go through an output of the wrapper, so "
        "the gradient is not averaged and the replicas diverge. Call the wrapper instead of the module "
        "inside it, or use no_sync()",
        context.slots.name(slot));
    if (reaction == OnUnreducedBackward::kThrow) throw_invalid(text);
    context.runtime.log.warning(text);
  });
}

void Reducer::Impl::fill_recorded(Round& round) {
  std::vector<std::size_t> order, used;
  {
    MutexLock lock(context_.mutex);
    order = graph_.end_recording();
    for (const std::size_t slot : order) {
      if (graph_.was_used(slot)) used.push_back(slot);
    }
  }
  engine::GradientSink& sink = *round.sink();
  for (const std::size_t slot : used) round.gradients().accept(slot);
  for (const std::size_t slot : used)
    round.gradients().put(sink, slot, sink.gradient(context_.slots.tensor(slot)));
  for (const std::size_t slot : order) round.gradients().put_unused(sink, slot);
}

void Reducer::Impl::work_over(const RoundPtr& round, const engine::PassStatus& status) {
  if (round->is_given_up() || round->is_concluded()) return;
  if (!status.ok()) return give_up(round, describe(status.error).text);
  RoundGradients& gradients = round->gradients();
  try {
    if (round->is_delayed()) fill_recorded(*round);
    if (round->defers_unused()) {
      for (const std::size_t slot : round->unreached()) gradients.put_unused(*round->sink(), slot);
    }
  } catch (...) {
    give_up(round, describe(std::current_exception()).text);
    throw;
  }
  const std::vector<std::size_t> left = gradients.missing();
  if (left.empty()) return;
  if (context_.options.partial_backward && !round->all_passed()) {
    {
      MutexLock lock(context_.mutex);
      accepting_ = false;
    }
    gradients.copy_delayed(*round->sink());
    return round->pause();
  }
  const std::string text = fmt::format(
      "this backward pass left {} of {} parameters without a gradient, so nothing can be averaged: {}. {}",
      left.size(), context_.slots.size(), context_.hooks.describe_missing(left),
      context_.options.static_graph
          ? "static_graph requires that every step is like the first; unset it"
          : "If the loss does not depend on them in every step, set find_unused_parameters; if more backward "
            "passes over other outputs of this forward follow, set partial_backward");
  give_up(round, text);
  throw_invalid(text);
}

/// Runs on the thread that reaches the end of the pass. No other thread uses the pass's gradients then.
void Reducer::Impl::pass_over(const RoundPtr& round) {
  if (current() != round || !round->is_concluded()) return;
  struct End {
    Impl& self;
    ~End() {
      RoundPtr ended;
      {
        MutexLock lock(self.context_.mutex);
        ended.swap(self.round_);
      }
      ended->set_written_back();
    }
  } end{*this};
  round->finish_pass();
}

bool Reducer::Impl::give_up_paused(const std::string& reason) {
  const RoundPtr round = current();
  if (!round || round->is_concluded() || round->sink() != nullptr) return false;
  give_up(round, reason);
  return true;
}

void Reducer::Impl::give_up(const RoundPtr& round, const std::string& reason) {
  abort_in_layer(context_.group, StepPartScope::current(), reason);
  if (!round->give_up(reason)) return;
  RoundPtr given_up;  // released without the lock
  {
    MutexLock lock(context_.mutex);
    if (round_ == round) given_up.swap(round_);
  }
  end_given_up(*round);
}

Reducer::Reducer(std::vector<Parameter> parameters, collective::Group group, DataParallelOptions options)
    : Reducer(Replicas{std::move(parameters)}, std::move(group), std::move(options)) {}

Reducer::Reducer(Replicas replicas, collective::Group group, DataParallelOptions options) {
  data_parallel::agree(group, reducer_agreement(replicas, options, group));
  Agreement built;  // a rank without memory for its buckets fails here on all ranks, not in the first step
  try {
    impl_ = make_process_shared<Impl>(replicas, group, std::move(options));
    impl_->context().hooks.attach(impl_);
  } catch (...) {
    built.failure = describe(std::current_exception()).text;
  }
  try {
    data_parallel::agree(group, built);
  } catch (...) {
    if (impl_) impl_->close();
    throw;
  }
}

Reducer::~Reducer() {
  if (process_.is_current()) impl_->close();
}

void Reducer::begin_forward() { impl_->begin_forward(); }
std::vector<at::Tensor> Reducer::prepare_for_backward(std::vector<at::Tensor> outputs,
                                                      ForwardOptions options) {
  return impl_->prepare(std::move(outputs), options);
}
void Reducer::register_comm_hook(CommHook hook, std::string name) {
  ReducerContext& context = impl_->context();
  impl_->settle();
  Agreement mine;
  if (!hook) {
    mine.failure = "the communication hook is empty";
  } else if (context.comm_hook) {
    mine.failure = "a communication hook is already set; it cannot be replaced";
  } else if (context.rounds > 0) {
    mine.failure = "a communication hook must be set before the first backward pass";
  }
  mine.settings = {{"the communication hook", "'" + name + "'"}};
  data_parallel::agree(context.group, mine);
  context.comm_hook = std::move(hook);
}
void Reducer::keep_buckets() { impl_->context().keeps_buckets = true; }
void Reducer::join_with_zeros(const RoundTerms& terms) { impl_->join_with_zeros(terms); }
void Reducer::fail_next_round(const RoundTerms& terms, const std::string& reason) {
  impl_->fail_next_round(terms, reason);
}
void Reducer::restart_count() {
  ReducerContext& context = impl_->context();
  ForwardPtr dropped;
  MutexLock lock(context.mutex);
  context.forward_count = 0;
  dropped = context.forwards.forget();
}
bool Reducer::agree(bool ok, const BegunForwards& begun) { return impl_->agree(ok, begun); }
void Reducer::settle() { impl_->settle(); }
std::uint64_t Reducer::rounds() const { return impl_->context().rounds; }
std::uint64_t Reducer::reductions() const { return stats().reductions; }
ReducerStats Reducer::stats() const {
  const ReducerContext& context = impl_->context();
  MutexLock lock(context.mutex);
  return context.stats;
}
const collective::Group& Reducer::group() const { return impl_->context().group; }

}  // namespace torchspan::data_parallel
