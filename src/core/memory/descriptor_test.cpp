#include "core/api/descriptor.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

namespace torchspan::descriptor_test {
namespace {

bool is_socket(int fd) {
  struct stat about {};
  return ::fstat(fd, &about) == 0 && S_ISSOCK(about.st_mode);
}
bool is_open(int fd) {
  struct stat about {};
  return ::fstat(fd, &about) == 0;
}

/// Whether `claim` holds in a forked child.
template <class Claim>
bool holds_in_a_child(const Claim& claim) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(claim() ? 0 : 1);
  int status = 1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

Descriptor make_socket() {
  return Descriptor::not_inherited([] { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); });
}

TEST(DescriptorTest, AForkedChildReplacesDescriptorsThatItMustNotInherit) {
  Descriptor socket = make_socket();
  const Descriptor other(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Descriptor moved = std::move(socket);
  EXPECT_TRUE(holds_in_a_child([&] {
    const bool replaced = is_open(moved.get()) && !is_socket(moved.get()) && is_socket(other.get());
    moved.reset();
    return replaced && !is_open(moved.get());
  }));
  EXPECT_TRUE(is_socket(moved.get())) << "the parent lost it";
}

TEST(DescriptorTest, AReusedDescriptorNumberIsInherited) {
  Descriptor socket = make_socket();
  const int number = socket.get();
  socket.reset();
  const Descriptor next(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(next.get(), number);
  EXPECT_TRUE(holds_in_a_child([&] { return is_socket(number); }));
}

TEST(DescriptorTest, AChildsOwnFilesAreInheritedByItsChildren) {
  const Descriptor socket = make_socket();
  EXPECT_TRUE(holds_in_a_child([&] {
    ::close(socket.get());  // as a daemon closes all descriptors that it did not open
    const int own = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return own == socket.get() && holds_in_a_child([&] { return is_socket(own); });
  }));
}

TEST(DescriptorTest, AFailedCreationKeepsErrno) {
  const Descriptor none = Descriptor::not_inherited([] { return ::socket(-1, SOCK_STREAM, 0); });
  EXPECT_EQ(errno, EAFNOSUPPORT);
  EXPECT_FALSE(none);
}

}  // namespace
}  // namespace torchspan::descriptor_test
