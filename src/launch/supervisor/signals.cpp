#include "launch/supervisor/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

namespace torchspan::launch {

SignalDescriptor::SignalDescriptor(int also) {
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, also}) sigaddset(&mask, signal);
  pthread_sigmask(SIG_BLOCK, &mask, &mask_before_);
  descriptor_ = Descriptor(signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK));
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &pipe_before_);
}

SignalDescriptor::~SignalDescriptor() {
  while (take() != 0) {
  }
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

int SignalDescriptor::take() const {
  signalfd_siginfo info{};
  if (read(descriptor_.get(), &info, sizeof info) != sizeof info) return 0;
  return static_cast<int>(info.ssi_signo);
}

}  // namespace torchspan::launch
