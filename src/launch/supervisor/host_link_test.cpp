#include "launch/supervisor/host_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>

#include "launch/supervisor/simulated_hosts.h"

namespace torchspan::launch::host_link_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string address_of(int node) { return "sim:" + SimulatedHosts::questions_of(node); }

/// The launcher of one host, which has met the others.
class Launcher {
 public:
  Launcher(SimulatedHosts& world, int node, int nodes)
      : executor_(world.executor()),
        runtime_(executor_, "launcher", LogLevel::kOff),
        link(executor_, node, nodes) {
    NodeMeeting meeting = world.meeting(node, nodes);
    membership_ = rendezvous::Membership::join(runtime_, meeting.transports, meeting.join);
    EXPECT_EQ(link.listen(*membership_), address_of(node));
    std::vector<std::string> addresses;
    for (int other = 0; other < nodes; ++other) addresses.push_back(address_of(other));
    link.set_addresses(std::move(addresses));
  }
  std::vector<HostReport> collect(Duration limit = seconds(3), bool brief = false) {
    return link.collect(brief, executor_.deadline_in(limit), never_);
  }

 private:
  Executor& executor_;
  Runtime runtime_;
  std::unique_ptr<rendezvous::Membership> membership_;
  const std::atomic<bool> never_{false};

 public:
  HostLink link;  ///< ends first
};

/// One worker, whose rank is ten times the node; none in a brief report.
HostAnswers::Describe one_worker(int node) {
  return [node](bool brief, const std::atomic<bool>&) {
    HostReport report{.node = node, .host = "far", .trouble = "", .workers = {}};
    if (!brief) report.workers.emplace_back().rank = 10 * node;
    return report;
  };
}

class SimulatedLinks : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  /// Host 0 runs `asks` when all hosts have met; the others answer until it returns.
  void run(
      int hosts, const std::function<void(Launcher&)>& asks,
      const std::function<void(int, Launcher&)>& begin = [](int node, Launcher& launcher) {
        launcher.link.answers().set_describe(one_worker(node));
      }) {
    int met = 0;
    bool over = false;
    world_.run([&](int node) {
      if (node >= hosts) return;
      Launcher launcher(world_, node, hosts);
      begin(node, launcher);
      ++met;
      while (met < hosts) world_.executor().sleep(milliseconds(1));
      if (node == 0) {
        asks(launcher);
        over = true;
      }
      while (!over) world_.executor().sleep(milliseconds(1));
      launcher.link.answers().set_describe({});
    });
  }
  void cut(int a, int b) {
    world_.network().cut(SimulatedHosts::questions_of(a), SimulatedHosts::questions_of(b));
  }
  Duration since(TimePoint began) { return world_.executor().now() - began; }

  SimulatedHosts world_{GetParam(), 3};
};
INSTANTIATE_TEST_SUITE_P(Seeds, SimulatedLinks, ::testing::Range<std::uint64_t>(1, 9));

TEST_P(SimulatedLinks, AnswerWithTheirWorkers) {
  run(3, [&](Launcher& launcher) {
    for (const bool brief : {false, true, false}) {
      const auto reports = launcher.collect(seconds(3), brief);
      ASSERT_EQ(reports.size(), 2u);
      for (const int node : {1, 2}) {
        const HostReport& report = reports[static_cast<std::size_t>(node - 1)];
        EXPECT_EQ(report.node, node);
        EXPECT_THAT(report.trouble, IsEmpty());
        ASSERT_EQ(report.workers.size(), brief ? 0u : 1u);
        if (!brief) {
          EXPECT_EQ(report.workers[0].rank, 10 * node);
        }
      }
    }
  });
}

TEST_P(SimulatedLinks, AskEachOtherAtTheSameTime) {
  int done = 0;
  world_.run([&](int node) {
    Launcher launcher(world_, node, 3);
    launcher.link.answers().set_describe(one_worker(node));
    world_.executor().sleep(seconds(1));
    const TimePoint began = world_.executor().now();
    const auto reports = launcher.collect();
    EXPECT_EQ(reports.size(), 2u);
    for (const HostReport& report : reports) EXPECT_THAT(report.trouble, IsEmpty());
    EXPECT_LT(since(began), seconds(1));
    ++done;
    while (done < 3) world_.executor().sleep(milliseconds(1));
    launcher.link.answers().set_describe({});
  });
}

TEST_P(SimulatedLinks, NameAHostThatIsSilentAndShowTheOthers) {
  run(3, [&](Launcher& launcher) {
    cut(0, 1);
    const TimePoint began = world_.executor().now();
    const auto reports = launcher.collect();
    EXPECT_LE(since(began), milliseconds(3100));
    EXPECT_THAT(reports.at(0).trouble, HasSubstr("its launcher did not answer within 3.0 s"));
    EXPECT_EQ(reports.at(1).workers.at(0).rank, 20);
    world_.network().heal(SimulatedHosts::questions_of(0), SimulatedHosts::questions_of(1));
    EXPECT_EQ(launcher.collect().at(0).workers.at(0).rank, 10);
  });
}

TEST_P(SimulatedLinks, NameALauncherThatHasEnded) {
  run(3, [&](Launcher& launcher) {
    world_.kill(1);
    const TimePoint began = world_.executor().now();
    const auto reports = launcher.collect();
    EXPECT_LT(since(began), seconds(2));
    EXPECT_THAT(reports.at(0).trouble, HasSubstr("its launcher has ended, or its host is gone"));
    EXPECT_EQ(reports.at(1).workers.at(0).rank, 20);
  });
}

