#pragma once
#include <array>
#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace torchspan::device {

/// The device types for which autocast is enabled on a thread, and the dtypes that it casts to.
struct Autocast {
  struct Mode {
    c10::DeviceType device = c10::DeviceType::CPU;
    at::ScalarType dtype = at::ScalarType::Undefined;
  };
  std::vector<Mode> modes;
  bool cache = true;  ///< whether casts of parameters are kept for reuse

  bool enabled() const { return !modes.empty(); }
  static Autocast of_thread();
  /// The type that c10::DeviceTypeName() calls so, as in "cuda", if this LibTorch has autocast for it.
  static std::optional<c10::DeviceType> type_named(std::string_view name);
};

/// Restores all of this thread's autocast state at the end of a scope, whatever the code in between changed.
/// enter() replaces the state; like LibTorch's own scopes, the outermost one then drops the cached casts.
class AutocastScope {
 public:
  /// If `enters` is false, enter() must not be called, and the scope costs less without devices.
  explicit AutocastScope(bool enters = true);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
  /// Enables autocast for the modes of `autocast` and disables it for all other device types. At most once.
  void enter(const Autocast& autocast);

 private:
  static constexpr std::size_t kMostTypes = 4;
  struct Before {
    bool enabled = false;
    at::ScalarType dtype = at::ScalarType::Undefined;
  };
  std::array<Before, kMostTypes> before_;
  const bool cache_;
  const std::size_t types_;  ///< of before_: without devices, only that of the CPU
  bool entered_ = false;
};

}  // namespace torchspan::device
