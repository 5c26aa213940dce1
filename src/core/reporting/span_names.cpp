#include "core/reporting/span_names.h"

#include <functional>
#include <memory>

namespace torchspan {

SpanNames::~SpanNames() {
  for (const Name* name : names_) delete name;
}

const SpanNames::Name& SpanNames::add(std::string_view name) {
  MutexLock lock(mutex_);
  if (const auto found = known_.find(name); found != known_.end()) return *found->second;
  if (names_.size() == kMost) return *names_.back();
  const bool last = names_.size() + 1 == kMost;
  auto added = std::make_unique<Name>(
      Name{last ? "(other names)" : std::string(name), static_cast<std::uint32_t>(names_.size())});
  names_.push_back(added.get());
  const Name& result = *added.release();
  if (!last) known_.emplace(result.text, &result);
  return result;
}

std::uint32_t SpanNames::number_of(std::string_view name) {
  name = name.substr(0, kLongest);
  std::atomic<const Name*>& recent = recent_[std::hash<std::string_view>()(name) % recent_.size()];
  const Name* known = recent.load(std::memory_order_acquire);
  if (known == nullptr || known->text != name) {
    known = &add(name);
    recent.store(known, std::memory_order_release);
  }
  return known->number;
}

std::vector<std::string> SpanNames::from(std::size_t first) const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (std::size_t i = first; i < names_.size(); ++i) names.push_back(names_[i]->text);
  return names;
}

}  // namespace torchspan
