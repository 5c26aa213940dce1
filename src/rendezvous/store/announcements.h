#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "rendezvous/messages/messages.h"

namespace torchspan::rendezvous {

/// What the store announces to all workers, as a log in which each worker has a place. A worker gets the
/// changes since its place in one message: at once if none were announced recently, otherwise after
/// `per_worker` times the number of workers, or before the next other message to it. So a burst of changes
/// costs each worker one message, not one per change. A table without I/O or clock, for one thread at a time.
class Announcements {
 public:
  struct Options {
    Duration per_worker = std::chrono::microseconds(10);  ///< zero: announces every change by itself
    Duration most = std::chrono::milliseconds(50);
  };
  explicit Announcements(Options options) : options_(options) {}

  /// The place of a worker that knows everything so far.
  std::uint64_t end() const { return begin_ + log_.size(); }
  void add(Changes::Change change);
  /// The changes since `place`, which becomes end(); null if there are none.
  SharedBytes take_since(std::uint64_t& place);
  /// Whether changes wait, and may be sent now.
  bool due(TimePoint now) const { return waiting_ && now >= not_before_; }
  /// When due() may become true; never if nothing waits.
  Deadline next_deadline() const { return waiting_ ? Deadline(not_before_) : Deadline::never(); }
  /// All of `workers` workers have got all changes.
  void all_sent(TimePoint now, std::size_t workers);
  bool batches() const { return options_.per_worker > Duration::zero(); }

 private:
  const Options options_;
  std::deque<Changes::Change> log_;
  std::uint64_t begin_ = 0;  ///< place of the first entry
  bool waiting_ = false;
  TimePoint not_before_ = TimePoint::min();
  std::uint64_t encoded_from_ = 0, encoded_to_ = 0;
  SharedBytes encoded_;  ///< of the entries between these places
};

}  // namespace torchspan::rendezvous
