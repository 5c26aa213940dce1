// Tests ElasticOptions. Training itself needs processes that die: tests/cluster/survival_test.cpp.
#include <gtest/gtest.h>
#include <string>

#include <torchspan/elastic.h>

#include "tests/support/errors.h"

namespace torchspan::elastic::training_test {
namespace {

using torchspan::testing::error_of;

TEST(ElasticOptions, NameTheWrongField) {
  const auto message = [](const auto& change) {
    ElasticOptions options;
    options.samples = options.batch = 10;
    options.validate();
    change(options);
    return error_of([&] { options.validate(); }).message();
  };
  EXPECT_NE(message([](auto& options) { options.samples = 0; }).find("samples is 0"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.batch = -1; }).find("batch is -1"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.min_ranks = 0; }).find("min_ranks"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.start.next = 10; }).find("start.next"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.group.ranks = {0}; }).find("group.ranks"), std::string::npos);
  EXPECT_NE(message([](auto& options) { options.step_timeout = {}; }).find("step_timeout"),
            std::string::npos);
}

}  // namespace
}  // namespace torchspan::elastic::training_test
