// recv() from any rank, with every backend: which message it gets, who sent it, and how it fails.
#include <algorithm>
#include <array>
#include <atomic>
#include <gmock/gmock.h>
#include <map>
#include <optional>
#include <random>

#include <ATen/ATen.h>

#include "tests/conformance/collective_messages.h"

namespace torchspan::testing::collective_any_source {
namespace {

using namespace collective;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A call of recv() from any rank, with the tensor that it overwrites.
struct Receive {
  at::Tensor tensor;
  Future<ReceivedMessage> done;

  int source() const { return done.wait(seconds(60)).source; }
  std::int64_t first() const {
    done.wait(seconds(60));
    return tensor.cpu().flatten()[0].item<std::int64_t>();
  }
};

class CollectiveAnySource : public MessageSuite {
 protected:
  static Receive receive(const Group& group, std::int64_t length = 1, int tag = 0) {
    const at::Tensor tensor = on_row(at::full({length}, -1, at::kLong));
    return {tensor, group.recv(tensor, kAnySource, tag)};
  }
  static at::Tensor message(std::int64_t value, std::int64_t length = 1) {
    return on_row(at::full({length}, value, at::kLong));
  }
  std::vector<int> others(int rank) const {
    std::vector<int> all;
    for (int other = 0; other < ranks(); ++other) {
      if (other != rank) all.push_back(other);
    }
    return all;
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, CollectiveAnySource, ::testing::ValuesIn(rows_with_others()), row_name);

// peer: c10d `testSendRecvAnySource`, `test_send_recv_anysource`: same: the source is a part of the result
TEST_P(CollectiveAnySource, ReceivesFromAllRanksAtOnceAndNamesTheSource) {
  run([&](Group& group) {
    int tag = 0;  // a fast rank may be ahead
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBool, at::kComplexFloat}) {
      for (const std::int64_t length : {0L, 1L, 8193L, 300001L}) {
        ++tag;
        std::vector<at::Tensor> tensors;
        std::vector<Future<ReceivedMessage>> received;
        std::vector<Future<at::Tensor>> sent;
        for (const int other : others(group.rank())) {
          tensors.push_back(on_row(at::zeros({length}, dtype)));
          received.push_back(group.recv(tensors.back(), kAnySource, tag));
          sent.push_back(group.send(on_row(contents(group.rank(), other, length, dtype)), other, tag));
        }
        std::vector<int> sources;
        for (std::size_t i = 0; i < received.size(); ++i) {
          const ReceivedMessage message = received[i].wait(seconds(60));
          EXPECT_TRUE(message.tensor.is_same(tensors[i]));
          EXPECT_TRUE(same_bits(tensors[i].cpu(), contents(message.source, group.rank(), length, dtype)))
              << c10::toString(dtype) << " " << length << " from " << message.source;
          sources.push_back(message.source);
        }
        std::sort(sources.begin(), sources.end());
        EXPECT_EQ(sources, others(group.rank()));
        wait_all(sent, seconds(60));
      }
    }
  });
}

// peer: c10d `testSendRecvAnySource`
TEST_P(CollectiveAnySource, TheSenderMayBeEarlierOrLater) {
  const auto exchange = [this](Group& group, bool sends_first, std::int64_t length) {
    const bool receives = group.rank() == ranks() - 1;
    std::vector<Receive> received;
    std::vector<Future<at::Tensor>> sent;
    const auto act = [&](bool now) {
      if (!now) return;
      if (receives) {
        for (int i = 1; i < ranks(); ++i) received.push_back(receive(group, length));
      } else {
        sent.push_back(group.send(message(group.rank(), length), ranks() - 1));
      }
    };
    act(receives != sends_first);
    group.barrier();
    act(receives == sends_first);
    for (const Receive& one : received) EXPECT_EQ(one.source(), one.first());
    wait_all(sent, seconds(60));
  };
  std::vector<Body> exchanges;  // each connects the ranks of a new group
  for (const bool sends_first : {true, false}) {
    for (const std::int64_t length : {1L, 100000L})
      exchanges.push_back([=](Group& group) { exchange(group, sends_first, length); });
  }
  for (const auto& errors : errors_of_each(exchanges)) {
    for (const Error& error : errors) EXPECT_THAT(error.what(), HasSubstr("nothing was thrown"));
  }
}

TEST_P(CollectiveAnySource, AMessageGoesToTheEarliestCallThatItFits) {
  run([&](Group& group) {
    for (const bool any_is_first : {true, false}) {
      if (group.rank() == 0) {
        const at::Tensor mine = on_row(at::zeros({1}, at::kLong));
        std::optional<Receive> any;
        if (any_is_first) any = receive(group);
        const Future<at::Tensor> specific = group.recv(mine, 1);
        if (!any_is_first) any = receive(group);
        group.barrier();
        EXPECT_EQ(any->source(), 1);
        specific.wait(seconds(60));
        EXPECT_EQ(any->first(), any_is_first ? 0 : 1);
        EXPECT_EQ(mine.cpu().item<int>(), any_is_first ? 1 : 0);
      } else {
        group.barrier();
        if (group.rank() == 1) {
          for (int value = 0; value < 2; ++value) group.send(message(value), 0).wait(seconds(60));
        }
      }
      group.barrier();
    }
  });
}

TEST_P(CollectiveAnySource, AMessageSkipsEarlierCallsForOtherRanksAndTags) {
  if (ranks() < 3) return;
  run([&](Group& group) {
    if (group.rank() == 0) {
      const at::Tensor mine = on_row(at::zeros({1}, at::kLong));
      const Future<at::Tensor> of_rank_1 = group.recv(mine, 1);
      const Receive other_tag = receive(group, 1, 5), any = receive(group);
      EXPECT_EQ(any.source(), 2);
      EXPECT_EQ(any.first(), 20);
      group.barrier();
      of_rank_1.wait(seconds(60));
      EXPECT_EQ(mine.cpu().item<int>(), 10);
      EXPECT_EQ(other_tag.source(), 1);
      EXPECT_EQ(other_tag.first(), 15);
      return;
    }
    if (group.rank() == 2) group.send(message(20), 0).wait(seconds(60));
    group.barrier();
    if (group.rank() == 1) {
      group.send(message(15), 0, 5).wait(seconds(60));
      group.send(message(10), 0).wait(seconds(60));
    }
  });
}

/// Every rank sends messages with two tags to rank 0, which takes the first few of each rank by its number, and the others
/// from any rank: all arrive, those of one rank and tag in order.
TEST_P(CollectiveAnySource, KeepsTheOrderOfEachSenderInRandomSchedules) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  run([&](Group& group) {
    constexpr int kMessages = 12, kTags = 2;  // of each tag
    constexpr std::array<std::int64_t, kTags> kLengths{3, 20000};
    std::mt19937 random(seed + static_cast<unsigned>(group.rank()));
    const auto pause = [&] {
      if (random() % 4 == 0) world_.executor().sleep(std::chrono::microseconds(random() % 300));
    };
    if (group.rank() != 0) {
      std::vector<Future<at::Tensor>> sent;
      std::array<int, kTags> next{};
      while (next[0] + next[1] < kTags * kMessages) {
        const int tag = next[0] == kMessages || (next[1] < kMessages && random() % 2 == 0) ? 1 : 0;
        sent.push_back(group.send(message(1000 * group.rank() + next[tag]++, kLengths[tag]), 0, tag));
        pause();
        if (random() % 3 == 0) sent.back().wait(seconds(60));
      }
      wait_all(sent, seconds(60));
      return;
    }
    struct Call {
      int rank, tag;  ///< rank 0: any
    };
    std::vector<Call> of_ranks, of_any;
    for (int rank = 1; rank < ranks(); ++rank) {
      for (int tag = 0; tag < kTags; ++tag) {
        const std::size_t first = random() % kMessages;
        of_ranks.insert(of_ranks.end(), first, {rank, tag});
        of_any.insert(of_any.end(), kMessages - first, {0, tag});
      }
    }
    std::shuffle(of_ranks.begin(), of_ranks.end(), random);
    std::shuffle(of_any.begin(), of_any.end(), random);
    std::vector<std::pair<Call, at::Tensor>> calls;
    std::vector<Future<at::Tensor>> by_rank;
    std::vector<Future<ReceivedMessage>> from_any;
    for (const auto& list : {of_ranks, of_any}) {
      for (const Call& call : list) {
        calls.emplace_back(call, message(-1, kLengths[call.tag]));
        const at::Tensor& tensor = calls.back().second;
        if (call.rank == 0) {
          from_any.push_back(group.recv(tensor, kAnySource, call.tag));
        } else {
          by_rank.push_back(group.recv(tensor, call.rank, call.tag));
        }
        pause();
      }
    }
    wait_all(by_rank, seconds(60));
    std::map<std::pair<int, int>, int> next;  // by rank and tag
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const auto& [call, tensor] = calls[i];
      const int rank = call.rank != 0 ? call.rank : from_any[i - by_rank.size()].wait(seconds(60)).source;
      EXPECT_TRUE((tensor.cpu() == 1000 * rank + next[{rank, call.tag}]++).all().item<bool>())
          << "call " << i << " received " << tensor.cpu()[0].item<int>() << " from rank " << rank;
    }
  });
}

