#include "autograd/passes/pass_owner.h"

namespace torchspan::autograd {

void PassOwner::post(UniqueFunction<void()> act) {
  const auto host = host_.lock();
  if (!host) return act();
  host->post([self = shared_from_this(), act = std::move(act)]() mutable { act(); });
}

void PassOwner::release_on_pool(std::shared_ptr<PassOwner> pass) {
  if (pass->leave_to_context(pass)) return;
  const auto host = pass->host_.lock();
  if (host) host->post([last = std::move(pass)] {});
}

}  // namespace torchspan::autograd
