#include <gtest/gtest.h>
#include <string>

#include "pipeline/plan/replica_grid.h"

namespace torchspan::pipeline::stage_devices_test {
namespace {

using By = rpc::DevicePlace::By;

c10::Device cuda(int index) { return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)); }

TEST(StageDevices, AWorkersReportSaysWhereItsLayerRangesAre) {
  StageDevices devices;
  devices.read(3, StageDevices::line(0, cuda(1)) + StageDevices::line(4, cuda(0)));
  EXPECT_EQ(devices.of_range(3, 0).by, By::kDevice);
  EXPECT_EQ(devices.of_range(3, 0).device, cuda(1));
  EXPECT_EQ(devices.of_range(3, 4).device, cuda(0));
  EXPECT_EQ(devices.of_range(3, 1).by, By::kHost);
  EXPECT_EQ(devices.of_range(2, 0).by, By::kHost);
}

TEST(StageDevices, AWorkerHasADeviceIfAllItsLayerRangesHaveIt) {
  StageDevices devices;
  devices.read(0, StageDevices::line(0, cuda(1)) + StageDevices::line(2, cuda(1)));
  devices.read(1, StageDevices::line(1, cuda(0)) + StageDevices::line(3, cuda(1)));
  EXPECT_EQ(devices.of_worker(0).by, By::kDevice);
  EXPECT_EQ(devices.of_worker(0).device, cuda(1));
  EXPECT_EQ(devices.of_worker(1).by, By::kHost);
  EXPECT_EQ(devices.of_worker(2).by, By::kHost);
}

TEST(StageDevices, OtherLinesOfAReportAreSkipped) {
  StageDevices devices;
  const std::string shared = "4294967296\t1\tweight\tlayer 'Linear' (order 0, stage 0 on 'worker0')\n";
  const std::string faulty =
      "\n-1\n-1\t0\t\n-1\t0\tcuda:\t\n-1\t0\tabacus:0\t\n-9999999999\t0\tcuda:0\t\n-3\t0\tcuda:0";
  devices.read(0, shared + faulty + "\n" + StageDevices::line(1, cuda(0)));
  for (const int range : {0, 2}) EXPECT_EQ(devices.of_range(0, range).by, By::kHost);
  EXPECT_EQ(devices.of_range(0, 1).device, cuda(0));
}

}  // namespace
}  // namespace torchspan::pipeline::stage_devices_test
