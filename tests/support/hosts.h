#pragma once
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <sched.h>
#include <signal.h>
#include <stdexcept>
#include <string>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace torchspan::testing {

inline bool run_quietly(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
}

/// A simulated host: a network namespace, held by a process that sleeps until the end.
class TestHost {
 public:
  TestHost() {
    int ready[2];
    if (pipe(ready) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const char answer = unshare(CLONE_NEWNET) == 0 ? 'y' : 'n';
      if (write(ready[1], &answer, 1) != 1) _exit(1);
      while (true) pause();
    }
    char answer = 'n';
    good_ = read(ready[0], &answer, 1) == 1 && answer == 'y';
    close(ready[0]);
    close(ready[1]);
  }
  ~TestHost() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  TestHost(const TestHost&) = delete;

  bool good() const { return good_; }
  pid_t pid() const { return pid_; }
  /// Returns the program and arguments that run another program on this host, where it sees this host's devices.
  std::vector<std::string> through() const {
    return {"/usr/bin/nsenter", enter(),   "--", "/usr/bin/unshare",
            "--mount",          "/bin/sh", "-c", "mount -t sysfs sysfs /sys && exec \"$0\" \"$@\""};
  }
  /// Returns variables with which cluster_main() moves a process to this host before it runs a scenario, so that a fork
  /// server can start it. It sees nothing in the folder that `hidden` names, if any.
  std::map<std::string, std::string> variables(const std::string& hidden = {}) const {
    return {{kSpace, "/proc/" + std::to_string(pid_) + "/ns/net"}, {kHidden, hidden}};
  }
  /// Moves this process to the host that these variables name, if any.
  static void enter_from_env() {
    const char* space = std::getenv(kSpace);
    const char* hidden = std::getenv(kHidden);
    if (space == nullptr) return;
    const int file = open(space, O_RDONLY | O_CLOEXEC);
    const bool good =
        file >= 0 && setns(file, CLONE_NEWNET) == 0 && unshare(CLONE_NEWNS) == 0 &&
        mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
        mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0 &&
        (hidden == nullptr || *hidden == '\0' || mount("tmpfs", hidden, "tmpfs", 0, nullptr) == 0);
    if (!good) throw std::runtime_error(std::string("cannot enter ") + space + ": " + std::strerror(errno));
    close(file);
  }
  bool run(const std::string& command) const {
    return run_quietly("/usr/bin/nsenter " + enter() + " -- " + command);
  }

 private:
  static constexpr const char* kSpace = "TEST_NETWORK_NAMESPACE";
  static constexpr const char* kHidden = "TEST_HIDDEN_FOLDER";

  std::string enter() const { return "--net=/proc/" + std::to_string(pid_) + "/ns/net"; }

  pid_t pid_ = -1;
  bool good_ = false;
};

/// Two hosts, 10.77.0.1 and 10.77.0.2, connected by a virtual Ethernet pair. The destructor removes
/// everything.
class TestNetwork {
 public:
  static constexpr const char* kNear = "10.77.0.1";
  static constexpr const char* kFar = "10.77.0.2";

  TestNetwork() {
    if (geteuid() != 0) {
      trouble_ = "this user is not root, so it may make no network namespaces";
    } else if (!run_quietly("ip -V") || access("/usr/bin/nsenter", X_OK) != 0) {
      trouble_ = "there is no program 'ip' (package iproute2) or 'nsenter' (package util-linux)";
    } else if (!near.good() || !far.good()) {
      trouble_ = "this system gives no network namespaces";
    } else if (!near.run("ip link add near type veth peer name far netns " + std::to_string(far.pid())) ||
               !near.run(std::string("ip addr add ") + kNear + "/24 dev near") ||
               !far.run(std::string("ip addr add ") + kFar + "/24 dev far") || !start(near, "near") ||
               !start(far, "far") || !await_carrier(near, "near") || !await_carrier(far, "far")) {
      trouble_ = "this system makes no pair of virtual Ethernet ends (veth)";
    }
  }

  /// Empty, or the reason why two hosts cannot be simulated here.
  const std::string& trouble() const { return trouble_; }
  bool pull_cable() const { return near.run("ip link set near down"); }
  bool plug_cable() const { return near.run("ip link set near up"); }

  const TestHost near, far;

 private:
  static bool start(const TestHost& host, const std::string& device) {
    return host.run("ip link set lo up") && host.run("ip link set " + device + " up");
  }
  /// The kernel sees the other end a moment later, and UCX takes a device without carrier for absent.
  static bool await_carrier(const TestHost& host, const std::string& device) {
    return host.run("/bin/sh -c 'for i in $(seq 500); do ip -o link show " + device +
                    " | grep -q \"state UP\" && exit 0; sleep 0.02; done; exit 1'");
  }
  std::string trouble_;
};

}  // namespace torchspan::testing
