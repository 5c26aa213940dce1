#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/autograd.h>
#include <torchspan/detail/rpc/message.h>
#include <torchspan/wire.h>

namespace torchspan::autograd {

/// What every message of a pass carries, so that each worker can begin its part.
struct PassKey {
  std::uint64_t id = 0;
  bool retain_graph = false;
  PassMode mode = PassMode::kSmart;
  std::uint32_t threads = 1;
  bool run_leaf_hooks = true;  ///< on this worker; not sent to others

  static constexpr std::uint32_t kMostThreads = 64;
};

/// Header that the interceptor adds to a user message: the context, and the tensors with a gradient edge.
struct EdgeHeader {
  static constexpr FixedString kWireName = "autograd.EdgeHeader";
  std::uint64_t context = 0;
  std::uint64_t message = 0;           ///< connects the send node and the receive node; 0: no edges
  std::vector<std::uint32_t> tensors;  ///< indices into the message's tensor table
  std::string call;                    ///< requests with edges: the name of the function
  std::string site;                    ///< requests: the call site
};

/// How a worker's part of a pass ended: with success, or with the failure of the pass.
struct PartOver {
  static constexpr FixedString kWireName = "autograd.PartOver";
  std::optional<Error> failure;
};

/// The gradients of the tensors of one message, sent back to its sender. The receiver answers the first such
/// message of a pass when its part of the pass is over, and later ones at once.
struct PropagateGradients {
  static constexpr wire::MessageType kType{0x0101};
  static constexpr std::string_view kName = "autograd.propagate";
  using Reply = PartOver;
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
  std::uint64_t message = 0;
  bool retain_graph = false;
  std::uint32_t threads = 1;  ///< BackwardOptions::threads
  std::vector<at::Tensor> gradients;
  /// SMART: which of the tensors the pass reaches; a gradient that is reached may still be undefined. FAST:
  /// empty, and the defined ones are reached.
  std::vector<std::uint8_t> reached;
  rpc::DevicePlace place = {};  ///< not sent
};

/// The outputs of one send that a pass reaches.
struct MarkedSend {
  static constexpr FixedString kWireName = "autograd.MarkedSend";
  std::uint64_t message = 0;
  std::vector<std::uint32_t> outputs;
};

/// The ranks of the workers that were marked because of the request and still had sends without a mark: they
/// must be notified when all marks are made. Or the failure of the pass.
struct MarkedWorkers {
  static constexpr FixedString kWireName = "autograd.MarkedWorkers";
  std::vector<std::uint32_t> ranks;
  std::optional<Error> failure;
};

/// SMART: these sends of the receiver take part in the pass. Answered when the marks that the receiver sent
/// because of it have been answered (Dijkstra and Scholten, 1980); at once if the receiver is already
/// marking.
struct MarkSends {
  static constexpr wire::MessageType kType{0x0104};
  static constexpr std::string_view kName = "autograd.mark";
  static constexpr FixedString kWireName = "autograd.MarkSends";
  using Reply = MarkedWorkers;
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
  bool retain_graph = false;
  std::uint32_t threads = 1;
  std::vector<MarkedSend> sends;
};

/// SMART: all marks are made; sends without a mark get no gradient.
struct MarksFinal {
  static constexpr wire::MessageType kType{0x0105};
  static constexpr std::string_view kName = "autograd.marks_final";
  static constexpr FixedString kWireName = "autograd.MarksFinal";
  using Reply = Unit;
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
};

/// A pass failed: the receiver ends its part, notifies the workers it communicated with, and answers when
/// they have answered.
struct AbortPass {
  static constexpr wire::MessageType kType{0x0102};
  static constexpr std::string_view kName = "autograd.abort";
  using Reply = Unit;
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
  Error failure{ErrorKind::kCancelled, ""};
};

/// A context was released by its creator. The receiver releases it, notifies the workers it communicated with,
/// and answers when they have answered.
struct ReleaseContext {
  static constexpr wire::MessageType kType{0x0103};
  static constexpr std::string_view kName = "autograd.release";
  static constexpr FixedString kWireName = "autograd.ReleaseContext";
  using Reply = Unit;
  std::uint64_t context = 0;
};

/// Asks the creator of a context, on behalf of a worker that learned of it through a worker that died, whether
/// the context still exists. If so, the creator will notify the sender of its end.
struct AdoptMember {
  static constexpr wire::MessageType kType{0x0108};
  static constexpr std::string_view kName = "autograd.adopt";
  static constexpr FixedString kWireName = "autograd.AdoptMember";
  using Reply = bool;
  std::uint64_t context = 0;
};

/// Result of clearing; nothing is cleared while a pass runs. `peers` are the workers that the receiver
/// communicated with in the context.
struct ClearedPart {
  static constexpr FixedString kWireName = "autograd.ClearedPart";
  bool running = false;
  std::vector<std::uint32_t> peers;
};

/// Clears the receiver's accumulated gradients of a context. No effect if it does not know the context.
struct ClearGradients {
  static constexpr wire::MessageType kType{0x0109};
  static constexpr std::string_view kName = "autograd.clear_gradients";
  static constexpr FixedString kWireName = "autograd.ClearGradients";
  using Reply = ClearedPart;
  std::uint64_t context = 0;
};

/// A send that waits for its gradients.
struct WaitingSend {
  static constexpr FixedString kWireName = "autograd.WaitingSend";
  std::uint64_t message = 0;
  std::string call;
  std::string site;
  bool reply = false;
  std::string to;
  bool unanswered = false;  ///< the arguments of a call that has no result
};

/// The progress of a worker's part of a pass.
struct PartReport {
  static constexpr FixedString kWireName = "autograd.PartReport";
  std::string worker;
  bool silent = false;  ///< it did not answer in time; the other fields are unset
  bool busy = false;
  std::uint64_t executed = 0;
  std::uint64_t sent = 0, received = 0;  ///< messages with gradients
  std::vector<WaitingSend> waiting = {};
  std::vector<std::string> crowded = {};  ///< one line for each worker with queued messages
};

/// Asks all workers of the context for the progress of a pass. Each worker answers once for each `wave`, and
/// adds the answers of the workers that it asks in turn; it waits for those at most `patience` nanoseconds.
struct AskPass {
  static constexpr wire::MessageType kType{0x0106};
  static constexpr std::string_view kName = "autograd.ask";
  static constexpr FixedString kWireName = "autograd.AskPass";
  using Reply = std::vector<PartReport>;
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
  std::uint64_t wave = 0;
  std::int64_t patience = 0;
};

/// Asks all workers of the context for their part of its graph. See AskPass.
struct AskGraph {
  static constexpr wire::MessageType kType{0x0107};
  static constexpr std::string_view kName = "autograd.graph";
  static constexpr FixedString kWireName = "autograd.AskGraph";
  using Reply = std::vector<WorkerGraph>;
  std::uint64_t context = 0;
  std::uint64_t wave = 0;
  std::int64_t patience = 0;
};

}  // namespace torchspan::autograd

namespace torchspan {

template <>
struct Wire<autograd::PropagateGradients>
    : WireStruct<autograd::PropagateGradients, "autograd.PropagateGradients",
                 &autograd::PropagateGradients::context, &autograd::PropagateGradients::pass,
                 &autograd::PropagateGradients::message, &autograd::PropagateGradients::retain_graph,
                 &autograd::PropagateGradients::threads, &autograd::PropagateGradients::gradients,
                 &autograd::PropagateGradients::reached> {};
template <>
struct Wire<autograd::AbortPass>
    : WireStruct<autograd::AbortPass, "autograd.AbortPass", &autograd::AbortPass::context,
                 &autograd::AbortPass::pass, &autograd::AbortPass::failure> {};
}  // namespace torchspan
