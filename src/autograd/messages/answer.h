#pragma once
#include <memory>
#include <string>
#include <utility>

#include <torchspan/rpc/worker.h>

namespace torchspan::autograd {

/// The answer to a request of type M. Give it once, from any thread that holds no lock. If it is destroyed
/// before that, the request fails on the worker that sent it.
template <rpc::Message M>
class Answer {
 public:
  explicit Answer(std::shared_ptr<rpc::Completion> done) : done_(std::move(done)) {}
  Answer(Answer&&) noexcept = default;
  Answer& operator=(Answer&&) noexcept = default;

  void give(const typename M::Reply& reply) {
    auto payload = wire::to_payload(reply);
    std::exchange(done_, nullptr)->succeed(payload);
  }
  /// Leaves an empty object behind.
  Answer take() { return Answer(std::exchange(done_, nullptr)); }
  /// Whether this object must still give the answer.
  explicit operator bool() const { return done_ != nullptr; }

 private:
  std::shared_ptr<rpc::Completion> done_;
};

/// Locks a reference to a part of the worker. Throws Error{kCancelled} after the worker was destroyed.
template <class T>
std::shared_ptr<T> require_alive(const std::weak_ptr<T>& part) {
  auto alive = part.lock();
  if (!alive) throw Error(ErrorKind::kCancelled, "this worker was shut down");
  return alive;
}

/// Serves M with a member function of `part`, which gives the answer at once or keeps it.
template <rpc::Message M, class T>
void serve_answered(rpc::Registrar& registrar, std::weak_ptr<T> part, rpc::RunOn where,
                    void (T::*handler)(std::uint32_t peer, M, Answer<M>)) {
  registrar.handle_raw(M::kType, std::string(M::kName), where,
                       [part = std::move(part), handler](const rpc::CallInfo& call, wire::Payload& payload,
                                                         std::shared_ptr<rpc::Completion> done) {
                         const auto alive = require_alive(part);
                         (alive.get()->*handler)(call.peer, wire::from_payload<M>(payload),
                                                 Answer<M>(std::move(done)));
                       });
}

}  // namespace torchspan::autograd
