#include <algorithm>
#include <fmt/format.h>
#include <numeric>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>

#include "data_parallel/reducer_impl.h"

namespace torchspan::data_parallel {
namespace {

constexpr std::size_t kNamesInAMessage = 10;

}  // namespace

Reducer::Impl::RoundPtr Reducer::Impl::new_round(const ForwardOptions& options, engine::GradientSink* sink) {
  auto round = std::make_shared<Round>();
  round->number = ++rounds_;
  round->sink = sink;
  round->divisor = options.divisor > 0 ? options.divisor : group_.size();
  round->leader = options.leader;
  round->delayed = options_.static_graph && !graph_known_;
  round->measured = round->number <= 10 || round->number % 100 == 0;
  if (sink != nullptr) {
    round->end = sink->end();
    round->in_place = options_.gradient_as_bucket_view && sink->writes_grad_field();
  }
  round->ready.resize(slots());
  round->shared.resize(slots());
  round->order.reserve(count_);
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    round->pending.push_back(buckets_->parameters(bucket).size() * replicas_.size());
  }
  round->works.resize(buckets_->size());
  return round;
}

Reducer::Impl::Start Reducer::Impl::begin_round(engine::GradientSink& sink,
                                                const std::shared_ptr<ForwardRecord>& record) {
  Start start;
  round_ = new_round({.divisor = record->divisor, .leader = record->leader}, &sink);
  round_->records.push_back(record);
  start.arrived = take_arrived(sink);
  if (round_->delayed) {
    std::fill(firings_.begin(), firings_.end(), 0U);
  } else if (graph_known_) {
    remaining_ = firings_;
    for (std::size_t slot = 0; slot < slots(); ++slot) {
      if (firings_[slot] == 0) start.unused.push_back(slot);
    }
  } else if (options_.find_unused_parameters) {
    round_->deferred = std::any_of(outstanding_.begin(), outstanding_.end(), [&](const auto& other) {
      const auto alive = other.lock();
      return alive && alive != record && !alive->all_passed();
    });
    if (!round_->deferred) start.unused = record->unused;
  }
  return start;
}

std::vector<std::size_t> Reducer::Impl::take_arrived(const engine::GradientSink& sink) {
  std::vector<std::size_t> arrived;
  for (std::size_t slot = 0; local_end_ == sink.end() && slot < slots(); ++slot) {
    if (fired_locally_[slot] != 0) arrived.push_back(slot);
  }
  local_end_.reset();
  return arrived;
}

bool Reducer::Impl::join_round(engine::GradientSink& sink, const std::shared_ptr<ForwardRecord>& record) {
  Round& round = *round_;
  if (std::find(round.records.begin(), round.records.end(), record) == round.records.end()) {
    round.records.push_back(record);
  }
  if (round.end == sink.end()) return false;
  if (round.concluded || round.sink != nullptr) {
    throw Error(ErrorKind::kInvalid,
                "a second backward pass goes through this module while one is under way; run them one after "
                "another");
  }
  round.sink = &sink;
  round.end = sink.end();
  return true;
}

void Reducer::Impl::hold_awaited(engine::GradientSink& sink, ForwardRecord& record) {
  std::vector<Future<void>> awaited;
  {
    MutexLock lock(mutex_);
    awaited.swap(record.awaited);
  }
  for (Future<void>& future : awaited) sink.hold(std::move(future));
}

