#include "launch/supervisor/signals.h"

#include <csignal>
#include <gtest/gtest.h>

namespace torchspan::launch::signals_test {
namespace {

/// Sets what this process does at SIGHUP; the destructor restores it.
class HangupAction {
 public:
  explicit HangupAction(sighandler_t action) : before_(std::signal(SIGHUP, action)) {}
  ~HangupAction() { std::signal(SIGHUP, before_); }
  HangupAction(const HangupAction&) = delete;
  HangupAction& operator=(const HangupAction&) = delete;

 private:
  const sighandler_t before_;
};

TEST(SignalDescriptor, ReceivesTheSignalsOfThisThread) {
  const HangupAction usual(SIG_DFL);
  const SignalDescriptor signals(SIGUSR1);
  EXPECT_EQ(signals.take(), 0);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    std::raise(signal);
    EXPECT_EQ(signals.take(), signal);
  }
}

TEST(SignalDescriptor, LeavesOutSighupUnderNohupUnlessItIsThePreemptionSignal) {
  const HangupAction ignored(SIG_IGN);  // as nohup does
  {
    const SignalDescriptor signals(SIGUSR1);
    std::raise(SIGHUP);
    EXPECT_EQ(signals.take(), 0);
  }
  const SignalDescriptor signals(SIGHUP);
  std::raise(SIGHUP);
  EXPECT_EQ(signals.take(), SIGHUP);
}

}  // namespace
}  // namespace torchspan::launch::signals_test
