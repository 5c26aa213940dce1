#pragma once
#include <vector>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/rpc/message.h>

#include <torchspan/detail/wire/frame.h>
#include <torchspan/detail/wire/payload.h>

namespace torchspan::python {

using TorchMessage = torch::distributed::rpc::Message;
using TorchMessagePtr = c10::intrusive_ptr<TorchMessage>;

/// A message of torch.distributed.rpc, and its reply.
inline constexpr wire::MessageType kTorchMessage{0x8001};

/// The name of a message in errors and listings, as in torch: "PYTHON_CALL".
const char* name_of(torch::distributed::rpc::MessageType type);

/// Whether the program makes it, or backward() for it; others keep torch's references and contexts.
bool is_call(torch::distributed::rpc::MessageType type);

/// Puts the message's bytes and tensors into a payload, without copying tensors. `devices`: where the receiver places
/// each tensor; empty: on the CPU.
wire::Payload to_payload(const TorchMessage& message, const std::vector<c10::Device>& devices);

/// Whether a request runs Python code. Operators and TorchScript do not.
bool runs_python(const wire::Payload& request);

struct ReceivedTorchMessage {
  TorchMessagePtr message;
  std::vector<c10::Device> devices;  ///< as the sender wrote them
};
/// The message in a payload. Throws Error{kInvalid}.
ReceivedTorchMessage from_payload(wire::Payload& payload, std::int64_t id);

}  // namespace torchspan::python
