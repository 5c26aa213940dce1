#pragma once
#include <cstdint>
#include <exception>
#include <string>

#include "collective/serial/blocking_collectives.h"
#include "collective/serial/serial_options.h"

namespace torchspan::collective {

/// Explains failures of a serial group: which ranks are gone, late or silent, or made other calls.
class FailureReports {
 public:
  /// Everything must outlive this object.
  FailureReports(Executor& executor, const SerialOptions& options, BlockingCollectives& collectives)
      : executor_(executor), options_(options), collectives_(collectives) {}

  /// The error for what the engine threw during call `number` of the group.
  Error explain(const std::string& call, std::uint64_t number, const std::exception_ptr& exception) const;
  /// The ranks that are gone, or else those that do not answer, for a message about call `number`; begins with "; ".
  std::string missing_ranks(std::uint64_t number) const;
  void throw_if_rank_gone() const;
  [[noreturn]] void throw_different(std::size_t one, const std::string& its_call, std::size_t other,
                                    const std::string& other_call) const;
  /// The error for a rank that is gone; `how` may begin with its name.
  static Error lost(const std::string& peer, const std::string& how);

 private:
  /// Asks the ranks through the membership whether this call failed there too. Returns which ranks did not
  /// answer within a second; empty if all did.
  std::string find_silent_ranks(std::uint64_t number) const;

  Executor& executor_;
  const SerialOptions& options_;
  BlockingCollectives& collectives_;
};

}  // namespace torchspan::collective
