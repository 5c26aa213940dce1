#pragma once
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/net/tls.h>

#include "net/polled.h"
#include "net/stream/socket.h"
#include "net/tls/resolver.h"
#include "net/tls/tls_lane.h"
#include "net/tls/tls_link.h"
#include "net/tls/tls_request.h"

namespace torchspan::net {

/// Transport over TLS 1.3 between hosts. A channel is a TlsLink with one or more TlsLanes, its connections; a
/// caller is a lane without a link until it has proved itself and said which it is. Everything but the
/// request queue, the resolver and the atomics belongs to the thread that is in poll() or wait().
class TlsTransport final : public PolledTransport {
 public:
  /// Addresses begin with `scheme`, which another transport that is built on this one sets.
  TlsTransport(Executor& executor, Handler& handler, TransportOptions options, TlsOptions tls,
               std::string scheme = "tls");
  ~TlsTransport() override;

  std::string listen(const std::string& address) override;
  bool can_reach(const std::string& address) const override;
  std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline) override;
  bool poll() override;
  void wait(Deadline deadline) override;
  void wake() override;
  bool prepare_sleep(Deadline& until) override;
  void end_sleep(bool ready) override;
  int descriptor() const override { return poller_->descriptor(); }

  /// What wait() sleeps on. A transport built on this one adds descriptors that end wait(), under tokens from
  /// kForeignTokens on.
  Poller& poller() { return *poller_; }
  static constexpr std::uint64_t kForeignTokens = std::uint64_t{1} << 63;

 private:
  struct Listener {
    std::unique_ptr<ListeningSocket> socket;
    bool watched = false;
    std::optional<TimePoint> resume;  ///< after descriptors ran out
  };
  using LinkPtr = std::shared_ptr<TlsLink>;
  static constexpr std::size_t kScratchBytes = 64 << 10;

  // Channels (tls_transport.cpp)
  std::shared_ptr<TlsChannel> make_channel(std::string peer, std::uint64_t token) const;
  bool must_look() const;
  bool take_requests();
  void run(TlsRequest& errand);
  void open_link(TlsLane& lane, const LinkPtr& link);
  /// Brings poller and timers in line with the channel's state; ends it when there is nothing left to do.
  void review(TlsLink& link);
  void end_broken(TlsLink& link, const std::string& why);
  void end(TlsLink& link, const Error& reason, bool at_once = false);
  void set_timer(TlsLane& lane, std::optional<TimePoint> when);
  bool run_timers();
  Error timed_out(const TlsLane& lane) const;
  /// Shows peers that this side lives, and ends the channels of those that do not.
  void tick();
  bool is_silent(const TlsLink& link) const;

  // Connections (tls_driver.cpp)
  TlsLane& add_lane(Role role, std::string peer, std::uint8_t number, const LinkPtr& link);
  void dial_first(TlsLane& lane);
  void dial_rest(TlsLink& link);
  void start_dialing(TlsLane& lane);
  void serve(const Poller::Event& event);
  void handle(TlsLane& lane, const Poller::Event& event);
  void step(TlsLane& lane, const Poller::Event& event);
  void receive(TlsLane& lane);
  void meet(TlsLane& lane, const LaneHello& hello);
  void admit(TlsLane& lane, const LaneHello& hello);
  void admit_lane(TlsLane& lane, const LaneHello& hello);
  void be_admitted(TlsLane& lane, const LaneHello& hello);
  LaneHello greeting_of(const TlsLane& lane) const;
  void join(TlsLane& lane, const LinkPtr& link, std::uint8_t number);
  void stream_ended(TlsLane& lane);
  bool redial(TlsLane& lane);
  /// The end of a connection, which is the end of its channel unless the channel does without it.
  void fail(TlsLane& lane, const Error& reason);
  void drop(TlsLane& lane);
  void watch(TlsLane& lane, bool writing);
  void go_on_with(TlsLink& link);
  void forget_unauthenticated(TlsLane& lane);

  // Callers (tls_callers.cpp)
  void accept_from(std::uint64_t token, Listener& listener);
  void welcome(Descriptor socket, const Listener& listener);
  void watch(std::uint64_t token, Listener& listener, bool on);
  void pause(std::uint64_t token, Listener& listener, int reason);
  /// Others wait at the door: the unauthenticated peer who came first must be done soon.
  void shorten_handshakes();
  void resume_listeners();

  Executor& executor_;
  Handler& handler_;
  const TransportOptions options_;
  const TlsOptions tls_;
  const std::string scheme_;
  const std::shared_ptr<const TlsContext> context_;
  const std::unique_ptr<Poller> poller_;
  const std::shared_ptr<TlsRequestQueue> request_queue_;
  std::atomic<std::uint64_t> next_token_{1};
  std::atomic<bool> woken_{false};

  std::map<std::uint64_t, std::unique_ptr<TlsLane>> lanes_;
  std::map<std::uint64_t, LinkPtr> links_;     ///< by the first lane's token, which is the channel's
  std::map<ChannelToken, TlsLink*> accepted_;  ///< open channels that further lanes may join
  std::map<std::uint64_t, Listener> listeners_;
  std::set<std::pair<TimePoint, std::uint64_t>> timers_;
  std::vector<std::uint64_t> backlog_;  ///< lanes with bytes that the system does not report any more
  std::size_t polls_ = 0;               ///< since the sockets were looked at
  std::map<std::uint64_t, TimePoint> unauthenticated_;  ///< who proved nothing yet, and when they came
  TimePoint now_{};
  TimePoint next_tick_{};
  std::array<Poller::Event, 64> events_;
  std::size_t ready_ = 0;  ///< events that wait() left for poll()
  const std::unique_ptr<std::byte[]> scratch_;
  /// Its destructor waits for look-ups, which post to the request queue: it goes first.
  Resolver resolver_;
};

}  // namespace torchspan::net