void Reducer::Impl::listen(engine::GradientSink& sink, const RoundPtr& round) {
  const std::weak_ptr<Impl> weak = weak_from_this();
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

void Reducer::Impl::listen_locally(engine::GradientSink& sink) {
  sink.after_pass([weak = weak_from_this(), end = sink.end().get()](const engine::PassStatus&) {
    const auto self = weak.lock();
    if (!self) return;
    MutexLock lock(self->mutex_);
    if (self->local_end_.get() == end) self->local_end_.reset();
  });
}

/// Inside a join() the ranks say that they begin a reduction: one that has no batches left has to hear it.
void Reducer::Impl::announce(const std::shared_ptr<ForwardRecord>& record) {
  std::function<RoundTerms()> announce;
  {
    MutexLock lock(mutex_);
    if (record->synchronize && !round_) announce = record->announce;
  }
  if (!announce) return;
  const RoundTerms terms = announce();
  MutexLock lock(mutex_);
  record->divisor = terms.divisor;
  record->leader = terms.leader;
}

void Reducer::Impl::mark_dropped(const std::shared_ptr<ForwardRecord>& record) {
  MutexLock lock(mutex_);
  if (record->synchronize && !record->told && !record->any_passed() && !dropped_) dropped_ = record;
}

void Reducer::Impl::mark_reached(engine::GradientSink& sink, const std::shared_ptr<ForwardRecord>& record,
                                 std::size_t mark) {
  if (!reaches_parameters()) return;
  settle();
  {
    MutexLock lock(mutex_);
    record->passed[mark] = true;
  }
  announce(record);
  hold_awaited(sink, *record);
  RoundPtr round;
  Start start;
  bool local = false;
  {
    MutexLock lock(mutex_);
    if (!record->synchronize) {
      if (round_) return;
      stray_ = false;
      if (local_end_ == sink.end()) return;
      local = true;
      local_end_ = sink.end();
      std::fill(fired_locally_.begin(), fired_locally_.end(), 0);
    } else if (round_) {
      if (!join_round(sink, record)) return;
      round = round_;
      start.arrived = take_arrived(sink);
    } else {
      start = begin_round(sink, record);
      round = round_;
    }
  }
  if (local) return listen_locally(sink);
  listen(sink, round);
  for (const std::size_t slot : start.arrived) gradient_ready(sink, slot);
  for (const std::size_t slot : start.unused) fill_unused(round, sink, slot);
  launch_full_buckets(round);
}

bool Reducer::Impl::reaches_parameters() const {
  return std::any_of(hooked_.begin(), hooked_.end(),
                     [](const auto& hooked) { return engine::pass_accumulates_at(*hooked.first); });
}

Reducer::Impl::RoundPtr Reducer::Impl::admit(const engine::GradientSink& sink, std::size_t slot,
                                             bool& stray) {
  if (!round_ || round_->sink == nullptr) {
    if (!local_end_) {
      stray = stray_ = true;
      local_end_ = sink.end();
      std::fill(fired_locally_.begin(), fired_locally_.end(), 0);
    }
    fired_locally_[slot] = 1;
    return nullptr;
  }
  Round& round = *round_;
  if (round.delayed) {
    ++firings_[slot];
    fired_last_[slot] = ++firing_;
    return nullptr;
  }
  if (graph_known_) {
    if (remaining_[slot] == 0) {
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("parameter '{}' got a gradient more often than in the first step, but static_graph "
                      "promises that every step is like the first; do without static_graph",
                      name(slot)));
    }
    if (--remaining_[slot] > 0) return nullptr;
  }
  if (round.ready[slot] != 0) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("parameter '{}' got a second gradient in one step, after the first was given to the "
                    "reduction: it is used again in a backward pass inside the backward pass "
                    "(checkpointing), or outside of the wrapped forward, or in a backward pass over "
                    "another output. With the same graph in every step, static_graph allows this",
                    name(slot)));
  }
  round.ready[slot] = 1;
  return round_;
}

void Reducer::Impl::gradient_ready(engine::GradientSink& sink, std::size_t slot) {
  const at::Tensor gradient = sink.gradient(tensor(slot));
  RoundPtr round;
  bool stray = false;
  {
    MutexLock lock(mutex_);
    if (tracks_use_ && gradient.defined()) used_[slot % count_] = 1;
    round = admit(sink, slot, stray);
    if (round && slot < count_) round->order.push_back(static_cast<std::uint32_t>(slot));
  }
  if (!round) {
    if (stray) listen_to_stray(sink, slot);
    return;
  }
  fill(round, sink, slot, gradient);
  launch_full_buckets(round);
}

void Reducer::Impl::fill(const RoundPtr& round, engine::GradientSink& sink, std::size_t slot,
                         const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const std::size_t bucket = buckets_->bucket_of(slot);
  const bool shared = is_shared(slot);
  round->shared[slot] = shared ? 1 : 0;
  try {
    if (shared && buckets_->holds(slot, gradient)) sink.replace(tensor(slot), gradient.clone());
    const bool was_there = buckets_->put(slot, gradient, factor(*round, bucket));
    if (round->in_place && !shared && gradient.defined() && !was_there && !buckets_->sparse(bucket)) {
      sink.replace(tensor(slot), buckets_->view(slot));
    }
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("parameter '{}': {}", name(slot), error.message()));
  }
  MutexLock lock(mutex_);
  --round->pending[bucket];
  if (!round->measured) return;
  round->last_gradient = runtime_.executor.now();
  if (!round->first_gradient) round->first_gradient = round->last_gradient;
}

void Reducer::Impl::fill_unused(const RoundPtr& round, engine::GradientSink& sink, std::size_t slot) {
  {
    MutexLock lock(mutex_);
    if (round->ready[slot] != 0) return;
    round->ready[slot] = 1;
    ++stats_.unused;
  }
  const at::Tensor gradient = sink.gradient(tensor(slot));
  if (round->in_place && gradient.defined() && !gradient.is_sparse()) {
    at::Tensor kept = buckets_->holds(slot, gradient) ? gradient.clone() : gradient;
    MutexLock lock(mutex_);
    round->kept.emplace_back(slot, std::move(kept));
  }
  fill(round, sink, slot, gradient);
}

void Reducer::Impl::listen_to_stray(engine::GradientSink& sink, std::size_t slot) {
  sink.after_work([weak = weak_from_this(), slot, end = sink.end().get()](const engine::PassStatus& status) {
    const auto self = weak.lock();
    if (!self || !status.ok()) return;
    {
      MutexLock lock(self->mutex_);
      if (self->local_end_.get() != end || !self->stray_) return;
    }
    self->note_unwrapped(slot);
  });
  listen_locally(sink);
}

