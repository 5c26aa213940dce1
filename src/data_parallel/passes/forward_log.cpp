#include "data_parallel/passes/forward_log.h"

#include <algorithm>
#include <utility>

namespace torchspan::data_parallel {
namespace {

/// Whether other ranks may wait for the reduction that belongs to the forward. Needs the log's lock.
bool is_awaited(const ForwardRecord& record) {
  return record.synchronize && !record.settled && !record.any_passed();
}

}  // namespace

void ForwardLog::add(const Record& record) {
  MutexLock lock(mutex_);
  std::erase_if(records_, [](const auto& other) { return other.expired(); });
  records_.push_back(record);
}

void ForwardLog::set_passed(const Record& record, std::size_t mark) {
  MutexLock lock(mutex_);
  record->passed[mark] = true;
}

bool ForwardLog::has_passed(const Record& record, std::size_t mark) const {
  MutexLock lock(mutex_);
  return record->passed[mark];
}

void ForwardLog::announce(const Record& record) {
  std::function<RoundTerms()> announce;
  {
    MutexLock lock(mutex_);
    announce = record->announce;
  }
  if (!announce) return;
  const RoundTerms terms = announce();
  MutexLock lock(mutex_);
  record->divisor = terms.divisor;
  record->leader = terms.leader;
}

std::vector<Future<void>> ForwardLog::take_awaited(const Record& record) {
  MutexLock lock(mutex_);
  return std::exchange(record->awaited, {});
}

bool ForwardLog::all_passed(const std::vector<Record>& records) const {
  MutexLock lock(mutex_);
  return std::all_of(records.begin(), records.end(),
                     [](const Record& record) { return record->all_passed(); });
}

bool ForwardLog::others_unfinished(const Record& record) const {
  MutexLock lock(mutex_);
  return std::any_of(records_.begin(), records_.end(), [&](const auto& other) {
    const Record alive = other.lock();
    return alive && alive != record && !alive->all_passed();
  });
}

void ForwardLog::note_dropped(const Record& record) {
  MutexLock lock(mutex_);
  if (is_awaited(*record) && !dropped_) dropped_ = record;
}

ForwardLog::Record ForwardLog::take_dropped() {
  MutexLock lock(mutex_);
  return std::exchange(dropped_, nullptr);
}

ForwardLog::Record ForwardLog::unreached() const {
  MutexLock lock(mutex_);
  for (const auto& weak : records_) {
    if (Record record = weak.lock(); record && is_awaited(*record)) return record;
  }
  return nullptr;
}

void ForwardLog::skip() {
  forget();
  MutexLock lock(mutex_);
  for (const auto& weak : records_) {
    if (const Record record = weak.lock()) record->skipped = true;
  }
}

bool ForwardLog::is_skipped(const Record& record) const {
  MutexLock lock(mutex_);
  return record->skipped;
}

void ForwardLog::forget() {
  Record dropped;  // may own the last handles of what awaits it; released without the lock
  MutexLock lock(mutex_);
  for (const auto& weak : records_) {
    if (const Record record = weak.lock()) record->settled = true;
  }
  dropped.swap(dropped_);
}

}  // namespace torchspan::data_parallel
