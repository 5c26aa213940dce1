#include "pipeline/layers/micro_batches.h"

#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numeric>

#include <torch/torch.h>

#include "tests/support/errors.h"

namespace torchspan::pipeline::micro_batches_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torchspan::testing::invalid_text;

at::Tensor rows(std::int64_t count) { return at::arange(count * 2).reshape({count, 2}); }

// peer suite: pipe check, gather_tensors, gather_tuples, scatter_tensor, scatter_tuple: better: numbers and
//   None go to all micro-batches; a batch without rows is reported
TEST(MicroBatches, AreAsEvenAsTheyCanBeLargerOnesFirst) {
  EXPECT_THAT(split_rows(7, 4), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(split_rows(6, 4), ElementsAre(2, 2, 1, 1)) << "four were asked for, and four there are";
  EXPECT_THAT(split_rows(8, 4), ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(split_rows(5, 1), ElementsAre(5));
}

TEST(MicroBatches, AreFewerThanAskedForOnlyIfThereAreFewerRows) {
  EXPECT_THAT(split_rows(2, 4), ElementsAre(1, 1));
  for (std::int64_t count = 1; count <= 40; ++count) {
    for (int parts = 1; parts <= 12; ++parts) {
      const auto sizes = split_rows(count, parts);
      EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}), count);
      EXPECT_EQ(sizes.size(), static_cast<std::size_t>(std::min<std::int64_t>(count, parts)));
      EXPECT_TRUE(std::is_sorted(sizes.rbegin(), sizes.rend()));
      EXPECT_LE(sizes.front() - sizes.back(), 1);
      EXPECT_GE(sizes.back(), 1);
    }
  }
}

TEST(MicroBatches, CountRowsAndNameTheBatchThatHasNone) {
  EXPECT_EQ(count_rows(rows(3), "input"), 3);
  EXPECT_EQ(count_rows(Batch({c10::IValue(7), at::scalar_tensor(1.0), rows(4), c10::IValue()}), "input"), 4);
  EXPECT_THAT(invalid_text([] { count_rows(Batch(), "input"); }),
              HasSubstr("the input has no tensor with rows"));
  EXPECT_THAT(invalid_text([] { count_rows(Batch({c10::IValue(7)}), "target"); }),
              HasSubstr("the target has no"));
  EXPECT_THAT(invalid_text([] { count_rows(at::scalar_tensor(1.0), "input"); }),
              HasSubstr("no tensor with rows"));
  EXPECT_THAT(invalid_text([] { count_rows(rows(0), "input"); }), HasSubstr("the input has no rows"));
}

TEST(MicroBatches, NameTensorsOfDifferentFirstDimensions) {
  const std::string text = invalid_text([] { count_rows(Batch({rows(3), rows(4)}), "input"); });
  EXPECT_THAT(text, HasSubstr("3 and 4 (member 1)"));
  EXPECT_THAT(text, HasSubstr("Batch::mark_unsplit"));
  EXPECT_EQ(count_rows(Batch({rows(3), rows(4)}).mark_unsplit(1), "input"), 3);
  EXPECT_EQ(count_rows(Batch({rows(3), rows(4)}).mark_unsplit(0), "input"), 4);
  EXPECT_THAT(invalid_text([] { count_rows(Batch(rows(3)).mark_unsplit(0), "input"); }),
              HasSubstr("the input has no tensor with rows"));
}

TEST(MicroBatches, DoNotSplitInputsMarkedWhole) {
  const Batch batch = Batch({rows(4), rows(4)}).mark_unsplit(1);
  const Batch piece = slice(batch, 1, 2);
  EXPECT_EQ(piece.members[0].toTensor().size(0), 2);
  EXPECT_TRUE(piece.members[1].toTensor().is_same(batch.members[1].toTensor()));
  EXPECT_TRUE(piece.is_unsplit(1)) << "so that it is not split or joined later";
  EXPECT_TRUE(join({piece, piece}).members[1].toTensor().equal(at::stack({rows(4), rows(4)})));
}

