#pragma once
#include <map>
#include <memory>
#include <string>
#include <typeindex>
#include <vector>

#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rpc/extension.h>
#include <torchspan/detail/rpc/message.h>
#include <torchspan/rpc/debug.h>
#include <torchspan/rpc/function.h>

namespace torchspan::rendezvous {
class Membership;
}  // namespace torchspan::rendezvous

namespace torchspan::rpc {

/// One-way: the caller has cancelled the call named in the header.
inline constexpr wire::MessageType kCancelCall{0x0002};
inline constexpr wire::MessageType kCallFunction{0x0010};
inline constexpr wire::MessageType kCreateRemote{0x0011};
inline constexpr wire::MessageType kFetch{0x0012};
inline constexpr wire::MessageType kCallOperator{0x0013};
inline constexpr wire::MessageType kCreateByOperator{0x0014};
inline constexpr wire::MessageType kCallMethod{0x0015};
inline constexpr wire::MessageType kCreateByMethod{0x0016};
inline constexpr wire::MessageType kAwaitCreation{0x0017};

class Reference;
using ReferencePtr = std::shared_ptr<Reference>;

/// Workers that wait for each other, through the world's membership.
struct Gathering {
  std::shared_ptr<rendezvous::Membership> membership;
  std::vector<int> asked;  ///< in the order of their names
  std::vector<int>
      ranks;  ///< ascending; only these wait for each other, and each set of ranks counts its own rounds
};

/// Interface of the worker behind the templates of Worker and RRef. Implemented in src/rpc.
class WorkerBackend : public std::enable_shared_from_this<WorkerBackend> {
 public:
  virtual ~WorkerBackend() = default;

  virtual Runtime& runtime() = 0;
  virtual std::weak_ptr<ContinuationExecutor> continuations() = 0;
  /// Where handlers run.
  virtual Pool& pool() = 0;
  virtual const WorkerInfo& self() const = 0;
  /// Members of the world, by rank.
  virtual std::vector<WorkerInfo> workers() const = 0;
  virtual WorkerInfo info(const Destination& of) const = 0;
  /// Name of the current or last holder of a rank.
  virtual std::string name_of(std::uint32_t rank) const = 0;
  /// Rank of a destination; throws Error{kInvalid} that lists the members.
  virtual std::uint32_t resolve(const Destination& to) const = 0;
  /// Id of a token in this worker's table; throws Error{kInvalid} that says to add it.
  virtual std::uint64_t id_of(const char* name, std::string (*signature)()) const = 0;
  /// Sets a request's deadline and stop tokens from the options and the call being served.
  virtual void apply(const CallOptions& options, Request& request) = 0;
  virtual std::optional<CurrentCall> current_call() = 0;
  virtual DebugInfo debug() const = 0;
  virtual void set_default_timeout(Duration timeout) = 0;
  virtual Duration default_timeout() const = 0;

  /// Whether a worker has neither died nor left, as far as this one knows.
  virtual bool is_present(std::uint32_t rank) const = 0;
  /// Whether this worker has stopped or is about to; all its calls fail.
  virtual bool is_stopping() const = 0;
  /// Throws Error{kInvalid} on a thread that must never wait: in a function declared kInline.
  virtual void check_may_wait() const {}
  /// Error{kCancelled} for callers after is_stopping(); says what to do.
  Error shut_down() const;
  /// Throws shut_down() if is_stopping().
  void check_running() const;
  /// Runs `job` on a pool thread after a delay, or never if the worker stops first.
  virtual void after(Duration delay, UniqueFunction<void()> job) = 0;
  /// At the end of a job on a thread of the pool: receives messages on this thread, and serves those that a pool thread
  /// serves here, until none has arrived for the executor's spin limit. This saves waking a pool thread for each
  /// message. One thread at a time; on others it does nothing.
  virtual void receive_here() {}

  /// Sends a request; the completion receives its reply or failure. Never waits for the peer and never
  /// throws.
  virtual void send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion) = 0;

  /// Makes a reference to a new value owned here.
  virtual ReferencePtr own(ValuePtr value, std::string type_name, SourceLocation site) = 0;
  /// Starts the creation of a value on `to`; prepends the ids to the request's payload.
  virtual ReferencePtr create(std::uint32_t to, Request request, std::string type_name) = 0;
  /// The participants of Worker::all_gather_bytes() and of a barrier, all workers for none. Throws Error{kInvalid} for an
  /// unknown name, and in an open world without names.
  virtual Gathering gathering(const std::vector<std::string>& participants) = 0;
  /// See Worker::all_gather_bytes.
  std::vector<Bytes> all_gather_bytes(const std::string& tag, const Bytes& mine,
                                      const std::vector<std::string>& participants, Deadline deadline);
  /// A globally unique id.
  virtual GlobalId next_id() = 0;
  virtual void* find_extension(const std::type_info& type) const = 0;

 private:
  const OwnerProcess process_;
};

/// Shared state of an RRef: the owner's hold on the value, or a user's fork of it. Destroying it releases
/// the fork. Thread-safe.
class Reference {
 public:
  virtual ~Reference() = default;
  virtual bool is_owner() const = 0;
  virtual std::uint32_t owner() const = 0;
  virtual GlobalId value_id() const = 0;
  virtual GlobalId fork_id() const = 0;
  /// Digest of the value's type name, as in handles.
  virtual std::uint64_t type_tag() const = 0;
  /// Completes when the owner knows this fork (users) or the value has been created (owners); fails if the
  /// creation failed.
  virtual Future<void> ready() const = 0;
  /// Whether this is a copy of another user's reference; ready() then does not cover the creation.
  virtual bool copied() const { return false; }
  /// The value; owners only. Throws the creation's error, or Error{kInvalid} naming both workers on a user.
  virtual ValuePtr value(Deadline deadline) const = 0;
  /// Records the type name that belongs to this reference's tag, for listings.
  virtual void name_type(const std::string& /*name*/) const {}
  /// Fails everything still pending: the worker is stopping.
  virtual void abandon(const std::exception_ptr& reason) = 0;
  /// The worker; throws Error{kCancelled} if it is shut down or has deleted the reference.
  virtual std::shared_ptr<WorkerBackend> backend() const = 0;
};

}  // namespace torchspan::rpc
