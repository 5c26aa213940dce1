#include "data_parallel/rounds/conclusion.h"

#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

#include "data_parallel/advice.h"

namespace torchspan::data_parallel {

Conclusion::Conclusion(ReducerParts& parts, std::shared_ptr<BucketLauncher> launcher,
                       std::shared_ptr<RoundTimer> timer, ConclusionTerms terms)
    : parts_(parts),
      launcher_(std::move(launcher)),
      timer_(std::move(timer)),
      terms_(std::move(terms)),
      promise_(send_early()),
      finished_(promise_.future()) {}

/// Without a hook, or with one whose futures are complete, the status follows the buckets at once. Returns
/// the host of the future that the outcome depends on.
std::weak_ptr<FutureHost> Conclusion::send_early() {
  std::weak_ptr<FutureHost> host = launcher_->hook_host();
  if (!host.expired()) return host;
  send_status();
  return status_.host();
}

void Conclusion::start() { status_.valid() ? await_status() : await_hooks(0); }

/// Waits for one bucket after the other: the status follows everything that hooks send.
void Conclusion::await_hooks(std::size_t bucket) {
  if (bucket < launcher_->works().size()) {
    launcher_->works()[bucket].add_done_callback(
        [self = shared_from_this(), hold = parts_.holds.take(), bucket](const Future<at::Tensor>&) {
          self->await_hooks(bucket + 1);
        });
    return;
  }
  send_status();
  await_status();
}

void Conclusion::await_status() {
  status_.add_done_callback(
      [self = shared_from_this(), hold = parts_.holds.take()](const Future<at::Tensor>&) { self->finish(); });
}

void Conclusion::send_status() {
  try {
    launcher_->check_hook_results();
  } catch (...) {
    hook_failure_ = std::current_exception();
    if (!terms_.report.gave_up) terms_.reason = describe(hook_failure_).text;
  }
  terms_.report.hook_failed = hook_failure_ != nullptr;
  status_ = parts_.status.send(terms_.report);
}

void Conclusion::finish() {
  try {
    const at::NoGradGuard no_grad;
    status_.wait();
    if (parts_.status.failed_rank() >= 0 || parts_.status.counts_differ()) return fail_together();
    launcher_->take_results();
    count_reduction();
    if (parts_.plan.needs_rebuild()) return rebuild();
    promise_.set_value_behind(launcher_->gate());
  } catch (...) {
    promise_.set_error(placed(std::current_exception()));
  }
}

void Conclusion::fail_together() {
  parts_.status.adopt_count();
  parts_.forwards.forget();
  if (!terms_.report.gave_up) parts_.meter.count_aborted();
  const auto fail = [self = shared_from_this()](std::exception_ptr error) {
    self->promise_.set_error(self->hook_failure_ ? self->hook_failure_ : std::move(error));
  };
  const int rank = parts_.status.failed_rank();
  if (rank < 0) return parts_.status.compare_counts(fail);
  parts_.status.broadcast_reason(rank, terms_.reason, fail);
}

void Conclusion::count_reduction() {
  parts_.meter.count_reduction();
  if (terms_.is_whole_order) {
    std::vector<std::string> names;
    for (const std::uint32_t parameter : terms_.order) names.push_back(parts_.slots.name(parameter));
    parts_.meter.set_gradient_order(std::move(names));
  }
  if (!terms_.report.has_pass) return;
  if (const auto times = timer_->reduced()) parts_.meter.set_times(*times);
}

void Conclusion::rebuild() {
  parts_.plan.rebuild({terms_.order, terms_.leader, terms_.pass_stream},
                      [self = shared_from_this(), hold = parts_.holds.take()](
                          std::exception_ptr error, std::shared_ptr<Buckets> buckets) {
                        if (error) return static_cast<void>(self->promise_.set_error(std::move(error)));
                        self->rebuilt_ = std::move(buckets);
                        self->promise_.set_value_behind(self->launcher_->gate());
                      });
}

/// A failure of the group, with the bucket that it hit and with advice.
std::exception_ptr Conclusion::placed(std::exception_ptr failure) const {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    std::string where = launcher_->failed_bucket();
    if (where.empty() && status_.done() && status_.error()) where = "the status exchange";
    if (where.empty()) return failure;
    const Error located(error.kind(),
                        fmt::format("in reduction {}, {}: {}", terms_.round, where, error.message()));
    return std::make_exception_ptr(
        with_advice(Error(located).with_worker(error.worker()).with_call(error.call())));
  } catch (...) {
    return failure;
  }
}

}  // namespace torchspan::data_parallel
