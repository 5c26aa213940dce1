#pragma once
#include <memory>
#include <utility>

namespace torchspan::data_parallel {

/// While it lives, backward passes of new forwards of `Wrapped` reduce nothing; see no_sync() of the wrappers. Movable, for
/// example into a std::optional. Several may live at once, and end in any order, also after the wrapper.
template <class Wrapped>
class NoSync {
 public:
  explicit NoSync(const std::shared_ptr<Wrapped>& wrapped) : wrapped_(wrapped) {
    wrapped->pause_reductions();
  }
  ~NoSync() { end(); }
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&& other) noexcept {
    if (this == &other) return *this;
    end();
    wrapped_ = std::move(other.wrapped_);
    return *this;
  }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  void end() noexcept {
    if (const auto wrapped = std::exchange(wrapped_, {}).lock()) wrapped->resume_reductions();
  }

  std::weak_ptr<Wrapped> wrapped_;
};

}  // namespace torchspan::data_parallel
