#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/grad_field_sink.h"
#include "engine/execute.h"

namespace torchspan::engine {

void PassEnd::after(Callback callback) {
  PassStatus status{pass_, nullptr};
  {
    MutexLock lock(mutex_);
    if (!come_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
    status.error = error_;
  }
  const device::StreamsScope streams(streams_);
  callback(status);
}

void PassEnd::last(Callback callback) {
  MutexLock lock(mutex_);
  if (come_ || last_) throw_invalid("this pass has ended, or its last callback is set already");
  last_.emplace(std::move(callback));
}

bool PassEnd::is_watched() const {
  MutexLock lock(mutex_);
  return !callbacks_.empty();
}

void PassEnd::after_work(Callback callback) {
  MutexLock lock(mutex_);
  if (ended_) throw_invalid("this pass's work is over; register after_work() callbacks while it runs");
  work_callbacks_.push_back(std::move(callback));
}

void PassEnd::before_end(Callback callback) {
  MutexLock lock(mutex_);
  if (come_) throw_invalid("this pass has ended; register before_end() callbacks before that");
  decisions_.push_back(std::move(callback));
}

void PassEnd::hold(Future<void> future) {
  if (!future.valid())
    throw_invalid("a taker of gradients returned an empty Future; return one of a Promise");
  {
    MutexLock lock(mutex_);
    if (come_) {
      if (error_) std::rethrow_exception(error_);
      throw_invalid("this pass has ended; hold futures before its gradients are complete");
    }
    ++holds_;
  }
  Future<void> continuation =
      future.then([self = shared_from_this()](const Future<void>& done) { self->release(done.error()); });
  MutexLock lock(mutex_);
  continuations_.push_back(std::move(continuation));
}

void PassEnd::end(std::exception_ptr error) {
  std::vector<Callback> callbacks;
  PassStatus status{pass_, std::move(error)};
  {
    MutexLock lock(mutex_);
    if (std::exchange(ended_, true)) return;
    callbacks.swap(work_callbacks_);
  }
  call_all(callbacks, status);
  release(status.error);
}

void PassEnd::call_all(std::vector<Callback>& callbacks, PassStatus& status) const {
  const device::StreamsScope streams(streams_);
  for (Callback& callback : callbacks) {
    try {
      callback(status);
    } catch (...) {
      if (!status.error) status.error = std::current_exception();
    }
  }
}

void PassEnd::release(std::exception_ptr error) {
  std::vector<Callback> callbacks;
  PassStatus status{pass_, nullptr};
  for (;;) {
    std::vector<Callback> decisions;
    {
      MutexLock lock(mutex_);
      if (error && !error_) error_ = std::move(error);
      status.error = error_;
      if (holds_ > 1 || decisions_.empty()) {
        if (--holds_ > 0) return;
        come_ = true;
        callbacks.swap(callbacks_);
        if (last_) callbacks.push_back(*std::exchange(last_, std::nullopt));
        break;
      }
      decisions.swap(decisions_);  // they run while this last hold remains, and may add holds
    }
    call_all(decisions, status);
    error = status.error;
  }
  call_all(callbacks, status);
  MutexLock lock(mutex_);
  error_ = status.error;
}

void PassEnd::wait(Deadline deadline) {
  for (std::size_t next = 0;; ++next) {
    Future<void> continuation;
    {
      MutexLock lock(mutex_);
      if (next == continuations_.size()) break;
      continuation = continuations_[next];
    }
    continuation.wait(deadline);
  }
  MutexLock lock(mutex_);
  if (!come_) throw_invalid("this pass has not ended: its graph's work still runs");
  if (error_) std::rethrow_exception(error_);
}

bool PassEnd::has_arrived() const {
  MutexLock lock(mutex_);
  return come_;
}

GradientMap::GradientMap(device::EventPoolPtr events)
    : events_(events || !device::has_streams() ? std::move(events) : std::make_shared<device::EventPool>()) {}

std::shared_ptr<GradientMap::Entry> GradientMap::find(const at::Tensor& parameter) const {
  MutexLock lock(mutex_);
  auto found = entries_.find(parameter.unsafeGetTensorImpl());
  return found == entries_.end() ? nullptr : found->second;
}

std::shared_ptr<GradientMap::Entry> GradientMap::find_or_add(const at::Tensor& parameter) {
  MutexLock lock(mutex_);
  auto& entry = entries_[parameter.unsafeGetTensorImpl()];
  if (!entry) {
    entry = std::make_shared<Entry>(parameter);
    order_.push_back(entry);
  }
  return entry;
}

void GradientMap::join(Entry& entry) const {
  if (!entry.written) return;
  const c10::Stream here = device::current_stream(entry.written->stream().device());
  entry.written->hold_back(here);
  for (const c10::Stream& reader : entry.readers) device::order_after(here, reader, *events_);
  if (here != entry.written->stream()) device::keep_memory_for(entry.gradient, here);
}

void GradientMap::mark_written(Entry& entry) const {
  entry.written.reset();
  entry.readers.clear();
  if (!entry.gradient.defined() || !device::has_streams(entry.gradient.device())) return;
  entry.written.emplace(device::current_stream(entry.gradient.device()), events_);
}

at::Tensor GradientMap::read(Entry& entry) const {
  if (entry.written) {
    const c10::Stream here = device::current_stream(entry.written->stream().device());
    entry.written->hold_back(here);
    if (here != entry.written->stream()) {
      device::keep_memory_for(entry.gradient, here);
      if (std::find(entry.readers.begin(), entry.readers.end(), here) == entry.readers.end())
        entry.readers.push_back(here);
    }
  }
  return entry.gradient;
}

void GradientMap::accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  if (!gradient.defined()) return;
  const c10::AutoGradMode grad_mode(false);
  const std::shared_ptr<Entry> entry = find_or_add(parameter);
  at::Tensor displaced;  // destroyed, like `gradient`, after the lock is released
  MutexLock lock(entry->mutex);
  join(*entry);
  const bool fresh = !entry->gradient.defined();
  // A dense gradient that a sparse one is added to needs the parameter's layout, too.
  const bool becomes_dense = !fresh && entry->gradient.is_sparse() && !gradient.is_sparse();
  if (fresh || becomes_dense) gradient = adopt_gradient(parameter, std::move(gradient));
  if (fresh) {
    entry->gradient = std::move(gradient);
  } else {
    displaced = add_into(entry->gradient, gradient);
  }
  mark_written(*entry);
}

void GradientMap::replace(const at::Tensor& parameter, at::Tensor gradient) {
  const std::shared_ptr<Entry> entry = find_or_add(parameter);
  MutexLock lock(entry->mutex);
  join(*entry);
  std::swap(entry->gradient, gradient);
  mark_written(*entry);
}

at::Tensor GradientMap::gradient(const at::Tensor& parameter) const {
  const std::shared_ptr<Entry> entry = find(parameter);
  if (!entry) return {};
  MutexLock lock(entry->mutex);
  return read(*entry);
}

std::vector<ParameterGradient> GradientMap::gradients() const {
  std::vector<std::shared_ptr<Entry>> entries;
  {
    MutexLock lock(mutex_);
    entries = order_;
  }
  std::vector<ParameterGradient> result;
  result.reserve(entries.size());
  for (const auto& entry : entries) {
    MutexLock lock(entry->mutex);
    if (entry->gradient.defined()) result.push_back({entry->parameter, read(*entry)});
  }
  return result;
}

std::size_t GradientMap::size() const { return gradients().size(); }

void GradientMap::clear() {
  std::vector<std::shared_ptr<Entry>> order;
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Entry>> entries;
  MutexLock lock(mutex_);
  order.swap(order_);
  entries.swap(entries_);
}

at::Tensor GradFieldSink::gradient(const at::Tensor& parameter) const {
  MutexLock lock(mutex_);
  return parameter.grad();
}

void GradFieldSink::accumulate(const at::Tensor& parameter, at::Tensor gradient) {
  if (!gradient.defined()) return;
  const c10::AutoGradMode grad_mode(false);
  MutexLock lock(mutex_);
  at::Tensor& field = parameter.mutable_grad();
  torch::autograd::AccumulateGrad::accumulateGrad(parameter, field, gradient, /*num_expected_refs=*/1,
                                                  [&](at::Tensor&& sum) { field = std::move(sum); });
}

void GradFieldSink::replace(const at::Tensor& parameter, at::Tensor gradient) {
  MutexLock lock(mutex_);
  parameter.mutable_grad() = std::move(gradient);
}

/// Owned by the engine's callback queue, which runs it if the pass succeeds and always destroys it. The ends
/// of two owners must not wait for each other, because ranks may reach them in different orders.
class NativeEnginePasses::Ending {
 public:
  Ending(std::shared_ptr<NativeEnginePasses> passes, const void* task, std::shared_ptr<GradFieldSink> sink)
      : passes_(std::move(passes)), task_(task), sink_(std::move(sink)) {}
  ~Ending() {
    if (!ended_) {
      passes_->forget(task_);
      sink_->end()->end(std::make_exception_ptr(
          Error(ErrorKind::kCancelled,
                "LibTorch's engine abandoned this backward pass: see the error that backward() threw")));
    } else if (!waited_) {  // another owner's failure is being thrown; gradients must not change after that
      try {
        wait();
      } catch (...) {  // backward() throws the first failure
      }
    }
  }
  void end() {
    ended_ = true;
    passes_->forget(task_);
    sink_->end()->end(nullptr);
  }
  void wait() {
    waited_ = true;
    sink_->end()->wait();
  }

