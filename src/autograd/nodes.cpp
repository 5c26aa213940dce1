#include "autograd/nodes.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>

#include "autograd/contexts/context_lifetimes.h"
#include "autograd/contexts/current_contexts.h"
#include "autograd/messages/messages.h"
#include "autograd/passes/pass_state.h"
#include "core/api/throw_invalid.h"

namespace torchspan::autograd {

std::string MessageInfo::text() const {
  const std::string place = site.empty() ? "" : fmt::format(" (called at {})", site);
  return fmt::format("the {} of '{}'{}", reply ? "result" : "arguments", call, place);
}

std::string MessageInfo::span_name(const char* verb) const {
  return fmt::format("{} gradients: {} of {}", verb, reply ? "result" : "arguments", call);
}

torch::autograd::variable_list SendNode::apply(torch::autograd::variable_list&& gradients) {
  if (const PassState* pass = current_pass()) {
    spans_.record(SpanKind::kAutograd, message_.span_name("receive"), spans_.executor().now(),
                  SpanLink{.id = pass->id(), .peer = static_cast<std::int32_t>(message_.peer)});
  }
  return std::move(gradients);
}

void SendNode::place(torch::autograd::variable_list& gradients, device::CopyStreams& copies) const {
  const auto count = std::min<std::size_t>(gradients.size(), num_outputs());
  for (std::size_t i = 0; i < count; ++i) {
    const torch::autograd::Edge& edge = next_edge(i);
    if (!gradients[i].defined() || !edge.is_valid()) continue;
    const c10::Device device = edge.function->input_metadata(edge.input_nr).device();
    if (gradients[i].device() == device) continue;
    const c10::Device here = gradients[i].device();
    if (device::has_streams(here)) device::keep_memory_for(gradients[i], device::current_stream(here));
    const bool from_host = here.is_cpu() && device::has_streams(device);
    gradients[i] = from_host ? copies.to_device(gradients[i], device) : gradients[i].to(device);
  }
}

void RecvNode::run(torch::autograd::variable_list gradients, engine::GradientSink& sink) {
  PassState* pass = current_pass();
  if (pass == nullptr || !pass->fills(sink)) {
    throw_invalid(
        "a local backward pass reached {} from another worker (rank {}), through which only "
        "context.backward() can continue",
        message_.text(), message_.peer);
  }
  const SpanScope span(spans_, SpanKind::kAutograd, message_.span_name("send"),
                       SpanLink{.id = pass->id(), .peer = static_cast<std::int32_t>(message_.peer)});
  pass->send_back(*this, std::move(gradients));
}

void RecvNode::check_context(std::uint64_t context) const {
  if (message_.context == context) return;
  throw_invalid(
      "the loss depends on {}, which was received in autograd context {:#x}, but is differentiated in "
      "context {:#x}; run its forward pass in the context whose backward() you call, or detach tensors of "
      "other contexts",
      message_.text(), message_.context, context);
}

/// LibTorch's engine calls this; a distributed pass calls run().
torch::autograd::variable_list RecvNode::apply(torch::autograd::variable_list&&) {
  if (current_pass() == nullptr) {
    throw_invalid(
        "this loss depends on tensors received from another worker (call '{}', rank {}), so loss.backward() "
        "would lose their gradients: run the forward pass again and use context.backward(loss)",
        message_.call, message_.peer);
  }
  throw_invalid(
      "inside a distributed backward pass, a backward function or a hook ran LibTorch's engine (y.backward() "
      "or grad(), as a reentrant checkpoint does), which reached {} from another worker (rank {}): it cannot "
      "wait for gradients from there. A checkpointed function must not call other workers: put the "
      "checkpoint into the called function, or move the call out of the checkpoint",
      message_.text(), message_.peer);
}

namespace {

bool carries_edge(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

EdgeHeader decode_header(BytesView header) {
  wire::Payload payload;
  payload.value.assign(header.begin(), header.end());
  return wire::from_payload<EdgeHeader>(payload);
}

/// Rejects a call through a worker whose context is not current on this thread while a context of another
/// worker is: the gradients of its tensors would be lost silently.
void check_no_other_context(const rpc::CallInfo& call, std::span<const at::Tensor> tensors,
                            const std::string& worker) {
  const CurrentContexts* others = CurrentContexts::of_thread();
  if (others == nullptr || call.reply || !at::GradMode::is_enabled()) return;
  if (std::none_of(tensors.begin(), tensors.end(), carries_edge)) return;
  throw_invalid(
      "the call goes through worker '{}', but this thread works in an autograd context of worker '{}' of "
      "this process: the gradients of its tensors would be lost; call through that worker, make an "
      "autograd::Context of '{}' as well, or detach the tensors",
      worker, others->entries().front().context->worker_name(), worker);
}

}  // namespace

Bytes EdgeInterceptor::outgoing(const rpc::CallInfo& call, std::span<at::Tensor> tensors) {
  const CurrentContexts::Entry* current = current_of(registry_->worker());
  if (current == nullptr) {
    check_no_other_context(call, tensors, registry_->worker_name());
    return {};  // rpc warns if gradients are lost
  }
  const std::shared_ptr<ContextState> context = current->context;
  if (context->add_worker(call.peer) == ContextState::Added::kEnded)
    return {};  // the context has ended: no pass will need these gradients
  EdgeHeader header;
  header.context = context->id();
  if (!call.reply) header.site = site_text(call.site);
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    if (carries_edge(tensors[i])) header.tensors.push_back(i);
  }
  if (!at::GradMode::is_enabled()) {  // so that the receiver does not take them for its leaves
    for (const std::uint32_t i : std::exchange(header.tensors, {})) tensors[i] = tensors[i].detach();
  }
  if (!header.tensors.empty()) {
    header.message = registry_->next_id();
    if (!call.reply) header.call = call.name;
    const std::string site = call.reply && current->site ? *current->site : header.site;
    auto send = engine::make_node<SendNode>(
        MessageInfo{header.message, call.peer, std::string(call.name), site, call.reply, header.context},
        runtime_.spans);
    for (std::uint32_t i : header.tensors) {
      send->add_input_metadata(tensors[i]);
      send->add_next_edge(torch::autograd::impl::gradient_edge(tensors[i]));
      tensors[i] = tensors[i].detach();
    }
    context->sends().add(send, call.reply ? std::nullopt : std::optional(call.call));
  }
  return wire::to_payload(header).value;
}

void EdgeInterceptor::undo(const rpc::CallInfo&, BytesView bytes) {
  const EdgeHeader header = decode_header(bytes);
  if (auto context = registry_->find(header.context)) context->sends().remove(header.message);
}

rpc::EnvironmentValuePtr EdgeInterceptor::incoming(const rpc::CallInfo& call, std::span<at::Tensor> tensors,
                                                   BytesView bytes) {
  if (bytes.empty()) return nullptr;
  const EdgeHeader header = decode_header(bytes);
  auto context = call.reply ? registry_->find(header.context) : registry_->find_or_create(header.context);
  const auto added = context ? context->add_worker(call.peer) : ContextState::Added::kEnded;
  if (added == ContextState::Added::kEnded) {
    // The context ended while the call was on its way. The call is served without a context.
    return nullptr;
  }
  if (call.reply) context->sends().call_answered(call.call);
  if (added == ContextState::Added::kNow && peer_added_) peer_added_(context, call.peer);
  const std::string site = call.reply ? site_text(call.site) : header.site;
  if (header.message != 0) {
    auto receive = engine::make_node<RecvNode>(
        MessageInfo{header.message, call.peer, call.reply ? std::string(call.name) : header.call, site,
                    call.reply, header.context},
        runtime_.spans, ++arrivals_);
    for (std::uint32_t i : header.tensors) {
      if (i >= tensors.size() || !tensors[i].defined() ||
          !torch::autograd::isDifferentiableType(tensors[i].scalar_type())) {
        throw_invalid("an autograd header names a tensor that is not in its message");
      }
      tensors[i].set_requires_grad(false);
      torch::autograd::set_history(tensors[i], receive);
    }
  }
  if (call.reply) return nullptr;
  return std::make_shared<const CurrentContexts>(
      std::vector<CurrentContexts::Entry>{{std::move(context), std::make_shared<const std::string>(site)}});
}

}  // namespace torchspan::autograd
