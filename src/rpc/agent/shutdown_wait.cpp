#include "rpc/agent/shutdown_wait.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::rpc {

std::string ShutdownWait::news(const std::string& unfinished) {
  const TimePoint now = runtime_.executor.now();
  if (unfinished.empty() || now - logged_ < kReportInterval) return "";
  logged_ = now;
  return unfinished;
}

void ShutdownWait::heard(std::map<std::string, std::string> news, std::uint64_t busy) {
  for (auto& [worker, work] : news) {
    if (!work.empty()) continue;
    const auto known = others_.find(worker);
    work = known == others_.end() ? "still has work" : known->second;
  }
  others_ = std::move(news);
  more_ = busy - std::min<std::uint64_t>(busy, others_.size());
}

std::string ShutdownWait::work(const std::string& unfinished) const {
  constexpr std::size_t kMost = 8;
  std::string text = unfinished.empty() ? "" : "this worker " + unfinished;
  std::size_t named = 0;
  for (const auto& [worker, work] : others_) {
    if (named == kMost) break;
    ++named;
    text += fmt::format("{}worker '{}' {}", text.empty() ? "" : "; ", worker, work);
  }
  const std::uint64_t more = others_.size() - named + more_;
  if (more > 0) text += fmt::format("; and {} more workers have work", more);
  return text;
}

void ShutdownWait::warn(const std::string& unfinished) {
  if (!is_due()) return;
  if (const std::string text = work(unfinished); !text.empty()) say(text);
}

void ShutdownWait::warn_of_missing(const std::string& names, bool serving, std::uint64_t handled) {
  const TimePoint now = runtime_.executor.now();
  if (serving || handled != handled_) {
    handled_ = handled;
    served_at_ = now;
    return;
  }
  if (now - served_at_ < patience_) return;
  patience_ *= 2;
  say(fmt::format("these workers have not called shutdown() or have unfinished work: {}", names));
}

void ShutdownWait::say(const std::string& what) {
  warned_ = runtime_.executor.now();
  runtime_.log.warning(
      fmt::format("{} has waited {:.0f} s: {}", operation_, to_seconds(warned_ - began_), what));
}

}  // namespace torchspan::rpc
