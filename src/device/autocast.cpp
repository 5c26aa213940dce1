#include <ATen/core/ivalue.h>

#include <torchspan/detail/device/autocast.h>
#include <torchspan/detail/device/streams.h>

#include "device/api/autocast_compat.h"

namespace torchspan::device {
namespace {

/// The CPU first: the only one that concerns a process without other devices.
constexpr std::array kAutocastTypes{c10::DeviceType::CPU, c10::DeviceType::CUDA, c10::DeviceType::XPU,
                                    c10::DeviceType::PrivateUse1};

/// Calls `visit(type)` for the types that this LibTorch has autocast for.
template <class F>
void for_each_type(const F& visit) {
  for (const c10::DeviceType type : kAutocastTypes) {
    if (compat::has_autocast(type)) visit(type);
  }
}

}  // namespace

Autocast Autocast::of_thread() {
  Autocast autocast;
  for_each_type([&](c10::DeviceType type) {
    if (compat::autocast_enabled(type)) autocast.modes.push_back({type, compat::autocast_dtype(type)});
  });
  autocast.cache = at::autocast::is_autocast_cache_enabled();
  return autocast;
}

std::optional<c10::DeviceType> Autocast::type_named(std::string_view name) {
  std::optional<c10::DeviceType> named;
  for_each_type([&](c10::DeviceType type) {
    if (c10::DeviceTypeName(type, /*lower_case=*/true) == name) named = type;
  });
  return named;
}

AutocastScope::AutocastScope(bool enters)
    : cache_(at::autocast::is_autocast_cache_enabled()), types_(enters || has_streams() ? kMostTypes : 1) {
  static_assert(kAutocastTypes.size() == kMostTypes);
  for (std::size_t i = 0; i < types_; ++i) {
    if (!compat::has_autocast(kAutocastTypes[i])) continue;
    before_[i] = {compat::autocast_enabled(kAutocastTypes[i]), compat::autocast_dtype(kAutocastTypes[i])};
  }
}

void AutocastScope::enter(const Autocast& autocast) {
  for_each_type([&](c10::DeviceType type) {
    if (compat::autocast_enabled(type)) compat::set_autocast_enabled(type, false);
  });
  for (const Autocast::Mode& mode : autocast.modes) {
    if (!compat::has_autocast(mode.device)) continue;
    compat::set_autocast_dtype(mode.device, mode.dtype);
    compat::set_autocast_enabled(mode.device, true);
  }
  at::autocast::set_autocast_cache_enabled(autocast.cache);
  at::autocast::increment_nesting();
  entered_ = true;
}

AutocastScope::~AutocastScope() {
  if (entered_ && at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  for (std::size_t i = 0; i < types_; ++i) {
    const c10::DeviceType type = kAutocastTypes[i];
    if (!compat::has_autocast(type)) continue;
    if (compat::autocast_dtype(type) != before_[i].dtype) compat::set_autocast_dtype(type, before_[i].dtype);
    if (compat::autocast_enabled(type) != before_[i].enabled)
      compat::set_autocast_enabled(type, before_[i].enabled);
  }
  if (at::autocast::is_autocast_cache_enabled() != cache_) at::autocast::set_autocast_cache_enabled(cache_);
}

}  // namespace torchspan::device
