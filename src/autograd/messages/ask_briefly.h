#pragma once
#include <exception>
#include <memory>
#include <utility>

#include <torchspan/rpc/worker.h>

namespace torchspan::autograd {

/// Sends `message` and calls `on_reply(Reply, std::exception_ptr)` once, on the thread that delivers the
/// reply; this saves a change of threads in each step of a pass. That thread also serves other calls, so
/// `on_reply` must take microseconds, wait for nothing, run no user code and not throw; it posts other work.
template <rpc::Message M, class F>
void ask_briefly(const Worker& me, std::uint32_t to, const M& message, Deadline deadline, F on_reply) {
  using Reply = typename M::Reply;
  class Receiver final : public rpc::Completion {
   public:
    explicit Receiver(F on_reply) : on_reply_(std::move(on_reply)) {}
    void succeed(wire::Payload& payload) override {
      Reply reply{};
      try {
        reply = wire::from_payload<Reply>(payload);
      } catch (...) {
        return fail(std::current_exception());
      }
      on_reply_(std::move(reply), nullptr);
    }
    void fail(std::exception_ptr error) override { on_reply_(Reply{}, std::move(error)); }

   private:
    F on_reply_;
  };
  rpc::Request request = rpc::make_request(message);
  request.deadline = deadline;
  me.endpoint()->send(to, std::move(request), std::make_shared<Receiver>(std::move(on_reply)));
}

}  // namespace torchspan::autograd
