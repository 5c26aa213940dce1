#pragma once
#include <array>
#include <deque>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "rpc/references/rref_table.h"

namespace torchspan::rpc::testing {

/// One step of a schedule. Numbers select the nth of what exists at that moment, so a schedule stays valid
/// when steps are left out.
struct RRefStep {
  enum class Kind : std::uint8_t {
    kDeliver,          ///< any message in flight, in any order
    kMembershipEvent,  ///< a worker learns of the next join or death
    kCreate,           ///< remote(): a value on another worker, or on its own
    kOwnValue,         ///< a value of the worker itself
    kShare,            ///< a worker sends a reference to another one, to the owner or to itself
    kShareFails,       ///< the same, and its message cannot be sent
    kDrop,             ///< the program releases a reference
    kCreateFails,      ///< remote() whose message cannot be sent
    kRefuse,           ///< a creation arrives and fails there, begun or not
    kGiveUp,           ///< a creator's deadline passes
    kRepeat,           ///< an unanswered control message is sent once more
    kLose,             ///< a control message or its answer is lost
    kBreak,            ///< a connection breaks: some of what was on it is lost
    kAudit,            ///< a worker asks its peer which forks were lost
    kCrash,
    kRestart,
  };
  static constexpr int kKinds = 16;
  Kind kind = Kind::kDeliver;
  std::uint32_t a = 0, b = 0, c = 0;
};
using RRefSchedule = std::vector<RRefStep>;

/// Simulates a world of tables without workers, threads or time: a bag of messages, and programs that make,
/// share and drop references as a schedule says. Compares the tables with a model after each step: a value
/// that arrived is alive while its owner's program holds it or a protected reference (see is_protected())
/// lives; a protected reference is never refused, and its parent is kept until the owner knows it; a value
/// becomes alive and ends at most once.
class RRefWorld {
 public:
  RRefWorld(std::size_t workers, std::uint64_t seed);
  ~RRefWorld();
  RRefWorld(const RRefWorld&) = delete;

  /// Runs the schedule, then ends everything. Returns the first failure, or an empty string.
  std::string run(const RRefSchedule& schedule);
  /// Records what happens in trace_text(), one line per event; call it before run().
  void trace() { tracing_ = true; }
  const std::string& trace_text() const { return trace_text_; }
  /// Returns how often each kind of step found something to do: a search that never does a thing proves
  /// nothing about it.
  const std::array<std::size_t, RRefStep::kKinds>& done() const { return done_; }
  std::size_t messages() const { return messages_; }
  std::size_t references() const { return books_.size(); }

 private:
  struct Object;
  using ObjectPtr = std::shared_ptr<Object>;
  /// What the model knows of a reference.
  struct Book {
    std::size_t value = 0;
    PeerId holder;
    std::optional<GlobalId> parent;  ///< copied from; none: sent by the owner, or the creation's
    bool creation = false;
    bool known = false;   ///< to the owner
    bool living = true;   ///< in flight or held
    bool orphan = false;  ///< not protected any more
    std::weak_ptr<Object> held = {};
  };
  struct Value {
    GlobalId id;
    PeerId owner, creator;
    bool came = false;      ///< its creation counted
    bool given_up = false;  ///< by its creator
    bool failed = false;    ///< the owner knows that it never arrives
    std::weak_ptr<int> payload = {};
    int made = 0;
  };
  struct Worker {
    PeerId id;
    bool alive = true;
    std::unique_ptr<RRefTable> table;
    std::vector<ObjectPtr> program;
    std::deque<std::pair<PeerId, bool>> news;  ///< peers that joined (true) or died, in order
    std::vector<std::pair<std::size_t, RRefMessage>> unanswered;
    std::map<GlobalId, ObjectPtr> creating;  ///< by fork: creations that were not answered
    std::multiset<PeerId> audits;            ///< connections that broke
  };
  struct Packet {
    enum class Kind : std::uint8_t { kControl, kAnswer, kCreate, kCreated, kCarry, kAudit, kAudited };
    Kind kind = Kind::kControl;
    PeerId from, to;
    RRefMessage message = {};
    std::size_t number = 0;  ///< of the control message
    bool counted = true;
    bool failed = false;  ///< the creation, at its owner
    wire::Handle handle = {};
    RRefTable::Forks asked = {};
    std::vector<GlobalId> lost = {};
  };

