#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <new>
#include <random>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/executor.h>

#include "tests/support/hosts.h"

namespace torchspan::testing {

/// What a link does to packets, in each direction.
struct LinkQuality {
  Duration delay = {};                               ///< one way
  double bits_per_second = 0;                        ///< of IP packets; 0: unlimited
  double loss = 0;                                   ///< share of the packets that get lost, at random
  Duration buffer = std::chrono::milliseconds(100);  ///< drops packets that would wait longer for the link
  std::uint64_t seed = 1;                            ///< of the losses
};

/// Packets that travel in one direction.
class LinkDirection {
 public:
  LinkDirection(const LinkQuality& quality, std::uint64_t seed) : quality_(quality), random_(seed) {}

  /// A packet enters the link.
  void add(BytesView packet, TimePoint now) {
    const TimePoint begin = std::max(now, free_at_);
    if (begin - now > quality_.buffer) return;
    if (quality_.bits_per_second > 0) {
      constexpr double kBits = 8, kNanoseconds = 1e9;
      const double takes =
          static_cast<double>(packet.size()) * kBits * kNanoseconds / quality_.bits_per_second;
      free_at_ = begin + Duration(static_cast<Duration::rep>(takes));
    } else {
      free_at_ = begin;
    }
    if (std::uniform_real_distribution<double>(0, 1)(random_) < quality_.loss) return;
    travelling_.push_back({free_at_ + quality_.delay, Bytes(packet.begin(), packet.end())});
  }
  /// Hands the packets that have arrived to a device, or loses them.
  void deliver(int device, TimePoint now, bool is_cut) {
    for (; !travelling_.empty() && travelling_.front().arrives <= now; travelling_.pop_front()) {
      if (is_cut) continue;
      const Bytes& packet = travelling_.front().bytes;
      // A device that is down takes no packets.
      [[maybe_unused]] const auto written = write(device, packet.data(), packet.size());
    }
  }
  Deadline next() const {
    return travelling_.empty() ? Deadline::never() : Deadline(travelling_.front().arrives);
  }

 private:
  struct Packet {
    TimePoint arrives;
    Bytes bytes;
  };

  const LinkQuality quality_;
  std::mt19937_64 random_;
  TimePoint free_at_{};
  std::deque<Packet> travelling_;
};

/// A link between two hosts: a process that carries IP packets between two TUN devices, which are named "near" and "far".
/// Kernels without `netem` can thus delay and lose packets. For rates of up to some hundred megabits per second.
class SlowLink {
 public:
  SlowLink(const LinkQuality& quality, const TestHost& near, const TestHost& far) {
    void* const shared =
        mmap(nullptr, sizeof *is_cut_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int ready[2];
    if (shared == MAP_FAILED || pipe(ready) != 0) return;
    is_cut_ = new (shared) std::atomic<bool>(false);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const std::array<int, 2> devices{open_device(near, "near"), open_device(far, "far")};
      const char answer = devices[0] >= 0 && devices[1] >= 0 ? 'y' : 'n';
      if (write(ready[1], &answer, 1) != 1 || answer == 'n') _exit(1);
      carry(quality, devices, *is_cut_);
    }
    close(ready[1]);
    char answer = 'n';
    good_ = read(ready[0], &answer, 1) == 1 && answer == 'y';
    close(ready[0]);
  }
  ~SlowLink() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    if (is_cut_ != nullptr) munmap(is_cut_, sizeof *is_cut_);
  }
  SlowLink(const SlowLink&) = delete;

  bool good() const { return good_; }
  /// Loses all packets from now on, or none; the hosts' systems do not notice.
  void set_cut(bool is_cut) const { *is_cut_ = is_cut; }

 private:
  static int open_device(const TestHost& host, const char* name) {
    const int space = open(("/proc/" + std::to_string(host.pid()) + "/ns/net").c_str(), O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) != 0) return -1;
    close(space);
    const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    ifreq request{};
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    return device >= 0 && ioctl(device, TUNSETIFF, &request) == 0 ? device : -1;
  }

  [[noreturn]] static void carry(const LinkQuality& quality, const std::array<int, 2>& devices,
                                 const std::atomic<bool>& is_cut) {
    const auto executor = make_executor();
    const auto poller = executor->make_poller();
    std::array<LinkDirection, 2> directions{LinkDirection(quality, quality.seed),
                                            LinkDirection(quality, quality.seed + 1)};
    for (std::size_t side = 0; side < 2; ++side) poller->add(devices[side], side, false);
    std::array<Poller::Event, 2> events{};
    std::array<std::byte, 65536> packet;
    for (;;) {
      const std::size_t count = poller->wait(events, earlier(directions[0].next(), directions[1].next()));
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t side = events[i].token;
        if (events[i].hung_up) _exit(0);  // the host has gone
        for (ssize_t size; (size = read(devices[side], packet.data(), packet.size())) > 0;)
          directions[side].add(BytesView(packet.data(), static_cast<std::size_t>(size)), executor->now());
      }
      for (std::size_t side = 0; side < 2; ++side)
        directions[side].deliver(devices[1 - side], executor->now(), is_cut);
    }
  }

  std::atomic<bool>* is_cut_ = nullptr;  ///< in memory that the process of the link shares
  pid_t pid_ = -1;
  bool good_ = false;
};

/// The hosts of a TestNetwork, connected by a slow link.
class SlowNetwork {
 public:
  static constexpr const char* kNear = TestNetwork::kNear;
  static constexpr const char* kFar = TestNetwork::kFar;

  explicit SlowNetwork(const LinkQuality& link) : quality(link), link_(link, near, far) {
    if (geteuid() != 0) {
      trouble_ = "this user is not root, so it may make no network namespaces";
    } else if (!near.good() || !far.good()) {
      trouble_ = "this system gives no network namespaces";
    } else if (!link_.good()) {
      trouble_ = "this system makes no TUN devices (/dev/net/tun)";
    } else if (!start(near, "near", kNear) || !start(far, "far", kFar)) {
      trouble_ = "there is no program 'ip' (package iproute2) or 'nsenter' (package util-linux)";
    }
  }

  /// Empty, or the reason why two hosts cannot be simulated here.
  const std::string& trouble() const { return trouble_; }
  /// Loses all packets from now on, or none; the hosts' systems do not notice.
  void set_cut(bool is_cut) const { link_.set_cut(is_cut); }

  const LinkQuality quality;
  const TestHost near, far;

 private:
  static bool start(const TestHost& host, const std::string& device, const std::string& address) {
    return host.run("ip link set lo up") && host.run("ip addr add " + address + "/24 dev " + device) &&
           host.run("ip link set " + device + " up");
  }

  const SlowLink link_;
  std::string trouble_;
};

}  // namespace torchspan::testing
