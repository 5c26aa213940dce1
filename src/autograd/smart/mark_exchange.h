#pragma once
#include <cstdint>
#include <exception>
#include <vector>

#include "autograd/messages/answer.h"
#include "autograd/messages/messages.h"
#include "autograd/passes/pass_ending.h"
#include "autograd/passes/pass_parts.h"
#include "autograd/smart/smart_marks.h"

namespace torchspan::autograd {

/// Sends, takes and answers the marks of one worker's part of a SMART pass: a diffusing computation (Dijkstra
/// and Scholten, 1980) that runs beside the gradients; see docs/architecture/smart.md. Thread-safe.
class MarkExchange {
 public:
  MarkExchange(const PassParts& parts, PassEnding& ending) : parts_(parts), ending_(ending) {}

  /// On the root: marks what the losses reach.
  void begin(const std::vector<at::Tensor>& roots);
  /// Takes marks for messages that this worker sent to `peer`. Takes `answer`, or throws, which must fail the
  /// pass.
  void mark(const std::vector<MarkedSend>& sends, std::uint32_t peer, Answer<MarkSends>& answer);
  /// The same on a thread that must not fail the pass: returns false, without effect, where mark() throws.
  bool try_mark(const std::vector<MarkedSend>& sends, std::uint32_t peer, Answer<MarkSends>& answer);
  /// All marks are made. Another thread runs the nodes that become ready.
  void marks_are_final();

 private:
  SmartMarks::Marks find(const std::vector<MarkedSend>& sends, std::uint32_t peer) const;
  void take_marks(const SmartMarks::Marks& marks, Answer<MarkSends>& answer);
  void send_marks();
  void take_answer(MarkedWorkers marked, const std::exception_ptr& error, std::uint32_t from);
  void end_request();
  void drive_soon();

  const PassParts parts_;
  PassEnding& ending_;
};

}  // namespace torchspan::autograd
