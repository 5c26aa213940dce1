#pragma once
#include <string>
#include <vector>

#include <torchspan/rpc/message.h>

namespace torchspan::autograd {

/// What the interceptor adds to a user message: the context, and which tensors carry a gradient edge.
struct EdgeHeader {
  std::uint64_t context = 0;
  std::uint64_t message = 0;           ///< joins the send node with its receive node; 0: no edges
  std::vector<std::uint32_t> tensors;  ///< indices into the message's tensor table
};

/// The gradients of the tensors that one message carried, on their way back. The first such message of a pass
/// is answered when the receiver's part of it is done.
struct PropagateGradients {
  static constexpr wire::MessageType kType{0x0101};
  static constexpr std::string_view kName = "autograd.propagate";
  using Reply = Unit;
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
  std::uint64_t message = 0;
  bool retain_graph = false;
  std::vector<at::Tensor> gradients;
  /// SMART: which of the tensors the pass reaches; a gradient that is reached may still be undefined. FAST:
  /// empty, and the defined ones are reached.
  std::vector<std::uint8_t> reached;
};

/// The outputs of one send that a pass reaches.
struct MarkedSend {
  std::uint64_t message = 0;
  std::vector<std::uint32_t> outputs;
};

/// The ranks of those who were marked on the way.
struct MarkedWorkers {
  std::vector<std::uint32_t> ranks;
};

/// SMART: these sends of the receiver take part in the pass. Answered when the receiver and all it told
/// because of this are done with marking (Dijkstra and Scholten, 1980); at once if it is already in the
/// middle of it.
struct MarkSends {
  static constexpr wire::MessageType kType{0x0104};
  static constexpr std::string_view kName = "autograd.mark";
  using Reply = MarkedWorkers;
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
  bool retain_graph = false;
  std::vector<MarkedSend> sends;
};

/// SMART: all marks are made; sends without one get no gradient.
struct MarksFinal {
  static constexpr wire::MessageType kType{0x0105};
  static constexpr std::string_view kName = "autograd.marks_final";
  using Reply = Unit;
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
};

/// A pass failed somewhere: everybody who takes part drops it.
struct AbortPass {
  static constexpr wire::MessageType kType{0x0102};
  static constexpr std::string_view kName = "autograd.abort";
  using Reply = Unit;
  std::uint64_t context = 0;
  std::uint64_t pass = 0;
  std::string reason;
};

/// A context ended on the worker that made it; whoever hears of it tells the workers it called.
struct ReleaseContext {
  static constexpr wire::MessageType kType{0x0103};
  static constexpr std::string_view kName = "autograd.release";
  using Reply = Unit;
  std::uint64_t context = 0;
};

}  // namespace torchspan::autograd

namespace torchspan {
template <>
struct Wire<autograd::EdgeHeader>
    : WireStruct<autograd::EdgeHeader, "autograd.EdgeHeader", &autograd::EdgeHeader::context,
                 &autograd::EdgeHeader::message, &autograd::EdgeHeader::tensors> {};
template <>
struct Wire<autograd::PropagateGradients>
    : WireStruct<autograd::PropagateGradients, "autograd.PropagateGradients",
                 &autograd::PropagateGradients::context, &autograd::PropagateGradients::pass,
                 &autograd::PropagateGradients::message, &autograd::PropagateGradients::retain_graph,
                 &autograd::PropagateGradients::gradients, &autograd::PropagateGradients::reached> {};
template <>
struct Wire<autograd::MarkedSend>
    : WireStruct<autograd::MarkedSend, "autograd.MarkedSend", &autograd::MarkedSend::message,
                 &autograd::MarkedSend::outputs> {};
template <>
struct Wire<autograd::MarkedWorkers>
    : WireStruct<autograd::MarkedWorkers, "autograd.MarkedWorkers", &autograd::MarkedWorkers::ranks> {};
template <>
struct Wire<autograd::MarkSends>
    : WireStruct<autograd::MarkSends, "autograd.MarkSends", &autograd::MarkSends::context,
                 &autograd::MarkSends::pass, &autograd::MarkSends::retain_graph,
                 &autograd::MarkSends::sends> {};
template <>
struct Wire<autograd::MarksFinal> : WireStruct<autograd::MarksFinal, "autograd.MarksFinal",
                                               &autograd::MarksFinal::context, &autograd::MarksFinal::pass> {
};
template <>
struct Wire<autograd::AbortPass>
    : WireStruct<autograd::AbortPass, "autograd.AbortPass", &autograd::AbortPass::context,
                 &autograd::AbortPass::pass, &autograd::AbortPass::reason> {};
template <>
struct Wire<autograd::ReleaseContext>
    : WireStruct<autograd::ReleaseContext, "autograd.ReleaseContext", &autograd::ReleaseContext::context> {};
}  // namespace torchspan