  void step(const RRefStep& step);
  bool act(const RRefStep& step);
  bool deliver(std::size_t index);
  bool receive_membership_event(Worker& worker);
  bool create(Worker& worker, Worker& owner, bool fails);
  bool own(Worker& worker);
  bool share(Worker& worker, std::size_t index, Worker& to, bool fails);
  bool drop(Worker& worker, std::size_t index);
  bool refuse(std::uint32_t pick);
  bool give_up(std::uint32_t pick);
  bool repeat(std::uint32_t pick);
  bool lose(std::uint32_t pick);
  bool break_connection(Worker& a, Worker& b, std::uint32_t draw);
  bool audit(std::uint32_t pick);
  bool crash(Worker& worker, std::uint32_t draw);
  bool restart(Worker& worker);

  void arrive_creation(Worker& here, const Packet& packet);
  void arrive_created(Worker& here, const Packet& packet);
  void arrive_carry(Worker& here, const Packet& packet);
  void arrive_control(Worker& here, const Packet& packet);
  void arrive_answer(Worker& here, const Packet& packet);
  void fail_creation(Worker& worker, GlobalId fork);
  void answered(Worker& worker, const RRefMessage& message, bool counted);
  void send(Worker& from, const RRefMessage& message);
  void apply(Worker& worker, RRefTable::Effects effects);
  void ended(Object& object);
  void orphan_below(const std::set<GlobalId>& gone);
  void lose_packet(const Packet& packet);
  void settle();
  bool settle_step();
  void check();
  void check_empty();
  void fail(std::string what);
  void record(const std::string& line);
  std::string describe(const RRefStep& step) const;

  Worker& at(std::uint32_t rank) { return workers_[rank % workers_.size()]; }
  Worker* alive(PeerId id);
  /// Whether a reference is protected: it is unless, before its owner knew of it, one that it was copied from
  /// was lost with a worker that crashed or because its creation was given up. References to a value that
  /// never arrived are not protected.
  bool is_protected(const Book& book) const;
  Value& value_of(const wire::Handle& handle);

  std::mt19937_64 random_;  ///< for settle() only
  std::vector<Worker> workers_;
  std::vector<Packet> bag_;
  std::vector<Value> values_;
  std::map<std::pair<PeerId, GlobalId>, std::size_t> by_id_;  ///< owner and id -> index in values_
  std::map<GlobalId, Book> books_;                            ///< by fork
  std::size_t numbers_ = 0;
  std::size_t messages_ = 0;
  std::array<std::size_t, RRefStep::kKinds> done_{};
  std::string failure_;
  std::string trace_text_;
  bool tracing_ = false;
};

/// What the program and the tables hold: an owner's reference to a value, or a user's fork.
struct RRefWorld::Object {
  Object(RRefWorld& of, PeerId at, std::size_t number) : world(of), holder(at), value(number) {}
  Object(const Object&) = delete;
  ~Object() {
    if (fork) world.ended(*this);
  }

  RRefWorld& world;
  const PeerId holder;
  const std::size_t value;
  std::optional<GlobalId> fork;  ///< none: the owner's
  std::shared_ptr<int> payload;
  bool failed = false;
};

inline std::string str(PeerId id) { return fmt::format("{}.{}", id.rank, id.incarnation); }
inline std::string str(GlobalId id) { return fmt::format("{}:{:x}", id.worker, id.local); }

}  // namespace torchspan::rpc::testing