void Reducer::Impl::note_unwrapped(std::size_t slot) {
  if (options_.unwrapped_backward == Unwrapped::kIgnore) return;
  const std::string text = fmt::format(
      "a backward pass gave parameter '{}' a gradient without having come through the wrapped "
      "module's outputs: nothing is averaged, and ranks drift apart. Call the wrapper, not the module "
      "inside it, or say no_sync",
      name(slot));
  if (options_.unwrapped_backward == Unwrapped::kThrow) throw Error(ErrorKind::kInvalid, text);
  {
    MutexLock lock(mutex_);
    if (std::exchange(warned_unwrapped_, true)) return;
  }
  runtime_.log.warning(text);
}

std::vector<std::size_t> Reducer::Impl::missing(const RoundPtr& round) const {
  MutexLock lock(mutex_);
  std::vector<std::size_t> slots_left;
  for (std::size_t slot = 0; slot < slots(); ++slot) {
    if (round->ready[slot] == 0) slots_left.push_back(slot);
  }
  return slots_left;
}

std::string Reducer::Impl::missing_text(const std::vector<std::size_t>& missing_slots) const {
  std::string text;
  for (std::size_t i = 0; i < std::min(missing_slots.size(), kNamesInAMessage); ++i) {
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", name(missing_slots[i]));
  }
  if (missing_slots.size() > kNamesInAMessage) {
    text += fmt::format(" and {} more", missing_slots.size() - kNamesInAMessage);
  }
  for (const std::size_t slot : missing_slots) {
    const std::string why = why_unreachable(slot);
    if (!why.empty()) return fmt::format("{} ('{}' {})", text, name(slot), why);
  }
  return text;
}

std::string Reducer::Impl::why_unreachable(std::size_t slot) const {
  if (!tensor(slot).requires_grad()) {
    return "was frozen after it was wrapped, its requires_grad is false now: wrap the module again, or set "
           "find_unused_parameters to freeze and thaw while training";
  }
  if (torch::autograd::impl::grad_accumulator(tensor(slot)) == hooked_[slot].first) return {};
  return "was converted to another dtype or device after it was wrapped: wrap the module afterwards";
}

void Reducer::Impl::end_delayed(const RoundPtr& round) {
  std::vector<std::size_t> order(slots()), fired;
  std::iota(order.begin(), order.end(), 0U);
  {
    MutexLock lock(mutex_);
    graph_known_ = true;
    std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) TORCHSPAN_UNCHECKED {
      return fired_last_[a] < fired_last_[b];
    });
    for (const std::size_t slot : order) {
      if (slot < count_ && firings_[slot] > 0) round->order.push_back(static_cast<std::uint32_t>(slot));
      if (firings_[slot] == 0) continue;
      round->ready[slot] = 1;
      fired.push_back(slot);
    }
  }
  for (const std::size_t slot : fired) fill(round, *round->sink, slot, round->sink->gradient(tensor(slot)));
  for (const std::size_t slot : order) fill_unused(round, *round->sink, slot);
  launch_full_buckets(round);
}

void Reducer::Impl::end_deferred(const RoundPtr& round) {
  std::vector<std::size_t> counts(slots());
  std::size_t records = 0;
  {
    MutexLock lock(mutex_);
    records = round->records.size();
    for (const auto& record : round->records) {
      for (const std::size_t slot : record->unused) ++counts[slot];
    }
  }
  for (std::size_t slot = 0; slot < slots(); ++slot) {
    if (counts[slot] == records) fill_unused(round, *round->sink, slot);
  }
  launch_full_buckets(round);
}

void Reducer::Impl::work_over(const RoundPtr& round, const engine::PassStatus& status) {
  {
    MutexLock lock(mutex_);
    if (round->aborted || round->concluded) return;
  }
  if (!status.ok()) return give_up(round, describe(status.error).text);
  try {
    if (round->delayed) end_delayed(round);
    if (round->deferred) end_deferred(round);
  } catch (...) {
    give_up(round, describe(std::current_exception()).text);
    throw;
  }
  const std::vector<std::size_t> left = missing(round);
  if (left.empty()) return;
  if (options_.partial_backward) {
    MutexLock lock(mutex_);
    const bool more = std::any_of(round->records.begin(), round->records.end(),
                                  [](const auto& record) { return !record->all_passed(); });
    if (more) {
      round->sink = nullptr;
      return;
    }
  }
  const std::string text = fmt::format(
      "this backward pass left {} of {} parameters without a gradient, so nothing can be averaged: {}. {}",
      left.size(), slots(), missing_text(left),
      options_.static_graph
          ? "static_graph promises that every step is like the first; do without it"
          : "If the loss does not depend on them in every step, set find_unused_parameters; if more backward "
            "passes over other outputs of this forward follow, set partial_backward");
  give_up(round, text);
  throw Error(ErrorKind::kInvalid, text);
}

}  // namespace torchspan::data_parallel
