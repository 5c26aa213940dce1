#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/bytes.h>
#include <torchspan/core/future.h>
#include <torchspan/core/time.h>

namespace torchspan::collective {

/// How the values of all ranks become one. kAvg divides the sum by the number of ranks. Truth values:
/// sum and maximum mean "any", product and minimum mean "all".
enum class ReduceOp : std::uint8_t { kSum, kAvg, kMin, kMax, kProduct };
using enum ReduceOp;

/// "sum", "average", …
std::string to_string(ReduceOp reduction);

/// Who moves the bytes of one group, as seen from one rank of it: what a Group hands its calls to once their
/// arguments are known to make sense. Users may bring their own. Every method but allocate() and abort() is
/// called in the same order on all ranks. Thread-safe. Futures complete in the order of the calls, with
/// Error{kTimedOut} that names late ranks and the call they miss, or with Error{kDisconnected} that names
/// dead ones; after either the group is broken: every later call fails with that first error. The contracts
/// are those of Group.
class Backend {
 public:
  virtual ~Backend() = default;

  /// "shm", "c10d", …: for peers.
  virtual std::string name() const = 0;
  virtual int rank() const = 0;
  virtual const std::vector<int>& ranks() const = 0;
  int size() const { return static_cast<int>(ranks().size()); }
  /// Whether tensors of that device may be given to it: a Group refuses others with kUnsupported.
  virtual bool takes(c10::Device device) const { return device.is_cpu(); }

  virtual std::shared_ptr<Backend> split(int color, int key) = 0;
  virtual Future<at::Tensor> all_reduce(at::Tensor tensor, ReduceOp reduction) = 0;
  virtual Future<at::Tensor> reduce_scatter(at::Tensor tensor, ReduceOp reduction) = 0;
  virtual Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) = 0;
  virtual Future<at::Tensor> broadcast(at::Tensor tensor, int root) = 0;
  virtual Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) = 0;
  virtual std::vector<Bytes> all_gather_bytes(BytesView mine, Deadline deadline) = 0;
  virtual void barrier(Deadline deadline) = 0;
  virtual at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  virtual void abort(const Error& cause) = 0;
};

}  // namespace torchspan::collective
