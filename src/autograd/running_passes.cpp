#include "autograd/api/running_passes.h"

#include <fmt/format.h>
#include <utility>

#include "autograd/extension_impl.h"
#include "autograd/passes/pass_owner.h"

namespace torchspan::autograd {
namespace {

std::string describe_waiting(const WaitingSend& send) {
  return fmt::format("the gradient of the {} of '{}', sent to {}{}{}", send.reply ? "result" : "arguments",
                     send.call, send.to, send.site.empty() ? "" : fmt::format(" at {}", send.site),
                     send.unanswered ? " (that call has no result)" : "");
}

/// Throws if the worker has ended.
std::vector<RunningPass> find_passes(const Worker& worker) {
  std::vector<RunningPass> running;
  for (const auto& context : worker.extension<AutogradExtension>().impl()->registry()->all()) {
    auto pass = context->pass();
    if (!pass) continue;
    const PartReport report = pass->report();
    RunningPass& mine = running.emplace_back();
    mine.id = pass->id();
    mine.busy = report.busy;
    for (const WaitingSend& send : report.waiting) mine.waits.push_back(describe_waiting(send));
    PassOwner::release_on_pool(std::move(pass));
  }
  return running;
}

}  // namespace

std::vector<RunningPass> running_passes(const Worker& worker) {
  try {
    return find_passes(worker);
  } catch (const Error&) {
    return {};
  }
}

}  // namespace torchspan::autograd