TEST_P(CollectiveAnySource, PartsOfAGroupHaveTheirOwnMessages) {
  if (ranks() < 4) return;
  run([&](Group& group) {
    const Group part = group.split(group.rank() % 2, -group.rank());
    std::vector<Future<at::Tensor>> sent;
    const bool receives = part.rank() == 0;
    std::vector<Receive> of_part, of_group;
    // The same tag and shape in both groups.
    if (receives) {
      for (int i = 1; i < part.size(); ++i) of_part.push_back(receive(part));
      of_group.push_back(receive(group));
    } else {
      sent.push_back(part.send(message(100 + part.rank()), 0));
    }
    if (part.rank() == 1) sent.push_back(group.send(message(200 + group.rank()), part.ranks()[0]));
    for (const Receive& one : of_part) EXPECT_EQ(100 + one.source(), one.first());
    for (const Receive& one : of_group) EXPECT_EQ(200 + one.source(), one.first());
    wait_all(sent, seconds(60));
  });
}

TEST_P(CollectiveAnySource, ReceivesIntoStridedTensors) {
  run([&](Group& group) {
    const at::Tensor data = at::arange(60000).view({200, 300});
    if (group.rank() == 1) group.send(on_row(data).t(), 0).wait(seconds(60));
    if (group.rank() != 0) return;
    const at::Tensor whole = on_row(at::zeros({200, 300}, at::kLong)), target = whole.t();
    const auto version = whole._version();
    const ReceivedMessage message = group.recv(target, kAnySource).wait(seconds(60));
    EXPECT_TRUE(message.tensor.is_same(target));
    EXPECT_TRUE(same_bits(whole.cpu(), data));
    EXPECT_GT(whole._version(), version) << "autograd must notice the change";
  });
}

