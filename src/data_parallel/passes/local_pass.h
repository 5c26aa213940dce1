#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <torchspan/detail/engine/gradient_sink.h>

namespace torchspan::data_parallel {

/// The running pass that reduces nothing so far: its forward ran under no_sync, or it has not gone through a
/// marked output yet (a stray pass). Remembers its gradients in case it becomes a reduced one. Not
/// thread-safe.
class LocalPass {
 public:
  explicit LocalPass(std::size_t slots) : arrived_(slots) {}

  /// The pass goes through an output that is not reduced. False if that is known already.
  bool begin(const std::shared_ptr<engine::PassEnd>& end);
  /// A gradient arrived. True if it is the first of a stray pass.
  bool add(const std::shared_ptr<engine::PassEnd>& end, std::size_t slot);
  /// Returns the slots whose gradients arrived if `end` is that of this pass, and forgets the pass.
  std::vector<std::size_t> take(const std::shared_ptr<engine::PassEnd>& end);
  void forget(const engine::PassEnd* end);
  bool is_stray(const engine::PassEnd* end) const { return stray_ && end_.get() == end; }

 private:
  std::shared_ptr<engine::PassEnd> end_;
  bool stray_ = false;
  std::vector<std::uint8_t> arrived_;  // by slot
};

}  // namespace torchspan::data_parallel
