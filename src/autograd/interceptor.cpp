#include "autograd/interceptor.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "autograd/current.h"
#include "autograd/messages.h"

namespace torchspan::autograd {
namespace {

bool carries_edge(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

EdgeHeader decode_header(BytesView header) {
  wire::Payload payload;
  payload.value.assign(header.begin(), header.end());
  return wire::from_payload<EdgeHeader>(payload);
}

/// The context that a handler works in; follows it when it is a coroutine.
class HandlerScope final : public rpc::CallScope {
 public:
  HandlerScope(std::shared_ptr<ContextState> context, std::shared_ptr<const std::string> site)
      : current_{std::move(context), nullptr, std::move(site)} {}
  std::unique_ptr<Entry> enter() override { return std::make_unique<Entered>(current_); }
  void save() override { current_ = current_state(); }

 private:
  struct Entered final : Entry {
    explicit Entered(Current current) : scope(std::move(current)) {}
    CurrentScope scope;
  };
  Current current_;
};

}  // namespace

std::shared_ptr<rpc::CallScope> EdgeInterceptor::scope_of_thread() {
  const Current& current = current_state();
  if (!current.context) return nullptr;
  return std::make_shared<HandlerScope>(current.context, current.site);
}

Bytes EdgeInterceptor::outgoing(const rpc::CallInfo& call, std::span<at::Tensor> tensors) {
  const Current& current = current_state();
  const std::shared_ptr<ContextState>& context = current.context;
  if (!context) return {};  // rpc says so when gradients are cut
  if (context->add_worker(call.peer) == ContextState::Dealt::kEnded)
    return {};  // it has ended: nobody wants these gradients any more
  EdgeHeader header;
  header.context = context->id();
  if (!call.reply) header.site = site_text(call.site);
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    if (carries_edge(tensors[i])) header.tensors.push_back(i);
  }
  if (!at::GradMode::is_enabled()) {  // nor may the receiver take them for leaves of its own
    for (const std::uint32_t i : std::exchange(header.tensors, {})) tensors[i] = tensors[i].detach();
  }
  if (!header.tensors.empty()) {
    header.message = registry_->next_id();
    if (!call.reply) header.call = call.name;
    const std::string site = call.reply && current.site ? *current.site : header.site;
    auto send = std::make_shared<SendNode>(
        MessageInfo{header.message, call.peer, std::string(call.name), site, call.reply, header.context},
        runtime_.spans);
    for (std::uint32_t i : header.tensors) {
      send->add_input_metadata(tensors[i]);
      send->add_next_edge(torch::autograd::impl::gradient_edge(tensors[i]));
      tensors[i] = tensors[i].detach();
    }
    context->add_send(send);
  }
  return wire::to_payload(header).value;
}

void EdgeInterceptor::undo(const rpc::CallInfo&, BytesView bytes) {
  const EdgeHeader header = decode_header(bytes);
  if (auto context = registry_->find(header.context)) context->remove_send(header.message);
}

std::shared_ptr<rpc::CallScope> EdgeInterceptor::incoming(const rpc::CallInfo& call,
                                                          std::span<at::Tensor> tensors, BytesView bytes) {
  if (bytes.empty()) return std::make_shared<HandlerScope>(nullptr, nullptr);
  const EdgeHeader header = decode_header(bytes);
  auto context = call.reply ? registry_->find(header.context) : registry_->find_or_create(header.context);
  const auto dealt = context ? context->add_worker(call.peer) : ContextState::Dealt::kEnded;
  if (dealt == ContextState::Dealt::kEnded) {
    if (call.reply) return nullptr;  // the context ended while the call was out: nobody wants the gradient
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("autograd context {:#x} has ended, so a call made in it came too late", header.context));
  }
  if (dealt == ContextState::Dealt::kNow && heard_of_) heard_of_(context, call.peer);
  const std::string site = call.reply ? site_text(call.site) : header.site;
  if (header.message != 0) {
    auto receive = std::make_shared<RecvNode>(
        MessageInfo{header.message, call.peer, call.reply ? std::string(call.name) : header.call, site,
                    call.reply, header.context},
        runtime_.spans);
    for (std::uint32_t i : header.tensors) {
      if (i >= tensors.size() || !tensors[i].defined() ||
          !torch::autograd::isDifferentiableType(tensors[i].scalar_type())) {
        throw Error(ErrorKind::kInvalid, "an autograd header names a tensor that is not in its message");
      }
      tensors[i].set_requires_grad(false);
      torch::autograd::set_history(tensors[i], receive);
    }
  }
  return std::make_shared<HandlerScope>(std::move(context), std::make_shared<const std::string>(site));
}

}  // namespace torchspan::autograd
