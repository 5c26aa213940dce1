// send() and recv() on the simulated network: every seed determines a whole run.
#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <gmock/gmock.h>
#include <map>
#include <numeric>
#include <optional>

#include <ATen/ATen.h>

#include "tests/conformance/collective_simulated.h"

namespace torchspan::testing::collective_simulated_messages {
namespace {

using namespace collective;
using rendezvous::Membership;
using rendezvous::SimulatedWorld;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

class SimulatedMessages : public SimulatedGroupsSuite {};

/// What `from` sends to `to` as its message `number`.
at::Tensor message_of(int from, int to, int number) {
  const std::array<std::int64_t, 4> lengths{3, 9000, 0, 300000};
  return at::full({lengths[static_cast<std::size_t>(from + to + number) % lengths.size()]},
                  from * 10000 + to * 100 + number, at::kLong);
}

TEST_F(SimulatedMessages, MessagesBetweenAllPairsArriveInEveryOrderOfEvents) {
  for (const int ranks : {2, 3, 5}) {
    for (std::uint64_t seed = 1; seed <= seeds_or(2); ++seed) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, seed " << seed);
      SimulatedWorld world(seed, ranks, {.jitter = milliseconds(2)});
      run(world, seconds(60), [&](Group& group, Membership&) {
        const int rank = group.rank();
        std::vector<Future<at::Tensor>> pending;
        std::vector<std::pair<at::Tensor, at::Tensor>> received;
        std::vector<Future<at::Tensor>> sums;  // each rank calls it at another time
        for (int number = 0; number < 6; ++number) {
          for (int step = 1; step < ranks; ++step) {
            const int to = (rank + step) % ranks, from = (rank + ranks - step) % ranks;
            pending.push_back(group.send(message_of(rank, to, number), to, number % 2));
            const at::Tensor wanted = message_of(from, rank, number);
            received.emplace_back(at::zeros_like(wanted), wanted);
            pending.push_back(group.recv(received.back().first, from, number % 2));
          }
          if (number == rank % 3) sums.push_back(group.all_reduce(at::ones({10})));
        }
        for (const auto& future : pending) future.wait();
        for (const auto& [tensor, wanted] : received) EXPECT_TRUE(same_bits(tensor, wanted));
        for (const auto& sum : sums) EXPECT_EQ(sum.wait()[0].item<int>(), ranks);
      });
    }
  }
}

/// All ranks exchange messages until rank 1 is killed, at a time that depends on the seed. The others must get an error that
/// names it. `exchange` never returns.
void expect_that_a_death_is_named(int ranks, std::uint64_t seed, Duration when,
                                  const std::function<void(Group&)>& exchange) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  SimulatedWorld world(seed, ranks, {.jitter = microseconds(50)});
  std::vector<int> others(static_cast<std::size_t>(ranks));
  std::iota(others.begin(), others.end(), 0);
  std::erase(others, 1);
  std::atomic<int> named{0};
  world.run([&](int rank) {
    Runtime runtime(world.executor(), "worker" + std::to_string(rank), LogLevel::kOff);
    const auto membership = Membership::join(runtime, world.transports(rank), world.options(rank));
    std::optional<Group> group =
        Group::make(runtime, *membership, {.backend = BackendKind::kNetwork, .timeout = seconds(20)});
    Thread killer;
    if (rank == 1) {
      killer = world.executor().spawn("killer", [&] {
        world.executor().sleep(when);
        world.kill(1);
      });
    }
    const Error error = error_of([&] { exchange(*group); });
    if (rank != 1) {
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("worker1")) << "rank " << rank;
      const Error later = error_of([&] { group->barrier(); });
      EXPECT_EQ(later.kind(), ErrorKind::kDisconnected) << later.what();
      ++named;
      membership->barrier("test.named", others, world.in(seconds(30)));
    }
    group.reset();
    if (rank != 1) membership->leave(world.in(seconds(30)));
  });
  EXPECT_EQ(named, ranks - 1);
}

TEST_F(SimulatedMessages, ADeathAtAnyTimeIsNamedByTheMessagesOfAllOtherRanks) {
  for (std::uint64_t seed = 1; seed <= seeds_or(5); ++seed) {
    expect_that_a_death_is_named(3, seed, time_of_death(seed), [](Group& group) {
      for (int number = 0;; ++number) {
        std::vector<Future<at::Tensor>> pending;
        for (int peer = 0; peer < group.size(); ++peer) {
          if (peer == group.rank()) continue;
          pending.push_back(group.send(message_of(group.rank(), peer, number), peer));
          pending.push_back(group.recv(at::zeros_like(message_of(peer, group.rank(), number)), peer));
        }
        for (const auto& future : pending) future.wait();
      }
    });
  }
}

