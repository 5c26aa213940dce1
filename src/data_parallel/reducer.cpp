#include <cstdint>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/reducer.h>

#include "data_parallel/agreement/reducer_agreement.h"
#include "data_parallel/api/agreement.h"
#include "data_parallel/passes/forward_mark.h"
#include "data_parallel/passes/pass_reducer.h"
#include "data_parallel/reducer_parts.h"

namespace torchspan::data_parallel {
namespace {

/// Adds advice to a timeout of the group, for the case that a rank takes part in a backward pass which the others skip.
Error with_agreement(const Error& error) {
  return Error(error.kind(),
               error.message() +
                   ". If the ranks decide between forward and backward whether to skip a step, let them "
                   "call agree() for it instead of a reduction of the program");
}

}  // namespace

/// The forward side: marks the outputs of forwards. The backward side is PassReducer.
class Reducer::Impl {
 public:
  Impl(const Replicas& replicas, const collective::Group& group, DataParallelOptions options)
      : parts_(std::make_shared<ReducerParts>(replicas, group, std::move(options))),
        parent_(group),
        passes_(std::make_shared<PassReducer>(parts_)) {}

  ReducerParts& parts() { return *parts_; }
  PassReducer& passes() { return *passes_; }

  void attach() { parts_->hooks.attach(passes_); }
  void begin_forward();
  std::vector<at::Tensor> prepare(std::vector<at::Tensor> outputs, const ForwardOptions& options);
  void register_comm_hook(CommHook hook, const std::string& name);
  void restart_count();
  bool agree(bool ok, const BegunForwards& begun);

