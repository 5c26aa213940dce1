#include "autograd/nodes/nodes.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "autograd/contexts/current_contexts.h"
#include "autograd/passes/pass_state.h"

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
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("a local backward pass reached {} from another worker (rank {}), through which only "
                    "context.backward() can continue",
                    message_.text(), message_.peer));
  }
  const SpanScope span(spans_, SpanKind::kAutograd, message_.span_name("send"),
                       SpanLink{.id = pass->id(), .peer = static_cast<std::int32_t>(message_.peer)});
  pass->send_back(*this, std::move(gradients));
}

void RecvNode::check_context(std::uint64_t context) const {
  if (message_.context == context) return;
  throw Error(
      ErrorKind::kInvalid,
      fmt::format("the loss depends on {}, which was received in autograd context {:#x}, but is "
                  "differentiated in context {:#x}; run its forward pass in the context whose backward() you "
                  "call, or detach tensors of other contexts",
                  message_.text(), message_.context, context));
}

/// LibTorch's engine calls this; a distributed pass calls run().
torch::autograd::variable_list RecvNode::apply(torch::autograd::variable_list&&) {
  if (current_pass() == nullptr) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("this loss depends on tensors received from another worker (call '{}', rank {}), so "
                    "loss.backward() would lose their gradients: run the forward pass again and use "
                    "context.backward(loss)",
                    message_.call, message_.peer));
  }
  throw Error(
      ErrorKind::kInvalid,
      fmt::format(
          "inside a distributed backward pass, a backward function or a hook ran LibTorch's engine "
          "(y.backward() or grad(), as a reentrant checkpoint does), which reached {} from another "
          "worker (rank {}): it cannot wait for gradients from there. A checkpointed function must not "
          "call other workers: put the checkpoint into the called function, or move the call out of "
          "the checkpoint",
          message_.text(), message_.peer));
}

}  // namespace torchspan::autograd
