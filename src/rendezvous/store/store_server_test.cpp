#include "rendezvous/store/store_server.h"

#include <algorithm>
#include <atomic>
#include <gtest/gtest.h>

#include <torchspan/detail/core/runtime.h>

namespace torchspan::rendezvous::store_server_test {
namespace {

/// Records the last message sent.
class MemberChannel final : public net::Channel {
 public:
  explicit MemberChannel(Parker& notified) : notified_(notified) {}
  void send(BytesView header, std::span<const Segment>) override {
    {
      MutexLock lock(mutex_);
      last_.assign(header.begin(), header.end());
    }
    notified_.unpark();
  }
  std::size_t unsent_bytes() const override { return 0; }
  void close() override {}
  std::string peer() const override { return "member"; }
  Bytes last() const {
    MutexLock lock(mutex_);
    return last_;
  }

 private:
  Parker& notified_;
  mutable Mutex mutex_;
  Bytes last_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// One member registers; after that, unauthenticated peers keep poll() busy forever.
class FloodedTransport final : public net::Transport {
 public:
  FloodedTransport(Executor& executor, net::Handler& handler, std::shared_ptr<MemberChannel> member,
                   Bytes registration)
      : executor_(executor),
        handler_(handler),
        member_(std::move(member)),
        registration_(std::move(registration)) {}
  std::string listen(const std::string& address) override { return address; }
  bool can_reach(const std::string&) const override { return true; }
  std::shared_ptr<net::Channel> connect(const std::string&, Deadline) override { return nullptr; }
  bool poll() override {
    if (!registration_.empty()) {
      handler_.on_accepted(member_);
      net::Message message;
      message.header = std::exchange(registration_, {});
      handler_.on_message(member_, std::move(message));
    }
    executor_.yield();
    return true;
  }
  void wait(Deadline) override {}
  void wake() override {}

 private:
  Executor& executor_;
  net::Handler& handler_;
  const std::shared_ptr<MemberChannel> member_;
  Bytes registration_;
};

TEST(StoreServer, KeepsItsDeadlinesUnderManyUnauthenticatedPeers) {
  const auto executor = make_executor();
  Runtime runtime(*executor, "worker0", LogLevel::kOff);
  const auto notified = executor->make_parker();
  const auto member = std::make_shared<MemberChannel>(*notified);
  Register registration;
  registration.member.name = "worker1";
  registration.member.rank = 1;
  registration.world_size = 2;
  registration.timeout = std::chrono::milliseconds(20);
  const StoreServer server(
      runtime,
      [&](const std::string&, net::Handler& handler) {
        return std::make_unique<FloodedTransport>(*executor, handler, member, encode_message(registration));
      },
      "sim:store", StoreOptions{.world_size = 2, .job = "", .host_id = "", .heartbeats = {}});
  ASSERT_TRUE(notified->park(executor->deadline_in(std::chrono::seconds(30))));
  std::optional<ErrorKind> kind;
  MessageTable<> table;
  table.on<Refused>([&](Refused refused) { kind = refused.kind; });
  table.dispatch(member->last());
  EXPECT_EQ(kind, ErrorKind::kTimedOut);
}

/// Peers that send a message which is none, one after another.
class GarbageTransport final : public net::Transport {
 public:
  GarbageTransport(Executor& executor, net::Handler& handler, int peers, Parker& done)
      : handler_(handler), peers_(peers), done_(done), parker_(executor.make_parker()) {}
  std::string listen(const std::string& address) override { return address; }
  bool can_reach(const std::string&) const override { return true; }
  std::shared_ptr<net::Channel> connect(const std::string&, Deadline) override { return nullptr; }
  bool poll() override {
    if (peers_ == 0) return false;
    const auto channel = std::make_shared<MemberChannel>(*parker_);
    handler_.on_accepted(channel);
    net::Message message;
    message.header = Bytes(3, std::byte{0xff});
    handler_.on_message(channel, std::move(message));
    if (--peers_ == 0) done_.unpark();
    return true;
  }
  void wait(Deadline until) override {
    if (peers_ == 0) parker_->park(until);
  }
  void wake() override { parker_->unpark(); }

 private:
  net::Handler& handler_;
  int peers_;
  Parker& done_;
  const std::unique_ptr<Parker> parker_;
};

TEST(StoreServer, LogsOneLineForManyMalformedMessages) {
  const auto executor = make_executor();
  Runtime runtime(*executor, "worker0");
  const auto done = executor->make_parker();
  ::testing::internal::CaptureStderr();
  {
    const StoreServer server(
        runtime,
        [&](const std::string&, net::Handler& handler) {
          return std::make_unique<GarbageTransport>(*executor, handler, 500, *done);
        },
        "sim:store", StoreOptions{.world_size = 2, .job = "", .host_id = "", .heartbeats = {}});
    EXPECT_TRUE(done->park(executor->deadline_in(std::chrono::seconds(30))));
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("store closes the connection from member"), std::string::npos) << log;
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

}  // namespace
}  // namespace torchspan::rendezvous::store_server_test
