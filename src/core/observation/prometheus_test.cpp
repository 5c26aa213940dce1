#include "core/observation/prometheus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace torchspan::prometheus_test {

using ::testing::HasSubstr;

TEST(PrometheusText, ReplacesBytesOfLabelsThatAreNotUtf8) {
  PrometheusText out({{"rank", "1"}, {"worker", "\xff"}});
  out.family("torchspan_scalar", "gauge", "Last value.");
  out.sample("", {{"tag", "\xc3\xb6 \xc3\"\\\n"}}, 1);
  EXPECT_THAT(out.text(), HasSubstr(R"(torchspan_scalar{rank="1",worker="�",tag="ö �\"\\\n"} 1)"));
}

}  // namespace torchspan::prometheus_test
