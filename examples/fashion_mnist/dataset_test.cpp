#include "fashion_mnist/dataset.h"

#include <filesystem>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>

#include "fashion_mnist/idx.h"
#include "fashion_mnist/synthetic.h"
#include "tests/support/processes.h"

namespace fashion_mnist::dataset_test {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

class DatasetFiles : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }
  static std::string error_of(const std::function<void()>& body) {
    try {
      body();
    } catch (const torchspan::Error& error) {
      EXPECT_EQ(error.kind(), torchspan::ErrorKind::kInvalid);
      return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return {};
  }
  std::string load_error() const {
    return error_of([this] { load(folder_.path(), Split::kTrain); });
  }

  torchspan::testing::TemporaryFolder folder_;
  const std::string images_ = path("train-images-idx3-ubyte.gz"),
                    labels_ = path("train-labels-idx1-ubyte.gz");
};

TEST_F(DatasetFiles, AreReadZippedOrNot) {
  write_dataset(folder_.path(), 30, 20);
  const Dataset zipped = load(folder_.path(), Split::kTrain);
  EXPECT_EQ(zipped.size(), 30);
  EXPECT_EQ(load(folder_.path(), Split::kTest).size(), 20);
  for (const auto& file : {images_, labels_}) {
    const IdxArray array = read_idx(file, file == images_ ? 3 : 1);
    write_file(file.substr(0, file.size() - 3),
               idx_bytes({array.sizes.begin(), array.sizes.end()}, array.bytes));
    std::filesystem::remove(file);
  }
  const Dataset plain = load(folder_.path(), Split::kTrain);
  EXPECT_TRUE(plain.images.equal(zipped.images));
  EXPECT_TRUE(plain.labels.equal(zipped.labels));
  EXPECT_EQ(plain.labels[13].item<int>(), 3);
  EXPECT_EQ(plain.images[13][8][0].item<int>(), 213);
}

TEST_F(DatasetFiles, NameTheMissingFileAndGiveAdvice) {
  EXPECT_THAT(load_error(),
              AllOf(HasSubstr(images_), HasSubstr("No such file"),
                    HasSubstr("apt-get install --reinstall dataset-fashion-mnist"), HasSubstr("--data DIR")));
}

