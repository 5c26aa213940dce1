#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <memory>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>

#include "launch/supervisor/host_message.h"
#include "launch/watch/host_report.h"

namespace torchspan::launch {

/// Answers the questions of other launchers on a thread. Thread-safe.
class HostAnswers {
 public:
  /// Describes this host's workers; `brief`: without them. Ends soon when `stopping` becomes true.
  using Describe = std::function<HostReport(bool brief, const std::atomic<bool>& stopping)>;

  /// `node`: of this host.
  HostAnswers(Executor& executor, int node);
  ~HostAnswers();
  HostAnswers(const HostAnswers&) = delete;

  /// Sets what describes this host's workers; empty while none run. Returns when no earlier one is running.
  void set_describe(Describe describe);
  /// A question has arrived; the answer goes to `channel`.
  void add(std::shared_ptr<net::Channel> channel, const HostMessage& question);

 private:
  struct Asked {
    std::shared_ptr<net::Channel> channel;
    HostMessage message;
  };

  void run();
  std::deque<Asked> take();
  HostReport describe(bool brief);

  Executor& executor_;
  const int node_;
  const std::unique_ptr<Parker> parker_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> changing_{false};  ///< ends a running description early
  Mutex mutex_;
  std::shared_ptr<const Describe> describe_ TORCHSPAN_GUARDED_BY(mutex_);
  bool describing_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< a description runs
  std::deque<Asked> asked_ TORCHSPAN_GUARDED_BY(mutex_);
  Thread thread_;
};

/// Sends a message between launchers. Throws as Channel::send().
void send_to_host(net::Channel& channel, const HostMessage& header, const std::string& body);

}  // namespace torchspan::launch
