#pragma once
#include <map>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rpc/message.h>

namespace torchspan::rpc {

/// Who is in the world, as this worker has heard. Thread-safe.
class Roster {
 public:
  explicit Roster(WorkerInfo self) { set(std::move(self)); }

  /// Adds a worker or gives a rank to another one.
  void set(WorkerInfo worker);
  /// An open world forgets who left.
  void remove(std::uint32_t rank);
  void clear();
  /// By rank.
  std::vector<WorkerInfo> all() const;
  std::size_t size() const;
  /// Throws Error{kInvalid} that lists who is there.
  std::uint32_t resolve(const Destination& to) const;
  WorkerInfo info(const Destination& of) const;
  /// The name of whoever has, or had, the rank.
  std::string name(std::uint32_t rank) const;

 private:
  void forget_name(std::uint32_t rank) TORCHSPAN_REQUIRES(mutex_);
  [[noreturn]] void throw_unknown(const Destination& to) const TORCHSPAN_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::map<std::uint32_t, WorkerInfo> present_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::string, std::uint32_t, std::less<>> ranks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint32_t, std::string> names_ TORCHSPAN_GUARDED_BY(mutex_);  ///< those gone too
};

}  // namespace torchspan::rpc
