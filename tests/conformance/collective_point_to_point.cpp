// send() and recv(): between every two ranks, in every order, beside collective operations, with every backend.
#include <array>
#include <atomic>
#include <gmock/gmock.h>
#include <numeric>
#include <optional>
#include <random>

#include <ATen/ATen.h>

#include "tests/conformance/collective_messages.h"

namespace torchspan::testing::collective_point_to_point {
namespace {

using namespace collective;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CollectivePointToPoint : public MessageSuite {};
INSTANTIATE_TEST_SUITE_P(Backends, CollectivePointToPoint, ::testing::ValuesIn(rows_with_others()), row_name);

// peer: c10d `testSend`, `testRecv`, `testSendRecv`, `test_send_recv_complex`: same
TEST_P(CollectivePointToPoint, PassesTensorsOfAllDtypesAndSizesBetweenAllPairs) {
  run([&](Group& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kLong, at::kBool, at::kComplexFloat}) {
      for (const std::int64_t length : {0L, 1L, 8193L, 300001L}) {
        std::vector<at::Tensor> received;
        std::vector<Future<at::Tensor>> pending;
        for (int peer = 0; peer < ranks(); ++peer) {
          received.push_back(on_row(at::zeros({length}, dtype)));
          if (peer == group.rank()) continue;
          pending.push_back(group.send(on_row(contents(group.rank(), peer, length, dtype)), peer));
          pending.push_back(group.recv(received.back(), peer));
        }
        wait_all(pending, seconds(60));
        for (int peer = 0; peer < ranks(); ++peer) {
          if (peer == group.rank()) continue;
          EXPECT_TRUE(same_bits(received[peer].cpu(), contents(peer, group.rank(), length, dtype)))
              << c10::toString(dtype) << " " << length << " from " << peer;
        }
      }
    }
  });
}

// peer: c10d `test_send_recv_with_tag`: same
TEST_P(CollectivePointToPoint, MatchesTagsInAnyOrderAndKeepsTheOrderWithinATag) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  run([&](Group& group) {
    constexpr int kMessages = 24, kTags = 4;
    const int next = (group.rank() + 1) % ranks(), previous = (group.rank() + ranks() - 1) % ranks();
    const auto length = [](int message) { return message % 5 == 0 ? 20000 : message; };
    const auto value = [](int rank, int message) { return 1000 * rank + message; };
    std::vector<int> sends(kMessages);
    std::iota(sends.begin(), sends.end(), 0);
    std::vector<int> tags_received;
    for (int message = 0; message < kMessages; ++message) tags_received.push_back(message % kTags);
    std::mt19937 random(seed + static_cast<unsigned>(group.rank()));
    std::shuffle(tags_received.begin(), tags_received.end(), random);
    std::vector<Future<at::Tensor>> pending;
    std::vector<std::pair<int, at::Tensor>> received;  // number of the message
    std::array<int, kTags> count{};
    std::size_t receives = 0;
    const auto receive_some = [&](std::size_t until) {
      for (; receives < until; ++receives) {
        const int tag = tags_received[receives], message = tag + kTags * count[tag]++;
        received.emplace_back(message, on_row(at::zeros({length(message)}, at::kLong)));
        pending.push_back(group.recv(received.back().second, previous, tag));
      }
    };
    for (const int message : sends) {
      if (random() % 2 == 0) receive_some(std::min<std::size_t>(receives + random() % 3, kMessages));
      const at::Tensor mine = at::full({length(message)}, value(group.rank(), message), at::kLong);
      pending.push_back(group.send(on_row(mine), next, message % kTags));
    }
    receive_some(kMessages);
    wait_all(pending, seconds(60));
    for (const auto& [message, tensor] : received) {
      EXPECT_TRUE((tensor.cpu() == value(previous, message)).all().item<bool>()) << message;
    }
  });
}

TEST_P(CollectivePointToPoint, NeedsNoOrderRelativeToCollectiveOperations) {
  run([&](Group& group) {
    const at::Tensor data = at::arange(50000);
    for (int round = 0; round < 3; ++round) {
      const bool first = group.rank() == 0;
      at::Tensor mine = empty_like_row(data), sum = at::ones({20000});
      std::vector<Future<at::Tensor>> pending;
      // Rank 0 sends before the sums, and waits for this only after them; the last rank receives between them.
      if (first) pending.push_back(group.send(on_row(data + round), ranks() - 1, round));
      group.all_reduce(sum).wait();
      if (group.rank() == ranks() - 1) pending.push_back(group.recv(mine, 0, round));
      group.all_reduce(sum).wait();
      group.barrier();
      wait_all(pending, seconds(60));
      if (group.rank() == ranks() - 1) {
        EXPECT_TRUE(same_bits(mine.cpu(), data + round));
      }
      EXPECT_TRUE((sum == ranks() * ranks()).all().item<bool>());
    }
  });
}

