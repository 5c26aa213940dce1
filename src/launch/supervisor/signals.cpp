#include "launch/supervisor/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

namespace torchspan::launch {
namespace {

/// Whether this process was started with a signal ignored, as nohup does with SIGHUP.
bool is_signal_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

SignalDescriptor::SignalDescriptor(int also) {
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGINT, SIGTERM, also}) sigaddset(&mask, signal);
  // A blocked signal is delivered to a descriptor even if it is ignored.
  if (!is_signal_ignored(SIGHUP)) sigaddset(&mask, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &mask, &mask_before_);
  descriptor_ = Descriptor(signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK));
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &pipe_before_);
  // If the parent process ignored SIGCHLD, the system would discard the exit status of the workers.
  struct sigaction normal {};
  normal.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &normal, &child_before_);
}

SignalDescriptor::~SignalDescriptor() {
  while (take() != 0) {
  }
  sigaction(SIGCHLD, &child_before_, nullptr);
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

int SignalDescriptor::take() const {
  signalfd_siginfo info{};
  if (read(descriptor_.get(), &info, sizeof info) != sizeof info) return 0;
  return static_cast<int>(info.ssi_signo);
}

}  // namespace torchspan::launch
