#include "core/api/agreement.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <span>
#include <stdexcept>

#include <torchspan/detail/core/mutex.h>

#include "core/async/trials.h"

namespace torchspan::agreement_test {
namespace {

using ::testing::ElementsAre;

Bytes bytes_of(const std::string& text) {
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

std::string text_of(BytesView bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

/// Lets the threads of some ranks gather bytes.
class Exchange {
 public:
  Exchange(Executor& executor, std::size_t ranks) : contributions_(ranks) {
    while (parkers_.size() < ranks) parkers_.push_back(executor.make_parker());
  }

  std::vector<Bytes> gather(std::size_t rank, BytesView mine) {
    int round = 0;
    {
      MutexLock lock(mutex_);
      round = round_;
      contributions_[rank].assign(mine.begin(), mine.end());
      if (++arrived_ == contributions_.size()) {
        gathered_ = contributions_;
        arrived_ = 0;
        ++round_;
        for (const auto& parker : parkers_) parker->unpark();
      }
    }
    for (;;) {
      {
        MutexLock lock(mutex_);
        if (round_ != round) return gathered_;
      }
      parkers_[rank]->park(Deadline::never());
    }
  }

 private:
  std::vector<std::unique_ptr<Parker>> parkers_;
  Mutex mutex_;
  std::vector<Bytes> contributions_ TORCHSPAN_GUARDED_BY(mutex_), gathered_ TORCHSPAN_GUARDED_BY(mutex_);
  std::size_t arrived_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  int round_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

/// Runs `body(rank, gather)` on a thread for each rank.
void on_ranks(std::size_t ranks,
              const std::function<void(std::size_t rank, const GatherBytes& gather)>& body) {
  everywhere(3, [&](Executor& executor) {
    Exchange exchange(executor, ranks);
    std::vector<Thread> threads;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      threads.push_back(executor.spawn(fmt::format("rank {}", rank), [&, rank] {
        body(rank, [&](BytesView mine) { return exchange.gather(rank, mine); });
      }));
    }
    for (Thread& thread : threads) thread.join();
  });
}

TEST(GatherPieces, GathersBytesOfAnyLengthInBothFormats) {
  for (const bool with_total : {false, true}) {
    for (const std::size_t longest : {0, 1, 7, 8, 9, 16, 35}) {
      on_ranks(3, [&](std::size_t rank, const GatherBytes& gather) {
        const std::vector<Bytes> expected = {bytes_of(std::string(longest, 'a')), {}, bytes_of("bcdefghi")};
        int rounds = 0;
        const auto counted = [&](BytesView mine) {
          EXPECT_LE(mine.size(), with_total ? 16U : 8U);
          ++rounds;
          return gather(mine);
        };
        for (int again = 0; again < 2; ++again)
          EXPECT_EQ(gather_pieces(counted, expected[rank], {.most = 8, .with_total = with_total}), expected);
        // A full last piece announces another one, unless the total is known.
        const std::size_t most = std::max<std::size_t>(longest, 8);
        EXPECT_EQ(rounds, 2 * static_cast<int>(with_total ? (most + 7) / 8 : most / 8 + 1)) << longest;
      });
    }
  }
}

TEST(AllOrNone, ReturnsTheResultsOfAllRanks) {
  on_ranks(3, [](std::size_t rank, const GatherBytes& gather) {
    const auto refuse = [](std::size_t, const Error& failure) { return failure; };
    const auto mine = outcome_of([&] { return bytes_of(std::string(rank, 'x')); });
    EXPECT_THAT(all_or_none(gather, mine, refuse), ElementsAre(bytes_of(""), bytes_of("x"), bytes_of("xx")));
  });
}

TEST(AllOrNone, ThrowsTheFirstFailureOnAllRanks) {
  on_ranks(4, [](std::size_t rank, const GatherBytes& gather) {
    const auto mine = outcome_of([&] {
      if (rank == 1) throw Error(ErrorKind::kOverloaded, "no descriptor is left");
      if (rank == 2) throw std::runtime_error("disk full");
      return Bytes();
    });
    try {
      all_or_none(gather, mine, [](std::size_t failed, const Error& failure) {
        return Error(failure.kind(), fmt::format("rank {}: {}", failed, failure.message()));
      });
      ADD_FAILURE() << "rank " << rank << " goes on";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
      EXPECT_EQ(error.message(), "rank 1: no descriptor is left");
    }
  });
}

TEST(AllOrNone, ThrowsTheOwnFailureIfTheExchangeFailsToo) {
  const auto lost = [](BytesView) -> std::vector<Bytes> {
    throw Error(ErrorKind::kDisconnected, "rank 1 died");
  };
  const auto refuse = [](std::size_t, const Error& failure) { return failure; };
  const auto message_of = [&](const RankOutcome& mine) {
    try {
      all_or_none(lost, mine, refuse);
      return std::string();
    } catch (const Error& error) {
      return error.message();
    }
  };
  EXPECT_EQ(message_of({.failure = Error(ErrorKind::kInvalid, "the cause")}), "the cause");
  EXPECT_EQ(message_of({}), "rank 1 died");
}

TEST(Outcome, KeepsItsBytes) {
  EXPECT_EQ(text_of(encode_outcome({.result = bytes_of("ab")})), std::string("\0ab", 3));
  EXPECT_EQ(text_of(encode_outcome({.failure = Error(ErrorKind::kRemoteFailure, "no")})),
            std::string("\2\2\0\0\0no", 7));
  const RankOutcome failed = decode_outcome(encode_outcome({.failure = Error(ErrorKind::kTimedOut, "late")}));
  EXPECT_EQ(failed.failure->kind(), ErrorKind::kTimedOut);
  EXPECT_EQ(failed.failure->message(), "late");
  EXPECT_THROW(decode_outcome({}), Error);
  EXPECT_THROW(decode_outcome(bytes_of("\2\2")), Error);
}

TEST(JointFailure, NamesEachDifferentFailureOnce) {
  const std::vector<std::string> names = {"rank 0", "rank 1", "rank 2", "rank 3"};
  std::vector<RankOutcome> outcomes(4);
  EXPECT_FALSE(joint_failure(outcomes, names, "not saved"));
  outcomes[1].failure = Error(ErrorKind::kInvalid, "disk full");
  outcomes[2].failure = Error(ErrorKind::kInvalid, "disk full");
  outcomes[3].failure = Error(ErrorKind::kTimedOut, "late");
  const auto joint = joint_failure(outcomes, names, "not saved");
  EXPECT_EQ(joint->kind(), ErrorKind::kInvalid);
  EXPECT_EQ(joint->message(), "not saved: rank 1: disk full; rank 3: late");
  EXPECT_EQ(joint_failure({outcomes[1]}, {"this process"}, "not saved")->message(), "not saved: disk full");
}

TEST(FirstDifference, IsThatFromTheFirstRank) {
  EXPECT_EQ(first_difference<int>({}), std::nullopt);
  EXPECT_EQ(first_difference<int>({3, 3}), std::nullopt);
  EXPECT_EQ(first_difference<int>({3, 3, 4, 5}), 2U);
}

}  // namespace
}  // namespace torchspan::agreement_test
