#pragma once
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace torchspan::rpc {

/// Holds numbers that arrive nearly in order as intervals, so its size is the number of gaps. Numbers that
/// one sender counts up thus take as much memory as are in flight at once, however many arrived.
class NumberSet {
 public:
  /// Returns false if the number was there already.
  bool insert(std::uint64_t number) {
    auto after = intervals_.upper_bound(number);
    auto before = after == intervals_.begin() ? intervals_.end() : std::prev(after);
    if (before != intervals_.end() && number < before->second) return false;
    const bool joins_before = before != intervals_.end() && before->second == number;
    const bool joins_after = after != intervals_.end() && after->first == number + 1;
    if (joins_before && joins_after) {
      before->second = after->second;
      intervals_.erase(after);
    } else if (joins_before) {
      before->second = number + 1;
    } else if (joins_after) {
      const std::uint64_t end = after->second;
      intervals_.erase(after);
      intervals_.emplace(number, end);
    } else {
      intervals_.emplace(number, number + 1);
    }
    return true;
  }
  bool contains(std::uint64_t number) const {
    auto after = intervals_.upper_bound(number);
    return after != intervals_.begin() && number < std::prev(after)->second;
  }
  /// Returns what determines its memory, not how many numbers it holds.
  std::size_t intervals() const { return intervals_.size(); }

 private:
  std::map<std::uint64_t, std::uint64_t> intervals_;  ///< first -> one past the last
};

}  // namespace torchspan::rpc
