#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>

#include "launch/supervisor/limits.h"
#include "tests/support/processes.h"

namespace torchspan::launch::cpu_quota_test {
namespace {

class CpuQuota : public ::testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) const {
    const std::filesystem::path path = folder_.path() + "/" + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << '\n';
  }
  std::optional<int> quota() const {
    return read_cpu_quota(folder_.path() + "/root", folder_.path() + "/groups");
  }

  testing::TemporaryFolder folder_;
};

TEST_F(CpuQuota, IsAbsentWithoutLimits) {
  EXPECT_FALSE(quota());
  for (const char* groups : {"", "0::/", "0::/a/b", "1:cpu:/", "nonsense", "0:", "0::", "0::a"}) {
    write("groups", groups);
    EXPECT_FALSE(quota()) << groups;
  }
  write("groups", "0::/a/b");
  for (const char* limit : {"max 100000", "", "0 0", "-1 100000", "100000", "x y"}) {
    write("root/a/b/cpu.max", limit);
    EXPECT_FALSE(quota()) << limit;
  }
}

TEST_F(CpuQuota, IsTheLeastOfAGroupAndThoseAboveIt) {
  write("groups", "0::/a/b");
  write("root/a/b/cpu.max", "350000 100000");
  EXPECT_EQ(quota(), 4) << "rounded up";
  write("root/a/cpu.max", "100000 50000");
  EXPECT_EQ(quota(), 2);
  write("root/cpu.max",
        "1000 100000");  // a container sees its group as the root, but may have its name from outside
  EXPECT_EQ(quota(), 1);
}

TEST_F(CpuQuota, IsFoundInGroupsOfVersion1) {
  write("groups", "5:cpuset:/a\n4:cpu,cpuacct:/a\n0::/");
  write("root/cpu/a/cpu.cfs_quota_us", "-1");
  write("root/cpu/a/cpu.cfs_period_us", "100000");
  EXPECT_FALSE(quota());
  write("root/cpu/a/cpu.cfs_quota_us", "250000");
  EXPECT_EQ(quota(), 3);
}

}  // namespace
}  // namespace torchspan::launch::cpu_quota_test
