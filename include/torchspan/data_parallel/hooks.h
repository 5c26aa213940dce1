#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/future.h>

namespace torchspan::data_parallel {

/// One bucket to reduce: undivided gradients of some of this rank's parameters.
struct GradientBucket {
  std::size_t index = 0;  ///< position in the order of reduction
  bool is_last = false;
  at::Tensor buffer;                    ///< flat, or one sparse gradient; the hook may overwrite it
  std::vector<at::Tensor> gradients;    ///< views of `buffer`, shaped like the parameters
  std::vector<std::string> parameters;  ///< parameter names
  std::vector<at::Tensor> parameter_tensors;
  double divisor = 1;  ///< turns a sum over all ranks into the average
  /// This rank has given up its backward pass: it sends zeros, and the reduction fails on all ranks.
  bool given_up = false;
};

/// Reduces one bucket over all ranks; the future's value is the average, shaped like `buffer` and possibly
/// the same tensor. Called in bucket order on the thread that runs backward, with no lock held; buckets
/// overlap. The hook must issue its operations on `group` before it returns, so that their order is the
/// same on all ranks. A failed future or a wrong result fails the backward pass on all ranks. An exception
/// also ends the reducer's group, because other ranks may be waiting inside the hook.
using CommHook =
    std::function<Future<at::Tensor>(const GradientBucket& bucket, const collective::Group& group)>;

/// Sums `buffer` / divisor over the ranks; the behavior without a hook.
CommHook all_reduce_hook();
/// Sends gradients as half or bfloat16, half the bytes of float; divides before sending.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();
/// Wraps another hook, which then receives and returns 16-bit buckets.
CommHook fp16_compress_wrapper(CommHook inner);
CommHook bf16_compress_wrapper(CommHook inner);

/// A buffer with its name in the module. Autograd does not track writes to this tensor.
struct NamedBuffer {
  std::string name;
  at::Tensor tensor;
};

/// When a buffer hook runs. kBeforeForward: before the module's forward, which waits for the hook's
/// futures. kAfterForward: after it, so buffers are sent concurrently; backward does not end, and the next
/// forward does not begin, before the futures complete.
enum class BufferHookTime : std::uint8_t { kBeforeForward, kAfterForward };

/// Combines the ranks' buffers in place, instead of a broadcast from rank 0. Called for each reduced
/// forward on the training thread. The hook must issue its operations on `group` before it returns, the
/// same on all ranks. A failure of a returned future fails the forward, or the backward pass on all ranks.
/// An exception also ends the reducer's group, as with CommHook.
using BufferHook = std::function<std::vector<Future<at::Tensor>>(const std::vector<NamedBuffer>& buffers,
                                                                 const collective::Group& group)>;

struct PowerSgdOptions {
  int rank = 1;  ///< columns of the two factors that replace a gradient
  /// Reductions before the first compressed one; they send whole gradients.
  std::int64_t start_iteration = 1000;
  /// Gradients of n rows and m other elements are compressed if (n + m) * rank * this < n * m.
  double min_compression_rate = 2;
  bool error_feedback = true;  ///< adds what compression lost to the next gradient
  bool warm_start = true;      ///< begins with the factor of the last step instead of random numbers
  std::uint64_t seed = 0;      ///< of the random numbers
};

/// Sends two thin factors of a gradient instead of the gradient: P = MQ is summed over the ranks and
/// orthogonalized, then Q = M'P is averaged; PQ' is the average of M. Vogels et al., "PowerSGD", NeurIPS 2019.
/// One object per rank and wrapped module, with equal options on all ranks. Results have the same bits on
/// ranks with the same type of CPU or GPU.
class PowerSgd {
 public:
  /// Throws Error{kInvalid} that names an invalid option.
  explicit PowerSgd(PowerSgdOptions options = {});

  /// For register_comm_hook(); shares this object's state. backward() waits for the sum of P of each bucket,
  /// so a late rank delays it there. Sparse, integer and complex buckets are sent whole.
  CommHook hook() const;

  /// How many reductions have begun.
  std::int64_t iteration() const;
  /// Bytes that this rank passed to the group, and those of the gradients, since construction.
  struct Traffic {
    std::uint64_t sent = 0;
    std::uint64_t gradients = 0;
  };
  Traffic traffic() const;

  /// The iteration, and each parameter's factor and error, which differ between ranks: save them on each rank
  /// for an exact resumption. Call between steps.
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  /// Throws Error{kInvalid} that names an entry that does not belong to a state.
  void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace torchspan::data_parallel

namespace torchspan {
using data_parallel::PowerSgd;
using data_parallel::PowerSgdOptions;
}  // namespace torchspan
