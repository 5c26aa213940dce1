#pragma once
// Groups of ranks, their collective operations, and the interface of their backends. For groups over a c10d process
// group see collective/c10d.h. Includes no torch/nn.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <torchspan/core/bytes.h>
#include <torchspan/core/future.h>
#include <torchspan/core/time.h>

namespace torchspan {
struct Runtime;
}

namespace torchspan::collective {

/// Reduction over ranks. kAvg divides the sum by the number of ranks. For bool, sum and maximum are "any",
/// product and minimum are "all". The last three combine the bits of integers, or bools.
enum class ReduceOp : std::uint8_t { kSum, kAvg, kMin, kMax, kProduct, kBitAnd, kBitOr, kBitXor };
using enum ReduceOp;

/// "sum", "average", …
std::string to_string(ReduceOp reduction);

/// The call of Group for which a backend runs rooted_all_to_all().
struct RootedCall {
  enum class Verb : std::uint8_t { kGather = 1, kScatter = 2 };
  Verb verb;
  int root;
};

/// The call of Group for which a backend runs coalesced(): what all ranks must have in common.
struct CoalescedCall {
  enum class Verb : std::uint8_t { kAllReduce = 1, kReduceScatter = 2, kAllGather = 3 };
  Verb verb;
  ReduceOp reduction = kSum;  ///< unless it gathers
  std::string shapes = {};    ///< of the tensors: "[2, 3], [4]"
};

/// Moves the data of one group, as seen from one of its ranks. Users may implement their own. Group
/// validates arguments first; its contracts apply here. All ranks call every method except allocate() and
/// abort() in the same order. Thread-safe. Futures complete in call order, or fail with Error{kTimedOut}
/// that names late ranks and the call they miss or Error{kDisconnected} that names dead ranks; then the
/// group is broken and every later call fails with that first error.
class Backend {
 public:
  virtual ~Backend() = default;

  /// Name of the kind for errors and logs: "shm", "c10d", ….
  virtual std::string name() const = 0;
  virtual int rank() const = 0;
  virtual const std::vector<int>& ranks() const = 0;
  int size() const { return static_cast<int>(ranks().size()); }
  /// The services of the worker that made the group; they live as long as this backend.
  virtual Runtime& runtime() const = 0;
  /// Whether tensors on `device` are accepted; Group rejects others with kUnsupported.
  virtual bool takes(c10::Device device) const { return device.is_cpu(); }

  virtual std::shared_ptr<Backend> split(int color, int key) = 0;
  virtual Future<at::Tensor> all_reduce(at::Tensor tensor, ReduceOp reduction) = 0;
  virtual Future<at::Tensor> reduce_scatter(at::Tensor tensor, ReduceOp reduction) = 0;
  virtual Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) = 0;
  virtual Future<at::Tensor> broadcast(at::Tensor tensor, int root) = 0;
  virtual Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) = 0;
  /// all_to_all() for gather() and scatter(), whose verb and root all ranks must have in common. A backend
  /// that does not override it does not notice differences.
  virtual Future<std::vector<at::Tensor>> rooted_all_to_all(RootedCall call, std::vector<at::Tensor> parts) {
    static_cast<void>(call);
    return all_to_all(std::move(parts));
  }
  /// all_reduce() whose result only `root` gets; the tensors of the others do not change. Without an override as
  /// slow as all_reduce(). Dense tensors only.
  virtual Future<at::Tensor> reduce(at::Tensor tensor, int root, ReduceOp reduction);
  /// all_reduce(), reduce_scatter() or all_gather() of one dense tensor, which consists of several; returns one
  /// result, or that of each rank. A backend that does not override it does not notice different shapes.
  virtual Future<std::vector<at::Tensor>> coalesced(CoalescedCall call, at::Tensor flat);
  /// Both block. Zero: the limit of the other operations.
  virtual std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout) = 0;
  virtual void barrier(Duration timeout) = 0;
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  virtual void abort(const Error& cause) = 0;
  /// Distinguishes this group from others of the same ranks in what the worker reports of its operations; equal on all
  /// ranks. Called once, before any operation.
  virtual void set_instance(std::uint64_t instance) { static_cast<void>(instance); }
  /// Why the group is broken, as far as this rank knows without a call; nullopt if it may work.
  virtual std::optional<Error> failure() { return std::nullopt; }
};

}  // namespace torchspan::collective

