#pragma once
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace torchspan::testing {

/// Starts processes of this executable that do not load it again, which takes LibTorch more than a second: a process that
/// main() forked before there were threads, and that forks again for each of them. It ends with this process.
class ForkServer {
 public:
  /// Called at the beginning of main(): starts the server, whose children call `run` and exit with what it returns.
  static void start(const std::function<int()>& run) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return;
    const pid_t server = ::fork();
    if (server == 0) {
      close(ends[0]);
      serve(ends[1], run);
    }
    close(ends[1]);
    if (server < 0) return;
    setenv(kVariable, std::to_string(ends[0]).c_str(), 1);
  }
  /// The server that main() started, if any. Libraries read some variables when they are loaded, so there is none if this
  /// process has other values of them than its children shall have.
  static std::optional<ForkServer> of_this_process() {
    const char* socket = std::getenv(kVariable);
    const char* threads = std::getenv("OMP_NUM_THREADS");
    if (socket == nullptr || threads == nullptr || std::strcmp(threads, "1") != 0) return std::nullopt;
    return ForkServer(std::stoi(socket));
  }

  /// Starts a process with these variables ("NAME=value") that writes to a file.
  pid_t fork(const std::vector<std::string>& environment, const std::string& output) const {
    std::string request = output + '\0';
    for (const std::string& text : environment) {
      if (!text.starts_with(kVariable)) request += text + '\0';
    }
    return ask(request).value;
  }
  /// waitpid() for a process of the server.
  pid_t wait(pid_t pid, int* status, int options) const {
    const Reply reply = ask(std::string(1, '\0') + std::to_string(pid) + ' ' + std::to_string(options));
    *status = reply.status;
    return reply.value;
  }

 private:
  static constexpr const char* kVariable = "TORCHSPAN_TEST_FORK_SERVER";
  static constexpr std::size_t kLongest = 128 << 10;
  struct Reply {
    pid_t value = -1;
    int status = 0;
  };

  explicit ForkServer(int socket) : socket_(socket) {}

  Reply ask(const std::string& request) const {
    Reply reply;
    const bool sent =
        request.size() <= kLongest && send(socket_, request.data(), request.size(), MSG_NOSIGNAL) > 0;
    ssize_t size = -1;
    do {
      size = sent ? recv(socket_, &reply, sizeof reply, 0) : 0;
    } while (size < 0 && errno == EINTR);
    if (size != static_cast<ssize_t>(sizeof reply) || reply.value < 0)
      throw std::runtime_error("the fork server failed");
    return reply;
  }

  [[noreturn]] static void serve(int socket, const std::function<int()>& run) {
    std::string request(kLongest, '\0');
    while (true) {
      const ssize_t size = recv(socket, request.data(), request.size(), 0);
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) _exit(0);
      Reply reply;
      if (request[0] == '\0') {
        char* options = nullptr;
        const auto pid = static_cast<pid_t>(std::strtol(request.data() + 1, &options, 10));
        reply.value = waitpid(pid, &reply.status, std::atoi(options));
      } else {
        reply.value = ::fork();
        if (reply.value == 0) {
          prctl(PR_SET_PDEATHSIG, SIGKILL);
          close(socket);
          become({request.data(), static_cast<std::size_t>(size)});
          end(run());
        }
      }
      send(socket, &reply, sizeof reply, MSG_NOSIGNAL);
    }
  }

  /// Ends without the destructors of LibTorch's static objects, which take longer than most scenarios. The check for leaks
  /// needs them.
  [[noreturn]] static void end(int code) {
#ifndef __SANITIZE_ADDRESS__
    std::fflush(nullptr);
    _exit(code);
#else
    std::exit(code);
#endif
  }
  /// In the new process: its output and its variables.
  static void become(const std::string& request) {
    const int output = open(request.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (output < 0 || dup2(output, 1) < 0 || dup2(output, 2) < 0) _exit(127);
    close(output);
    clearenv();
    for (std::size_t at = request.find('\0') + 1; at < request.size(); at = request.find('\0', at) + 1) {
      const std::string text = request.c_str() + at;
      setenv(text.substr(0, text.find('=')).c_str(), text.substr(text.find('=') + 1).c_str(), 1);
    }
  }

  int socket_;
};

}  // namespace torchspan::testing