TEST_P(CollectiveAnySource, RejectsInvalidArgumentsAndContinues) {
  run([&](Group& group) {
    const auto refused = [](ErrorKind kind, const std::string& word, const std::function<void()>& call) {
      const Error error = thrown_by(call);
      EXPECT_EQ(error.kind(), kind) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(word));
    };
    refused(ErrorKind::kInvalid, "undefined",
            [&] { static_cast<void>(group.recv(at::Tensor(), kAnySource)); });
    refused(ErrorKind::kInvalid, "the tag of recv is -1",
            [&] { static_cast<void>(group.recv(at::ones({1}), kAnySource, -1)); });
    const Group bare(group.backend());
    refused(ErrorKind::kUnsupported, "Group::make()",
            [&] { static_cast<void>(bare.recv(at::ones({1}), kAnySource)); });
    EXPECT_EQ(group.all_reduce(at::ones({1})).wait().item<int>(), ranks());
  });
}

TEST(CollectiveAnySourceAlone, AGroupOfOneRankHasNoSource) {
  CollectiveWorld world(1);
  world.run([](Group& group) {
    try {
      static_cast<void>(group.recv(at::ones({1}), kAnySource));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.what(), HasSubstr("group of one rank"));
    }
  });
}

TEST_P(CollectiveAnySource, NamesBothCallsIfDtypeOrShapeDiffers) {
  std::vector<Body> exchanges;
  for (const MismatchedMessage& pair : mismatched_messages()) {
    exchanges.push_back([pair](Group& group) {
      if (group.rank() == 1) group.send(on_row(pair.sent), 0, 7).wait(seconds(60));
      if (group.rank() == 0) group.recv(on_row(pair.received), kAnySource, 7).wait(seconds(60));
    });
  }
  for (const auto& errors : errors_of_each(exchanges)) {
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(errors[rank].kind(), ErrorKind::kInvalid) << errors[rank].what();
      EXPECT_THAT(errors[rank].what(), AllOf(HasSubstr("worker0"), HasSubstr("worker1"), HasSubstr("send("),
                                             HasSubstr("from any rank, tag 7")));
    }
  }
}

