#include "data_parallel/reducer_context.h"

#include <numeric>
#include <string>
#include <utility>

namespace torchspan::data_parallel {

HoldCount::Hold HoldCount::take() {
  {
    MutexLock lock(mutex_);
    ++count_;
  }
  return {this, [](HoldCount* self) { self->release(); }};
}

void HoldCount::release() {
  MutexLock lock(mutex_);
  if (--count_ == 0 && waiter_ != nullptr) waiter_->unpark();
}

void HoldCount::wait() {
  const auto parker = executor_.make_parker();
  for (;;) {
    {
      MutexLock lock(mutex_);
      waiter_ = count_ > 0 ? parker.get() : nullptr;
      if (count_ == 0) return;
    }
    parker->park(Deadline::never());
  }
}

ReducerContext::ReducerContext(const Reducer::Replicas& replicas, const collective::Group& parent,
                               DataParallelOptions its_options)
    : options(std::move(its_options)),
      group(parent.split(0, parent.rank())),
      runtime(group.backend()->runtime()),
      slots(replicas),
      stream(slots.tensor(0).device()),
      hooks(slots),
      holds(runtime.executor),
      used(options.find_unused_parameters || options.static_graph ? slots.count() : 0) {
  status = group.allocate({static_cast<std::int64_t>(kStatusFields + used.size())}, at::kInt);
  std::vector<std::size_t> order(slots.count());
  std::iota(order.rbegin(), order.rend(), 0U);
  buckets = build_buckets(slots.replicas(), options, group, order);
  note_buckets();
}

void ReducerContext::note_buckets() {
  std::vector<std::size_t> bytes;
  std::vector<std::vector<std::string>> parameters;
  for (std::size_t bucket = 0; bucket < buckets->size(); ++bucket) {
    bytes.push_back(buckets->bytes(bucket));
    parameters.emplace_back();
    for (const std::size_t parameter : buckets->parameters(bucket))
      parameters.back().push_back(slots.name(parameter));
  }
  MutexLock lock(mutex);
  stats.bucket_bytes = std::move(bytes);
  stats.bucket_parameters = std::move(parameters);
}

void ReducerContext::restore_undefined() {
  std::vector<std::size_t> restored;
  {
    MutexLock lock(mutex);
    restored = undefined.take();
  }
  for (const std::size_t slot : restored) slots.tensor(slot).mutable_grad() = at::Tensor();
}

}  // namespace torchspan::data_parallel
