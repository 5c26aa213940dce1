#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/rpc/worker_backend.h>
#include <torchspan/rpc/debug.h>

#include "rpc/references/program_names.h"
#include "rpc/references/reference_states.h"
#include "rpc/references/rref_driver.h"
#include "rpc/references/rref_table.h"

namespace torchspan::rpc {

/// Turns references into handles before a send and handles into references after it, and creates references.
/// Thread-safe.
class References : public std::enable_shared_from_this<References> {
 public:
  References(std::weak_ptr<WorkerBackend> backend, std::uint32_t self);
  /// Sets this worker's rank and incarnation, before the first message: see RRefTable::begin.
  void begin(PeerId self);
  /// Handles a worker that joined, before any of its messages, or one that departed, once nothing can be sent
  /// to it any more.
  void joined(PeerId peer);
  void departed(PeerId peer);

  GlobalId next_id();
  ReferencePtr own(ValuePtr value, const std::string& type, SourceLocation site);
  /// The same as own() for a value that a creation on this worker will make.
  std::shared_ptr<OwnerReference> begin_own_creation(const std::string& type, SourceLocation site);
  void own_creation_failed(std::shared_ptr<OwnerReference> owner, std::exception_ptr error);
  /// Makes a user reference to a value that `to` will create; keeps it until created() or creation_failed().
  std::shared_ptr<UserReference> begin_creation(std::uint32_t to, const std::string& type,
                                                SourceLocation site);
  void created(const std::shared_ptr<UserReference>& user);
  void creation_failed(const std::shared_ptr<UserReference>& user, const std::exception_ptr& error);
  /// Reports to the owner a creation whose request was never sent. creation_failed() follows.
  void creation_not_sent(GlobalId fork, const std::exception_ptr& error);

  /// On the owner: returns the reference that a creation from `from` fills with its value or its failure; an
  /// unshared one if the creation does not count. Throws if it is not a creation by `from` on this worker.
  /// `site` is what encode_site() wrote, or empty.
  std::shared_ptr<OwnerReference> arriving_creation(const wire::Handle& handle, PeerId from, BytesView site);

  /// Makes handles for references to be sent to `to`. undo() takes them back after a failed send.
  std::vector<wire::Handle> to_handles(const std::vector<std::shared_ptr<void>>& references, PeerId to);
  void undo(const std::vector<wire::Handle>& handles);
  /// Makes references for handles that came from `from`. If one of them was reported lost, gives the others
  /// back and throws.
  std::vector<std::shared_ptr<void>> from_handles(const std::vector<wire::Handle>& handles, PeerId from);

  /// Handles the end of a user reference.
  void release(GlobalId fork);

  /// Returns the driver, which sends the protocol's messages.
  RRefDriver& driver() { return *driver_; }
  ProgramNames& names() { return names_; }

  RRefTable::Counts counts() const;
  /// Lists the table, oldest first; list_owners() only the values here that others refer to.
  std::vector<RRefInfo> list() const;
  std::vector<RRefInfo> list_owners() const;
  /// Whether nothing of the protocol is in flight.
  bool settled() const;
  /// Gives the user references that the program still holds back to their owners.
  void delete_users();
  void clear();

 private:
  /// Returns nullopt for a reference that this worker reported to its sender as lost.
  std::optional<std::shared_ptr<void>> from_handle(const wire::Handle& handle, PeerId from);
  std::shared_ptr<void> receive_at_owner(const wire::Handle& handle, PeerId from);
  std::shared_ptr<void> adopt(const wire::Handle& handle, PeerId from);
  Origin origin(SourceLocation site) const;
  Origin origin_from(PeerId from) const;

  const std::weak_ptr<WorkerBackend> backend_;
  const std::shared_ptr<SharedRRefTable> shared_;
  const std::shared_ptr<RRefDriver> driver_;
  ProgramNames names_;
};

}  // namespace torchspan::rpc
