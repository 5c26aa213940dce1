#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

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
