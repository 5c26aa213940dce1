#include "launch/supervisor/interruption.h"

namespace torchspan::launch {

Reaction react(Interruption& interruption, int signal, int preempt_signal) {
  const bool preempts = signal == SIGTERM || signal == preempt_signal;
  if (interruption.signal == 0) {
    interruption.signal = signal;
    interruption.preemption = preempts;
    return preempts ? Reaction::kPreempt : Reaction::kStop;
  }
  if (signal == preempt_signal && signal != SIGTERM) return Reaction::kNone;
  if (!interruption.preemption) return Reaction::kKill;
  if (!preempts) {
    interruption.signal = signal;
    interruption.preemption = false;
    return Reaction::kStop;
  }
  if (interruption.signal == SIGTERM) return Reaction::kKill;
  interruption.signal = SIGTERM;
  return Reaction::kPreempt;
}

}  // namespace torchspan::launch