// peer: pipelining test_microbatch split_and_merge
TEST(MicroBatches, AreViewsAndShareWhatCannotBeSplit) {
  const at::Tensor tensor = rows(5), scalar = at::scalar_tensor(2.5);
  const Batch batch({tensor, scalar, c10::IValue(3), c10::IValue()});
  const Batch piece = slice(batch, 1, 2);
  EXPECT_TRUE(piece.tuple);
  EXPECT_TRUE(piece.members[0].toTensor().equal(tensor.narrow(0, 1, 2)));
  EXPECT_EQ(piece.members[0].toTensor().storage().data(), tensor.storage().data());
  EXPECT_TRUE(piece.members[1].toTensor().is_same(scalar));
  EXPECT_EQ(piece.members[2].toInt(), 3);
  EXPECT_TRUE(piece.members[3].isNone());
  EXPECT_FALSE(slice(Batch(tensor), 0, 1).tuple);
}

// peer: pipelining test_microbatch `split_and_merge`, `chunk_spec`; test_chunkspec: differs: along the first
//   dimension; values without one go to all micro-batches
TEST(MicroBatches, AreJoinedToWhatWasSplit) {
  for (const std::int64_t count : {1, 2, 5, 7, 12}) {
    const Batch whole({rows(count), rows(count).to(at::kDouble) * 0.5, c10::IValue(9), c10::IValue()});
    std::vector<Batch> pieces;
    std::int64_t first = 0;
    for (const std::int64_t size : split_rows(count, 4)) {
      pieces.push_back(slice(whole, first, size));
      first += size;
    }
    const Batch joined = join(pieces);
    EXPECT_TRUE(joined.tuple);
    EXPECT_TRUE(joined.members[0].toTensor().equal(whole.members[0].toTensor()));
    EXPECT_TRUE(joined.members[1].toTensor().equal(whole.members[1].toTensor()));
    EXPECT_EQ(joined.members[2].toInt(), 9);
    EXPECT_TRUE(joined.members[3].isNone());
  }
}

TEST(MicroBatches, StackWhatHasNoRows) {
  const Batch joined = join({Batch(at::scalar_tensor(1.0)), Batch(at::scalar_tensor(2.0))});
  EXPECT_TRUE(joined.tensor().equal(at::tensor({1.0, 2.0}, at::kFloat)));
  EXPECT_EQ(join({Batch(at::scalar_tensor(1.0))}).tensor().dim(), 0) << "one alone stays what it is";
}

TEST(MicroBatches, ThatDoNotFitAreNotJoined) {
  EXPECT_THAT(invalid_text([] {
                join({Batch({rows(1), rows(1)}), Batch({c10::IValue(rows(1))})});
              }),
              HasSubstr("micro-batches 0 and 1 cannot be joined"));
  EXPECT_THAT(invalid_text([] {
                join({Batch({rows(1), rows(1)}), Batch({rows(1), rows(1)}), Batch({rows(1), c10::IValue()})});
              }),
              HasSubstr("micro-batches 0 and 2"));
  EXPECT_EQ(join({}).size(), 0u);
}

TEST(MicroBatches, WithDifferentNumbersAreNotJoined) {
  const auto with = [](const c10::IValue& value) { return Batch({rows(1), value}); };
  const auto text_of = [&](const c10::IValue& other) {
    return invalid_text([&] { join({with(3), with(3), with(other)}); });
  };
  for (const c10::IValue& other : {c10::IValue(4), c10::IValue(3.0), c10::IValue(true), c10::IValue()}) {
    EXPECT_THAT(text_of(other), HasSubstr("member 1 of the output is not a tensor and differs between "
                                          "micro-batches 0 and 2"));
  }
  EXPECT_EQ(join({with(3), with(3)}).members[1].toInt(), 3);
  EXPECT_TRUE(std::isnan(join({with(NAN), with(NAN)}).members[1].toDouble()));
}

}  // namespace
}  // namespace torchspan::pipeline::micro_batches_test
