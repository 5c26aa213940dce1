#include <gmock/gmock.h>
#include <map>

#include "tests/conformance/transport_node.h"

/// Segments in device memory, in whose place there is host memory: those transports that carry them deliver them to memory
/// of the receiver's choice, and others send nothing.
namespace torchspan::net::conformance::transport_device_memory {
namespace {

using ::testing::HasSubstr;

Node::Options with_devices(std::function<Buffer(std::uint32_t, std::size_t)> device_memory = {}) {
  Node::Options options;
  options.transport.device_memory = DeviceMemoryKind::kHost;
  options.device_memory = std::move(device_memory);
  return options;
}

Bytes pattern(std::size_t size, int salt) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(salt));
  return bytes;
}

/// A segment that owns its bytes.
Segment segment(Bytes bytes, std::uint32_t target) {
  const auto kept = std::make_shared<const Bytes>(std::move(bytes));
  return {kept->data(), kept->size(), kept, target};
}

/// What the receiver of a message found in its segments.
struct Found {
  std::vector<Bytes> segments;
  std::vector<std::uint32_t> targets;
  std::vector<const std::byte*> places;
};

/// Target 1 is a device with room, target 2 one without.
class Devices {
 public:
  Buffer allocate(std::uint32_t target, std::size_t size) {
    if (target == 2) return {};
    if (target != 1)
      throw Error(ErrorKind::kInvalid, "target " + std::to_string(target) + " was not offered");
    auto memory = std::make_shared<Bytes>(size);
    places_.push_back(memory->data());
    return {memory->data(), size, memory};
  }
  const std::vector<const std::byte*>& places() const { return places_; }

 private:
  std::vector<const std::byte*> places_;
};

/// Runs `body` where the transport carries device memory; elsewhere checks that it refuses to.
void where_carried(World& world, Node::Options listen,
                   const std::function<void(Node& listener, Node& dialer, Channel& channel)>& body) {
  Node listener(world, "listener", std::move(listen)), dialer(world, "dialer", with_devices());
  const auto channel = dialer.connect(listener.listen());
  if (channel->carries_device_memory()) return body(listener, dialer, *channel);
  const std::vector<Segment> segments{segment(pattern(100, 1), 1)};
  try {
    channel->send(bytes_of("header"), segments);
    ADD_FAILURE() << "it sent device memory";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), HasSubstr("device memory"));
  }
  send(*channel, numbered(1));
  listener.wait_for_messages(1);
}

TEST_P(TransportConformance, DeliversDeviceMemoryToMemoryThatTheReceiverChooses) {
  in_world([](World& world) {
    Devices devices;
    std::vector<Found> found;
    Node::Options listen =
        with_devices([&](std::uint32_t target, std::size_t size) { return devices.allocate(target, size); });
    listen.on_message = [&](const std::shared_ptr<Channel>&, const Message& message) {
      Found& one = found.emplace_back();
      for (const Buffer& buffer : message.segments) {
        one.segments.emplace_back(buffer.data, buffer.data + buffer.size);
        one.targets.push_back(buffer.device_target);
        one.places.push_back(buffer.data);
      }
    };
    where_carried(world, std::move(listen), [&](Node& listener, Node&, Channel& channel) {
      std::vector<std::weak_ptr<const void>> kept;
      constexpr int kMessages = 20;
      const auto sizes = [](int i) {
        return std::vector<std::size_t>{10, 70'000, 1, 300'000, 5'000, 100 + static_cast<std::size_t>(i)};
      };
      const std::vector<std::uint32_t> targets{0, 1, 1, 2, 0, 1};
      for (int i = 0; i < kMessages; ++i) {
        std::vector<Segment> segments;
        for (std::size_t s = 0; s < targets.size(); ++s)
          segments.push_back(segment(pattern(sizes(i)[s], i + static_cast<int>(s)), targets[s]));
        channel.send(bytes_of("message"), segments);
        for (const Segment& one : segments) kept.push_back(one.keep);
      }
      listener.wait_for_messages(kMessages);
      ASSERT_EQ(found.size(), kMessages);
      std::size_t on_device = 0;
      for (int i = 0; i < kMessages; ++i) {
        const Found& one = found[static_cast<std::size_t>(i)];
        EXPECT_EQ(one.targets, (std::vector<std::uint32_t>{0, 1, 1, 0, 0, 1}));
        for (std::size_t s = 0; s < targets.size(); ++s) {
          EXPECT_EQ(one.segments[s], pattern(sizes(i)[s], i + static_cast<int>(s)));
          on_device += std::ranges::count(devices.places(), one.places[s]) != 0 && targets[s] == 1;
        }
      }
      EXPECT_EQ(on_device, 3 * kMessages);
      // The memory that was sent is free again.
      const Deadline deadline = world.executor().deadline_in(std::chrono::seconds(20));
      const auto gone = [&] {
        return std::ranges::all_of(kept, [](const auto& one) { return one.expired(); });
      };
      while (!gone() && !deadline.passed(world.executor().now()))
        world.executor().sleep(std::chrono::milliseconds(1));
      EXPECT_TRUE(gone());
    });
  });
}

TEST_P(TransportConformance, CutsOffAPeerThatSendsToDevicesWhichWereNotOffered) {
  in_world([](World& world) {
    Devices devices;
    where_carried(world, with_devices([&](std::uint32_t target, std::size_t size) {
                    return devices.allocate(target, size);
                  }),
                  [&](Node& listener, Node& dialer, Channel& channel) {
                    const std::vector<Segment> segments{segment(pattern(70'000, 1), 3)};
                    send(channel, numbered(1));
                    channel.send(bytes_of("message"), segments);
                    const auto accepted = listener.wait_for_caller();
                    const Error error = listener.wait_for_end(accepted);
                    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
                    EXPECT_THAT(error.what(), HasSubstr("target 3 was not offered"));
                    EXPECT_EQ(listener.journal().received.size(), 1);
                    dialer.wait_until([](const Journal& journal) { return !journal.closed.empty(); });
                  });
  });
}

TEST_P(TransportConformance, CutsOffAPeerThatSendsDeviceMemoryWhereNoneIsCarried) {
  in_world([](World& world) {
    where_carried(world, {}, [&](Node& listener, Node&, Channel& channel) {
      const std::vector<Segment> segments{segment(pattern(70'000, 1), 1)};
      channel.send(bytes_of("message"), segments);
      const Error error = listener.wait_for_end(listener.wait_for_caller());
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.what(), HasSubstr("device memory, which this side does not carry"));
      EXPECT_TRUE(listener.journal().received.empty());
    });
  });
}

TEST_P(TransportConformance, RefusesDeviceMemoryThatIsBorrowedOrEmpty) {
  in_world([](World& world) {
    where_carried(world, with_devices(), [&](Node& listener, Node&, Channel& channel) {
      const Bytes bytes = pattern(70'000, 1);
      for (const Segment& wrong : {Segment{bytes.data(), bytes.size(), nullptr, 1}, segment({}, 1)}) {
        const std::vector<Segment> segments{wrong};
        EXPECT_THROW(channel.send(bytes_of("message"), segments), Error);
      }
      send(channel, numbered(1));
      listener.wait_for_messages(1);
    });
  });
}

}  // namespace
}  // namespace torchspan::net::conformance::transport_device_memory
