#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace torchspan::collective {

/// The TCP connections of an engine that has no way to end what waits for them, found among the descriptors
/// of this process by the addresses at which its ranks listen.
class Connections {
 public:
  /// Addresses at which this rank or another listens, wherever they are in bytes that the engine's ranks told
  /// each other: a socket address of the kernel's form.
  void add_own(const std::vector<std::uint8_t>& told) { find(told, own_); }
  void add_peer(const std::vector<std::uint8_t>& told) { find(told, peers_); }

  /// Shuts them down: the engine sees what it would see if all its peers had closed them. Returns how many.
  int end() const;

 private:
  static void find(const std::vector<std::uint8_t>& told, std::set<std::string>& addresses);
  bool is_ours(int socket) const;

  std::set<std::string> own_, peers_;
};

}  // namespace torchspan::collective
