#pragma once
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <torchspan/optim.h>
#include <torchspan/rpc/rref.h>
#include <torchspan/rpc/worker.h>

#include "fashion_mnist/model.h"

namespace parameter_server {

struct ServerOptions {
  std::int64_t trainers = 1;
  std::int64_t wait_for = 1;  ///< gradients for one step
  std::uint64_t seed = 1;
  double lr = 0.05, momentum = 0.9;
  bool is_double = false;
};

/// The network after some number of steps.
struct Version {
  static constexpr torchspan::FixedString kWireName = "Version";
  std::int64_t step = 0;
  std::vector<at::Tensor> parameters;
};

/// What the server did.
struct Statistics {
  std::int64_t steps = 0, gradients = 0;
  std::int64_t missed_steps = 0;  ///< steps between the version of a gradient and its use, for all gradients
};

/// A network and its optimizer. Trainers send gradients and wait; when enough of them wait, one step with the mean of their
/// gradients answers all with the next version. Thread-safe.
class ParameterServerImpl : public torch::nn::Module {
 public:
  explicit ParameterServerImpl(ServerOptions options);

  Version fetch() const;
  /// Completes `next` after the step that uses the gradients, which were computed from version `step`. A trainer that
  /// already waits, or gradients that do not fit the parameters, complete it with Error{kInvalid}.
  void update(std::int64_t trainer, std::int64_t step, std::vector<at::Tensor> gradients,
              torchspan::Promise<Version> next);
  /// The trainer has no more gradients; steps no longer wait for it.
  void leave();
  Statistics statistics() const;

 private:
  struct Waiting {
    std::int64_t trainer, step;
    std::vector<at::Tensor> gradients;
    torchspan::Promise<Version> next;
  };
  /// Takes steps while enough trainers wait, one thread at a time.
  void take_steps();
  /// Moves out the gradients of the next step; if there are too few, returns none, and later calls step.
  std::vector<Waiting> take_waiting();
  void step(std::vector<Waiting> waiting);

  const ServerOptions options_;
  fashion_mnist::ConvNet network_;
  std::optional<torchspan::optim::Optimizer> optimizer_;  ///< used by the thread that steps
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<Waiting> waiting_;
  std::int64_t present_;
  bool steps_ = false;  ///< a thread takes steps
  Version version_;
  Statistics statistics_;
};
TORCH_MODULE(ParameterServer);

/// ParameterServerImpl::update() for trainers on other workers: returns a future, so that no thread waits.
torchspan::Future<Version> update_and_fetch(torchspan::Worker& worker,
                                            const torchspan::RRef<ParameterServer>& server,
                                            std::int64_t trainer, std::int64_t step,
                                            const std::vector<at::Tensor>& gradients);
inline constexpr torchspan::Function<update_and_fetch> kUpdateAndFetch{"update_and_fetch"};
inline constexpr torchspan::Function<&ParameterServerImpl::fetch> kFetch{"ParameterServer.fetch"};
inline constexpr torchspan::Function<&ParameterServerImpl::leave> kLeave{"ParameterServer.leave"};

}  // namespace parameter_server
