#include "collective/serial/failure_reports.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::collective {
namespace {

constexpr Duration kAnswerLimit = std::chrono::seconds(1);

}  // namespace

Error FailureReports::lost(const std::string& peer, const std::string& how) {
  return {ErrorKind::kDisconnected,
          fmt::format("{}, and the group cannot continue without it", text_of_gone(peer, how))};
}

void FailureReports::throw_if_rank_gone() const {
  const auto gone = options_.world ? options_.world->first_gone(options_.instances) : std::nullopt;
  if (gone) throw lost(options_.peers[gone->rank], gone->how);
}

void FailureReports::throw_different(std::size_t one, const std::string& its_call, std::size_t other,
                                     const std::string& other_call) const {
  throw Error(
      ErrorKind::kInvalid,
      fmt::format(
          "the ranks of a group must call the same operations in the same order, but {} called {}, and {} "
          "called {}",
          options_.peers[one], its_call, options_.peers[other], other_call));
}

Error FailureReports::explain(const std::string& call, std::uint64_t number,
                              const std::exception_ptr& exception) const {
  const auto about = [&](ErrorKind kind, const std::string& text) {
    if (kind == ErrorKind::kDisconnected && options_.world)
      options_.world->await_first_gone(options_.instances);
    return Error(kind, fmt::format("{}, call {} of the group, failed in {}: {}{}", call, number,
                                   collectives_.name(), text, missing_ranks(number)));
  };
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    const bool lost = error.kind() == ErrorKind::kDisconnected || error.kind() == ErrorKind::kTimedOut;
    return lost ? about(error.kind(), error.message()) : error;
  } catch (...) {
  }
  const std::string text = torchspan::describe(exception).text;
  // Engines that announce failures report lost connections as Errors; anything else concerns this rank alone.
  if (collectives_.announces()) {
    return {to_error(exception).kind(),
            fmt::format("{}, call {} of the group, failed on {}: {}", call, number,
                        options_.peers[static_cast<std::size_t>(options_.rank)], text)};
  }
  const bool late = text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos;
  return about(late ? ErrorKind::kTimedOut : ErrorKind::kDisconnected, text);
}

std::string FailureReports::missing_ranks(std::uint64_t number) const {
  if (const auto first = options_.world ? options_.world->first_gone(options_.instances) : std::nullopt) {
    return fmt::format("; {}", text_of_gone(options_.peers[first->rank], first->how));
  }
  const std::string awaited = collectives_.awaited();
  if (!awaited.empty()) return "; it waits for " + awaited;
  if (!options_.world) return {};
  const std::string silent = find_silent_ranks(number);
  return silent.empty() ? "; all ranks report this failure"
                        : "; the ranks were asked whether it failed on them too: " + silent;
}

std::string FailureReports::find_silent_ranks(std::uint64_t number) const {
  std::vector<int> ranks = options_.ranks;
  std::sort(ranks.begin(), ranks.end());
  try {
    options_.world->ask([&](rendezvous::Membership& world) {
      world.barrier(fmt::format("torchspan.roll_call.{}", number), std::move(ranks),
                    executor_.deadline_in(kAnswerLimit));
    });
  } catch (const Error& error) {
    return error.message();
  }
  return {};
}

}  // namespace torchspan::collective
