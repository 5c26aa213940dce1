#pragma once
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <poll.h>
#include <spawn.h>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <vector>

#include "core/api/descriptor.h"
#include "net/stream/socket.h"
#include "tests/conformance/transport_conformance.h"

namespace torchspan::net::conformance {

enum class Peers { kThreads, kProcesses };

/// An unauthenticated peer with a plain socket.
class UnauthenticatedSocketPeer final : public UnauthenticatedPeer {
 public:
  using Reader = std::function<Address(const std::string&)>;
  explicit UnauthenticatedSocketPeer(Reader read = parse_address) : read_(std::move(read)) {}

  void dial(const std::string& text, BytesView bytes) override {
    const Address address = read_(text);
    socket_.reset(::socket(address.socket.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(socket_.get(), address.raw(), address.socket_size), 0);
    send(bytes);
  }
  void send(BytesView bytes) override {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }
  bool sees_hang_up() override {
    for (;;) {
      pollfd event{socket_.get(), POLLIN, 0};
      if (::poll(&event, 1, 30'000) != 1) return false;
      std::byte bytes[512];
      if (::recv(socket_.get(), bytes, sizeof bytes, 0) <= 0) return true;
    }
  }

 private:
  const Reader read_;
  Descriptor socket_;
};

/// An echo in a separate process, which ends when the test closes its standard input.
class ProcessEcho final : public EchoPeer {
 public:
  /// `arguments` of transport_peer: the transport, its address, and the transport's arguments.
  explicit ProcessEcho(std::vector<std::string> arguments) {
    int input[2], output[2];
    if (::pipe2(input, O_CLOEXEC) != 0 || ::pipe2(output, O_CLOEXEC) != 0) std::abort();
    input_.reset(input[1]);
    answer_.reset(output[0]);
    const Descriptor its_input(input[0]);
    Descriptor its_output(output[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, its_input.get(), 0);
    posix_spawn_file_actions_adddup2(&actions, its_output.get(), 1);
    const std::string program =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "transport_peer";
    arguments.insert(arguments.begin(), "transport_peer");
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    const int failed = ::posix_spawn(&process_, program.c_str(), &actions, nullptr, pointers.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    EXPECT_EQ(failed, 0) << program;
    its_output.reset();
    address_ = read_line();
    EXPECT_FALSE(address_.empty()) << "the peer did not start";
  }
  ~ProcessEcho() override {
    input_.reset();
    reap();
  }

  std::string address() const override { return address_; }
  void kill() override {
    ::kill(process_, SIGKILL);
    reap();
  }
  bool stop() override {
    int status = 0;
    return ::kill(process_, SIGSTOP) == 0 && ::waitpid(process_, &status, WUNTRACED) == process_;
  }
  void go_on() override { ::kill(process_, SIGCONT); }
  bool fork_child() override { return ::write(input_.get(), "f", 1) == 1 && read_line() == "forked"; }

 private:
  std::string read_line() const {
    std::string line;
    char c;
    while (::read(answer_.get(), &c, 1) == 1 && c != '\n') line += c;
    return line;
  }
  void reap() {
    if (process_ > 0) ::waitpid(process_, nullptr, 0);
    process_ = 0;
  }

  Descriptor input_, answer_;
  pid_t process_ = 0;
  std::string address_;
};

/// Binds a TCP port without listening, so that no other process gets it; returns its address.
inline std::string reserve_port(Descriptor& socket, std::string_view scheme) {
  socket.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Address address = parse_address("tcp:127.0.0.1:0");
  EXPECT_EQ(::bind(socket.get(), address.raw(), address.socket_size), 0);
  socklen_t size = sizeof address.socket;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.socket), &size);
  return tcp_text(address.socket, scheme);
}

}  // namespace torchspan::net::conformance
