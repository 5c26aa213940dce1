#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

namespace torchspan::collective {

/// Receives the events of a WorldLink. Called without locks, on the membership thread or on a thread that
/// ends the membership.
class WorldListener {
 public:
  virtual ~WorldListener() = default;
  /// The member's process died. Another process may hold its rank later.
  virtual void member_died(const rendezvous::Member& member, const Error& reason) = 0;
  virtual void member_left(const rendezvous::Member& member) = 0;
  /// This worker's world has ended: pending and later operations fail.
  virtual void world_ended(const Error& reason) = 0;
  /// Ends the threads that run operations. Called after world_ended(), while the membership is destroyed.
  virtual void world_closing() = 0;
};

/// "worker1 (rank 1, …) died: …", or "worker1 (rank 1, …) is gone: it left the world" if `how` does not name it.
std::string text_of_departed(const std::string& peer, const std::string& how);

/// Membership::all_gather_bytes() with the contributions in the order of `ranks`. `once`: as in Membership::Wait.
std::vector<Bytes> gather_in_order(rendezvous::Membership& world, const std::string& tag, BytesView mine,
                                   const std::vector<int>& ranks, Deadline deadline, bool once = false);

/// The ranks of a group, by rank of the group.
struct GroupMembers {
  std::vector<int> ranks = {};                ///< of the world
  std::vector<std::string> names = {};        ///< for messages
  std::vector<std::uint64_t> instances = {};  ///< of their processes, if there is a world

  static GroupMembers of(const std::vector<rendezvous::Member>& members);
  int size() const { return static_cast<int>(ranks.size()); }
  const std::string& name(int rank) const { return names[static_cast<std::size_t>(rank)]; }
  bool contains(const rendezvous::Member& member) const;
  /// Returns the members with these ranks of the world, in this order.
  GroupMembers part(const std::vector<int>& of_ranks) const;
};

class WorldLink;

/// Names the membership's rounds in which the ranks of a group connect. `split`: SplitPlan::number; several threads may split
/// groups of the same ranks at the same time, in different orders. 0: of a group that is not a part.
struct ConnectionRounds {
  std::string tag = "torchspan.connections";
  std::uint64_t split = 0;
  std::uint64_t count = 0;  ///< rounds of the split so far

  /// Collective over `ranks`: returns their bytes in this order.
  std::vector<Bytes> gather(WorldLink& world, BytesView mine, const std::vector<int>& ranks,
                            Deadline deadline);
};

/// The error of a group that lost a rank; `how` may begin with its name.
Error departed_rank_error(const std::string& peer, const std::string& how);

/// Why a group is broken after a rank has called abort(): "worker1 (…) aborted the group: …". A cause that says so already
/// stays as it is.
Error aborted_by(const std::string& peer, const Error& cause);

/// Connects a Membership with the groups made from it; either may end first. Forwards its events to the
/// groups, and gives them access to the membership while the world exists. Thread-safe.
class WorldLink {
 public:
  /// Uses `world` until it ends; keeps the runtime alive.
  static std::shared_ptr<WorldLink> make(std::shared_ptr<Runtime> runtime, rendezvous::Membership& world);

  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  const rendezvous::Member& self() const { return self_; }
  /// Sends later events to `listener` while it lives. If the world has ended already, calls world_ended() at
  /// once.
  void add(const std::weak_ptr<WorldListener>& listener);
  /// Why the process with this instance cannot take part any more; nullopt if it may be alive.
  std::optional<std::string> departed(std::uint64_t instance);
  /// A rank of a group that cannot take part any more, and why.
  struct DepartedRank {
    std::size_t rank;
    std::string how;
  };
  /// The one of these processes, in rank order, that went first: others may have ended because of it.
  std::optional<DepartedRank> first_departed(const std::vector<std::uint64_t>& instances);
  /// The same after something else than the membership has reported the end of one of them, such as its
  /// connection: waits up to a second for the membership, which knows the first. Not on the membership thread.
  std::optional<DepartedRank> await_first_departed(const std::vector<std::uint64_t>& instances);
  /// Why a group lost a rank, whose connection reported `lost.how`: names the process that went first, as
  /// await_first_departed() finds it; otherwise lost.how, with this rank, which is then the only one that has lost the other.
  std::string cause_of_loss(const GroupMembers& members, const DepartedRank& lost);
  /// Why the world ended; nullopt while it exists.
  std::optional<Error> ended();

  /// Calls question(world); throws kCancelled if the world has ended. The end of the world cancels what the
  /// question waits for, and then waits for the call to return.
  template <class Question>
  auto ask(Question question) {
    const Asking asking(*this);
    return question(world_);
  }

 private:
  /// Owned by the membership's callbacks, which are destroyed when the membership ends.
  struct Hold {
    explicit Hold(const std::shared_ptr<WorldLink>& link) : link(link) {}
    ~Hold() {
      if (const auto held = link.lock()) held->close();
    }
    Hold(const Hold&) = delete;
    const std::weak_ptr<WorldLink> link;
  };
  class Asking {
   public:
    explicit Asking(WorldLink& link);
    ~Asking();
    Asking(const Asking&) = delete;

   private:
    WorldLink& link_;
  };

  WorldLink(std::shared_ptr<Runtime> runtime, rendezvous::Membership& world);
  std::vector<std::shared_ptr<WorldListener>> listeners();
  void note_death(const rendezvous::Member& member, const Error& reason);
  void note_departed(const rendezvous::Member& member, const std::string& how);
  std::optional<DepartedRank> find_first_departed(const std::vector<std::uint64_t>& instances) const
      TORCHSPAN_REQUIRES(mutex_);
  void end(const Error& reason);
  void close();

  const std::shared_ptr<Runtime> runtime_;
  rendezvous::Membership& world_;
  const rendezvous::Member self_;
  Mutex mutex_;
  std::vector<std::weak_ptr<WorldListener>> listeners_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::pair<std::uint64_t, std::string>> departed_
      TORCHSPAN_GUARDED_BY(mutex_);  ///< instance and reason
  std::optional<Error> ended_ TORCHSPAN_GUARDED_BY(mutex_);
  int asking_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  Parker* closing_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  std::vector<Parker*> awaiting_departed_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::collective
