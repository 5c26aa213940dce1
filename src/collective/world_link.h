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

/// What a WorldLink tells. Called under no lock, on the membership thread or on one that ends the membership.
class WorldListener {
 public:
  virtual ~WorldListener() = default;
  /// That member died; its process does, whoever holds its rank later.
  virtual void member_died(const rendezvous::Member& member, const Error& reason) = 0;
  virtual void member_left(const rendezvous::Member& member) = 0;
  /// This worker has no world any more: everything pending fails, and all that is called later.
  virtual void world_ended(const Error& reason) = 0;
  /// Ends the threads that run operations: after world_ended(), as the membership goes.
  virtual void world_closing() = 0;
};

/// Between a Membership and the groups that were made over it, of which either may end first: tells them what
/// it hears, and answers their questions as long as there is a world. Thread-safe.
class WorldLink {
 public:
  /// `world` is used until it ends; the runtime lives as long as the link.
  static std::shared_ptr<WorldLink> make(std::shared_ptr<Runtime> runtime, rendezvous::Membership& world);

  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  const rendezvous::Member& self() const { return self_; }
  /// Tells `listener`, as long as it lives, what happens from now on, and what has happened to the world.
  void add(const std::weak_ptr<WorldListener>& listener);
  /// Why the process with this instance can take part no more, if that is known.
  std::optional<std::string> gone(std::uint64_t instance);
  /// Why there is no world any more.
  std::optional<Error> ended();

  /// question(world), or kCancelled once the world ended. The world's end waits for the answer, and ends what
  /// the question waits for.
  template <class Question>
  auto ask(Question question) {
    const Asking asking(*this);
    return question(world_);
  }

 private:
  /// Held by the membership's callbacks, which go when its part ends.
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
