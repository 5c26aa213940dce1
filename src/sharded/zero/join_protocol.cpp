#include "sharded/zero/join_protocol.h"

#include <fmt/format.h>
#include <limits>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

namespace torchspan::sharded {

PendingAverages::PendingAverages(std::shared_ptr<data_parallel::WrappedModule> wrapped,
                                 std::shared_ptr<GradientScatter> scatter)
    : wrapped_(std::move(wrapped)), scatter_(std::move(scatter)) {}

bool PendingAverages::exist() const {
  return scatter_->begun() == 1 && wrapped_->reducer().reductions() == forgotten_ + 1;
}

void PendingAverages::check(const char* call) const {
  if (exist()) return;
  throw_invalid(
      "{}() without averaged gradients: run a backward pass through the DistributedDataParallel, outside of "
      "no_sync(), after the last step() or zero_grad(); call zero_grad() after a backward pass that failed",
      call);
}

void PendingAverages::forget() {
  scatter_->clear();
  forgotten_ = wrapped_->reducer().reductions();
}

namespace {

using Verb = JoinProtocol::Verb;

/// What the ranks with batches announced; at a maximum over ranks, ranks without batches contribute nothing.
struct Announcement {
  Verb verb = Verb::kStep;
  Verb least = Verb::kStep;  ///< differs from `verb` if the ranks announced different verbs
  double max_norm = 0, norm_type = 0;
};

Announcement exchange(const collective::Group& group, const at::Tensor& word) {
  group.all_reduce(word, collective::kMax).wait();
  const auto* values = word.data_ptr<double>();
  return {static_cast<Verb>(values[0]), static_cast<Verb>(-values[1]), values[2], values[3]};
}

const char* function_of(Verb verb) {
  if (verb == Verb::kStep) return "step()";
  return verb == Verb::kClip ? "clip_grad_norm()" : "zero_grad()";
}

}  // namespace

JoinProtocol::JoinProtocol(collective::Group group, std::shared_ptr<data_parallel::WrappedModule> wrapped,
                           std::shared_ptr<const PendingAverages> pending)
    : group_(std::move(group)), wrapped_(std::move(wrapped)), pending_(std::move(pending)) {}

bool JoinProtocol::is_followed() const { return wrapped_->ranks_without_batches() > 0; }

void JoinProtocol::announce(Verb verb, double max_norm, double norm_type) const {
  if (!is_followed()) return;
  const auto code = static_cast<double>(verb);
  const Announcement all = exchange(group_, at::tensor({code, -code, max_norm, norm_type}, at::kDouble));
  if (all.verb == all.least) return;
  throw_invalid(
      "inside join(), one rank calls {} of the ZeroRedundancyOptimizer and another {}: do the same on all "
      "ranks that have batches; a loop that ends before step() calls zero_grad()",
      function_of(all.verb), function_of(all.least));
}

void JoinProtocol::follow(const Shadow& shadow) const {
  for (;;) {
    const double none = -std::numeric_limits<double>::infinity();
    const Announcement next = exchange(group_, at::tensor({0.0, none, 0.0, 0.0}, at::kDouble));
    if (next.verb != next.least) continue;  // the others throw and still have their averages
    if (next.verb == Verb::kClear) return;
    if (next.verb == Verb::kClip) {
      shadow.clip({next.max_norm, next.norm_type});
      continue;
    }
    try {
      return shadow.step();
    } catch (const Error& error) {  // kInvalid: nothing has changed, on any rank
      if (error.kind() != ErrorKind::kInvalid) throw;
    }
  }
}

void JoinProtocol::check_round() const {
  if (!is_followed() || !pending_->exist()) return;
  throw_invalid(
      "inside join(), a forward or a reduction follows a reduction before step() or zero_grad() of the "
      "ZeroRedundancyOptimizer, and ranks without batches wait for one of them; to skip a step, call "
      "zero_grad() before the next forward");
}

void JoinProtocol::give_up(const std::string& reason) const {
  if (!pending_->exist()) return;
  group_.abort(Error(ErrorKind::kCancelled,
                     fmt::format("rank {} left join() after a backward pass and before step(), so this "
                                 "ZeroRedundancyOptimizer cannot be used any more; build it and its "
                                 "DistributedDataParallel again: {}",
                                 group_.ranks()[static_cast<std::size_t>(group_.rank())], reason)));
}

}  // namespace torchspan::sharded
