#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/rpc/endpoint.h>
#include <torchspan/rpc/debug.h>

#include "rpc/references/program_names.h"
#include "rpc/references/reference_states.h"
#include "rpc/references/rref_driver.h"
#include "rpc/references/shared_table.h"

namespace torchspan::rpc {

/// Turns references into handles before a send and handles into references after it, and creates references.
/// Thread-safe.
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
  /// References for handles that came from `from`. Throws when one of them was said to be lost; then the
  /// others are given back.
  std::vector<std::shared_ptr<void>> from_handles(const std::vector<wire::Handle>& handles, PeerId from);

  /// A user reference ended.
  void release(GlobalId fork);

  /// The messages of the protocol.
  RRefDriver& driver() { return *driver_; }
  ProgramNames& names() { return names_; }

  RRefTable::Counts counts() const;
  /// The books, oldest first; or of values here that others refer to alone.
  std::vector<RRefInfo> list() const;
  std::vector<RRefInfo> list_owners() const;
  /// Whether nothing of the protocol is on its way.
  bool settled() const;
  /// User references that the program still holds are given back to their owners now.
  void delete_users();
  void clear();

 private:
  /// False, and `dead` if that is why, when it cannot be sent.
  bool send_reference(const std::shared_ptr<void>& reference, PeerId to, wire::Handle& handle,
                      std::optional<Refusal>& dead) TORCHSPAN_REQUIRES(shared_->mutex);
  /// Nothing for one that its sender was told is lost.
  std::optional<std::shared_ptr<void>> from_handle(const wire::Handle& handle, PeerId from);
  std::shared_ptr<void> come_home(const wire::Handle& handle, PeerId from);
  std::shared_ptr<void> adopt(const wire::Handle& handle, PeerId from);
  Origin origin(SourceLocation site) const;
  Origin origin_from(PeerId from) const;

  const std::weak_ptr<Endpoint> endpoint_;
  const std::shared_ptr<SharedRRefTable> shared_;
  const std::shared_ptr<RRefDriver> driver_;
  ProgramNames names_;
};

}  // namespace torchspan::rpc