namespace c10d {
class ProcessGroup;
}

namespace torchspan {
struct Runtime;
namespace rendezvous {
class Membership;
}
}  // namespace torchspan

/// Collective operations over groups of ranks.
namespace torchspan::collective {

class OperationLog;
class PointToPoint;

/// Selects a group's backend. kAutomatic is kSharedMemory if all ranks prove that they share a host, else
/// kHierarchical. Built-in backends take CPU tensors only and reject others with kUnsupported.
enum class BackendKind : std::uint8_t {
  kAutomatic,
  kSharedMemory,  ///< built in, one host
  kC10d,          ///< LibTorch's Gloo; for other process groups see c10d.h, for devices `process_group`
  kMpi,           ///< Open MPI
  kHierarchical,  ///< shared memory within a host, kNetwork between hosts; with kIsolated Gloo
  kNccl,          ///< CUDA devices, one for each rank, through NCCL
  kCudaIpc,       ///< built in, CUDA devices of one host, which ranks may share
  kNetwork,       ///< built in, connections between all ranks, authenticated, and encrypted between hosts
};

/// Where traffic may go.
enum class Network : std::uint8_t {
  kEncrypted,     ///< between hosts over the workers' connections only: authenticated, and encrypted unless
                  ///< TORCHSPAN_NETWORK=tcp-isolated
  kThisHostOnly,  ///< groups over several hosts are rejected with kUnsupported
  kIsolated,      ///< also in the clear (Gloo, Open MPI): you assert that no one else can reach the network
};

/// Makes this rank's part of a LibTorch process group; collective. `ranks`: the global ranks of a group or of a part
/// that split() makes; `rank`: this one's place among them.
using ProcessGroupFactory =
    std::function<c10::intrusive_ptr<c10d::ProcessGroup>(const std::vector<int>& ranks, int rank)>;

struct GroupOptions {
  BackendKind backend = BackendKind::kAutomatic;
  Network network = Network::kEncrypted;
  std::vector<int> ranks = {};  ///< global rank of each group rank; empty: all
  /// What the group is for, such as "replicas" (characters of worker names). A rank that makes groups in another order
  /// than the others, for example after an exception, is then waited for by name and never paired with another group's
  /// call. Empty: the nth calls for the same ranks match.
  std::string name = {};
  /// The device of this rank's tensors, such as c10::Device(c10::kCUDA, local_rank); the type must be equal on
  /// all ranks. Such a group also takes tensors on the CPU. None, or the CPU: the CPU only. See docs/gpu.md.
  std::optional<c10::Device> device = std::nullopt;
  /// How long an operation waits for a late rank before it fails with kTimedOut; also the limit for
  /// creating the group. 0: no limit.
  Duration timeout = std::chrono::minutes(5);
  /// Address space for each rank's shared memory; only used pages take memory. 0: the size of the machine's
  /// memory.
  std::uint64_t shared_bytes = 0;
  /// With kC10d and `device`: makes the process group through which the device's tensors go, such as LibTorch's
  /// NCCL, whose watchdog may end the process (docs/gpu.md).
  ProcessGroupFactory process_group = nullptr;
};

/// The runtime of a group: shared with it, or one that outlives the group, its splits and their users.
struct GroupRuntime {
  GroupRuntime(std::shared_ptr<Runtime> shared)
      : runtime(std::move(shared)) {}  // NOLINT(google-explicit-constructor)
  GroupRuntime(Runtime& outlives)      // NOLINT(google-explicit-constructor)
      : runtime(std::shared_ptr<void>(), &outlives) {}
  std::shared_ptr<Runtime> runtime;
};

/// The source of Group::recv() from any rank.
struct AnySource {};
inline constexpr AnySource kAnySource{};

/// A message that recv() from any rank received.
struct ReceivedMessage {
  at::Tensor tensor;  ///< the one that was passed to recv()
  int source = 0;     ///< rank of this group that sent it
};

/// A fixed, ordered set of ranks with collective operations. Cheap to copy, thread-safe; dropping the last
/// handle fails pending operations with kCancelled. All ranks issue the same operations in the same order;
/// a mismatch (operation, dtype, shape, reduction, root, part of a pipeline's step) fails on all with kInvalid
/// naming two ranks and calls. Operations return at once and complete in order; results have the same bits on all ranks and in
/// all runs of one group size. A dead (kDisconnected) or late (kTimedOut) rank is named and breaks the
/// group: later calls fail with that error. Errors thrown immediately (kInvalid, kUnsupported) do not break it.
class Group {
 public:
  /// Collective over options.ranks; kInvalid if these differ or omit this rank. A death reported by `world`
  /// fails the operations of its groups at once. When `world` ends or this worker leaves it, operations
  /// fail with kCancelled; the group may outlive both and shares ownership of the runtime. Throws kTimedOut
  /// naming missing ranks, and kUnsupported with a remedy if the ranks have no common backend.
  static Group make(GroupRuntime runtime, rendezvous::Membership& world, GroupOptions options = {});
  /// A group over an existing backend; not null.
  explicit Group(std::shared_ptr<Backend> backend);
  /// The same, but records operations as spans of `runtime`. `messages` implements send() and recv(); set by make().
  Group(std::shared_ptr<Backend> backend, const std::shared_ptr<Runtime>& runtime,
        std::shared_ptr<PointToPoint> messages = nullptr);

