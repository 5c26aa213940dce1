#include <cstdint>
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/data.h>

#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::data::record_files_test {
namespace {

using testing::invalid_text;

class RecordFilesTest : public ::testing::Test {
 protected:
  /// Writes a file of `header` bytes and these numbers.
  std::string write(const std::string& name, std::size_t header, const std::vector<std::int32_t>& numbers) {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream file(path, std::ios::binary);
    file << std::string(header, 'h');
    file.write(reinterpret_cast<const char*>(numbers.data()),
               static_cast<std::streamsize>(numbers.size() * sizeof(std::int32_t)));
    return path;
  }
  testing::TemporaryFolder folder_;
};

TEST_F(RecordFilesTest, AreOneDataSet) {
  const RecordFiles files({write("a", 16, {1, 2, 3, 4}), write("b", 16, {5, 6})},
                          {.shape = {2}, .dtype = at::kInt, .header_bytes = 16});
  EXPECT_EQ(files.size(), 3);
  EXPECT_TRUE(
      at::equal(files.get_batch({2, 0, 1, 2}), at::tensor({5, 6, 1, 2, 3, 4, 5, 6}, at::kInt).view({4, 2})));
  EXPECT_EQ(files.get_batch({}).sizes(), at::IntArrayRef({0, 2}));
}

TEST_F(RecordFilesTest, AreWindowsOfAText) {
  const RecordFiles files({write("a", 0, {0, 1, 2, 3, 4, 5, 6, 7})},
                          {.shape = {4}, .dtype = at::kInt, .stride = 3});
  EXPECT_EQ(files.size(), 2) << "the third window ends behind the file";
  EXPECT_TRUE(
      at::equal(files.get_batch({1, 0}), at::tensor({3, 4, 5, 6, 0, 1, 2, 3}, at::kInt).view({2, 4})));
}

TEST_F(RecordFilesTest, NameWhatIsWrong) {
  const std::string file = write("a", 0, {1, 2, 3});
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const auto text = [&](const std::vector<std::string>& paths, const RecordFileOptions& options) {
    return invalid_text([&] { RecordFiles(paths, options); });
  };
  has(text({}, {}), "at least one file");
  has(text({file + "x"}, {}), "ax': No such file");
  has(text({folder_.path()}, {}), "is no file");
  has(text({file}, {.shape = {2}, .dtype = at::kInt}), "a' ends within a record");
  has(text({file}, {.shape = {4}, .dtype = at::kInt}),
      "12 bytes, less than a header of 0 and a record of 16");
  has(text({file}, {.shape = {0}}), "length of 0");
  has(text({file}, {.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40}}), "too many bytes");
  has(text({file}, {.header_bytes = -1}), "header_bytes is -1");
  has(text({file}, {.shape = {2}, .stride = 3}), "stride is 3");
  const RecordFiles files({file}, {.dtype = at::kInt});
  has(invalid_text([&] { files.get_batch({0, 3}); }), "record 3 does not exist");
  has(invalid_text([&] { files.get_batch({-1}); }), "record -1 does not exist");
  write("a", 0, {1, 2});
  has(invalid_text([&] { files.get_batch({2}); }), "a' has become shorter");
}

}  // namespace
}  // namespace torchspan::data::record_files_test
