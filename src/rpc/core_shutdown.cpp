#include <fmt/format.h>

#include "rpc/core.h"

namespace torchspan::rpc {
namespace {

constexpr Duration kQuietCheck = std::chrono::milliseconds(2);
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
void Core::agree_on_quiet(Deadline deadline) {
  Totals before;
  bool quiet_before = false;
  for (;;) {
    wait_until_quiet(deadline);
    Totals sum;
    for (const Bytes& bytes : membership_->all_gather(kTag, to_bytes(totals()), {}, deadline)) {
      const Totals one = from_bytes(bytes);
      sum.sent += one.sent;
      sum.handled += one.handled;
      sum.busy = sum.busy || one.busy;
    }
    if (!sum.busy && quiet_before && sum.sent == before.sent && sum.handled == before.handled) return;
    quiet_before = !sum.busy;
    before = sum;
  }
}

void Core::give_back_references(Deadline deadline) {
  references_->delete_users();
  agree_on_quiet(deadline);
}

void Core::report_leaks() {
  if (!options_.report_leaks) return;
  for (const auto& [value, holders] : references_->holders()) {
    runtime_.log.warning(
        fmt::format("value {}:{} still has {} forks that nobody gave back; a worker that held them "
                    "may have ended without shutdown()",
                    value.worker, value.local, holders.size()));
  }
}

/// Nobody else stops: what this worker began ends, and its references go back to their owners. What it serves
/// for others may never end; their calls fail as it leaves.
void Core::leave_open_world(Deadline deadline) {
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
  membership_->leave(deadline);
}

void Core::shutdown(Deadline deadline) {
  if (shut_down_.exchange(true) || stopping_.load()) return;
  references_->leave();
  std::exception_ptr failure;
  try {
    for (const auto& hook : shutdown_hooks_) hook().wait(deadline);
    if (membership_ && membership_->open()) {
      leave_open_world(deadline);
    } else if (membership_ && membership_->world_size() > 1) {
      agree_on_quiet(deadline);
      give_back_references(deadline);
      report_leaks();
      membership_->leave(deadline);
    } else {
      while (!wait_until_quiet(deadline) && !deadline.passed(runtime_.executor.now())) {
      }
    }
  } catch (...) {
    failure = std::current_exception();
  }
  stop();
  if (!failure) return;
  const Error error = to_error(failure);
  throw Error(error.kind(), fmt::format("worker '{}' stopped without waiting for all others: {}", self_.name,
                                        error.message()));
}

}  // namespace torchspan::rpc