TEST_F(DatasetFiles, AreRefusedWhereverAPlainFileIsCut) {
  const Raw whole = idx_bytes({2, 3}, {1, 2, 3, 4, 5, 6});
  write_file(images_, whole);
  EXPECT_EQ(read_idx(images_, 2).bytes, (Raw{1, 2, 3, 4, 5, 6}));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE("cut to " + std::to_string(size) + " bytes");
    write_file(images_, Raw(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    EXPECT_THAT(error_of([&] { read_idx(images_, 2); }), AllOf(HasSubstr(images_), HasSubstr("truncated")));
  }
}

TEST_F(DatasetFiles, AreRefusedWhereverAZippedFileIsCut) {
  write_dataset(folder_.path(), 3, 3);
  const Raw whole = read_file(images_);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    SCOPED_TRACE("cut to " + std::to_string(size) + " bytes");
    write_file(images_, Raw(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    EXPECT_THAT(load_error(), AllOf(HasSubstr(images_), HasSubstr("truncated")));
  }
}

TEST_F(DatasetFiles, AreRefusedWhenAByteWasFlipped) {
  write_dataset(folder_.path(), 3, 3);
  Raw raw = read_file(images_);
  raw[raw.size() / 2] ^= 0x10;
  write_file(images_, raw);
  EXPECT_THAT(load_error(), AllOf(HasSubstr(images_), HasSubstr("damaged")));
}

TEST_F(DatasetFiles, AreRefusedWhenTheirMagicIsAnother) {
  write_dataset(folder_.path(), 3, 3);
  std::filesystem::copy_file(labels_, images_, std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT(load_error(), AllOf(HasSubstr(images_), HasSubstr("00 00 08 01"), HasSubstr("00 00 08 03")));
}

TEST_F(DatasetFiles, AreRefusedWhenLongerThanTheirHeaderSays) {
  write_zipped(images_, idx_bytes({2}, {1, 2, 3}));
  EXPECT_THAT(error_of([&] { read_idx(images_, 1); }),
              AllOf(HasSubstr("too long"), HasSubstr("says 2 elements, and 3 follow")));
}

TEST_F(DatasetFiles, AreRejectedWhenTheyClaimMoreThanMemoryHolds) {
  write_zipped(images_, idx_bytes({0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF}, {1}));
  EXPECT_THAT(load_error(), AllOf(HasSubstr("truncated"), HasSubstr("4294967295 x 4294967295 x 4294967295")));
  write_zipped(images_, idx_bytes({1u << 31, 1u << 31, 4}, {}));  // 2^64 elements, which is 0 in 64 bits
  EXPECT_THAT(load_error(), HasSubstr("truncated"));
}

TEST_F(DatasetFiles, AreRefusedWhenTheirCountsDisagree) {
  write_split(folder_.path(), "train", 3);
  write_zipped(labels_, idx_bytes({2}, {0, 1}));
  EXPECT_THAT(load_error(), AllOf(HasSubstr("3 images"), HasSubstr("2 labels"), HasSubstr("same copy")));
}

TEST_F(DatasetFiles, AreRefusedWhenTheyAreOfAnotherDataSet) {
  write_zipped(labels_, idx_bytes({1}, {0}));
  write_zipped(images_, idx_bytes({1, 2, 2}, {0, 1, 2, 3}));
  EXPECT_THAT(load_error(), AllOf(HasSubstr("2 x 2 pixels"), HasSubstr("28 x 28")));
  write_zipped(images_, idx_bytes({1, 28, 28}, Raw(28 * 28)));
  write_zipped(labels_, idx_bytes({1}, {10}));
  EXPECT_THAT(load_error(), AllOf(HasSubstr(labels_), HasSubstr("the label 10")));
  write_zipped(images_, idx_bytes({0, 28, 28}, {}));
  write_zipped(labels_, idx_bytes({0}, {}));
  EXPECT_THAT(load_error(), HasSubstr("no images"));
}

TEST(Dataset, OfTheDebianPackageIsTheOneThatWasPublished) {
  if (!std::filesystem::exists(kDefaultFolder)) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  for (const auto& [split, count] : {std::pair{Split::kTrain, 60000}, std::pair{Split::kTest, 10000}}) {
    const Dataset dataset = load(kDefaultFolder, split);
    EXPECT_EQ(dataset.size(), count);
    EXPECT_TRUE(dataset.labels.bincount().eq(count / 10).all().item<bool>());
    const at::Tensor pixels = dataset.batch(torch::arange(dataset.size())).images;
    EXPECT_NEAR(pixels.mean().item<double>(), 0, 0.01);
    EXPECT_NEAR(pixels.std().item<double>(), 1, 0.01);
  }
}

TEST(Dataset, GivesNormalizedBatchesOfThePositionsAskedFor) {
  Dataset dataset{torch::zeros({4, kSide, kSide}, torch::kByte), torch::arange(4)};
  dataset.images[2].fill_(255);
  const Batch batch = dataset.batch(torch::tensor({2, 0, 2}, torch::kLong));
  EXPECT_EQ(batch.size(), 3);
  EXPECT_EQ(batch.images.sizes(), (std::vector<std::int64_t>{3, 1, kSide, kSide}));
  EXPECT_TRUE(batch.labels.equal(torch::tensor({2, 0, 2}, torch::kLong)));
  EXPECT_NEAR(batch.images[0][0][0][0].item<double>(), (1 - 0.2860) / 0.3530, 1e-6);
  EXPECT_NEAR(batch.images[1][0][27][27].item<double>(), -0.2860 / 0.3530, 1e-6);
}

TEST(Dataset, IsCutToItsFirstImages) {
  const Dataset dataset{torch::zeros({4, kSide, kSide}, torch::kByte), torch::arange(4)};
  EXPECT_TRUE(dataset.first(2).labels.equal(torch::arange(2)));
  EXPECT_EQ(dataset.first(9).size(), 4);
}

TEST(Batches, CoverEveryPositionOnceAndEndWithTheRest) {
  for (const auto& batches : {batches_in_order(10, 4), shuffled_batches(10, 4, 7)}) {
    ASSERT_EQ(batches.size(), 3u);
    EXPECT_EQ(batches[1].size(0), 4);
    EXPECT_EQ(batches[2].size(0), 2);
    EXPECT_TRUE(std::get<0>(torch::cat(batches).sort()).equal(torch::arange(10)));
  }
}

TEST(Batches, AreShuffledByTheirSeedAlone) {
  const at::Tensor first = torch::cat(shuffled_batches(100, 7, 1));
  torch::manual_seed(5);
  torch::rand({3});
  EXPECT_TRUE(torch::cat(shuffled_batches(100, 9, 1)).equal(first));
  EXPECT_FALSE(torch::cat(shuffled_batches(100, 7, 2)).equal(first));
  EXPECT_FALSE(first.equal(torch::arange(100)));
}

}  // namespace
}  // namespace fashion_mnist::dataset_test
