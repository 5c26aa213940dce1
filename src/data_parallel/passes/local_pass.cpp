#include "data_parallel/passes/local_pass.h"

#include <algorithm>

namespace torchspan::data_parallel {

bool LocalPass::begin(const std::shared_ptr<engine::PassEnd>& end) {
  begun_ = true;
  stray_ = false;
  if (end_ == end) return false;
  end_ = end;
  std::fill(arrived_.begin(), arrived_.end(), 0);
  return true;
}

bool LocalPass::add(const std::shared_ptr<engine::PassEnd>& end, std::size_t slot, bool expected_elsewhere) {
  if (is_idle()) {
    begun_ = stray_ = false;
    end_ = end;
    std::fill(arrived_.begin(), arrived_.end(), 0);
  }
  arrived_[slot] = 1;
  const bool becomes_stray = !expected_elsewhere && !begun_ && !stray_;
  stray_ = stray_ || becomes_stray;
  return becomes_stray;
}

std::vector<std::size_t> LocalPass::take(const std::shared_ptr<engine::PassEnd>& end) {
  std::vector<std::size_t> arrived;
  for (std::size_t slot = 0; end_ == end && slot < arrived_.size(); ++slot) {
    if (arrived_[slot] != 0) arrived.push_back(slot);
  }
  end_.reset();
  return arrived;
}

void LocalPass::forget(const engine::PassEnd* end) {
  if (end_.get() == end) end_.reset();
}

}  // namespace torchspan::data_parallel