TEST_P(CollectivePointToPoint, ReceivesIntoStridedTensorsAndSendsViews) {
  run([&](Group& group) {
    const at::Tensor data = at::arange(60000).view({200, 300});
    if (group.rank() == 0) {
      group.send(on_row(data).t(), 1).wait(seconds(60));
      group.send(on_row(data).narrow(1, 3, 1), 1).wait(seconds(60));
    } else if (group.rank() == 1) {
      const at::Tensor whole = on_row(at::zeros({200, 300}, at::kLong)), target = whole.t();
      EXPECT_TRUE(group.recv(target, 0).wait(seconds(60)).is_same(target));
      EXPECT_TRUE(same_bits(whole.cpu(), data));
      const at::Tensor wide = on_row(at::full({200, 2}, -1, at::kLong));
      const auto version = wide._version();
      group.recv(wide.narrow(1, 1, 1), 0).wait(seconds(60));
      EXPECT_TRUE(same_bits(wide.cpu().narrow(1, 1, 1), data.narrow(1, 3, 1)));
      EXPECT_TRUE((wide.cpu().narrow(1, 0, 1) == -1).all().item<bool>());
      EXPECT_GT(wide._version(), version) << "autograd must notice the change";
    }
  });
}

// peer: c10d subgroups with `send` and `recv`: same
TEST_P(CollectivePointToPoint, PartsOfAGroupHaveTheirOwnMessages) {
  if (ranks() < 4) return;
  run([&](Group& group) {
    const Group part = group.split(group.rank() % 2, -group.rank());
    const Group again = group.split(group.rank() % 2, -group.rank());
    const int other = part.rank() == 0 ? 1 : 0;
    if (part.rank() > 1) return;
    std::vector<Future<at::Tensor>> pending;
    at::Tensor whole = on_row(at::zeros({1}, at::kLong)), one = whole.clone(), two = whole.clone();
    const auto mine = [&](int add) { return on_row(at::full({1}, 10 * group.rank() + add, at::kLong)); };
    const int peer = part.ranks()[other];
    // The same ranks, tag and shape in three groups.
    pending.push_back(again.send(mine(2), other));
    pending.push_back(part.send(mine(1), other));
    pending.push_back(group.send(mine(0), peer));
    pending.push_back(group.recv(whole, peer));
    pending.push_back(part.recv(one, other));
    pending.push_back(again.recv(two, other));
    wait_all(pending, seconds(60));
    EXPECT_EQ(whole.cpu().item<int>(), 10 * peer);
    EXPECT_EQ(one.cpu().item<int>(), 10 * peer + 1);
    EXPECT_EQ(two.cpu().item<int>(), 10 * peer + 2);
  });
}

TEST_P(CollectivePointToPoint, RejectsInvalidArgumentsAndContinues) {
  run([&](Group& group) {
    const at::Tensor one = at::ones({1});
    const auto refused = [](const std::string& word, const std::function<void()>& call) {
      const Error error = [&] {
        try {
          call();
        } catch (const Error& thrown) {
          return thrown;
        }
        return Error(ErrorKind::kCancelled, "nothing was thrown");
      }();
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(word));
    };
    refused("the receiver", [&] { static_cast<void>(group.send(one, ranks())); });
    refused("pass kAnySource", [&] { static_cast<void>(group.recv(one, -1)); });
    refused("which is this one", [&] { static_cast<void>(group.send(one, group.rank())); });
    refused("which is this one", [&] { static_cast<void>(group.recv(one, group.rank())); });
    refused("the tag of send is -1",
            [&] { static_cast<void>(group.send(one, (group.rank() + 1) % ranks(), -1)); });
    refused("undefined", [&] { static_cast<void>(group.recv(at::Tensor(), (group.rank() + 1) % ranks())); });
    EXPECT_EQ(group.all_reduce(at::ones({1})).wait().item<int>(), ranks());
  });
}

TEST_P(CollectivePointToPoint, GroupsThatAreMadeFromABackendSayThatTheyHaveNone) {
  run([&](Group& group) {
    const Group bare(group.backend());
    try {
      static_cast<void>(bare.send(at::ones({1}), (group.rank() + 1) % ranks()));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
      EXPECT_THAT(error.what(), HasSubstr("Group::make()"));
    }
  });
}

// peer: c10d sends and receives of different sizes: better: both calls are named
TEST_P(CollectivePointToPoint, NamesBothCallsIfDtypeOrShapeDiffers) {
  std::vector<Body> exchanges;
  for (const MismatchedMessage& pair : mismatched_messages()) {
    exchanges.push_back([pair](Group& group) {
      if (group.rank() == 0) group.send(on_row(pair.sent), 1, 7).wait(seconds(60));
      if (group.rank() == 1) group.recv(on_row(pair.received), 0, 7).wait(seconds(60));
    });
  }
  for (const auto& errors : errors_of_each(exchanges)) {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(errors[rank].kind(), ErrorKind::kInvalid) << errors[rank].what();
      EXPECT_THAT(errors[rank].what(), AllOf(HasSubstr("worker0"), HasSubstr("worker1"), HasSubstr("send("),
                                             HasSubstr("recv("), HasSubstr("tag 7")));
    }
  }
}

