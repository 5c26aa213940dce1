#include <algorithm>
#include <fmt/format.h>

#include "rpc/core.h"

namespace torchspan::rpc {
namespace {

constexpr Duration kQuietCheck = std::chrono::milliseconds(2);
/// Values that a report of leaks names.
constexpr std::size_t kLeakLines = 20;
constexpr const char* kTag = "rpc.shutdown";

Bytes to_bytes(const Totals& totals) {
  ByteWriter writer;
  writer.put(totals.sent);
  writer.put(totals.handled);
  writer.put(totals.busy);
  return writer.take();
}

Totals from_bytes(BytesView bytes) {
  ByteReader reader(bytes);
  Totals totals;
  totals.sent = reader.get<std::uint64_t>();
  totals.handled = reader.get<std::uint64_t>();
  totals.busy = reader.get<bool>();
  return totals;
}

/// One line for each of the first values.
std::vector<std::string> lines(const std::vector<RRefInfo>& leaks) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < std::min(leaks.size(), kLeakLines); ++i) lines.push_back(leaks[i].str());
  if (leaks.size() > kLeakLines) lines.push_back(fmt::format("and {} more", leaks.size() - kLeakLines));
  return lines;
}

}  // namespace

/// Waits a moment for this worker's own work to end; false when some is still going on.
bool Core::wait_until_quiet(Deadline deadline) {
  const Deadline round = earlier(deadline, runtime_.executor.deadline_in(std::chrono::milliseconds(100)));
  while (totals().busy) {
    if (round.passed(runtime_.executor.now())) return false;
    runtime_.executor.sleep(kQuietCheck);
  }
  return true;
}

/// Returns when in two rounds running no worker was busy and nothing was sent or handled between them: then
/// no message is on its way either, since every request is outstanding at its sender until it is answered.
/// Gives, if asked for, the values that others referred to at that moment: some workers may be further on
/// when this returns here.
std::vector<RRefInfo> Core::agree_on_quiet(Deadline deadline, bool list) {
  std::vector<RRefInfo> held;
  Totals before;
  bool quiet_before = false;
  for (;;) {
    wait_until_quiet(deadline);
    if (list) held = references_->list_owners();
    Totals sum;
    for (const Bytes& bytes : membership_->all_gather(kTag, to_bytes(totals()), {}, deadline)) {
      const Totals one = from_bytes(bytes);
      sum.sent += one.sent;
      sum.handled += one.handled;
      sum.busy = sum.busy || one.busy;
    }
    references_->leave();  // all have come this far: nobody serves on
    if (!sum.busy && quiet_before && sum.sent == before.sent && sum.handled == before.handled) return held;
    quiet_before = !sum.busy;
    before = sum;
  }
}

void Core::give_back_references(Deadline deadline) {
  references_->delete_users();
  agree_on_quiet(deadline, false);
}

void Core::report_leaks(const char* why) {
  if (!options_.report_leaks) return;
  const std::vector<RRefInfo> leaks = references_->list_owners();
  if (leaks.empty()) return;
  runtime_.log.warning(fmt::format("{} values end though {}:", leaks.size(), why));
  for (const std::string& line : lines(leaks)) runtime_.log.warning("leak: " + line);
}

void Core::throw_leaks(const std::vector<RRefInfo>& leaks) const {
  if (leaks.empty()) return;
  std::string text = fmt::format(
      "worker '{}' was shut down while others referred to {} of its values (strict_leaks); let go of these "
      "RRefs before shutdown():",
      self_.name, leaks.size());
  for (const std::string& line : lines(leaks)) text += "\n  " + line;
  throw Error(ErrorKind::kInvalid, text);
}

/// Nobody else stops: what this worker began ends, and its references go back to their owners. What it serves
/// for others may never end; their calls fail as it leaves. Gives the values that are to be leaks then.
std::vector<RRefInfo> Core::leave_open_world(Deadline deadline) {
  references_->leave();
  auto wait = [&](const char* for_what) {
    while (calls_.size() != 0 || !references_->settled()) {
      if (deadline.passed(runtime_.executor.now()))
        throw Error(ErrorKind::kTimedOut,
                    fmt::format("{} did not end in time:\n{}", for_what, debug().str()));
      runtime_.executor.sleep(kQuietCheck);
    }
  };
  wait("its calls");
  references_->delete_users();
  wait("the return of its references");
  std::vector<RRefInfo> leaks;
  if (options_.strict_leaks) {
    leaks = references_->list_owners();
  } else {
    report_leaks("other workers refer to them");
  }
  membership_->leave(deadline);
  return leaks;
}

void Core::shutdown(Deadline deadline) {
  if (shut_down_.exchange(true) || stopping_.load()) return;
  std::exception_ptr failure;
  std::vector<RRefInfo> leaks;
  try {
    for (const auto& hook : shutdown_hooks_) hook().wait(deadline);
    if (membership_ && membership_->open()) {
      leaks = leave_open_world(deadline);
    } else if (membership_ && membership_->world_size() > 1) {
      leaks = agree_on_quiet(deadline, options_.strict_leaks);
      give_back_references(deadline);
      report_leaks(
          "nobody gave back the references to them; a worker that held them may have ended without "
          "shutdown()");
      membership_->leave(deadline);
    } else {
      while (!wait_until_quiet(deadline) && !deadline.passed(runtime_.executor.now())) {
      }
    }
  } catch (...) {
    failure = std::current_exception();
  }
  stop();
  if (!failure) return throw_leaks(leaks);
  const Error error = to_error(failure);
  throw Error(error.kind(), fmt::format("worker '{}' stopped without waiting for all others: {}", self_.name,
                                        error.message()));
}

}  // namespace torchspan::rpc
