#pragma once
#include <csignal>

namespace torchspan::launch {

/// The signal that ends a running job, or none.
struct Interruption {
  int signal = 0;           ///< 0: none
  bool preemption = false;  ///< the workers were given time to write a checkpoint
  int clean_code = 0;       ///< the launcher's exit code if every worker then exits with 0
};

/// What the launcher does about a signal.
enum class Reaction {
  kNone,     ///< ignore it
  kPreempt,  ///< forward it to the workers, once, and give them the grace period
  kStop,     ///< stop the workers
  kKill,     ///< kill the workers
};

/// Decides what `signal` does to a job that `interruption` describes, and notes it there. SIGTERM and
/// `preempt_signal` preempt; a repeated `preempt_signal` has no effect, so that a batch system may send it to
/// every process; SIGTERM may follow it. Any other second signal kills the workers, except that SIGINT and
/// SIGHUP stop a job that has been preempted.
Reaction react(Interruption& interruption, int signal, int preempt_signal);

}  // namespace torchspan::launch
