#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/core/mutex.h>

#include "data_parallel/passes/forward_mark.h"

namespace torchspan::data_parallel {

/// The forwards whose graphs are alive, and the marks that backward passes have reached. Thread-safe: guards
/// what changes in the records.
class ForwardLog {
 public:
  using Record = std::shared_ptr<ForwardRecord>;

  /// Adds a forward whose outputs were marked.
  void add(const Record& record);
  void set_passed(const Record& record, std::size_t mark);
  bool has_passed(const Record& record, std::size_t mark) const;
  /// Calls the record's `announce`, if there is one, and stores the terms that it returns.
  void announce(const Record& record);
  /// Takes the futures that the first pass through the record waits for.
  std::vector<Future<void>> take_awaited(const Record& record);
  /// Whether passes have reached every mark of all the records.
  bool all_passed(const std::vector<Record>& records) const;
  /// Whether a forward other than `record` has marks that no pass has reached.
  bool others_unfinished(const Record& record) const;

  /// An exception discarded the forward's outputs. Kept if other ranks wait for the forward's reduction.
  void note_dropped(const Record& record);
  Record take_dropped();
  /// A forward that is reduced and whose outputs are alive, but which no pass has reached; null if there is none.
  Record unreached() const;
  /// A reduction failed on all ranks, so no rank waits for the reductions of earlier forwards.
  void forget();
  /// The ranks agreed that the forwards so far are not reduced.
  void skip();
  bool is_skipped(const Record& record) const;

 private:
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<ForwardRecord>> records_ TORCHSPAN_GUARDED_BY(mutex_);
  Record dropped_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::data_parallel
