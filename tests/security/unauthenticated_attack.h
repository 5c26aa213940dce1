#pragma once
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <sys/socket.h>
#include <utility>

#include "tests/security/attacked_listener.h"

/// Unauthenticated peers attack a listener while authenticated peers are served there; limits on what that
/// may cost.
namespace torchspan::net::conformance {

/// What 128 unauthenticated peers may cost at the same time: a TLS connection in the middle of its handshake
/// is the most expensive.
inline constexpr std::size_t kMostMemory = std::size_t{48} << 20;
inline constexpr std::size_t kMaxUnauthenticated = 128;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
/// Sleeps between two steps of an attack: the test does not measure whether there is enough processor time
/// for all.
inline constexpr Duration kPace = std::chrono::milliseconds(3);
inline constexpr bool kMemoryIsMeasurable =
    false;  ///< the sanitizer's own memory grows with every allocation
#else
inline constexpr Duration kPace = std::chrono::microseconds(300);
inline constexpr bool kMemoryIsMeasurable = true;
#endif

inline bool hung_up(const Descriptor& socket) {
  std::byte bytes[4096];
  for (;;) {
    const ssize_t got = ::recv(socket.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR && errno != ENOTCONN)) return true;
    if (got < 0) return false;
  }
}

inline void send_now(const Descriptor& socket, BytesView bytes) {
  static_cast<void>(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
}

/// The most resources of the victim, sampled while this object exists.
class Watch {
 public:
  explicit Watch(AttackedListener& listener)
      : files_(listener.open_files()), memory_(listener.resident_bytes()) {
    thread_ = listener.executor().spawn("watch", [this, &listener] {
      while (!stopping_) {
        files_ = std::max(files_.load(), listener.open_files());
        memory_ = std::max(memory_.load(), listener.resident_bytes());
        listener.executor().sleep(std::chrono::milliseconds(5));
      }
    });
  }
  ~Watch() { stopping_ = true; }
  std::size_t files() const { return files_; }
  std::size_t memory() const { return memory_; }

 private:
  std::atomic<std::size_t> files_, memory_;
  std::atomic<bool> stopping_{false};
  Thread thread_;
};

/// A peer that authenticated before the attack and exchanges messages during it. The attack must not affect it.
class Traffic {
 public:
  explicit Traffic(AttackedListener& listener) : honest_(listener.make_honest()) {
    if (!honest_) return;
    thread_ = listener.executor().spawn("traffic", [this, &listener] {
      while (!stopping_) {
        const bool served = honest_->exchange();
        EXPECT_TRUE(served) << "an honest peer lost its connection after " << rounds_
                            << " rounds: " << honest_->why();
        if (!served) return;
        ++rounds_;
        listener.executor().sleep(std::chrono::microseconds(500));
      }
    });
  }
  ~Traffic() { stopping_ = true; }
  std::uint64_t rounds() const { return rounds_; }

 private:
  const std::unique_ptr<Honest> honest_;
  std::atomic<std::uint64_t> rounds_{0};
  std::atomic<bool> stopping_{false};
  Thread thread_;
};

/// Unauthenticated peers: calls step() repeatedly, at least `least` times and until `done`.
struct Attack {
  std::function<void()> step;
  int least = 1;
  std::function<bool()> done = [] { return true; };
  Duration pace = kPace;
  std::function<std::uint64_t()> admitted = [] {
    return std::uint64_t{0};
  };  ///< counts those that knew the secret
};

class UnauthenticatedPeers : public ::testing::TestWithParam<ListenerKind> {
 protected:
  void under(AttackedListener& listener, const Attack& attack) {
    const Counts counts_before = listener.counts();
    std::uint64_t honest = 1;
    const auto warm = listener.make_honest();
    ASSERT_TRUE(warm);
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(warm->exchange());
    const std::size_t files = listener.open_files(), memory = listener.resident_bytes();
    {
      const Traffic traffic(listener);
      ++honest;
      const Watch watch(listener);
      std::atomic<bool> stopping{false};
      std::atomic<int> steps{0};
      Thread attackers = listener.executor().spawn("attackers", [&] {
        const Deadline deadline = listener.executor().deadline_in(std::chrono::seconds(30));
        while (!stopping || steps < attack.least ||
               !(attack.done() || deadline.passed(listener.executor().now()))) {
          attack.step();
          ++steps;
          if (attack.pace != Duration::zero()) listener.executor().sleep(attack.pace);
        }
      });
      const std::uint64_t before = traffic.rounds();
      for (int i = 0; i < 3; ++i) {
        const auto new_peer = listener.make_honest();
        ++honest;
        for (int k = 0; k < 5 && new_peer; ++k) EXPECT_TRUE(new_peer->exchange());
      }
      EXPECT_TRUE(happens([&] { return traffic.rounds() > before + 10; }, listener))
          << "honest traffic stood still";
      stopping = true;
      attackers.join();
      EXPECT_LE(watch.files(), files + kMaxUnauthenticated + 16);
      EXPECT_TRUE(!kMemoryIsMeasurable || watch.memory() <= memory + kMostMemory)
          << watch.memory() << " bytes, before " << memory;
    }
    held_.clear();
    EXPECT_TRUE(happens([&] { return listener.open_files() <= files; }, listener))
        << listener.open_files() << " files are open, " << files << " were";
    EXPECT_TRUE(listener.alive());
    EXPECT_TRUE(!kMemoryIsMeasurable || listener.resident_bytes() <= memory + kMostMemory);
    EXPECT_TRUE(warm->exchange());
    const Counts counts = listener.counts();
    EXPECT_EQ(counts.accepted - counts_before.accepted, honest + attack.admitted())
        << "a peer without the secret was admitted";
    refused_ = counts.refused - counts_before.refused;
    denied_ = counts.denied - counts_before.denied;
  }

  static ::testing::AssertionResult happens(const std::function<bool()>& what, AttackedListener& listener) {
    const Deadline deadline = listener.executor().deadline_in(std::chrono::seconds(20));
    while (!what()) {
      if (deadline.passed(listener.executor().now())) return ::testing::AssertionFailure();
      listener.executor().sleep(std::chrono::milliseconds(5));
    }
    return ::testing::AssertionSuccess();
  }

  /// Keeps the newest `most` sockets open.
  void hold(Descriptor socket, std::size_t most) {
    if (socket) held_.push_back(std::move(socket));
    while (held_.size() > most) held_.pop_front();
  }

  std::deque<Descriptor> held_;
  std::uint64_t refused_ = 0, denied_ = 0;
};

}  // namespace torchspan::net::conformance
