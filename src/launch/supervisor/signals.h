#pragma once
#include <csignal>

#include "launch/supervisor/child.h"

namespace torchspan::launch {

/// While it exists, SIGINT, SIGTERM, SIGHUP and one more signal of this thread arrive at a descriptor instead of ending the
/// process, and writing to a closed pipe is an error instead of a signal.
class SignalDescriptor {
 public:
  explicit SignalDescriptor(int also);
  ~SignalDescriptor();
  SignalDescriptor(const SignalDescriptor&) = delete;

  int get() const { return descriptor_.get(); }
  /// Returns the next signal that arrived, or 0.
  int take() const;

 private:
  Descriptor descriptor_;
  sigset_t mask_before_;
  struct sigaction pipe_before_;
};

}  // namespace torchspan::launch
