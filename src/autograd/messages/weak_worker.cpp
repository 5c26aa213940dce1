#include "autograd/messages/weak_worker.h"

#include <fmt/format.h>

namespace torchspan::autograd {

Worker WeakWorker::require() const {
  auto endpoint = endpoint_.lock();
  if (!endpoint) throw Error(ErrorKind::kCancelled, fmt::format("worker '{}' was shut down", name_));
  return Worker(std::move(endpoint));
}

}  // namespace torchspan::autograd
