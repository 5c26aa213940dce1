#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchspan::data_parallel {

/// How often each slot gets a gradient in one pass of a static graph: recorded in the first round, and
/// expected in the later ones. Not thread-safe.
class StaticGraph {
 public:
  explicit StaticGraph(std::size_t slots);

  /// Whether the first round has been recorded.
  bool is_known() const { return known_; }
  void begin_recording();
  void record(std::size_t slot);
  /// Returns all slots in the order of their last gradients; slots without gradients come first.
  std::vector<std::size_t> end_recording();
  /// Whether the recorded pass gave the slot a gradient.
  bool was_used(std::size_t slot) const { return expected_[slot] > 0; }

  /// Begins a pass like the recorded one. Returns the slots that get no gradient in it.
  std::vector<std::size_t> begin_pass();
  enum class Arrival : std::uint8_t { kMoreFollow, kLast, kTooMany };
  /// One more gradient of the slot arrived.
  Arrival arrive(std::size_t slot);

 private:
  bool known_ = false;
  std::uint32_t time_ = 0;                // number of recorded gradients
  std::vector<std::uint32_t> expected_;   // by slot: gradients per pass
  std::vector<std::uint32_t> last_;       // by slot: time of the last one
  std::vector<std::uint32_t> remaining_;  // by slot: still to come in this pass
};

}  // namespace torchspan::data_parallel
