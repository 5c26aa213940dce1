#pragma once
#include <csignal>

#include "launch/supervisor/worker.h"

namespace torchspan::launch {

/// While it exists, SIGINT, SIGTERM, SIGHUP and one more signal of this thread arrive at a descriptor instead of ending the
/// process, and writing to a closed pipe is an error instead of a signal. SIGHUP is left alone if it was ignored before, as
/// under nohup, unless it is the one more signal. Children that end can be waited for, even if the parent process ignored SIGCHLD.
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
  struct sigaction pipe_before_, child_before_;
};

}  // namespace torchspan::launch
