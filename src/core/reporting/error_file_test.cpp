#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <stdexcept>

#include <torchspan/core/error.h>

namespace torchspan::error_file_test {
namespace {

class ErrorFile : public ::testing::Test {
 protected:
  ErrorFile() {
    std::string pattern = (std::filesystem::temp_directory_path() / "torchspan-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~ErrorFile() override { std::filesystem::remove_all(folder_); }
  std::string text(const std::string& path) const {
    std::ifstream stream(path);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::string folder_;
};

TEST_F(ErrorFile, HasTheFormOfTorchrun) {
  const auto error = std::make_exception_ptr(std::runtime_error("bad \"batch\"\n\x01\xff\\"));
  EXPECT_EQ(encode_error_file(error, 1700000000),
            R"({"message": {"message": "std::runtime_error: bad \"batch\"\n\u0001�\\", )"
            R"("extraInfo": {"py_callstack": "", "timestamp": "1700000000"}}})"
            "\n");
}

TEST_F(ErrorFile, ListsTheRemoteCalls) {
  Error error(ErrorKind::kRemoteFailure, "the call failed");
  error.with_frame({"worker1", "train_step", "std::out_of_range", "index 9"});
  EXPECT_NE(encode_error_file(std::make_exception_ptr(error), 1)
                .find(R"(\n  on worker1, in train_step: std::out_of_range: index 9)"),
            std::string::npos);
}

TEST_F(ErrorFile, KeepsTheFirstError) {
  const std::string path = folder_ + "/error.json";
  write_error_file(path, std::make_exception_ptr(std::runtime_error("first")));
  write_error_file(path, std::make_exception_ptr(std::runtime_error("second")));
  EXPECT_NE(text(path).find("first"), std::string::npos);
  EXPECT_EQ(text(path).find("second"), std::string::npos);
  const auto all = std::filesystem::directory_iterator(folder_);
  EXPECT_EQ(std::distance(begin(all), end(all)), 1) << "a temporary file is left";
}

TEST_F(ErrorFile, IsNotWrittenWhereItCannotBe) {
  const auto error = std::make_exception_ptr(std::runtime_error("x"));
  write_error_file("", error);
  write_error_file(folder_ + "/none/error.json", error);
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

}  // namespace
}  // namespace torchspan::error_file_test
