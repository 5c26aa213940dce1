// Releases that differ in the version of the store's protocol, or of the workers' messages, on the simulated network.
#include <gmock/gmock.h>

#include "rendezvous/messages/messages.h"
#include "rendezvous/simulated_world.h"

namespace torchspan::rendezvous::versions_test {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr ProtocolRange kOld{1, 1, 0};
constexpr ProtocolRange kBoth{1, 2, 0};
constexpr ProtocolRange kNew{2, 2, 0};

/// Ranks 0 and 1 with these versions of the store's protocol.
struct Versions {
  ProtocolRange rank0, rank1;
};

MembershipOptions options_of(const SimulatedWorld& world, int rank, const Versions& versions) {
  MembershipOptions options = world.options(rank);
  options.store = rank == 0 ? versions.rank0 : versions.rank1;
  return options;
}

TEST(StoreVersions, OfNeighborsShareAWorld) {
  for (const Versions& versions : {Versions{kOld, kBoth}, Versions{kBoth, kOld}, Versions{kBoth, kNew},
                                   Versions{kNew, kBoth}, Versions{kNew, kNew}}) {
    SCOPED_TRACE(describe_versions(versions.rank0) + " on rank 0, " + describe_versions(versions.rank1));
    SimulatedWorld world(31, 2);
    world.run([&](int rank) {
      const auto member = world.join(rank, options_of(world, rank, versions));
      const Bytes mine(1, static_cast<std::byte>(rank + 7));
      const auto all = member->all_gather_bytes("tag", mine, {}, world.in(seconds(5)));
      EXPECT_EQ(all, (std::vector<Bytes>{Bytes(1, std::byte{7}), Bytes(1, std::byte{8})}));
      member->leave(world.in(seconds(5)));
    });
  }
}

TEST(StoreVersions, WithoutACommonOneAreNamedOnBothSides) {
  for (const Versions& versions : {Versions{kOld, kNew}, Versions{kNew, kOld}}) {
    SimulatedWorld world(32, 2);
    world.run([&](int rank) {
      const Error error = error_of([&] { world.join(rank, options_of(world, rank, versions)); });
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("the worker that joins speaks " + describe_versions(versions.rank1)),
                        HasSubstr("rank 0 speaks " + describe_versions(versions.rank0)),
                        HasSubstr("two neighboring ones")));
      EXPECT_EQ(error.kind(), rank == 0 ? ErrorKind::kTimedOut : ErrorKind::kUnsupported) << error.what();
    });
  }
}

TEST(WireVersions, AreAnnouncedToAllMembers) {
  SimulatedWorld world(33, 2);
  world.run([&](int rank) {
    MembershipOptions options = world.options(rank);
    options.wire = rank == 0 ? ProtocolRange{1, 1, 0} : ProtocolRange{1, 2, 0x80000000};
    const auto member = world.join(rank, options);
    EXPECT_EQ(member->member(0).wire, (ProtocolRange{1, 1, 0}));
    EXPECT_EQ(member->member(1).wire, (ProtocolRange{1, 2, 0x80000000}));
    member->leave(world.in(seconds(5)));
  });
}

TEST(WireVersions, WithoutACommonOneFailTheWorldOnAllWorkers) {
  SimulatedWorld world(34, 3);
  world.run([&](int rank) {
    MembershipOptions options = world.options(rank);
    options.wire = rank == 0 ? kOld : rank == 1 ? kBoth : kNew;
    const Error error = error_of([&] { world.join(rank, options); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what();
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("worker0 (rank 0"), HasSubstr("speaks version 1 of the wire format"),
                      HasSubstr("worker2 (rank 2"), HasSubstr("speaks version 2"),
                      HasSubstr("install the same release")));
  });
}

/// An open world goes on without a worker that it cannot understand.
TEST(WireVersions, WithoutACommonOneRefuseOnlyTheWorkerThatJoinsARunningWorld) {
  SimulatedWorld world(35, 2);
  world.run([&](int rank) {
    MembershipOptions options = world.options(rank);
    options.world_size = kOpenWorld;
    options.wire = rank == 0 ? kOld : kNew;
    if (rank == 1) {
      const Error error = error_of([&] { world.join(rank, options); });
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported) << error.what();
      EXPECT_THAT(error.what(), AllOf(HasSubstr("worker0 (rank 0"), HasSubstr("worker1 (rank 1")));
      return;
    }
    const auto member = world.join(rank, options);
    world.executor().sleep(seconds(1));
    EXPECT_EQ(member->world_size(), 1);
    member->leave(world.in(seconds(5)));
  });
}

/// Replaces the store: answers a registration with what a newer release may send.
class NewerStore final : public net::Handler {
 public:
  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_closed(const std::shared_ptr<net::Channel>&, const Error&) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override {
    ByteReader reader(message.header);
    const auto type = reader.get<std::uint16_t>();
    if (type == Register::kType) return welcome(*channel, Register::decode(reader));
    if (type == Leave::kType) return send(*channel, Farewell{});
    const auto round = decode_message<Contribute>(reader);
    channel->send(unknown_message(), {});
    send(*channel, Gathered{round.call, {{1, Bytes(1, std::byte{1})}, {1, round.bytes}}});
  }

 private:
  static Bytes unknown_message() {
    ByteWriter writer;
    writer.put(std::uint16_t{0x0ABC});
    writer.put_string("news");
    return writer.take();
  }
  void welcome(net::Channel& channel, const Register& client) {
    Welcome welcome;
    Member server = client.member;
    server.name = "worker0";
    server.rank = 0;
    welcome.members = {server, client.member};
    welcome.versions = {kStoreProtocol.newest, kStoreProtocol.newest + 1, 0};
    send(channel, welcome);
  }
  template <class Message>
  void send(net::Channel& channel, const Message& message) {
    Bytes bytes = encode_message(message);
    bytes.insert(bytes.end(), 6, std::byte{0xAA});  // fields that this release does not know
    channel.send(bytes, {});
  }
};

TEST(StoreVersions, OfANewerStoreMayAddFieldsAndMessages) {
  SimulatedWorld world(36, 2);
  world.executor().run([&] {
    NewerStore handler;
    const auto store = world.network().make_transport("store", handler, {});
    store->listen("sim:store");
    std::atomic<bool> done{false};
    Thread server = world.executor().spawn("store", [&] {
      while (!done) {
        while (store->poll()) {
        }
        store->wait(Deadline::never());
      }
    });
    const auto member = world.join(1);
    const Bytes mine(1, std::byte{2});
    EXPECT_EQ(member->all_gather_bytes("tag", mine, {}, world.in(seconds(5))),
              (std::vector<Bytes>{Bytes(1, std::byte{1}), Bytes(1, std::byte{2})}));
    member->leave(world.in(seconds(5)));
    done = true;
    store->wake();
    server.join();
  });
}

}  // namespace
}  // namespace torchspan::rendezvous::versions_test
