#pragma once
#include <cstdint>
#include <span>
#include <string>

namespace torchspan {

/// The number by which spans and states name a group: equal on all of its ranks, not negative, and with high probability
/// different for different lists of ranks, and for groups of the same ranks that differ in `instance`.
std::int32_t group_number(std::span<const int> ranks, std::uint64_t instance = 0);
/// Whether a group with this number may have these ranks.
bool has_ranks(std::int32_t group_number, std::span<const int> ranks);

/// A part of a pipeline's step, or the unit of a sharded model. A collective operation belongs to the part that its thread
/// runs, the same one on all ranks of the group.
struct StepPart {
  enum class Kind : std::uint8_t {
    kNone,  ///< the thread runs no part
    kForward,
    kRepeatedForward,
    kBackward,
    kInputGradient,
    kWeightGradient,
  };
  Kind kind = Kind::kNone;
  std::int32_t layer_range = 0;
  std::int32_t micro_batch = 0;
  std::int32_t unit = -1;  ///< number of a unit in FullyShardedStats::units; negative: none
  std::uint64_t step = 0;
  friend bool operator==(const StepPart&, const StepPart&) = default;
};

/// "repeated forward".
const char* name_of(StepPart::Kind kind);
/// " of unit #3 in the forward of micro-batch 2 through layer range 1 of step 7", without what is not set.
std::string describe(const StepPart& part);
/// " of unit #3".
std::string describe_unit(std::int32_t unit);

/// Sets the part that this thread runs, until the end of the scope.
class StepPartScope {
 public:
  /// `unordered`: why other ranks may run the part in another order, and what to do, which makes operations fail; null:
  /// all ranks run it in the same order. It must outlive the scope.
  explicit StepPartScope(const StepPart& part, const char* unordered = nullptr);
  ~StepPartScope();
  StepPartScope(const StepPartScope&) = delete;
  StepPartScope& operator=(const StepPartScope&) = delete;

  /// Whether an operation of several ranks began in this scope, on this thread.
  bool communicated() const { return communicated_; }
  /// The part that this thread runs.
  static StepPart current();
  /// An operation of several ranks begins on this thread, or will in the part's backward. Throws Error{kUnsupported} if
  /// ranks may run the part in different orders.
  static void begin_operation(const char* call);

 private:
  static StepPartScope*& of_thread();

  const StepPart part_;
  const char* const unordered_;
  StepPartScope* const outside_;
  bool communicated_ = false;
};

}  // namespace torchspan
