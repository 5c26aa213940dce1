#include <algorithm>
#include <fmt/format.h>

#include <torchspan/rpc/debug.h>

namespace torchspan {
namespace {

/// How many references str() prints.
constexpr std::size_t kRRefs = 20;

std::string size_text(std::uint64_t bytes) {
  constexpr double kUnit = 1024;
  if (bytes < 10 * 1024) return fmt::format("{} bytes", bytes);
  const double kibibytes = static_cast<double>(bytes) / kUnit;
  if (kibibytes < 10 * kUnit) return fmt::format("{:.1f} KiB", kibibytes);
  if (kibibytes < 10 * kUnit * kUnit) return fmt::format("{:.1f} MiB", kibibytes / kUnit);
  return fmt::format("{:.1f} GiB", kibibytes / kUnit / kUnit);
}

std::string names(const std::map<std::string, std::size_t>& holders) {
  std::string text;
  for (const auto& [name, references] : holders) {
    text += fmt::format("{}'{}'", text.empty() ? "" : ", ", name);
    if (references > 1) text += fmt::format(" ({} times)", references);
  }
  return text.empty() ? "no worker" : text;
}

}  // namespace

std::string RRefInfo::str() const {
  std::string text;
  switch (role) {
    case Role::kOwner:
      text = fmt::format("value {}", value);
      break;
    case Role::kUser:
      text = fmt::format("reference {} to value {} on '{}'", fork, value, owner);
      break;
    case Role::kPendingFork:
      text = fmt::format("unconfirmed reference {} to value {} on '{}'", fork, value, owner);
      break;
    case Role::kPendingChild:
      text = fmt::format("copy {} of a reference to value {} on '{}', in flight to {}", fork, value, owner,
                         names(holders));
      break;
  }
  text += type.empty() ? "" : fmt::format(", {}", type);
  if (bytes) text += fmt::format(", {}", size_text(*bytes));
  if (!there) text += ", its creation has not arrived";
  text += site.empty() ? fmt::format(", made by '{}'", creator)
                       : fmt::format(", made by '{}' at {}", creator, site);
  if (!from.empty()) text += fmt::format(", sent by '{}'", from);
  text += fmt::format(", here for {:.3f} s", to_seconds(age));
  if (role == Role::kOwner) text += fmt::format(", held by {}", names(holders));
  return text;
}

std::string DebugInfo::str() const {
  std::string text = fmt::format(
      "worker '{}': {} calls wait for replies, {} are served; {} sent and {} handled so far, {} late "
      "replies; pool: "
      "{} threads, {} jobs queued; references: {} values with {} forks elsewhere, {} unconfirmed, {} kept "
      "for "
      "copies in flight\n",
      worker, pending.size(), serving.size(), calls_sent, calls_handled, late_replies, pool_threads,
      pool_queued, references.owners, references.forks, references.pending_users,
      references.pending_children);
  for (const Pending& call : pending) {
    text += fmt::format("  waits {:.3f} s for '{}' on worker '{}'{}{}\n", to_seconds(call.age), call.call,
                        call.to, call.site.empty() ? "" : ", called at " + call.site,
                        call.left == Duration::max() ? ", without deadline"
                                                     : fmt::format(", {:.3f} s left", to_seconds(call.left)));
  }
  for (const Serving& call : serving) {
    text += fmt::format("  {} '{}' of worker '{}' for {:.3f} s\n", call.begun ? "runs" : "keeps", call.call,
                        call.from, to_seconds(call.age));
  }
  const std::vector<RRefInfo> listed = rrefs();
  for (std::size_t i = 0; i < std::min(listed.size(), kRRefs); ++i)
    text += fmt::format("  {}\n", listed[i].str());
  if (listed.size() > kRRefs)
    text += fmt::format("  and {} references more: see rrefs()\n", listed.size() - kRRefs);
  return text;
}

}  // namespace torchspan
