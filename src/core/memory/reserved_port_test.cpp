#include <gtest/gtest.h>
#include <netinet/in.h>
#include <set>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "core/api/descriptor.h"

namespace torchspan::reserved_port_test {
namespace {

constexpr std::uint16_t kFirst = 19000, kLast = 19999;

TEST(ReservedPort, BelongsToOneHolderAtATime) {
  auto port = ReservedPort::draw(kFirst, kLast, INADDR_LOOPBACK);
  ASSERT_TRUE(port);
  const std::uint16_t number = port->number();
  EXPECT_FALSE(ReservedPort::take(number));
  const pid_t other = fork();
  if (other == 0) _exit(ReservedPort::take(number) ? 1 : 0);
  int status = -1;
  ASSERT_EQ(waitpid(other, &status, 0), other);
  EXPECT_EQ(status, 0) << "another process got it";
  port.reset();
  EXPECT_TRUE(ReservedPort::take(number));
}

TEST(ReservedPort, DrawsDifferentFreeOnes) {
  std::vector<ReservedPort> held;
  std::set<std::uint16_t> numbers;
  for (int i = 0; i < 50; ++i) {
    auto port = ReservedPort::draw(kFirst, kLast, INADDR_LOOPBACK);
    ASSERT_TRUE(port);
    EXPECT_TRUE(numbers.insert(port->number()).second);
    held.push_back(std::move(*port));
  }
  const std::uint16_t only = held.back().number();
  EXPECT_FALSE(ReservedPort::draw(only, only, INADDR_LOOPBACK));
}

TEST(ReservedPort, IsNoneAtWhichAProgramListens) {
  const Descriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::uint16_t taken = ntohs(address.sin_port);
  EXPECT_FALSE(ReservedPort::is_free(taken, INADDR_LOOPBACK));
  EXPECT_FALSE(ReservedPort::draw(taken, taken, INADDR_LOOPBACK));
}

}  // namespace
}  // namespace torchspan::reserved_port_test
