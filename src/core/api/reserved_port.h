#pragma once
#include <cstdint>
#include <optional>

#include "core/api/descriptor.h"

namespace torchspan {

/// A TCP port that was chosen for a process that starts later. Until this object is destroyed or its process ends, other
/// programs in this network namespace that reserve theirs get different ones. It does not listen at the port.
class ReservedPort {
 public:
  /// Nullopt if another program has reserved it.
  static std::optional<ReservedPort> take(std::uint16_t port);
  /// Draws a port from `first` to `last` that is free at an IPv4 address in host byte order. Nullopt if it finds none.
  static std::optional<ReservedPort> draw(std::uint16_t first, std::uint16_t last, std::uint32_t address);
  /// Whether a program could listen at the port now.
  static bool is_free(std::uint16_t port, std::uint32_t address);

  std::uint16_t number() const { return number_; }

 private:
  ReservedPort(std::uint16_t number, Descriptor holder) : number_(number), holder_(std::move(holder)) {}

  std::uint16_t number_;
  Descriptor holder_;  ///< a Unix socket whose abstract name contains the port
};

}  // namespace torchspan
