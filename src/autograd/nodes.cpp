#include "autograd/nodes.h"

#include <algorithm>
#include <fmt/format.h>

#include <torchspan/core/error.h>

#include "autograd/current.h"
#include "autograd/pass.h"

namespace torchspan::autograd {

std::string MessageInfo::text() const {
  const std::string place = site.empty() ? "" : fmt::format(" (called at {})", site);
  return fmt::format("the {} of '{}'{}", reply ? "result" : "arguments", call, place);
}

std::string MessageInfo::span_name(const char* deed) const {
  return fmt::format("{} gradients: {} of {}", deed, reply ? "result" : "arguments", call);
}

torch::autograd::variable_list SendNode::apply(torch::autograd::variable_list&& gradients) {
  if (const PassState* pass = current_state().pass) {
    spans_.record(SpanKind::kAutograd, message_.span_name("receive"), spans_.executor().now(), pass->id());
  }
  return std::move(gradients);
}

void SendNode::place(torch::autograd::variable_list& gradients) const {
  const auto count = std::min<std::size_t>(gradients.size(), num_outputs());
  for (std::size_t i = 0; i < count; ++i) {
    const torch::autograd::Edge& edge = next_edge(i);
    if (!gradients[i].defined() || !edge.is_valid()) continue;
    const c10::Device device = edge.function->input_metadata(edge.input_nr).device();
    if (gradients[i].device() != device) gradients[i] = gradients[i].to(device);
  }
}

torch::autograd::variable_list RecvNode::apply(torch::autograd::variable_list&& gradients) {
  PassState* pass = current_state().pass;
  if (pass == nullptr) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("this loss depends on tensors that came from another worker (call '{}', rank {}), so "
                    "loss.backward() would lose their gradients: run the forward pass again and use "
                    "context.backward(loss)",
                    message_.call, message_.peer));
  }
  const SpanScope span(spans_, SpanKind::kAutograd, message_.span_name("send"), pass->id());
  pass->send_back(*this, std::move(gradients));
  return {};
}

}  // namespace torchspan::autograd
