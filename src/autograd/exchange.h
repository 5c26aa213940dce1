#pragma once
#include <memory>
#include <utility>

#include <torchspan/rpc/worker.h>

namespace torchspan::autograd {

/// The answer to a request of type M, given once, from any thread that holds no lock; one that is dropped
/// tells the asker that.
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
  /// Whether it is still to be given by whoever has this object.
  explicit operator bool() const { return done_ != nullptr; }

 private:
  std::shared_ptr<rpc::Completion> done_;
};

/// Sends `message` and calls `hear(Reply, std::exception_ptr)` once, on the thread that brings the reply,
/// which saves a change of threads in each step of a pass. That thread serves others too: `hear` is for
/// moments, waits for nothing, runs no code of the user's and throws nothing; all else it posts.
template <rpc::Message M, class F>
void ask_briefly(const Worker& me, std::uint32_t to, const M& message, Deadline deadline, F hear) {
  using Reply = typename M::Reply;
  class Heard final : public rpc::Completion {
   public:
    explicit Heard(F hear) : hear_(std::move(hear)) {}
    void succeed(wire::Payload& payload) override {
      Reply reply{};
      try {
        reply = wire::from_payload<Reply>(payload);
      } catch (...) {
        return fail(std::current_exception());
      }
      hear_(std::move(reply), nullptr);
    }
    void fail(std::exception_ptr error) override { hear_(Reply{}, std::move(error)); }

   private:
    F hear_;
  };
  rpc::Request request = rpc::make_request(message);
  request.deadline = deadline;
  me.endpoint()->send(to, std::move(request), std::make_shared<Heard>(std::move(hear)));
}

}  // namespace torchspan::autograd
