#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "rendezvous/messages/messages.h"

namespace torchspan::rendezvous {

/// The function tables and wire versions of the present workers: one copy of each distinct table, and which workers
/// have it. For one thread at a time.
class FunctionTables {
 public:
  /// A worker with this registration came or is gone.
  void add(const Register& registration);
  void remove(const Register& registration);
  /// Why a worker with this registration may not join the present ones; nullopt if it may. `describe` formats
  /// the worker of a rank.
  std::optional<Error> difference(const Register& message,
                                  const std::function<std::string(int rank)>& describe) const;

 private:
  /// Digest of the functions; oldest and newest version, and features, of the wire format.
  using Key = std::tuple<std::uint64_t, std::uint16_t, std::uint16_t, std::uint32_t>;
  struct Table {
    std::vector<std::string> functions;
    ProtocolRange wire;
    std::set<int> holders;         ///< their ranks
    std::size_t require_same = 0;  ///< how many holders require the same table of all
  };
  static Key key_of(const Member& member);
  std::map<Key, Table> tables_;
};

}  // namespace torchspan::rendezvous
