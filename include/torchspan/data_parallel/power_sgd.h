#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/data_parallel/hooks.h>

namespace torchspan::data_parallel {

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
