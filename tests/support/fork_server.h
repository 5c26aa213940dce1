#pragma once
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <initializer_list>
#include <optional>
#include <poll.h>
#include <signal.h>
#include <stdexcept>
#include <string>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace torchspan::testing {

/// Starts processes of this executable that do not load it again, which takes LibTorch most of a second: a process that
/// main() forked before there were threads, and that forks again for each of them. It ends with this process. Launchers,
/// which start programs by their paths, reach it through the program `start_loaded` (start_loaded.cpp).
class ForkServer {
 public:
  /// What main() does in a process of the server, with the arguments of that process; returns the exit code.
  using Run = std::function<int(int argc, char** argv)>;

  /// Called at the beginning of main(): starts the server, whose children call `run` and exit with what it returns.
  static void start(const Run& run) {
    int ends[2];
    const int listening = listen_at("torchspan-fork-server-" + std::to_string(getpid()));
    if (listening < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return;
    const pid_t owner = getpid();
    const pid_t server = ::fork();
    if (server == 0) {
      close(ends[0]);
      serve(ends[1], listening, run);
    }
    close(ends[1]);
    close(listening);
    if (server < 0) return;
    setenv(kVariable, std::to_string(ends[0]).c_str(), 1);
    setenv(kName, ("torchspan-fork-server-" + std::to_string(owner)).c_str(), 1);
  }
  /// The server that main() started, if any. Libraries read some variables when they are loaded, so there is none if this
  /// process has other values of them than its children shall have.
  static std::optional<ForkServer> of_this_process() {
    const char* socket = std::getenv(kVariable);
    const char* threads = std::getenv("OMP_NUM_THREADS");
    if (socket == nullptr || threads == nullptr || std::strcmp(threads, "1") != 0) return std::nullopt;
    return ForkServer(std::stoi(socket));
  }
  /// The words with which a launcher starts `program`: in the server, if main() started one, or else by itself.
  static std::vector<std::string> words_of(const std::string& program) {
    if (!of_this_process()) return {program};
    return {program.substr(0, program.rfind('/')) + "/start_loaded", program};
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

  static constexpr const char* kVariable = "TORCHSPAN_TEST_FORK_SERVER";
  /// Where `start_loaded` reaches the server: the name of an abstract Unix socket.
  static constexpr const char* kName = "TORCHSPAN_TEST_FORK_SERVER_NAME";
  static constexpr std::size_t kLongest = 128 << 10;
  /// What the server answers: the process, and, when it has ended, its status.
  struct Reply {
    pid_t value = -1;
    int status = 0;
  };
  static sockaddr_un address_of(const std::string& name, socklen_t& size) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
  }

 private:
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

  static int listen_at(const std::string& name) {
    const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    socklen_t size = 0;
    const sockaddr_un address = address_of(name, size);
    const bool listens = socket >= 0 &&
                         bind(socket, reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
                         listen(socket, 64) == 0;
    return listens ? socket : -1;
  }

  [[noreturn]] static void serve(int socket, int listening, const Run& run) {
    std::string request(kLongest, '\0');
    while (true) {
      pollfd events[2] = {{socket, POLLIN, 0}, {listening, POLLIN, 0}};
      if (poll(events, 2, -1) < 0) continue;
      if (events[1].revents != 0) {
        const int connection = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
        start_keeper({socket, listening}, connection, run);
        close(connection);
      }
      if (events[0].revents == 0) continue;
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
          close(listening);
          become({request.data(), static_cast<std::size_t>(size)});
          char* none = nullptr;
          end(run(0, &none));
        }
      }
      send(socket, &reply, sizeof reply, MSG_NOSIGNAL);
    }
  }

  /// Starts a process that keeps one program for `start_loaded`. It is no child of the server, which waits for its children
  /// by their numbers.
  static void start_keeper(std::initializer_list<int> of_the_server, int connection, const Run& run) {
    const pid_t between = ::fork();
    if (between > 0) waitpid(between, nullptr, 0);
    if (between != 0) return;
    if (::fork() != 0) _exit(0);
    for (const int descriptor : of_the_server) close(descriptor);
    keep(connection, run);
  }
  /// Starts the program, reports its end, and ends it when its starter ends.
  [[noreturn]] static void keep(int connection, const Run& run) {
    std::string request(kLongest, '\0');
    int outputs[3] = {-1, -1, -1};
    const ssize_t size = receive_with_descriptors(connection, request, outputs);
    if (size <= 0) _exit(1);
    request.resize(static_cast<std::size_t>(size));
    Reply reply{.value = ::fork()};
    if (reply.value == 0) {
      setpgid(0, 0);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(connection);
      end(run_as_asked(request, outputs, run));
    }
    if (reply.value < 0) _exit(1);  // kill() with this number would end every process of the user
    for (const int output : outputs) close(output);
    send(connection, &reply, sizeof reply, MSG_NOSIGNAL);
    pollfd events[2] = {{connection, POLLIN, 0},
                        {static_cast<int>(syscall(SYS_pidfd_open, reply.value, 0)), POLLIN, 0}};
    while (poll(events, 2, -1) < 0) {
    }
    if (events[1].revents == 0) ::kill(reply.value, SIGKILL);
    waitpid(reply.value, &reply.status, 0);
    send(connection, &reply, sizeof reply, MSG_NOSIGNAL);
    _exit(0);
  }
  static ssize_t receive_with_descriptors(int connection, std::string& request, int (&descriptors)[3]) {
    iovec memory{request.data(), request.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptors)];
    msghdr message{};
    message.msg_iov = &memory;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t size = recvmsg(connection, &message, 0);
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    if (header == nullptr || header->cmsg_len != CMSG_LEN(sizeof descriptors)) return -1;
    std::memcpy(descriptors, CMSG_DATA(header), sizeof descriptors);
    return size;
  }
  /// `request`: the working directory, the number of arguments, these, and the variables, each with a 0 behind it.
  static int run_as_asked(const std::string& request, const int (&outputs)[3], const Run& run) {
    std::vector<std::string> texts;
    for (std::size_t at = 0; at < request.size(); at = request.find('\0', at) + 1)
      texts.emplace_back(request.c_str() + at);
    for (int i = 0; i < 3; ++i) {
      if (dup2(outputs[i], i) < 0) _exit(127);
    }
    for (const int output : outputs) close(output);
    if (chdir(texts.at(0).c_str()) != 0) _exit(127);
    const auto count = static_cast<std::size_t>(std::stoi(texts.at(1)));
    set_variables({texts.begin() + 2 + static_cast<std::ptrdiff_t>(count), texts.end()});
    std::vector<char*> arguments;
    for (std::size_t i = 0; i < count; ++i) arguments.push_back(texts.at(2 + i).data());
    arguments.push_back(nullptr);
    return run(static_cast<int>(count), arguments.data());
  }
  static void set_variables(const std::vector<std::string>& texts) {
    clearenv();
    for (const std::string& text : texts) {
      if (text.starts_with(kVariable)) continue;
      setenv(text.substr(0, text.find('=')).c_str(), text.substr(text.find('=') + 1).c_str(), 1);
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
    std::vector<std::string> texts;
    for (std::size_t at = request.find('\0') + 1; at < request.size(); at = request.find('\0', at) + 1)
      texts.emplace_back(request.c_str() + at);
    set_variables(texts);
  }

  int socket_;
};

}  // namespace torchspan::testing