  int rank() const;
  int size() const { return backend_->size(); }
  /// Global ranks, by rank in this group.
  const std::vector<int>& ranks() const;

  /// Splits the group: ranks with the same non-negative `color` form a group, ordered by `key`, then by
  /// rank. Collective.
  Group split(int color, int key) const;

  /// Reduces in place; same shape and dtype on all ranks, any strides. Sparse COO tensors (kSum and kAvg
  /// only) may differ in their entries but need equal sparse dimensions where they have any; returns the
  /// coalesced result and leaves `tensor` alone. Half and bfloat16 accumulate in float and are rounded
  /// once. kAvg needs a floating-point or complex dtype, kMin and kMax an ordered one, kBit… integers. As in all
  /// operations, do not touch tensors until the future completes; autograd does not track them; a group of
  /// one returns its input.
  Future<at::Tensor> all_reduce(at::Tensor tensor, ReduceOp reduction = kSum) const;
  /// Returns this rank's part of the reduced tensor, split evenly along the first dimension; size() must
  /// divide it.
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, ReduceOp reduction = kSum) const;
  /// reduce_scatter() that writes this rank's part to `output`, of that part's shape or any with as many elements; it may be
  /// this rank's part of `tensor`, and must not overlap the rest. Ranks may mix the two calls.
  Future<at::Tensor> reduce_scatter_tensor(at::Tensor output, at::Tensor tensor,
                                           ReduceOp reduction = kSum) const;
  /// Returns all ranks' tensors, by rank; their first dimensions may differ.
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) const;
  /// Overwrites `tensor` with that of `root`, a rank of this group.
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) const;
  /// Sends parts[r] to rank r; returns what each rank sent here. One dtype, any shapes.
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) const;
  /// Returns all ranks' tensors in `output`, of shape [size() * n, …] or [size(), n, …] for tensors of [n, …].
  Future<at::Tensor> all_gather_into_tensor(at::Tensor output, at::Tensor tensor) const;
  /// Returns all ranks' tensors, by rank, on rank `root`; nothing on the others.
  Future<std::vector<at::Tensor>> gather(at::Tensor tensor, int root) const;
  /// Overwrites `output` with parts[rank()] of `root`, of the same dtype and shape; only `root` passes parts.
  Future<at::Tensor> scatter(at::Tensor output, std::vector<at::Tensor> parts, int root) const;
  /// all_reduce() whose result only `root` gets, in place; the tensors of the others stay as they are. Costs about
  /// half of all_reduce() over shared memory and kNetwork, and as much elsewhere. Dense tensors only.
  Future<at::Tensor> reduce(at::Tensor tensor, int root, ReduceOp reduction = kSum) const;
  /// Sends `tensor` to another rank, which calls recv() with the same tag (0 or more). Needs no order relative to other
  /// operations and ranks; messages of one tag arrive in the order of calls. Completes with `tensor` when the rank
  /// has received it. For groups from make() and their splits, on every backend; otherwise kUnsupported.
  Future<at::Tensor> send(at::Tensor tensor, int to, int tag = 0) const;
  /// Overwrites `tensor` with one that rank `from` sends, of the same dtype and shape. A tensor on a device
  /// passes through the CPU, as in send(), which then blocks while it copies.
  Future<at::Tensor> recv(at::Tensor tensor, int from, int tag = 0) const;
  /// The same from the rank whose message with this tag arrives first; `recv(tensor, kAnySource)`. A message goes to
  /// the earliest call that it fits, including calls for its sender only. Fails if the group fails, for example if any
  /// rank dies, and with kDisconnected if no other rank is left.
  Future<ReceivedMessage> recv(at::Tensor tensor, AnySource from, int tag = 0) const;
  /// Returns all ranks' bytes, by rank. Blocks; meant for handshakes. If `timeout` (zero:
  /// GroupOptions::timeout) passes first, throws kTimedOut as every operation does.
  std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout = Duration::zero()) const;
  /// Returns once every rank has called it, with the same limit.
  void barrier(Duration timeout = Duration::zero()) const;
  /// A barrier as a future: an operation like the others, in their order, that completes once every rank has begun it. All
  /// ranks call this function; it does not meet barrier().
  Future<void> barrier_async() const;

  /// Allocates an uninitialized tensor, in memory shared by the group's ranks if the backend has any.
  /// all_reduce is zero-copy if every rank's tensor, or the tensor it is a view of, is such a tensor and it
  /// is contiguous. Not collective. The memory lives as long as the tensor.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) const;

  /// Breaks the group and its splits (DistributedDataParallel and others split the group that they get) with `cause`:
  /// fails pending operations here, and on other ranks if the backend can notify them.
  void abort(const Error& cause) const;

  const std::shared_ptr<Backend>& backend() const { return backend_; }

  friend Future<std::vector<at::Tensor>> all_reduce_coalesced(const Group& group,
                                                              std::vector<at::Tensor> tensors,
                                                              ReduceOp reduction);
  friend Future<std::vector<at::Tensor>> reduce_scatter_coalesced(const Group& group,
                                                                  const std::vector<at::Tensor>& tensors,
                                                                  ReduceOp reduction);
  friend Future<std::vector<at::Tensor>> all_gather_into_tensor_coalesced(
      const Group& group, std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& tensors);

 private:
  template <class F>
  auto start(const char* call, std::uint64_t bytes, F begin) const;
  std::int32_t identify() const;

  std::shared_ptr<Backend> backend_;
  std::shared_ptr<OperationLog> log_;       ///< null: none
  std::shared_ptr<PointToPoint> messages_;  ///< null: none
  class Parts;
  std::shared_ptr<Parts> parts_;
};

/// Group::all_reduce(), reduce_scatter() and all_gather_into_tensor() of several dense tensors, which are sent as one:
/// one dtype and device for all, the same shapes on all ranks.
Future<std::vector<at::Tensor>> all_reduce_coalesced(const Group& group, std::vector<at::Tensor> tensors,
                                                     ReduceOp reduction = kSum);
Future<std::vector<at::Tensor>> reduce_scatter_coalesced(const Group& group,
                                                         const std::vector<at::Tensor>& tensors,
                                                         ReduceOp reduction = kSum);
/// outputs[i] is for tensors[i].
Future<std::vector<at::Tensor>> all_gather_into_tensor_coalesced(const Group& group,
                                                                 std::vector<at::Tensor> outputs,
                                                                 const std::vector<at::Tensor>& tensors);

}  // namespace torchspan::collective

namespace torchspan {
using collective::BackendKind;
using collective::Group;
using collective::GroupOptions;
using collective::kAnySource;
using collective::Network;
using collective::ReduceOp;
}  // namespace torchspan
