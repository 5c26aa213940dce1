#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/detail/engine/gradient_map.h>

#include "engine/sums.h"

namespace torchspan::engine {

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

}  // namespace torchspan::engine
