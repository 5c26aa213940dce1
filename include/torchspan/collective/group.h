#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include <torchspan/collective/backend.h>

namespace torchspan {
struct Runtime;
namespace rendezvous {
class Membership;
}
}  // namespace torchspan

/// Operations that every rank of a group takes part in.
namespace torchspan::collective {

/// Which back end a group gets. kAutomatic: shared memory where all ranks are proven to share a host, else
/// hierarchical.
enum class BackendKind : std::uint8_t {
  kAutomatic,
  kSharedMemory,  ///< ours, one host
  kC10d,          ///< LibTorch's Gloo; for another process group see c10d.h
  kMpi,           ///< Open MPI
  kHierarchical,  ///< shared memory inside a host, Gloo between hosts
};

/// Back ends between hosts neither authenticate nor encrypt: they run only where the user says kIsolated.
enum class Network : std::uint8_t { kThisHostOnly, kIsolated };

struct GroupOptions {
  BackendKind backend = BackendKind::kAutomatic;
  Network network = Network::kThisHostOnly;
  std::vector<int> ranks = {};  ///< ranks of the world by rank of the group; empty: the whole world
  /// How long the group waits for a late rank before its operation fails; also for the making of the group.
  Duration timeout = std::chrono::minutes(5);
  /// Address space for each rank's shared memory, of which only what is used takes memory; zero: as much as
  /// the machine has memory.
  std::uint64_t shared_bytes = 0;
};

/// Some ranks of a world, in a fixed order. A cheap handle, copied freely; the last one that goes fails what
/// is still pending with kCancelled. Thread-safe, but every rank must issue the same operations in the same
/// order: a difference of operation, dtype, shape, reduction or root fails on all ranks with kInvalid that
/// names two ranks and their calls. Operations return at once and complete in order; results have the same
/// bits on all ranks, and from run to run for one size of group. A rank that dies fails the operations of all
/// others with kDisconnected naming it; one that is late by more than the time-out fails them with kTimedOut
/// naming it and the call it misses. Either breaks the group: all later calls fail with that first error. A
/// group of one returns what it is given. Bad arguments throw kInvalid at once, and what a back end cannot do
/// kUnsupported; neither breaks anything: so for tensors of devices that the back end does not take, which
/// for ours are all but the CPU. Tensors are not tracked by autograd, and must not be touched until the
/// future completes.
class Group {
 public:
  /// Collective over options.ranks (kInvalid if these differ between ranks, or this rank is not among them).
  /// A death that `world` hears of fails the operations of all its groups with that rank, at once; its own
  /// end, and that of this worker's part in it, fails all operations with kCancelled: a group may outlive its
  /// world. It has a part in the runtime. Throws kTimedOut naming who did not come, kUnsupported when the
  /// ranks have no back end in common, with what to do about it.
  static Group make(std::shared_ptr<Runtime> runtime, rendezvous::Membership& world,
                    GroupOptions options = {});
  /// The same for a runtime that outlives the group, what is split from it and what uses them.
  static Group make(Runtime& runtime, rendezvous::Membership& world, GroupOptions options = {});
  /// A group over a back end that exists already; not null.
  explicit Group(std::shared_ptr<Backend> backend);

  int rank() const;
  int size() const;
  /// Ranks of the world, by rank of this group.
  const std::vector<int>& ranks() const;

  /// Collective: the ranks that gave one `color`, which is not negative, become a group, ordered by `key`,
  /// then by rank.
  Group split(int color, int key) const;

  /// Reduces in place; `tensor` has one shape and dtype on all ranks and any strides. Sparse COO tensors may
  /// hold different numbers of elements; their sum is returned, coalesced, and `tensor` is left alone
  /// (kSum and kAvg only). Ranks that hold any must agree on the number of sparse dimensions. Half and
  /// bfloat16 are added in float and rounded once. kAvg needs a floating or complex dtype, kMin and
  /// kMax an ordered one.
  Future<at::Tensor> all_reduce(at::Tensor tensor, ReduceOp reduction = kSum) const;
  /// The rank's equal part of the reduced tensor, cut along its first dimension, which size() divides.
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, ReduceOp reduction = kSum) const;
  /// Everybody's tensor, by rank; first dimensions may differ.
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) const;
  /// Overwrites `tensor` with that of `root`, a rank of this group.
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) const;
  /// Sends parts[r] to rank r; returns what each rank sent here. One dtype, any shapes.
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) const;
  /// Everybody's bytes, by rank: for handshakes. Blocks.
  std::vector<Bytes> all_gather_bytes(BytesView mine, Deadline deadline = Deadline::never()) const;
  /// Waits until every rank called it.
  void barrier(Deadline deadline = Deadline::never()) const;

  /// A tensor, its values undefined, in memory that this group's ranks share, where the back end has such;
  /// else in ordinary memory. all_reduce copies nothing when every rank's tensor is contiguous and lies in
  /// such memory (a view of it will do). Not collective. The memory lives as long as the tensor.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) const;

  /// Breaks the group with `cause`: fails what is pending here, and on the other ranks as far as the back end
  /// can tell them.
  void abort(const Error& cause) const;

  const std::shared_ptr<Backend>& backend() const { return backend_; }

 private:
  std::shared_ptr<Backend> backend_;
};

}  // namespace torchspan::collective
