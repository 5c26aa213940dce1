#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "rendezvous/messages/messages.h"
#include "rendezvous/store/function_tables.h"

namespace torchspan::rendezvous {

using ConnectionId = std::uint64_t;

/// The workers of a store: the latest holder of every rank, present or gone, by rank, name and connection.
/// For one thread at a time.
class Roster {
 public:
  struct Worker {
    Register registration;                        ///< without its functions, which FunctionTables has
    std::optional<ConnectionId> connection = {};  ///< none once it left or died
    bool died = false;                            ///< else it left
    std::string how = {};                         ///< it died; see Gone::how
    std::uint64_t told = 0;                       ///< its place in the announcements
    const Member& member() const { return registration.member; }
  };
  using Workers = std::map<int, Worker>;

  const Workers& all() const { return workers_; }
  Workers& all() { return workers_; }
  bool contains(int rank) const { return workers_.contains(rank); }
  Worker& at(int rank) { return workers_.at(rank); }
  const Worker& at(int rank) const { return workers_.at(rank); }
  /// Null if no worker has held the rank, or had the name last.
  const Worker* find(int rank) const;
  const Worker* find(const std::string& name) const;
  std::optional<int> rank_of(ConnectionId connection) const;
  std::size_t present() const { return ranks_.size(); }
  /// The rank for a worker that may ask for any.
  int rank_for(const Member& member);
  std::optional<Error> difference_of_functions(const Register& message) const;

  /// The worker takes its rank, perhaps after another one.
  Worker& enter(ConnectionId connection, Register message);
  /// A present worker left or died.
  void leave(Worker& worker);

 private:
  Workers workers_;
  std::map<ConnectionId, int> ranks_;  ///< of the present workers
  std::map<std::string, int> names_;   ///< of workers_
  FunctionTables functions_;           ///< of the present workers
  int unused_rank_ = 1;                ///< lower ranks, except 0, have been used
};

}  // namespace torchspan::rendezvous
