#include "python/greeting.h"

#include <memory>
#include <utility>
#include <vector>

namespace torchspan::python {
namespace {

constexpr wire::MessageType kGreeting{0x8002};

}  // namespace

void answer_greetings(rpc::Registrar& registrar) {
  registrar.handle_raw(
      kGreeting, "greeting", rpc::RunOn::kReceiver,
      [](const rpc::CallInfo&, wire::Payload&, const std::shared_ptr<rpc::Completion>& reply) {
        wire::Payload nothing;
        reply->succeed(nothing);
      });
}

void greet_members(rpc::WorkerBackend& backend, const rendezvous::Membership& membership, Deadline deadline) {
  std::vector<Future<void>> answers;
  for (const rendezvous::Member& member : membership.members()) {
    if (member.rank == membership.self().rank || !membership.is_present(member.rank)) continue;
    rpc::Request request;
    request.type = kGreeting;
    request.name = "greeting";
    request.deadline = deadline;
    auto completion = std::make_shared<rpc::PromiseCompletion<void>>(backend.continuations());
    answers.push_back(completion->future());
    backend.send(static_cast<std::uint32_t>(member.rank), std::move(request), std::move(completion));
  }
  for (const Future<void>& answer : answers) {
    answer.wait_until(Deadline::never());
    if (!answer.error()) continue;
    const ErrorKind kind = to_error(answer.error()).kind();
    // A worker of C++ answers that it does not serve this message.
    if (kind != ErrorKind::kDisconnected && kind != ErrorKind::kUnsupported)
      std::rethrow_exception(answer.error());
  }
}

}  // namespace torchspan::python
