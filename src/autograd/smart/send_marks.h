#pragma once
#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "autograd/nodes/nodes.h"

namespace torchspan::autograd {

/// SMART: the marks and gradients of one send that a pass reaches. Every output that received a gradient must
/// also be marked before the pass may end on this worker, because only marks cause further marks. Not
/// thread-safe.
class SendMarks {
 public:
  explicit SendMarks(SendNodePtr send) : send_(std::move(send)) {}
  const SendNodePtr& send() const { return send_; }
  void mark(const std::vector<std::uint32_t>& outputs) { marked_.insert(outputs.begin(), outputs.end()); }
  /// Records gradients for the outputs that are reached. False if the gradients came before.
  bool deliver(const std::vector<std::uint8_t>& reached);
  bool is_marked() const { return !marked_.empty(); }
  /// Whether every output that received a gradient is marked.
  bool agree() const;

 private:
  SendNodePtr send_;
  std::set<std::uint32_t> marked_;
  std::set<std::uint32_t> delivered_;
  bool has_gradients_ = false;
};

}  // namespace torchspan::autograd
