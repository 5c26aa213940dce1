#pragma once
#include <cstdint>
#include <type_traits>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>
#include <torchspan/core/time.h>

/// Operations that every rank of a group takes part in. This room is not built yet: what follows is the
/// interface it is meant to have. Including it is harmless; making a group stops the compilation and says so.
namespace torchspan::collective {

template <class Use>
struct Built {
  static_assert(!std::is_same_v<Use, Use>, "torchspan::collective is not built yet: see docs/status.md");
  using Yes = int;
};
template <class Use>
using NotBuilt = typename Built<Use>::Yes;

enum class Reduction : std::uint8_t { kSum, kAverage, kMinimum, kMaximum, kProduct };

/// Who moves the bytes. kAutomatic: shared memory where all ranks are proven to share a host, else
/// hierarchical.
enum class BackEnd : std::uint8_t {
  kAutomatic,
  kSharedMemory,  ///< ours, one host
  kC10d,          ///< any LibTorch process group: Gloo, NCCL, MPI, UCC
  kMpi,           ///< Open MPI
  kHierarchical,  ///< shared memory inside a host, another back end between hosts
};

/// Back ends between hosts neither authenticate nor encrypt: they run only where the user says kIsolated.
enum class Network : std::uint8_t { kThisHostOnly, kIsolated };

struct GroupOptions {
  BackEnd back_end = BackEnd::kAutomatic;
  Network network = Network::kThisHostOnly;
  std::vector<int> ranks;  ///< empty: the whole world
  Duration timeout = std::chrono::minutes(5);
};

/// Some ranks of a world, in a fixed order. Every rank calls the same operations in the same order. Sums have
/// the same bits on all ranks, and from run to run for one world size. A group of one is a no-op. A rank that
/// dies fails the pending operations of all others with Error{kDisconnected} naming it; one that is late
/// fails them with kTimedOut naming who is missing. Thread-safe.
class Group {
 public:
  /// Collective: all of options.ranks make it together. `world` is a Session or a rendezvous::Membership.
  template <class World, NotBuilt<World> = 0>
  explicit Group(World& world, GroupOptions options = {});

  template <class Use = void, NotBuilt<Use> = 0>
  int rank() const;
  template <class Use = void, NotBuilt<Use> = 0>
  int size() const;
  /// Collective: the ranks that gave one `color` become a group, ordered by `key`, then by rank.
  template <class Use = void, NotBuilt<Use> = 0>
  Group split(int color, int key) const;

  /// Reduces in place; `tensor` has one shape and dtype on all ranks and is not touched until the future
  /// completes. Sparse tensors may hold different numbers of elements.
  template <class Use = void, NotBuilt<Use> = 0>
  Future<at::Tensor> all_reduce(at::Tensor tensor, Reduction reduction = Reduction::kSum);
  /// The rank's equal part of the reduced tensor, cut along its first dimension.
  template <class Use = void, NotBuilt<Use> = 0>
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, Reduction reduction = Reduction::kSum);
  /// Everybody's tensor, by rank; first dimensions may differ.
  template <class Use = void, NotBuilt<Use> = 0>
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor);
  /// Overwrites `tensor` with that of `root`.
  template <class Use = void, NotBuilt<Use> = 0>
  Future<at::Tensor> broadcast(at::Tensor tensor, int root);
  /// Sends parts[r] to rank r; returns what each rank sent here.
  template <class Use = void, NotBuilt<Use> = 0>
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts);
  /// Waits until every rank called it.
  template <class Use = void, NotBuilt<Use> = 0>
  void barrier(Deadline deadline);
};

}  // namespace torchspan::collective
