#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <torchspan/detail/engine/gradient_sink.h>

namespace torchspan::data_parallel {

/// The running pass that reduces nothing so far: its forward ran under no_sync, or it has not gone through a
/// marked output yet. It is a stray pass if it then has a gradient that no other wrapper expects from it. Remembers its
/// gradients in case it becomes a reduced one. Not thread-safe.
class LocalPass {
 public:
  explicit LocalPass(std::size_t slots) : arrived_(slots) {}

  /// The pass goes through an output that is not reduced. False if that is known already.
  bool begin(const std::shared_ptr<engine::PassEnd>& end);
  /// A gradient arrived, which another wrapper expects or not. True if the pass becomes a stray one by it.
  bool add(const std::shared_ptr<engine::PassEnd>& end, std::size_t slot, bool expected_elsewhere);
  /// No gradient of a pass has arrived, and none has begun.
  bool is_idle() const { return end_ == nullptr; }
  /// The pass went through an output that is not reduced.
  bool has_begun(const engine::PassEnd* end) const { return begun_ && end_.get() == end; }
  /// Returns the slots whose gradients arrived if `end` is that of this pass, and forgets the pass.
  std::vector<std::size_t> take(const std::shared_ptr<engine::PassEnd>& end);
  void forget(const engine::PassEnd* end);
  bool is_stray(const engine::PassEnd* end) const { return stray_ && end_.get() == end; }

 private:
  std::shared_ptr<engine::PassEnd> end_;
  bool begun_ = false, stray_ = false;
  std::vector<std::uint8_t> arrived_;  // by slot
};

}  // namespace torchspan::data_parallel
