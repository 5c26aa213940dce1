#include <fmt/format.h>

#include <torchspan/rpc/debug.h>

namespace torchspan {
namespace {

double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

std::string DebugInfo::str() const {
  std::string text = fmt::format(
      "worker '{}': {} calls wait for replies, {} are served; {} sent and {} handled so far, {} late "
      "replies; pool: "
      "{} threads, {} jobs queued; references: {} values with {} forks elsewhere, {} unconfirmed, {} kept "
      "for "
      "copies on their way\n",
      worker, pending.size(), serving.size(), calls_sent, calls_handled, late_replies, pool_threads,
      pool_queued, references.owners, references.forks, references.pending_users,
      references.pending_children);
  for (const Pending& call : pending) {
    text += fmt::format("  waits {:.3f} s for '{}' on worker '{}'{}{}\n", seconds(call.age), call.call,
                        call.to, call.site.empty() ? "" : ", called at " + call.site,
                        call.left == Duration::max() ? ", without deadline"
                                                     : fmt::format(", {:.3f} s left", seconds(call.left)));
  }
  for (const Serving& call : serving) {
    text += fmt::format("  {} '{}' of worker '{}' for {:.3f} s\n", call.begun ? "runs" : "keeps", call.call,
                        call.from, seconds(call.age));
  }
  return text;
}

}  // namespace torchspan
