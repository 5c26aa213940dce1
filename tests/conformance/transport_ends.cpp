#include <algorithm>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>

#include <torchspan/net.h>

#include "tests/conformance/transport_echo.h"

/// What remains when a peer stops, dies or comes back.
namespace torchspan::net::conformance::transport_ends {
namespace {

using ::testing::HasSubstr;

/// The system resources of this process, and files that it left behind.
struct Resources {
  std::size_t files = 0;     ///< open
  std::size_t memory = 0;    ///< mappings that others may share
  std::size_t segments = 0;  ///< in the system's folder of shared memory
  friend bool operator==(const Resources&, const Resources&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Resources& one) {
    return out << one.files << " files, " << one.memory << " mappings, " << one.segments << " segments";
  }
};

std::size_t count_in(const std::string& folder) {
  std::error_code none;
  const std::filesystem::directory_iterator all(folder, none);
  // Tests of devices, which may run at the same time, keep the memory of stand-in devices there.
  return static_cast<std::size_t>(std::count_if(begin(all), end(all), [](const auto& entry) {
    const std::string name = entry.path().filename().string();
    return !name.starts_with("torchspan-stand-in-") && !name.starts_with("torchspan-fake-nccl-");
  }));
}

Resources resources() {
  Resources now{count_in("/proc/self/fd"), 0, count_in("/dev/shm")};
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) now.memory += line.find("memfd:") != std::string::npos;
  return now;
}

/// The file of a Unix socket in an address, or an empty text.
std::string socket_file(const std::string& address) {
  if (!address.starts_with("unix:")) return {};
  return address.substr(5, address.find_first_of("@,") - 5);
}

void talk(Node& node, const std::shared_ptr<Channel>& channel, std::uint64_t rounds) {
  for (std::uint64_t i = 0; i < rounds; ++i) {
    const std::size_t before = node.journal().received.size();
    send(*channel, {numbered(i).header, {Bytes(i % 5 == 0 ? 100'000 : 10)}});
    node.wait_for_messages(before + 1);
    EXPECT_EQ(number_of(node.journal().parcels().at(before)), i);
  }
}

TEST_P(TransportPeerConformance, LeavesNothingBehindHoweverItsPeersEnd) {
  in_world([](World& world) {
    const auto live = [&] {
      auto victim = world.start_echo("victim");
      const std::string file = socket_file(victim->address());
      {
        Node node(world, "node");
        const auto first = node.connect(victim->address());
        talk(node, first, 20);
        send(*first, {{}, {Bytes(8 << 20)}});
        victim->kill();
        node.wait_for_end(first);
        // The victim is replaced and its channel is closed; another channel is still in use when this side
        // ends.
        victim = world.start_echo("victim");
        const auto second = node.connect(victim->address()), third = node.connect(victim->address());
        talk(node, second, 20);
        second->close();
        node.wait_for_end(second);
        talk(node, third, 1);
      }
      victim.reset();
      EXPECT_TRUE(file.empty() || !std::filesystem::exists(file)) << file;
    };
    live();  // loads libraries and data that the first use loads permanently
    const Resources before = resources();
    live();
    EXPECT_EQ(resources(), before);
  });
}

TEST_P(TransportPeerConformance, DistinguishesAStoppedPeerFromADeadOneIfItsKindCan) {
  in_world([](World& world) {
    constexpr Duration kDeadAfter = std::chrono::milliseconds(1500);
    const auto sleeper = world.start_echo("sleeper"), other = world.start_echo("other");
    Node friends(world, "friends");
    // Of the node only: the others must not die on a busy machine. Where there is no option, a limit would be the default.
    const Duration limit = world.set_dead_after(kDeadAfter) ? kDeadAfter : TlsOptions().dead_after;
    Node node(world, "node");
    const auto channel = node.connect(sleeper->address()), kept = friends.connect(other->address());
    talk(node, channel, 3);
    talk(friends, kept, 3);
    if (!sleeper->stop()) return;  // a thread of this process cannot be stopped
    const TimePoint stopped = world.executor().now();
    send(*channel, {numbered(7).header, {Bytes(300'000)}});
    if (world.silence_is_death()) {
      const Error error = node.wait_for_end(channel);
      const Duration time = world.executor().now() - stopped;
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
      EXPECT_THAT(error.message(), HasSubstr("silent for 1.5 s"));
      EXPECT_LT(time, std::chrono::seconds(10));
      EXPECT_GT(time, kDeadAfter / 2);
      talk(friends, kept, 3);
      sleeper->go_on();
      talk(node, node.connect(sleeper->address()), 3);
      return;
    }
    while (world.executor().now() - stopped < limit + std::chrono::milliseconds(500)) {
      talk(friends, kept, 3);
      world.executor().sleep(std::chrono::milliseconds(100));
    }
    EXPECT_TRUE(node.journal().closed.empty()) << "silence alone is no death on one host";
    EXPECT_EQ(node.journal().received.size(), 3u);
    sleeper->go_on();
    node.wait_for_messages(4);
    EXPECT_EQ(number_of(node.journal().parcels().at(3)), 7u);
    talk(node, channel, 3);
  });
}

}  // namespace
}  // namespace torchspan::net::conformance::transport_ends
