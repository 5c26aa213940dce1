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

/// The events that a WorldLink reports. Called without a lock, on the membership thread or on a thread that
/// ends the membership.
class WorldListener {
 public:
  virtual ~WorldListener() = default;
  /// Reports the death of a member's process; another process may hold its rank later.
  virtual void member_died(const rendezvous::Member& member, const Error& reason) = 0;
  virtual void member_left(const rendezvous::Member& member) = 0;
  /// This worker has left its world: fail everything pending, and all later calls.
  virtual void world_ended(const Error& reason) = 0;
  /// Ends the threads that run operations. Called after world_ended(), when the membership is destroyed.
  virtual void world_closing() = 0;
};

/// Connects a Membership with the groups made over it, either of which may end first: reports the
/// membership's events, and answers questions while the world exists. Thread-safe.
class WorldLink {
 public:
  /// Uses `world` until it ends; the runtime lives as long as the link.
  static std::shared_ptr<WorldLink> make(std::shared_ptr<Runtime> runtime, rendezvous::Membership& world);

  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  const rendezvous::Member& self() const { return self_; }
  /// Notifies `listener`, while it exists, of later events and of the end of the world if that has happened.
  void add(const std::weak_ptr<WorldListener>& listener);
  /// Why the process with this instance can no longer take part, if known.
  std::optional<std::string> gone(std::uint64_t instance);
  /// Why the world has ended; nullopt if it has not.
  std::optional<Error> ended();

  /// Returns question(world); throws kCancelled after the world has ended. The end of the world fails what
  /// the question waits for, and waits for the question to return.
  template <class Question>
  auto ask(Question question) {
    const Asking asking(*this);
    return question(world_);
  }

 private:
  /// Held by the membership's callbacks, and destroyed with them.
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
  void note_gone(const rendezvous::Member& member, const std::string& how);
  void end(const Error& reason);
  void close();

  const std::shared_ptr<Runtime> runtime_;
  rendezvous::Membership& world_;
  const rendezvous::Member self_;
  Mutex mutex_;
  std::vector<std::weak_ptr<WorldListener>> listeners_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::pair<std::uint64_t, std::string>> gone_ TORCHSPAN_GUARDED_BY(mutex_);  ///< instance, how
  std::optional<Error> ended_ TORCHSPAN_GUARDED_BY(mutex_);
  int asking_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  Parker* closing_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace torchspan::collective