 private:
  const std::shared_ptr<NativeEnginePasses> passes_;
  const void* const task_;
  const std::shared_ptr<GradFieldSink> sink_;  // an owner that holds the end may still use it
  bool ended_ = false, waited_ = false;
};

std::shared_ptr<NativeEnginePasses> NativeEnginePasses::united() {
  std::shared_ptr<NativeEnginePasses> at = shared_from_this();
  for (;;) {
    std::shared_ptr<NativeEnginePasses> next;
    {
      MutexLock lock(at->mutex_);
      next = at->successor_;
    }
    if (!next) return at;
    at = std::move(next);
  }
}

void NativeEnginePasses::unite(const std::shared_ptr<NativeEnginePasses>& other) {
  const std::shared_ptr<NativeEnginePasses> mine = united(), theirs = other->united();
  if (mine == theirs) return;
  MutexLock lock(mine->mutex_);
  mine->successor_ = theirs;
}

std::shared_ptr<GradFieldSink> NativeEnginePasses::current() {
  // The address of a member of the task that the engine runs on this thread: unique as long as the task
  // lives.
  const void* task = torch::autograd::get_current_graph_task_exec_info();
  if (!task) {
    throw_invalid("no backward pass of LibTorch's engine is running on this thread");
  }
  if (const auto one = united(); one.get() != this) return one->current();
  std::shared_ptr<GradFieldSink> sink;
  {
    MutexLock lock(mutex_);
    auto& known = sinks_[task];
    if (known) return known;
    known = std::make_shared<GradFieldSink>(next_pass_++);
    sink = known;
  }
  auto ending = std::make_shared<Ending>(shared_from_this(), task, sink);
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([ending, &engine] {
    ending->end();
    engine.queue_callback([ending] { ending->wait(); });
  });
  return sink;
}

void NativeEnginePasses::forget(const void* task) {
  std::shared_ptr<GradFieldSink> dropped;
  MutexLock lock(mutex_);
  auto found = sinks_.find(task);
  if (found == sinks_.end()) return;
  dropped = std::move(found->second);
  sinks_.erase(found);
}

torch::autograd::variable_list GradientHook::operator()(const torch::autograd::variable_list& outputs,
                                                        const torch::autograd::variable_list& inputs) {
  gradient_ready(*passes_->current(), parameter_);
  return outputs;
}

std::vector<GradientHook*> gradient_hooks(const at::Tensor& parameter) {
  std::vector<GradientHook*> found;
  const auto leaf = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!leaf) return found;
  for (const auto& hook : leaf->post_hooks()) {
    if (auto* ours = dynamic_cast<GradientHook*>(hook.get())) found.push_back(ours);
  }
  return found;
}

bool pass_accumulates_at(torch::autograd::Node& leaf) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;
  const auto found = chosen->find(&leaf);
  return found != chosen->end() && found->second.needed_;
}

torch::autograd::variable_list PassHook::operator()(const torch::autograd::variable_list& gradients) {
  pass_arrives(*passes_->current());
  return gradients;
}

}  // namespace torchspan::engine