// peer: c10d `testRecvTimeout`, `test_timeout_in_wait`: better: the late rank is named, with what it sends instead
TEST_P(CollectivePointToPoint, NamesALateRankAndWhatItSendsInstead) {
  std::atomic<bool> failed{false};
  const auto exchange = [&](Group& group) {
    if (group.rank() == 1) {
      const auto pending = group.send(on_row(at::ones({5})), 0, 2);
      group.send(on_row(at::ones({1})), 0, 3).wait(seconds(60));
      while (!failed.load()) world_.executor().sleep(milliseconds(5));
      pending.wait(seconds(60));
    } else if (group.rank() == 0) {
      group.recv(on_row(at::ones({1})), 1, 3).wait(seconds(60));  // so the message with tag 2 has arrived
      try {
        const auto pending = group.recv(on_row(at::ones({3})), 1, 1);
        pass_limit();
        pending.wait(seconds(60));
      } catch (...) {
        failed = true;
        throw;
      }
    }
  };
  const auto errors = errors_of_late(exchange);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(errors[rank].kind(), ErrorKind::kTimedOut) << errors[rank].what();
    EXPECT_THAT(errors[rank].what(), HasSubstr("worker"));
  }
  EXPECT_THAT(errors[0].what(), AllOf(HasSubstr("recv(Float [3] from rank 1, tag 1)"), HasSubstr("worker1"),
                                      HasSubstr("it sends Float [5] with tag 2")));
}

TEST_P(CollectivePointToPoint, ASendThatNoRankReceivesTimesOut) {
  const auto send = [&](Group& group) {
    if (group.rank() != 0) return;
    const auto large = group.send(on_row(at::ones({100000})), 1);
    pass_limit();
    EXPECT_THROW(large.wait(seconds(60)), Error);
    group.send(on_row(at::ones({3})), 1).wait(seconds(60));
  };
  const auto errors = errors_of_late(send);
  EXPECT_EQ(errors[0].kind(), ErrorKind::kTimedOut) << errors[0].what();
  EXPECT_THAT(errors[0].what(), AllOf(HasSubstr("worker1"), HasSubstr("send(Float [3] to rank 1, tag 0)")));
}

TEST_P(CollectivePointToPoint, FailWithTheGroupThatIsAborted) {
  const auto errors = errors_of([&](Group& group) {
    if (group.rank() == 0) {
      const auto pending = group.recv(on_row(at::ones({3})), 1);
      group.abort(Error(ErrorKind::kCancelled, "the trainer gave up"));
      pending.wait(seconds(60));
    }
  });
  EXPECT_EQ(errors[0].kind(), ErrorKind::kCancelled) << errors[0].what();
  EXPECT_THAT(errors[0].what(), HasSubstr("the trainer gave up"));
}

TEST_P(CollectivePointToPoint, NameARankThatDestroysItsGroupOrLeavesTheWorld) {
  for (const bool leaves : {false, true}) {
    const auto in = [&](Duration time) { return world_.executor().deadline_in(time); };
    std::atomic<int> named{0};
    for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
           std::optional<Group> group = make_group_of_row(self.runtime, self.membership, options());
           // All have made it. A barrier of the group might still run on another rank when rank 1 destroys its group.
           self.membership.barrier("test.made", {}, in(seconds(60)));
           // Connects the two.
           if (self.rank == 0) group->recv(on_row(at::ones({1})), 1).wait(seconds(60));
           if (self.rank == 1) {
             group->send(on_row(at::ones({1})), 0).wait(seconds(60));
             leaves ? self.membership.leave(in(seconds(60))) : group.reset();
           }
           if (self.rank == 0) {
             const Error error = [&] {
               try {
                 group->recv(on_row(at::ones({100000})), 1).wait(seconds(60));
               } catch (const Error& thrown) {
                 return thrown;
               }
               return Error(ErrorKind::kCancelled, "nothing was thrown");
             }();
             EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
             EXPECT_THAT(error.what(), HasSubstr("worker1"));
             ++named;
           }
           while (named == 0) world_.executor().sleep(milliseconds(1));
         })) {
      EXPECT_FALSE(failure) << describe(failure).text;
    }
    EXPECT_EQ(named, 1);
  }
}

TEST_P(CollectivePointToPoint, AreCancelledWhenTheLastHandleIsDropped) {
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         std::optional<Group> group = make_group_of_row(self.runtime, self.membership, options());
         const auto pending = group->recv(on_row(at::ones({3})), (self.rank + 1) % ranks());
         self.membership.barrier("test.called", {}, world_.executor().deadline_in(seconds(60)));
         group.reset();
         pending.wait(seconds(60));
       })) {
    ASSERT_TRUE(failure);
    const Error error = to_error(failure);
    EXPECT_TRUE(error.kind() == ErrorKind::kCancelled || error.kind() == ErrorKind::kDisconnected)
        << error.what();
  }
}

}  // namespace
}  // namespace torchspan::testing::collective_point_to_point
