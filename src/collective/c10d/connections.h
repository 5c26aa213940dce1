#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace torchspan::collective {

/// The TCP connections of an engine that cannot cancel its pending operations. Finds them among the
/// descriptors of this process by the addresses at which the engine's ranks listen.
class Connections {
 public:
  /// Adds the addresses at which this rank, or a peer, listens: every sockaddr found in the bytes that the
  /// engine's ranks exchanged.
  void add_own(const std::vector<std::uint8_t>& exchanged) { find(exchanged, own_); }
  void add_peer(const std::vector<std::uint8_t>& exchanged) { find(exchanged, peers_); }

  /// Shuts the connections down, as if all peers had closed them. Returns their number.
  int end() const;

 private:
  static void find(const std::vector<std::uint8_t>& exchanged, std::set<std::string>& addresses);
  bool is_ours(int socket) const;

  std::set<std::string> own_, peers_;
};

}  // namespace torchspan::collective
