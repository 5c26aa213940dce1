#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "launch/watch/host_report.h"

namespace torchspan::launch {

/// The header of a message between the launchers of two hosts. An answer of the same version is accompanied by a
/// HostReport.
struct HostMessage {
  static constexpr std::uint32_t kVersion = 1;
  enum class Kind : std::uint8_t { kQuestion = 1, kAnswer = 2 };

  std::uint32_t version = kVersion;
  Kind kind = Kind::kQuestion;
  std::uint64_t id = 0;  ///< a number of the asking launcher; the answer repeats it
  bool brief = false;    ///< without the workers: answered at once
};

Bytes encode_host_message(const HostMessage& message);
/// Returns nullopt for bytes that are no header. Of another version, only `version`, `kind` and `id` are read, which no
/// version changes. Pure; accepts any bytes.
std::optional<HostMessage> decode_host_message(BytesView bytes);

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

/// Asks the launchers of the job's other hosts what their workers do, and answers them, over authenticated connections
/// of its own that last for one question. Nothing else of the launcher waits for it. Thread-safe.
class HostLink final : public net::Handler {
 public:
  /// `node`: of this host, of `nodes`.
  HostLink(Executor& executor, int node, int nodes);
  ~HostLink() override;
  HostLink(const HostLink&) = delete;

  /// Accepts questions from now on. Returns the address for the other launchers; empty if there is no free port.
  std::string listen(const rendezvous::Membership& world);
  /// Sets the addresses of all launchers by node rank; empty for those that cannot be asked.
  void set_addresses(std::vector<std::string> addresses);
  /// States why no other launcher can be asked.
  void set_trouble(std::string trouble);
  /// Answers the others; HostAnswers::set_describe() sets with what.
  HostAnswers& answers() { return answers_; }

  /// Asks all other launchers at once. Returns their answers by node rank; those that have not answered at `until`, or
  /// when `stopping` becomes true, have HostReport::trouble.
  std::vector<HostReport> collect(bool brief, Deadline until, const std::atomic<bool>& stopping);

  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override;
  void on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) override;

 private:
  struct Question;

  void drive();
  void ask(Question& question, int node, const HostMessage& header, Deadline until)
      TORCHSPAN_REQUIRES(mutex_);
  void settle(std::uint64_t id, const net::Channel& channel, HostReport report);

  Executor& executor_;
  const int node_;
  const int nodes_;
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  std::vector<std::string> addresses_ TORCHSPAN_GUARDED_BY(mutex_);
  std::string trouble_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint64_t, Question*> questions_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by id
  std::uint64_t last_id_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<net::Transport> transport_;  ///< set once, by listen()
  std::atomic<bool> listening_{false};
  Thread driver_;
  HostAnswers answers_;  ///< ends first: it uses channels of the transport
};

}  // namespace torchspan::launch