/// Each rank sends messages of two tags to random others, which receive all of them from any rank.
TEST_F(SimulatedMessages, MessagesFromAnyRankArriveInEveryOrderOfEvents) {
  for (const int ranks : {2, 3, 5}) {
    for (std::uint64_t seed = 1; seed <= seeds_or(2); ++seed) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, seed " << seed);
      SimulatedWorld world(seed, ranks, {.jitter = milliseconds(2)});
      run(world, seconds(60), [&](Group& group, Membership&) {
        constexpr int kRounds = 6;
        const int rank = group.rank();
        const auto length = [](int tag) { return tag == 0 ? 4 : 30000; };
        std::vector<Future<at::Tensor>> sent;
        std::vector<Future<ReceivedMessage>> received;
        std::vector<Future<at::Tensor>> sums;  // each rank calls it at another time
        for (int round = 0; round < kRounds; ++round) {
          const int tag = round % 2;
          for (int step = 1; step < ranks; ++step) {
            world.executor().sleep(microseconds(world.executor().random() % 3000));
            sent.push_back(group.send(at::full({length(tag)}, rank * 100 + round, at::kLong),
                                      (rank + step) % ranks, tag));
            received.push_back(group.recv(at::zeros({length(tag)}, at::kLong), kAnySource, tag));
          }
          if (round == rank % 3) sums.push_back(group.all_reduce(at::ones({10})));
        }
        std::map<std::pair<int, int>, std::vector<int>> rounds;  // by source and tag
        for (std::size_t i = 0; i < received.size(); ++i) {
          const ReceivedMessage message = received[i].wait();
          const int tag = static_cast<int>(i) / (ranks - 1) % 2, value = message.tensor[0].item<int>();
          EXPECT_TRUE((message.tensor == value).all().item<bool>());
          EXPECT_EQ(value / 100, message.source);
          rounds[{message.source, tag}].push_back(value % 100);
        }
        for (int other = 0; other < ranks; ++other) {
          if (other == rank) continue;
          EXPECT_EQ((rounds[{other, 0}]), (std::vector<int>{0, 2, 4})) << "from rank " << other;
          EXPECT_EQ((rounds[{other, 1}]), (std::vector<int>{1, 3, 5})) << "from rank " << other;
        }
        for (const auto& future : sent) future.wait();
        for (const auto& sum : sums) EXPECT_EQ(sum.wait()[0].item<int>(), ranks);
      });
    }
  }
}

/// Every sender has more messages than the receiver takes.
TEST_F(SimulatedMessages, AReceiverFromAnyRankStarvesNoSender) {
  for (std::uint64_t seed = 1; seed <= seeds_or(2); ++seed) {
    constexpr int kRanks = 6, kOutstanding = 4, kReceived = 200;
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    SimulatedWorld world(seed, kRanks, {.jitter = microseconds(50)});
    std::atomic<bool> over{false};
    run(world, seconds(60), [&](Group& group, Membership&) {
      if (group.rank() == 0) {
        std::vector<int> counts(kRanks);
        for (int i = 0; i < kReceived; ++i) {
          world.executor().sleep(milliseconds(1));  // slower than the senders
          ++counts[static_cast<std::size_t>(group.recv(at::zeros({2}), kAnySource).wait().source)];
          const auto [fewest, most] = std::minmax_element(counts.begin() + 1, counts.end());
          // The messages that a sender has under way, and those that arrived before the others were connected.
          EXPECT_LE(*most - *fewest, 2 * kOutstanding) << "after " << i + 1 << " messages";
        }
        over = true;
        for (int i = 1; i < kRanks; ++i) {  // what they still send, and the last one of each
          while (group.recv(at::zeros({2}), kAnySource).wait().tensor[0].item<int>() == 0) {
          }
        }
        return;
      }
      std::deque<Future<at::Tensor>> sent;
      while (!over) {
        while (sent.size() < kOutstanding) sent.push_back(group.send(at::zeros({2}), 0));
        sent.front().wait();
        sent.pop_front();
      }
      sent.push_back(group.send(at::ones({2}), 0));
      for (const auto& future : sent) future.wait();
    });
  }
}

TEST_F(SimulatedMessages, ADeathAtAnyTimeFailsReceivesFromAnyRank) {
  for (std::uint64_t seed = 1; seed <= seeds_or(5); ++seed) {
    expect_that_a_death_is_named(4, seed, time_of_death(seed), [](Group& group) {
      // Rank 0 receives from any rank for ever; rank 3 sends nothing, and waits for a message from any rank.
      if (group.rank() == 3) group.recv(at::zeros({3}), kAnySource, 1).wait();
      for (;;) {
        if (group.rank() == 0) {
          group.recv(at::zeros({20000}), kAnySource).wait();
        } else {
          group.send(at::zeros({20000}), 0).wait();
        }
      }
    });
  }
}

/// A master that takes results from whichever worker is ready: the messages of a result do not depend on the number of
/// workers, and each worker is met once.
TEST_F(SimulatedMessages, ReceivingFromAnyOfManyRanksCostsTheMessagesOfItsSender) {
  for (const int ranks : {4, 16, 64}) {
    constexpr int kResults = 4;
    SimulatedWorld world(7, ranks);
    std::atomic<int> messages{0};
    world.network().observe([&](const net::SimMessage& message) {
      if (message.from.find(".direct.messages") != std::string::npos) ++messages;
    });
    run(world, seconds(60), [&](Group& group, Membership&) {
      if (group.rank() != 0) {
        for (int i = 0; i < kResults; ++i) group.send(at::full({5}, group.rank()), 0).wait();
        return;
      }
      std::vector<int> counts(static_cast<std::size_t>(ranks));
      for (int i = 0; i < kResults * (ranks - 1); ++i) {
        const ReceivedMessage result = group.recv(at::zeros({5}, at::kLong), kAnySource).wait();
        EXPECT_EQ(result.tensor[0].item<int>(), result.source);
        ++counts[static_cast<std::size_t>(result.source)];
      }
      for (int rank = 1; rank < ranks; ++rank) EXPECT_EQ(counts[static_cast<std::size_t>(rank)], kResults);
    });
    // Per worker: two hellos and two ends; per result: its offer with the data, and the answer.
    EXPECT_LE(messages, (ranks - 1) * (2 * kResults + 4)) << ranks << " ranks";
    EXPECT_GE(messages, (ranks - 1) * 2 * kResults) << ranks << " ranks";
  }
}

}  // namespace
}  // namespace torchspan::testing::collective_simulated_messages
