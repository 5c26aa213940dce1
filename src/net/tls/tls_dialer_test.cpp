#include <arpa/inet.h>
#include <array>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "net/stream/driver_context.h"
#include "net/tls/tls_channel.h"
#include "net/tls/tls_driver.h"
#include "net/tls/tls_test_tools.h"

namespace torchspan::net::tls_dialer_test {
namespace {

TEST(TlsDialer, GivesTheReasonsOfAllAddressesOfAHost) {
  const auto executor = make_executor();
  const auto poller = executor->make_poller();
  const auto queue = std::make_shared<TlsRequestQueue>(*poller);
  const TransportOptions options;
  TlsLane lane(1, Role::kDialer, "tls:host:1", 0);
  lane.link = std::make_shared<TlsLink>(make_tls_channel("tls:host:1", 1, options, queue), 1, true, options);
  const Error last(ErrorKind::kDisconnected, "no worker listens at '[::1]:1'; is it running yet?");
  EXPECT_EQ(TlsDialer::with_earlier(lane, last).message(), last.message());
  // The last address refuses at once; the first one says that the network loses packets.
  lane.link->failures = {"'10.0.0.1:1' cannot be reached: Connection timed out", last.message()};
  const Error all = TlsDialer::with_earlier(lane, last);
  EXPECT_EQ(all.kind(), ErrorKind::kDisconnected);
  EXPECT_EQ(all.message(), "'10.0.0.1:1' cannot be reached: Connection timed out; " + last.message());
}

/// A listening socket on the loopback interface, and its address.
struct Place {
  explicit Place(int backlog) : socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    sockaddr_in address{
        .sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(socket.get(), backlog), 0);
    EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    place = parse_tls_address(fmt::format("tls:127.0.0.1:{}", ntohs(address.sin_port)));
  }
  Address address() const { return numeric_address(place).value(); }
  Descriptor dial() const {
    Descriptor dialed(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    ::connect(dialed.get(), address().raw(), address().socket_size);
    return dialed;
  }
  Descriptor socket;
  TlsPlace place{};
};

/// The system drops what is sent to a listening socket whose queue is full, as a firewall does.
TEST(TlsDialer, TriesTheNextAddressIfOneDoesNotAnswer) {
  const auto executor = make_executor();
  const auto poller = executor->make_poller();
  TlsJournal journal;
  TransportOptions options;
  options.secret = test_secret();
  options.handshake_timeout = std::chrono::seconds(1);
  TokenCounter tokens;
  Timers timers;
  const auto queue = std::make_shared<TlsRequestQueue>(*poller);
  TlsDriver driver({*executor, journal, options, *poller, tokens, timers}, {}, queue);
  const Place silent(0), good(8);
  const std::array filling{silent.dial(), silent.dial(), silent.dial()};
  const std::uint64_t token = tokens.next();
  auto request = std::make_unique<TlsRequest>();
  request->token = token;
  request->dial = {make_tls_channel(good.place.text, token, options, queue),
                   good.place,
                   Deadline::never(),
                   {silent.address(), good.address()}};
  TlsRequestQueue::Requests requests;
  requests.connections.push_back(std::move(request));
  driver.carry_out(std::move(requests));
  const Deadline limit = executor->deadline_in(std::chrono::seconds(20));
  int accepted = -1;
  while (accepted < 0 && journal.closed.empty() && !limit.passed(executor->now())) {
    std::array<Poller::Event, 8> events;
    const std::size_t count = poller->wait(
        events, earlier(driver.next_due(), executor->deadline_in(std::chrono::milliseconds(10))));
    driver.serve(std::span(events.data(), count));
    accepted = ::accept(good.socket.get(), nullptr, nullptr);
  }
  EXPECT_GE(accepted, 0) << (journal.closed.empty() ? "nothing happened" : journal.closed.front().message());
  ::close(accepted);
  driver.end_all(Error(ErrorKind::kCancelled, "the test ends"));
}

}  // namespace
}  // namespace torchspan::net::tls_dialer_test