TEST_P(CollectiveAnySource, ATimeoutNamesAllRanksAndWhatTheySendInstead) {
  std::atomic<bool> failed{false};
  const auto exchange = [&](Group& group) {
    if (group.rank() == 0) {
      group.recv(on_row(at::ones({1})), 1, 3).wait(seconds(60));  // so the message with tag 2 has arrived
      try {
        const Future<ReceivedMessage> pending = group.recv(on_row(at::ones({3})), kAnySource, 1);
        pass_limit();
        pending.wait(seconds(60));
      } catch (...) {
        failed = true;
        throw;
      }
    } else if (group.rank() == 1) {
      const auto pending = group.send(on_row(at::ones({5})), 0, 2);
      group.send(on_row(at::ones({1})), 0, 3).wait(seconds(60));
      while (!failed.load()) world_.executor().sleep(milliseconds(5));
      pending.wait(seconds(60));
    }
  };
  const auto errors = errors_of_late(exchange);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(errors[rank].kind(), ErrorKind::kTimedOut) << errors[rank].what();
  }
  EXPECT_THAT(errors[0].what(), AllOf(HasSubstr("recv(Float [3] from any rank, tag 1)"),
                                      HasSubstr("waited 20 s"), HasSubstr("sends Float [5] with tag 2")));
  for (const int other : others(0)) {
    EXPECT_THAT(errors[0].what(), HasSubstr("worker" + std::to_string(other)));
  }
}

TEST_P(CollectiveAnySource, FailsWithTheGroupThatIsAborted) {
  const auto errors = errors_of([&](Group& group) {
    if (group.rank() != 0) return;
    const Receive pending = receive(group);
    group.abort(Error(ErrorKind::kCancelled, "the trainer gave up"));
    static_cast<void>(pending.source());
  });
  EXPECT_EQ(errors[0].kind(), ErrorKind::kCancelled) << errors[0].what();
  EXPECT_THAT(errors[0].what(), HasSubstr("the trainer gave up"));
}

TEST_P(CollectiveAnySource, IsCancelledWhenTheLastHandleIsDropped) {
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         std::optional<Group> group = make_group_of_row(self.runtime, self.membership, options());
         const Receive pending = receive(*group);
         self.membership.barrier("test.called", {}, world_.executor().deadline_in(seconds(60)));
         group.reset();
         static_cast<void>(pending.source());
       })) {
    ASSERT_TRUE(failure);
    const Error error = to_error(failure);
    EXPECT_TRUE(error.kind() == ErrorKind::kCancelled || error.kind() == ErrorKind::kDisconnected)
        << error.what();
  }
}

TEST_P(CollectiveAnySource, IsCancelledWhenThisWorkerLeavesTheWorld) {
  for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
         Group group = make_group_of_row(self.runtime, self.membership, options());
         const auto in = [&](Duration time) { return world_.executor().deadline_in(time); };
         std::optional<Receive> pending;
         if (self.rank == ranks() - 1) pending = receive(group);
         self.membership.barrier("test.called", {}, in(seconds(60)));
         self.membership.leave(in(seconds(60)));
         if (!pending) return;
         const Error error = thrown_by([&] { static_cast<void>(pending->source()); });
         EXPECT_TRUE(error.kind() == ErrorKind::kCancelled || error.kind() == ErrorKind::kDisconnected)
             << error.what();
       })) {
    EXPECT_FALSE(failure) << describe(failure).text;
  }
}

/// A rank that destroys its group or leaves can send no more, but the others can.
TEST_P(CollectiveAnySource, FailsOnlyWhenNoOtherRankIsLeft) {
  for (const bool leaves : {false, true}) {
    SCOPED_TRACE(leaves ? "leaves the world" : "destroys its group");
    const auto in = [&](Duration time) { return world_.executor().deadline_in(time); };
    std::atomic<int> gone{0};
    for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
           std::optional<Group> group = make_group_of_row(self.runtime, self.membership, options());
           group->barrier();
           if (self.rank == 0) {
             // Connects to all.
             for (int i = 1; i < ranks(); ++i)
               EXPECT_EQ(receive(*group).done.wait(seconds(60)).tensor.numel(), 1);
             for (int step = 1; step < ranks(); ++step) {
               const Receive pending = receive(*group);
               gone = step;  // the next rank sends a last message, and ends
               EXPECT_EQ(pending.source(), step);
             }
             const Error error = thrown_by([&] { static_cast<void>(receive(*group).source()); });
             EXPECT_EQ(error.kind(), ErrorKind::kDisconnected) << error.what();
             for (const int other : others(0)) {
               EXPECT_THAT(error.what(), HasSubstr("worker" + std::to_string(other)));
             }
             gone = ranks();
             return;
           }
           group->send(message(self.rank), 0).wait(seconds(60));
           while (gone < self.rank) world_.executor().sleep(milliseconds(1));
           group->send(message(self.rank), 0).wait(seconds(60));
           leaves ? self.membership.leave(in(seconds(60))) : group.reset();
           while (gone < ranks()) world_.executor().sleep(milliseconds(1));
         })) {
      EXPECT_FALSE(failure) << describe(failure).text;
    }
    EXPECT_EQ(gone, ranks());
  }
}

}  // namespace
}  // namespace torchspan::testing::collective_any_source
