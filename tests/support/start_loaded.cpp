// Starts a program in the ForkServer of a test, and ends as it does: for launchers, which start programs by their paths.
// Signals are passed on; the program ends with this process.
#include <sys/resource.h>
#include <sys/signalfd.h>

#include "tests/support/fork_server.h"

namespace {

using torchspan::testing::ForkServer;

int connect_to_server() {
  const char* const name = std::getenv(ForkServer::kName);
  const int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  socklen_t size = 0;
  const sockaddr_un address = ForkServer::address_of(name == nullptr ? "" : name, size);
  if (connect(connection, reinterpret_cast<const sockaddr*>(&address), size) == 0) return connection;
  std::perror("start_loaded: no fork server");
  std::exit(127);
}

bool send_request(int connection, std::string request) {
  const int outputs[3] = {0, 1, 2};
  iovec memory{request.data(), request.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof outputs)] = {};
  msghdr message{};
  message.msg_iov = &memory;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof outputs);
  std::memcpy(CMSG_DATA(header), outputs, sizeof outputs);
  return sendmsg(connection, &message, MSG_NOSIGNAL) > 0;
}

ForkServer::Reply receive(int connection) {
  ForkServer::Reply reply;
  ssize_t size = -1;
  do {
    size = recv(connection, &reply, sizeof reply, 0);
  } while (size < 0 && errno == EINTR);
  if (size == static_cast<ssize_t>(sizeof reply)) return reply;
  std::fprintf(stderr, "start_loaded: the fork server failed\n");
  std::exit(127);
}

/// Waits for the end of the program, and passes these signals on to it meanwhile.
int status_of(pid_t program, int connection, const sigset_t& signals) {
  const int arriving = signalfd(-1, &signals, SFD_CLOEXEC);
  while (true) {
    pollfd events[2] = {{connection, POLLIN, 0}, {arriving, POLLIN, 0}};
    if (poll(events, 2, -1) < 0) continue;
    if (events[0].revents != 0) return receive(connection).status;
    signalfd_siginfo arrived{};
    if (read(arriving, &arrived, sizeof arrived) == static_cast<ssize_t>(sizeof arrived))
      ::kill(program, static_cast<int>(arrived.ssi_signo));
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string request;
  const auto add = [&](const std::string& text) { request += text + '\0'; };
  char* const folder = get_current_dir_name();
  add(folder);
  std::free(folder);
  add(std::to_string(argc - 1));
  for (int i = 1; i < argc; ++i) add(argv[i]);
  for (char** entry = environ; *entry != nullptr; ++entry) add(*entry);
  const int connection = connect_to_server();
  if (!send_request(connection, std::move(request))) {
    std::perror("start_loaded: cannot ask the fork server");
    return 127;
  }
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT})
    sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  const pid_t program = receive(connection).value;
  const int status = status_of(program, connection, signals);
  if (!WIFSIGNALED(status)) return WEXITSTATUS(status);
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  sigprocmask(SIG_UNBLOCK, &signals, nullptr);
  ::raise(WTERMSIG(status));
  return 128 + WTERMSIG(status);
}
