#include <gtest/gtest.h>

#include "net/tls/tls_channel.h"
#include "net/tls/tls_driver.h"

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

}  // namespace
}  // namespace torchspan::net::tls_dialer_test
