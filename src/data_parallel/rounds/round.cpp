#include "data_parallel/rounds/round.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

double divisor_of(const RoundOptions& options, const collective::Group& group) {
  return options.divisor > 0 ? options.divisor : group.size();
}

}  // namespace

Round::Round(ReducerParts& parts, const RoundOptions& options)
    : parts_(parts),
      options_(options),
      gradients_(parts, divisor_of(options, parts.group), /*in_place=*/false) {}

Round::Round(ReducerParts& parts, const RoundOptions& options, engine::GradientSink& sink,
             const ForwardLog::Record& record)
    : parts_(parts),
      options_(options),
      pass_stream_(parts.stream.current()),
      gradients_(parts, divisor_of(options, parts.group),
                 parts.options.gradient_as_bucket_view && sink.writes_grad_field()),
      records_({record}),
      sink_(&sink),
      end_(sink.end()) {}

bool Round::enter(engine::GradientSink& sink, const ForwardLog::Record& record) {
  MutexLock lock(mutex_);
  if (std::find(records_.begin(), records_.end(), record) == records_.end()) records_.push_back(record);
  if (end_ == sink.end()) return false;
  if (conclusion_ || sink_ != nullptr) {
    throw Error(ErrorKind::kInvalid,
                "a second backward pass goes through this module while another one is running; run one after "
                "the other");
  }
  sink_ = &sink;
  end_ = sink.end();
  return true;
}

bool Round::reduces(const ForwardLog::Record& record) const {
  MutexLock lock(mutex_);
  return std::find(records_.begin(), records_.end(), record) != records_.end();
}

bool Round::all_passed() const {
  std::vector<ForwardLog::Record> records;
  {
    MutexLock lock(mutex_);
    records = records_;
  }
  return parts_.forwards.all_passed(records);
}

bool Round::is_deferred() const {
  MutexLock lock(mutex_);
  return options_.deferred || all_deferred_;
}

void Round::defer_all() {
  MutexLock lock(mutex_);
  all_deferred_ = true;
}

std::vector<std::size_t> Round::unreached() const {
  const bool last = all_passed();
  std::vector<std::size_t> counts(parts_.slots.size()), slots;
  MutexLock lock(mutex_);
  if (all_deferred_ && last) {
    slots.resize(parts_.slots.size());
    std::iota(slots.begin(), slots.end(), std::size_t{0});
    return slots;
  }
  for (const auto& record : records_) {
    for (const std::size_t slot : record->unused) ++counts[slot];
  }
  for (std::size_t slot = 0; slot < counts.size(); ++slot) {
    if (counts[slot] == records_.size()) slots.push_back(slot);
  }
  return slots;
}

void Round::pause() {
  MutexLock lock(mutex_);
  sink_ = nullptr;
}

engine::GradientSink* Round::sink() const {
  MutexLock lock(mutex_);
  return sink_;
}

void Round::note_reason(const std::string& reason) {
  MutexLock lock(mutex_);
  if (reason_.empty()) reason_ = reason;
}

std::string Round::reason() const {
  MutexLock lock(mutex_);
  return reason_;
}

bool Round::give_up(const std::string& reason) {
  {
    MutexLock lock(mutex_);
    if (concluding_ || std::exchange(given_up_, true)) return false;
    abandoned_ = std::exchange(sink_, nullptr);
    if (reason_.empty()) reason_ = reason;
  }
  gradients_.launcher()->stop();
  parts_.meter.count_aborted();
  parts_.forwards.forget();
  return true;
}

void Round::conclude_with_zeros() {
  engine::GradientSink* abandoned = nullptr;
  {
    MutexLock lock(mutex_);
    abandoned = std::exchange(abandoned_, nullptr);
  }
  BucketLauncher& launcher = *gradients_.launcher();
  try {
    const PassStreamScope on_pass(pass_stream_, parts_.stream.events());
    if (abandoned != nullptr) gradients_.transfer().leave_buckets(*abandoned);
  } catch (...) {  // the other ranks' reduction would write to gradients
    launcher.set_broken();
  }
  if (launcher.is_broken()) throw Error(ErrorKind::kCancelled, reason());
  gradients_.launch_zeros();
  conclude();
}

void Round::conclude() {
  ConclusionTerms terms;
  terms.round = gradients_.round();
  terms.leader = options_.leader;
  std::shared_ptr<engine::PassEnd> end;
  {
    MutexLock lock(mutex_);
    if (std::exchange(concluding_, true)) return;
    terms.report = {.gave_up = given_up_, .has_pass = sink_ != nullptr, .shadow = options_.shadow};
    terms.reason = reason_;
    if (sink_ != nullptr) end = end_;
  }
  terms.order = gradients_.order();
  terms.pass_stream = pass_stream_;
  terms.is_whole_order = terms.order.size() == parts_.slots.count() || options_.delayed;
  gradients_.timer()->backward_ended();
  const auto conclusion =
      std::make_shared<Conclusion>(parts_, gradients_.launcher(), gradients_.timer(), std::move(terms));
  {
    MutexLock lock(mutex_);
    conclusion_ = conclusion;
    over_.emplace(conclusion->finished().host());
  }
  if (end) end->hold(conclusion->finished());
  conclusion->start();
}

bool Round::is_open() const {
  MutexLock lock(mutex_);
  return !given_up_ && !concluding_ && sink_ != nullptr;
}

bool Round::is_given_up() const {
  MutexLock lock(mutex_);
  return given_up_;
}

bool Round::is_concluded() const {
  MutexLock lock(mutex_);
  return conclusion_ != nullptr;
}

Future<void> Round::finished() const {
  MutexLock lock(mutex_);
  return conclusion_->finished();
}

Future<void> Round::over() const {
  MutexLock lock(mutex_);
  return over_->future();
}

void Round::finish_pass() {
  const Future<void> outcome = finished();
  if (!outcome.done() || outcome.error()) return parts_.undefined.restore();
  parts_.undefined.forget();
  const PassStreamScope on_pass(pass_stream_, parts_.stream.events());
  outcome.wait();  // orders the stream after the reductions
  gradients_.transfer().write_back(*sink(), parts_.status);
  install_rebuilt();
}

void Round::install_rebuilt() {
  std::shared_ptr<Conclusion> conclusion;
  {
    MutexLock lock(mutex_);
    conclusion = conclusion_;
  }
  const std::shared_ptr<Buckets> rebuilt = conclusion->take_rebuilt();
  if (!rebuilt) return;
  parts_.plan.replace(rebuilt);
  parts_.meter.set_buckets(*rebuilt, parts_.slots);
  if (engine::GradientSink* target = sink()) gradients_.transfer().move_to(*rebuilt, *target);
  parts_.meter.set_rebuilt();
}

void Round::set_over() {
  Promise<void>* over = nullptr;
  {
    MutexLock lock(mutex_);
    over = &*over_;
  }
  over->set_value();
}

}  // namespace torchspan::data_parallel
