#include "checkpoint/manager/restore_round.h"

#include <algorithm>
#include <cstddef>
#include <fmt/format.h>
#include <span>
#include <utility>

namespace torchspan::checkpoint {
namespace {

constexpr const char* kNotRestored = "the checkpoint was not restored";

Bytes bytes_of_text(const std::string& text) {
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

}  // namespace

std::optional<std::int64_t> RestoreRound::run(const Load& load) {
  for (;;) {
    const auto proposals = exchange_outcomes(
        ranks_, "restore.proposed",
        ranks_.commits() ? outcome_of([&] { return bytes_of_text(propose()); }) : RankOutcome());
    if (const auto failure = joint_failure(proposals, ranks_, kNotRestored)) throw *failure;
    const Bytes& chosen = proposals.front().result;
    if (chosen.empty()) return std::nullopt;
    const std::string name(reinterpret_cast<const char*>(chosen.data()), chosen.size());
    const std::string folder = directory_.path_of(name);
    Manifest manifest;
    const auto checked =
        exchange_outcomes(ranks_, "restore.checked", outcome_of([&] {
                            manifest = open_manifest(directory_.disk(), folder);
                            verify_data(directory_.disk(), folder, manifest, {ranks_.index(), ranks_.size()});
                            return Bytes();
                          }));
    if (const auto damage = joint_failure(checked, ranks_, fmt::format("'{}' cannot be used", name))) {
      reject(name, damage->message());
      continue;
    }
    const auto loaded =
        exchange_outcomes(ranks_, "restore.loaded", outcome_of([&] { return load(folder, manifest); }));
    if (const auto failure = joint_failure(loaded, ranks_, kNotRestored)) throw *failure;
    if (ranks_.commits()) report_unused(name, manifest, loaded);
    return manifest.step;
  }
}

std::string RestoreRound::propose() {
  bool any = false;
  for (const Committed& one : directory_.committed()) {
    any = true;
    if (!rejected_.contains(one.name)) return one.name;
  }
  if (any) {
    throw_invalid(
        fmt::format("no checkpoint in '{}' can be used: {}; to start from the beginning, remove them",
                    directory_.path(), first_reason_));
  }
  return {};
}

void RestoreRound::report_unused(const std::string& name, const Manifest& manifest,
                                 const std::vector<RankOutcome>& loaded) const {
  constexpr std::size_t kShown = 3;
  std::string shown;
  std::size_t unused = 0, index = 0;
  for (const auto& [tensor, saved] : manifest.tensors) {
    const std::size_t place = index++;
    const bool used = std::any_of(loaded.begin(), loaded.end(), [&](const RankOutcome& outcome) {
      return place < outcome.result.size() && outcome.result[place] != std::byte{0};
    });
    // The state of a generator belongs to a rank, and there may be fewer ranks now.
    if (used || tensor.starts_with("rng.")) continue;
    if (++unused <= kShown) shown += fmt::format("{}'{}'", unused == 1 ? "" : ", ", tensor);
  }
  if (unused == 0) return;
  if (unused > kShown) shown += fmt::format(" and {} more", unused - kShown);
  log_.warning(fmt::format(
      "'{}' was restored without {} of its tensors, which no rank has registered: {}; register the objects "
      "that have them, unless this program does not need them",
      name, unused, shown));
}

void RestoreRound::reject(const std::string& name, const std::string& why) {
  rejected_.insert(name);
  if (first_reason_.empty()) first_reason_ = why;
  if (ranks_.commits()) log_.warning(fmt::format("{}; an older checkpoint is tried", why));
}

}  // namespace torchspan::checkpoint
