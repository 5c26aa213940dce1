#include <gtest/gtest.h>

#include <torchspan/detail/core/source_location.h>

namespace torchspan::source_location_test {
namespace {

TEST(SourceLocation, IsTheFileWithoutFoldersAndTheLine) {
  const auto here = SourceLocation::current();
  EXPECT_EQ(file_of(here.file_name()), "source_location_test.cpp");
  EXPECT_EQ(site_text(here), "source_location_test.cpp:" + std::to_string(here.line()));
}

TEST(SourceLocation, IsEmptyForAnUnknownLocation) { EXPECT_EQ(site_text({}), ""); }

}  // namespace
}  // namespace torchspan::source_location_test
