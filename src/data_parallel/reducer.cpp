#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/reducer.h>

#include "data_parallel/agreement/reducer_agreement.h"
#include "data_parallel/api/agreement.h"
#include "data_parallel/passes/forward_mark.h"
#include "data_parallel/passes/pass_reducer.h"
#include "data_parallel/reducer_parts.h"

namespace torchspan::data_parallel {

/// The forward side: marks the outputs of forwards. The backward side is PassReducer.
class Reducer::Impl {
 public:
  Impl(const Replicas& replicas, const collective::Group& group, DataParallelOptions options)
      : parts_(std::make_shared<ReducerParts>(replicas, group, std::move(options))),
        passes_(std::make_shared<PassReducer>(parts_)) {}

  ReducerParts& parts() { return *parts_; }
  PassReducer& passes() { return *passes_; }

  void attach() { parts_->hooks.attach(passes_); }
  void begin_forward();
  std::vector<at::Tensor> prepare(std::vector<at::Tensor> outputs, const ForwardOptions& options);
  void register_comm_hook(CommHook hook, const std::string& name);
  void restart_count();

 private:
  void refuse_dropped_forward();

  const std::shared_ptr<ReducerParts> parts_;
  const std::shared_ptr<PassReducer> passes_;
};

void Reducer::Impl::begin_forward() {
  if (c10::GradMode::is_enabled()) {
    passes_->settle();
    refuse_dropped_forward();
  }
  parts_->meter.begin_forward();
}

void Reducer::Impl::refuse_dropped_forward() {
  const ForwardLog::Record dropped = parts_->forwards.take_dropped();
  if (!dropped) return;
  passes_->announce(dropped);
  passes_->refuse({.divisor = dropped->divisor, .leader = dropped->leader},
                  "an exception discarded the outputs of its forward before their backward pass");
  passes_->settle();
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
  agree(parts_->group, mine);
  parts_->reducer.set_hook(std::move(hook));
}

void Reducer::Impl::restart_count() {
  parts_->status.restart_count();
  parts_->forwards.forget();
}

Reducer::Reducer(std::vector<Parameter> parameters, collective::Group group, DataParallelOptions options)
    : Reducer(Replicas{std::move(parameters)}, std::move(group), std::move(options)) {}

Reducer::Reducer(Replicas replicas, collective::Group group, DataParallelOptions options) {
  agree(group, reducer_agreement(replicas, options, group));
  Agreement built;  // a rank without memory for its buckets fails here on all ranks, not in the first step
  try {
    impl_ = std::make_shared<Impl>(replicas, group, std::move(options));
    impl_->attach();
  } catch (...) {
    built.failure = describe(std::current_exception()).text;
  }
  try {
    agree(group, built);
  } catch (...) {
    if (impl_) impl_->passes().close();
    throw;
  }
}

Reducer::~Reducer() { impl_->passes().close(); }

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
void Reducer::settle() { impl_->passes().settle(); }
std::uint64_t Reducer::rounds() const { return impl_->parts().meter.rounds(); }
std::uint64_t Reducer::reductions() const { return impl_->parts().meter.reductions(); }
ReducerStats Reducer::stats() const { return impl_->parts().meter.stats(); }
const collective::Group& Reducer::group() const { return impl_->parts().group; }

}  // namespace torchspan::data_parallel
