#pragma once
// Preemption: the signal that asks a program to write a checkpoint and end. Includes no LibTorch.
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torchspan {

struct PreemptionOptions {
  std::vector<int> signals = {};  ///< the signals to handle; empty: SIGUSR1 and SIGTERM
  int launcher_descriptor = -1;   ///< where the launcher reads notices, or -1

  /// Derives options from TORCHSPAN_PREEMPT_SIGNAL (a number, besides SIGTERM) and TORCHSPAN_PROGRESS_FD, which
  /// `torchspan run` sets.
  static PreemptionOptions from_process();
};

/// While it exists, SIGUSR1 and SIGTERM no longer end this process but set requested(). A signal may reach one
/// rank only: `torchspan run` then forwards it to the other workers; without it, agree between the ranks
/// before acting. At most one per process at a time; a second one throws kInvalid.
class Preemption {
 public:
  explicit Preemption(PreemptionOptions options = PreemptionOptions::from_process());
  /// Restores the previous handling of the signals. If one has arrived, further ones are ignored from now on,
  /// so that they do not end the process while it exits.
  ~Preemption();
  Preemption(const Preemption&) = delete;

  /// Whether a signal has arrived. Cheap; from any thread.
  bool requested() const { return signal() != 0; }
  /// The first signal that arrived, or 0. From any thread.
  int signal() const;
  /// Becomes readable when a signal arrives and stays so; for poll(2). Do not read or close it.
  int descriptor() const;

 private:
  class Handlers;
  std::unique_ptr<Handlers> handlers_;
};

/// Encodes the line "torchspan-preempted 1 signal=10" with which a worker reports a signal to its launcher.
std::string encode_preemption(int signal);
/// Decodes such a line, with or without its newline, to the signal; nullopt for any other line.
std::optional<int> decode_preemption(std::string_view line);

}  // namespace torchspan