 private:
  const std::shared_ptr<ReducerParts> parts_;
  const collective::Group parent_;
  const std::shared_ptr<PassReducer> passes_;
  std::uint64_t agreed_rounds_ = 0;  // number of rounds at the last agree()
  std::uint64_t agreed_given_up_ = 0;
};

void Reducer::Impl::begin_forward() {
  if (c10::GradMode::is_enabled()) {
    if (const auto late = passes_->settle()) throw with_agreement(*late);
    const auto failure = parts_->group.backend()->failure();
    if (failure && failure->kind() == ErrorKind::kTimedOut) throw with_agreement(*failure);
    passes_->refuse_dropped();
    passes_->settle();
  }
  parts_->meter.begin_forward();
}

std::vector<at::Tensor> Reducer::Impl::prepare(std::vector<at::Tensor> outputs,
                                               const ForwardOptions& options) {
  if (!c10::GradMode::is_enabled()) return outputs;
  passes_->settle();
  if (options.synchronize) passes_->refuse_unfinished_round();
  parts_->slots.check_frozen();
  parts_->hooks.attach_again(*parts_->plan.buckets());
  auto record = std::make_shared<ForwardRecord>();
  record->synchronize = options.synchronize;
  record->divisor = options.divisor > 0 ? options.divisor : parts_->group.size();
  record->leader = options.leader;
  record->awaited = options.awaited;
  record->part = StepPartScope::current();
  record->announce = options.announce;
  const DataParallelOptions& wrapper = parts_->options;
  if (wrapper.find_unused_parameters && !wrapper.static_graph)
    record->unused = parts_->slots.unreached_from(outputs);
  outputs = mark_outputs(std::move(outputs), record,
                         {.listener = passes_,
                          .passes = parts_->hooks.passes(),
                          .together = wrapper.find_unused_parameters && !wrapper.partial_backward});
  parts_->forwards.add(record);
  if (options.synchronize) {
    parts_->status.count_forward();
    parts_->meter.end_forward();
  }
  return outputs;
}

void Reducer::Impl::register_comm_hook(CommHook hook, const std::string& name) {
  passes_->settle();
  Agreement mine;
  if (!hook) {
    mine.failure = "the communication hook is empty";
  } else if (parts_->reducer.has_hook()) {
    mine.failure = "a communication hook is already set; it cannot be replaced";
  } else if (parts_->meter.rounds() > 0) {
    mine.failure = "a communication hook must be set before the first backward pass";
  }
  mine.settings = {{"the communication hook", "'" + name + "'"}};
  data_parallel::agree(parts_->group, mine);
  parts_->reducer.set_hook(std::move(hook));
}

void Reducer::Impl::restart_count() {
  parts_->status.restart_count();
  parts_->forwards.forget();
}

/// A rank that does not continue takes part in the reduction of a step in which it has none, because others may be in it:
/// after the exchange, those that are not take part in it, too. All messages but the exchange are on the reducer's group,
/// whose operations do not wait for those of `parent_`.
bool Reducer::Impl::agree(bool ok, const BegunForwards& begun) {
  const std::string reason = "it does not continue the step: agree(false)";
  const std::string others_stop = "another rank does not continue the step: agree(false)";
  const auto rounds = [&] { return static_cast<std::int64_t>(parts_->meter.rounds() - agreed_rounds_); };
  std::int64_t forwards = begun.count;
  const auto join = [&] {
    if (begun.join) begun.join();
    ++forwards;
  };
  if (!ok && !passes_->give_up_paused(reason)) {
    const ForwardLog::Record open = parts_->forwards.unreached();
    if (open) {
      passes_->refuse({.divisor = open->divisor, .leader = open->leader}, reason);
    } else if (parts_->meter.given_up() ==
               agreed_given_up_) {  // others may be in the next forward or pass of the step
      join();
      passes_->refuse({}, reason);
    }
  }
  const at::Tensor word = at::tensor({std::int64_t{ok ? 0 : 1}, rounds(), forwards}, at::kLong);
  parent_.all_reduce(word, collective::kMax).wait();
  const auto* most = word.data_ptr<std::int64_t>();
  while (rounds() < most[1] || forwards < most[2]) {
    if (forwards < most[2]) join();
    if (rounds() < most[1] && !passes_->give_up_paused(ok ? others_stop : reason)) passes_->refuse({}, "");
  }
  if (most[0] != 0) passes_->give_up_paused(others_stop);
  passes_->settle();
  agreed_rounds_ = parts_->meter.rounds();
  agreed_given_up_ = parts_->meter.given_up();
  if (most[0] == 0) return true;
  parts_->forwards.skip();
  parts_->undefined.restore();
  parts_->status.restart_count();
  return false;
}

Reducer::Reducer(std::vector<Parameter> parameters, collective::Group group, DataParallelOptions options)
    : Reducer(Replicas{std::move(parameters)}, std::move(group), std::move(options)) {}

Reducer::Reducer(Replicas replicas, collective::Group group, DataParallelOptions options) {
  data_parallel::agree(group, reducer_agreement(replicas, options, group));
  Agreement built;  // a rank without memory for its buckets fails here on all ranks, not in the first step
  try {
    impl_ = make_process_shared<Impl>(replicas, group, std::move(options));
    impl_->attach();
  } catch (...) {
    built.failure = describe(std::current_exception()).text;
  }
  try {
    data_parallel::agree(group, built);
  } catch (...) {
    if (impl_) impl_->passes().close();
    throw;
  }
}

Reducer::~Reducer() {
  if (process_.is_current()) impl_->passes().close();
}

void Reducer::begin_forward() { impl_->begin_forward(); }
std::vector<at::Tensor> Reducer::prepare_for_backward(std::vector<at::Tensor> outputs,
                                                      ForwardOptions options) {
  return impl_->prepare(std::move(outputs), options);
}
void Reducer::register_comm_hook(CommHook hook, std::string name) {
  impl_->register_comm_hook(std::move(hook), name);
}
void Reducer::keep_buckets() { impl_->parts().plan.keep(); }
void Reducer::shadow(ForwardOptions options) { impl_->passes().shadow(options); }
void Reducer::refuse(ForwardOptions options, const std::string& reason) {
  impl_->passes().refuse(options, reason);
}
void Reducer::restart_count() { impl_->restart_count(); }
bool Reducer::agree(bool ok, const BegunForwards& begun) { return impl_->agree(ok, begun); }
void Reducer::settle() { impl_->passes().settle(); }
std::uint64_t Reducer::rounds() const { return impl_->parts().meter.rounds(); }
std::uint64_t Reducer::reductions() const { return impl_->parts().meter.reductions(); }
ReducerStats Reducer::stats() const { return impl_->parts().meter.stats(); }
const collective::Group& Reducer::group() const { return impl_->parts().group; }

}  // namespace torchspan::data_parallel
