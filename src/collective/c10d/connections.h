#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace torchspan::collective {

/// The TCP connections of an engine that cannot abort pending calls, found among this process's descriptors
/// by the addresses at which the engine's ranks listen.
class Connections {
 public:
  /// Adds the addresses at which this rank or a peer listens. Finds them anywhere in bytes that the engine's
  /// ranks exchanged, in the form of the kernel's socket addresses.
  void add_own(const std::vector<std::uint8_t>& told) { find(told, own_); }
  void add_peer(const std::vector<std::uint8_t>& told) { find(told, peers_); }

  /// Shuts the connections down, as if all peers had closed them. Returns how many.
  int end() const;

 private:
  static void find(const std::vector<std::uint8_t>& told, std::set<std::string>& addresses);
  bool is_ours(int socket) const;

  std::set<std::string> own_, peers_;
};

}  // namespace torchspan::collective
