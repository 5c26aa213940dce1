#include "sharded/zero/pending_averages.h"

#include <fmt/format.h>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan::sharded {

PendingAverages::PendingAverages(std::shared_ptr<data_parallel::WrappedModule> wrapped,
                                 std::shared_ptr<GradientScatter> scatter)
    : wrapped_(std::move(wrapped)), scatter_(std::move(scatter)) {}

bool PendingAverages::exist() const {
  return scatter_->begun() == 1 && wrapped_->reducer().reductions() == forgotten_ + 1;
}

void PendingAverages::check(const char* call) const {
  if (exist()) return;
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("{}() without averaged gradients: run a backward pass through the "
                  "DistributedDataParallel, outside of no_sync(), after the last step() or zero_grad(); "
                  "call zero_grad() after a backward pass that failed",
                  call));
}

void PendingAverages::forget() {
  scatter_->clear();
  forgotten_ = wrapped_->reducer().reductions();
}

}  // namespace torchspan::sharded
