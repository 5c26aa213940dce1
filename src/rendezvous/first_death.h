#pragma once
#include <fmt/format.h>
#include <optional>
#include <string>

#include <torchspan/detail/rendezvous/membership.h>

namespace torchspan::rendezvous {

/// The first of several deaths that follow each other: the later ones are probably its consequences. The store and
/// every worker keep one, so that an error about a later death names the first one too. For one thread at a time.
class FirstDeath {
 public:
  /// Deaths within this time are taken for consequences of the first.
  static constexpr Duration kConsequences = std::chrono::seconds(5);

  /// Follows the reason why a worker left or died now: "; worker1 (…) had died before it", or nothing.
  std::string before(TimePoint now) const {
    return who_.empty() || now - when_ >= kConsequences ? "" : fmt::format("; {} had died before it", who_);
  }
  /// `member` died. It is the first one unless before() names another.
  void add(const Member& member, TimePoint now) {
    if (!before(now).empty()) return;
    who_ = describe(member);
    when_ = now;
  }

 private:
  std::string who_;
  TimePoint when_ = {};
};

}  // namespace torchspan::rendezvous
