#pragma once
#include <fcntl.h>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <sys/socket.h>
#include <utility>
#include <vector>

#include "net/api/tls.h"
#include "net/framing.h"
#include "net/stream/socket.h"
#include "net/tls/hello.h"
#include "net/tls/tls_address.h"
#include "net/tls/tls_links.h"
#include "net/tls/tls_session.h"

/// For the tests of the TLS transport: a transport that the test drives, and peers made of bare parts.
namespace torchspan::net {

inline Secret test_secret() { return Secret::from_bytes(Bytes(32, std::byte{'k'})); }

struct TlsJournal : Handler {
  void on_accepted(const std::shared_ptr<Channel>& channel) override { accepted.push_back(channel); }
  void on_message(const std::shared_ptr<Channel>&, Message message) override {
    received.push_back(std::move(message));
  }
  void on_closed(const std::shared_ptr<Channel>&, const Error& reason) override { closed.push_back(reason); }
  void on_refused(const std::string&, const Error& reason) override { refused.push_back(reason); }

  std::vector<std::shared_ptr<Channel>> accepted;
  std::vector<Message> received;
  std::vector<Error> closed;
  std::vector<Error> refused;
};

/// A transport that the test drives.
class TlsTest : public ::testing::Test {
 protected:
  void start(TransportOptions options, TlsOptions tls = {}) {
    options.secret = test_secret();
    transport_ = make_tls_transport(*executor_, journal_, std::move(options), std::move(tls));
    address_ = transport_->listen("tls:127.0.0.1:0");
  }
  /// Drives the transport until `happened` returns true; calls it between polls.
  void drive_until(const std::function<bool()>& happened) {
    const Deadline deadline = executor_->deadline_in(std::chrono::seconds(30));
    while (!happened()) {
      ASSERT_FALSE(deadline.passed(executor_->now())) << "not reached within the time limit";
      if (!transport_->poll()) transport_->wait(executor_->deadline_in(std::chrono::milliseconds(1)));
    }
  }
  static Descriptor dial_raw(const std::string& text) {
    const auto address = numeric_address(parse_tls_address(text));
    Descriptor socket(::socket(address->socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(socket.get(), address->raw(), address->socket_size), 0);
    EXPECT_EQ(::fcntl(socket.get(), F_SETFL, O_NONBLOCK), 0);
    return socket;
  }
  static void say(const Descriptor& socket, BytesView bytes) {
    ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  /// Passes on what is there, and adds it to `record`.
  static void forward(const Descriptor& from, const Descriptor& to, Bytes* record) {
    std::byte bytes[4096];
    const ssize_t got = ::recv(from.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got <= 0) return;
    if (record != nullptr) record->insert(record->end(), bytes, bytes + got);
    ASSERT_EQ(::send(to.get(), bytes, static_cast<std::size_t>(got), MSG_NOSIGNAL), got);
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  TlsJournal journal_;
  std::unique_ptr<Transport> transport_;
  std::string address_;
};

/// A TLS connection to the transport under test, without a transport on this side.
class BarePeer {
 public:
  explicit BarePeer(Descriptor socket, Role role = Role::kDialer)
      : context_(std::make_shared<const TlsContext>(test_secret(), TlsOptions())),
        session_(std::make_unique<TlsSession>(context_, std::move(socket),
                                              TlsSession::Start{.role = role, .peer = "bare", .host = {}})) {}

  TlsSession& session() { return *session_; }
  /// Runs one step of the handshake; returns true once it is done.
  bool shake_hands() { return shaken_ = shaken_ || session_->shake_hands(); }
  /// Sends a greeting, which the tested transport may reject.
  void greet(const LaneHello& hello) {
    greeting_.say(*session_, hello);
    greeted_ = true;
    if (answer_) session_->trust();
  }
  /// Receives the available bytes of the peer's greeting; returns true once it has arrived.
  bool hears_greeting() {
    if (answer_) return true;
    answer_ = greeting_.hear(*session_, {});
    if (answer_ && greeted_) session_->trust();
    return answer_.has_value();
  }
  const LaneHello& answer() const { return *answer_; }
  void say(BytesView bytes) {
    const iovec place{const_cast<std::byte*>(bytes.data()), bytes.size()};
    ASSERT_EQ(session_->write(std::span(&place, 1)), static_cast<ssize_t>(bytes.size()));
  }
  /// Receives the available bytes; returns true once `size` bytes are received and not yet taken.
  bool receives(std::size_t size) {
    Bytes bytes(64 << 10);
    const iovec place{bytes.data(), bytes.size()};
    const TlsSession::Got got = session_->read(std::span(&place, 1));
    heard_.insert(heard_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(got.size));
    ended_ = got.ended || got.broken != 0;
    return heard_.size() >= size;
  }
  bool sees_hang_up() { return receives(~std::size_t{0}) || ended_; }
  Bytes take(std::size_t size) {
    const auto end = heard_.begin() + static_cast<std::ptrdiff_t>(size);
    const Bytes taken(heard_.begin(), end);
    heard_.erase(heard_.begin(), end);
    return taken;
  }

 private:
  const std::shared_ptr<const TlsContext> context_;
  std::unique_ptr<TlsSession> session_;
  /// As a listener's, it does not check what the peer says.
  TlsGreeting greeting_{Role::kListener, "bare"};
  std::optional<LaneHello> answer_;
  bool shaken_ = false;
  bool greeted_ = false;
  bool ended_ = false;
  Bytes heard_;
};

}  // namespace torchspan::net
