#pragma once
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rpc/endpoint.h>
#include <torchspan/rpc/debug.h>

#include "rpc/reference_states.h"
#include "rpc/rref_table.h"

namespace torchspan::rpc {

/// The blob of a creation's request that says where the program made it.
inline constexpr const char* kSiteBlob = "rpc.site";
/// The place of a creation, as its request carries it; empty when it is not known.
Bytes encode_site(const SourceLocation& site);
/// What a control message of that kind is called on the wire.
std::string_view name_of(RRefMessage::Kind kind);

/// Drives the table: turns references into handles before a send and handles into references after it, and
/// sends the protocol's messages. Thread-safe; its lock is never held while sending or destroying.
class References : public std::enable_shared_from_this<References> {
 public:
  References(std::weak_ptr<Endpoint> endpoint, std::uint32_t self);
  /// Before the first message: see RRefTable::begin.
  void begin(PeerId self);
  /// Before anything of that worker is heard, and once nothing can be sent to it any more.
  void joined(PeerId peer);
  void departed(PeerId peer);

  GlobalId next_id();
  ReferencePtr own(ValuePtr value, const std::string& type, SourceLocation site);
  /// The same for a value that a creation on this worker will bring.
  std::shared_ptr<OwnerReference> begin_own_creation(const std::string& type, SourceLocation site);
  void own_creation_failed(std::shared_ptr<OwnerReference> owner, std::exception_ptr error);
  /// A user reference to a value that `to` will create; kept until created() or creation_failed().
  std::shared_ptr<UserReference> begin_creation(std::uint32_t to, const std::string& type,
                                                SourceLocation site);
  void created(const std::shared_ptr<UserReference>& user);
  void creation_failed(const std::shared_ptr<UserReference>& user, const std::exception_ptr& error);
  /// Its request never left: the owner hears nothing of it unless it is told. creation_failed() follows.
  void creation_not_sent(GlobalId fork, const std::exception_ptr& error);

  /// Owner: the reference that a creation from `from` fills, with its value or its failure; nobody else's
  /// when it came before. Throws for what is no creation by `from` here. `site` is what encode_site() wrote,
  /// or empty.
  std::shared_ptr<OwnerReference> arriving_creation(const wire::Handle& handle, PeerId from, BytesView site);

  /// Handles for references that travel to `to`. undo() takes them back after a failed send.
  std::vector<wire::Handle> to_handles(const std::vector<std::shared_ptr<void>>& references, PeerId to);
  void undo(const std::vector<wire::Handle>& handles);
  /// Lets go of references on a thread where the destructors of values may wait.
  void let_go(std::vector<std::shared_ptr<void>> references) const;
  /// References for handles that came from `from`. Throws when one of them was said to be lost; then the
  /// others are given back.
  std::vector<std::shared_ptr<void>> from_handles(const std::vector<wire::Handle>& handles, PeerId from);

  /// A control message came. The answer to a fork request: why it is not counted, or nothing.
  std::optional<Error> receive(const RRefMessage& message, PeerId from);
  /// A connection to a worker that lives broke: asks it which references were lost with it.
  void on_broken(std::uint32_t rank);
  std::vector<GlobalId> on_fork_audit(const std::vector<GlobalId>& forks, PeerId from);
  /// A user reference ended.
  void release(GlobalId fork);

  RRefTable::Counts counts() const;
  /// The books, oldest first; or of values here that others refer to alone.
  std::vector<RRefInfo> list() const;
  std::vector<RRefInfo> list_owners() const;
  /// What the type with that tag is called; a name that does not fit the tag is not believed.
  void name_type(std::uint64_t tag, const std::string& name);
  bool knows_type(std::uint64_t tag) const;
  /// Whether nothing of the protocol is on its way.
  bool settled() const;
  /// The messages of the protocol that have no answer yet, a line for each kind and receiver, for people.
  std::vector<std::string> outstanding() const;
  /// Nobody waits for this worker's services any more: from now on messages that nobody answers are given up
  /// in the end. `alone`: the others stay; so are questions after what broken connections lost.
  void leave(bool alone);
  /// User references that the program still holds are given back to their owners now.
  void delete_users();
  void clear();

 private:
  struct Entry;
  class ControlCompletion;
  class AuditCompletion;
  void audit(PeerId peer, int attempt);
  void audited(PeerId peer, const RRefTable::Forks& asked, const std::vector<GlobalId>& lost);
  void answered(const RRefMessage& message, const std::exception_ptr& refusal);
  /// When a message that failed is sent again, and the number of that attempt.
  struct Again {
    Duration pause{0};
    int attempt = 0;
  };
  /// Nothing: it is given up.
  std::optional<Again> send_again(const RRefMessage& message, int attempt, ErrorKind why) const;
  std::optional<Again> audit_again(int attempt) const;
  void give_up_audit(PeerId peer);
  void not_in_flight(const RRefMessage& message) TORCHSPAN_REQUIRES(mutex_);
  void apply(RRefTable::Effects effects);
  void send(const RRefMessage& message, int attempt);
  /// False, and `dead` if that is why, when it cannot be sent.
  bool send_reference(const std::shared_ptr<void>& reference, PeerId to, wire::Handle& handle,
                      std::optional<Refusal>& dead) TORCHSPAN_REQUIRES(mutex_);
  /// Nothing for one that its sender was told is lost.
  std::optional<std::shared_ptr<void>> from_handle(const wire::Handle& handle, PeerId from);
  std::shared_ptr<void> come_home(const wire::Handle& handle, PeerId from);
  std::shared_ptr<void> adopt(const wire::Handle& handle, PeerId from);
  Error refused(GlobalId value, const Refusal& refusal) const;
  Origin origin(SourceLocation site) const;
  Origin origin_from(PeerId from) const;
  void read_site(BytesView site, Origin& origin) TORCHSPAN_REQUIRES(mutex_);
  std::vector<Entry> read_owned() const;
  void read_held(std::vector<Entry>& entries) const;
  std::vector<RRefInfo> describe(const std::vector<Entry>& entries) const;

  const std::weak_ptr<Endpoint> endpoint_;
  mutable Mutex mutex_;
  RRefTable table_ TORCHSPAN_GUARDED_BY(mutex_);
  std::unordered_map<std::uint64_t, std::string> types_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by tag
  std::set<std::string> files_ TORCHSPAN_GUARDED_BY(mutex_);    ///< of programs elsewhere
  std::map<PeerId, bool> audits_ TORCHSPAN_GUARDED_BY(mutex_);  ///< under way; whether once more
  std::map<std::pair<PeerId, RRefMessage::Kind>, std::size_t> in_flight_ TORCHSPAN_GUARDED_BY(mutex_);
  bool leaving_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool alone_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

}  // namespace torchspan::rpc
