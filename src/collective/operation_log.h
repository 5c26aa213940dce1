#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/runtime.h>

namespace torchspan::collective {

/// Numbers the operations of one group and records them as spans in a traced run. Does not keep the runtime
/// alive, because its last owner must not be a thread of the group.
class OperationLog {
 public:
  /// An operation that has begun; without spans in a run that is not traced.
  struct Operation {
    const char* call;
    std::uint64_t number;
    std::uint64_t bytes;
    std::optional<TimePoint> began;
  };

  OperationLog(const std::shared_ptr<Runtime>& runtime, const std::vector<int>& ranks);

  /// The log of a part of the group.
  std::shared_ptr<OperationLog> of_part(const std::vector<int>& ranks) const;

  Operation begin(const char* call, std::uint64_t bytes);
  void end(const Operation& operation) const;

  /// A blocking operation, listed as open until the destructor ends it.
  class Blocking {
   public:
    Blocking(OperationLog& log, const char* call, std::uint64_t bytes);

    /// Returns what `work` returns; reports it to the launcher if it times out.
    template <class F>
    auto run(F work) const {
      try {
        return work();
      } catch (const Error& error) {
        note(error);
        throw;
      }
    }

   private:
    void note(const Error& error) const;

    const char* const call_;
    const std::uint64_t number_;
    const std::int32_t group_;
    std::shared_ptr<Runtime> runtime_;
    TimePoint began_;
    std::optional<SpanScope> scope_;
  };

  /// Ends the operation when `work` completes; `log` may be null.
  template <class T>
  static Future<T> until(const std::shared_ptr<OperationLog>& log, const Operation& operation,
                         Future<T> work) {
    if (operation.began) work.add_done_callback([log, operation](const Future<T>&) { log->end(operation); });
    return work;
  }

 private:
  std::shared_ptr<Runtime> runtime() const { return borrowed_ ? borrowed_ : owned_.lock(); }

  const std::weak_ptr<Runtime> owned_;
  const std::shared_ptr<Runtime> borrowed_;  ///< owns nothing
  const std::int32_t group_;                 ///< hash of the ranks
  std::atomic<std::uint64_t> next_{0};
};

}  // namespace torchspan::collective