TEST_P(SimulatedLinks, NameALauncherThatEndsWhileItAnswers) {
  run(
      3,
      [&](Launcher& launcher) {
        const TimePoint began = world_.executor().now();
        const auto reports = launcher.collect();
        EXPECT_LT(since(began), seconds(2));
        EXPECT_THAT(reports.at(0).trouble, HasSubstr("its launcher has ended, or its host is gone"));
        EXPECT_EQ(reports.at(1).workers.at(0).rank, 20);
      },
      [&](int node, Launcher& launcher) {
        if (node != 1) return launcher.link.answers().set_describe(one_worker(node));
        launcher.link.answers().set_describe([&](bool brief, const std::atomic<bool>& stopping) {
          world_.kill(1);
          return one_worker(1)(brief, stopping);
        });
      });
}

TEST_P(SimulatedLinks, SayThatAHostRunsNoWorkersOrCannotBeAsked) {
  run(
      3,
      [&](Launcher& launcher) {
        launcher.link.set_addresses({address_of(0), address_of(1), ""});
        const auto reports = launcher.collect();
        EXPECT_THAT(reports.at(0).trouble, HasSubstr("no workers run there at the moment"));
        EXPECT_THAT(reports.at(1).trouble, HasSubstr("another version of TorchSpan"));
        launcher.link.set_addresses({address_of(0), address_of(2), address_of(2)});
        EXPECT_THAT(launcher.collect().at(0).trouble,
                    HasSubstr("the launcher of host 2 answered at its address"));
        launcher.link.set_trouble("it has not met the others");
        const auto unmet = launcher.collect();
        ASSERT_EQ(unmet.size(), 2u);
        for (const HostReport& report : unmet) EXPECT_EQ(report.trouble, "it has not met the others");
      },
      [](int node, Launcher& launcher) {
        if (node == 2) launcher.link.answers().set_describe(one_worker(node));
      });
}

TEST_P(SimulatedLinks, EndAQuestionThatIsNoLongerWanted) {
  run(2, [&](Launcher& launcher) {
    cut(0, 1);
    const std::atomic<bool> stopping{true};
    const TimePoint began = world_.executor().now();
    const auto reports = launcher.link.collect(false, world_.executor().deadline_in(seconds(3)), stopping);
    EXPECT_LT(since(began), milliseconds(200));
    EXPECT_THAT(reports.at(0).trouble, HasSubstr("this launcher continues"));
  });
}

TEST_P(SimulatedLinks, EndADescriptionThatIsReplaced) {
  Launcher* asked = nullptr;
  bool running = false;
  run(
      2,
      [&](Launcher& launcher) {
        Thread replaces = world_.executor().spawn("replaces", [&] {
          while (!running) world_.executor().sleep(milliseconds(1));
          asked->link.answers().set_describe(one_worker(1));
          EXPECT_FALSE(running) << "set_describe() waits for the earlier description";
        });
        const auto reports = launcher.collect();
        EXPECT_THAT(reports.at(0).trouble, IsEmpty());
        replaces.join();
      },
      [&](int node, Launcher& launcher) {
        if (node == 0) return;
        asked = &launcher;
        launcher.link.answers().set_describe([&](bool brief, const std::atomic<bool>& stopping) {
          running = true;
          while (!stopping) world_.executor().sleep(milliseconds(1));
          running = false;
          return one_worker(1)(brief, stopping);
        });
      });
}

/// A process that knows the secret and does not keep to the protocol.
class Hostile final : public net::Handler {
 public:
  explicit Hostile(std::vector<Bytes> answers) : answers_(std::move(answers)) {}
  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override {
    const auto header = decode_host_message(message.header);
    if (!header) return;
    static const std::string kBody = R"({"node":1})";
    const Segment body{reinterpret_cast<const std::byte*>(kBody.data()), kBody.size(), nullptr};
    for (const Bytes& answer : answers_) channel->send(answer, {});
    HostMessage mine{.version = version, .kind = HostMessage::Kind::kAnswer, .id = header->id};
    channel->send(encode_host_message(mine), std::span(&body, 1));
  }
  void on_closed(const std::shared_ptr<net::Channel>&, const Error&) override {}

  std::uint32_t version = HostMessage::kVersion;

 private:
  const std::vector<Bytes> answers_;
};

TEST_P(SimulatedLinks, SurviveALauncherThatBreaksTheProtocol) {
  run(2, [&](Launcher& launcher) {
    const std::string name = "hostile";
    Hostile hostile({encode_host_message({.kind = HostMessage::Kind::kAnswer, .id = 999})});
    const auto transport = world_.network().make_transport(name, hostile, {});
    transport->listen("sim:" + name);
    bool over = false;
    Thread driver = world_.executor().spawn("hostile", [&] {
      while (!over) {
        transport->poll();
        transport->wait(world_.executor().deadline_in(milliseconds(10)));
      }
    });
    launcher.link.set_addresses({address_of(0), "sim:" + name});
    EXPECT_THAT(launcher.collect().at(0).trouble, HasSubstr("something else than the state of its workers"));
    hostile.version = 9;
    EXPECT_THAT(launcher.collect().at(0).trouble, HasSubstr("speaks version 9 of the launchers' requests"));
    // It also asks: with bytes that are no question, and in a version that is not known here.
    for (const Bytes& question : {Bytes(3, std::byte{1}), Bytes(100, std::byte{0xff}),
                                  encode_host_message({.version = 9, .id = 1})}) {
      transport->connect(address_of(0), Deadline::never())->send(question, {});
    }
    world_.executor().sleep(seconds(1));
    over = true;
    driver.join();
    launcher.link.set_addresses({address_of(0), address_of(1)});
    EXPECT_THAT(launcher.collect().at(0).trouble, IsEmpty());
  });
}

}  // namespace
}  // namespace torchspan::launch::host_link_test
