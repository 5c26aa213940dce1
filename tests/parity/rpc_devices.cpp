// Tensors on devices other than the CPU: their device on the other worker, and what happens if no map names
// one. The devices are stand-ins for GPUs from tests/support/stand_in_device.h.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tests/parity/rpc_world.h"
#include "tests/support/stand_in_device.h"

namespace torchspan::rpc_devices {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

const c10::Device kCpu(c10::kCPU);
using Maps = std::map<std::string, DeviceMap>;

/// The sum, on device `to`; both arguments must be on device `from`.
at::Tensor add_there(const at::Tensor& a, const at::Tensor& b, const c10::Device& from,
                     const c10::Device& to) {
  if (a.device() != from || b.device() != from)
    throw std::runtime_error("arguments on " + a.device().str() + " and " + b.device().str());
  return (a + b).to(to);
}
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) devices.push_back(tensor.device());
  return devices;
}
at::Tensor made_on(const c10::Device& device) { return at::full({2}, 5.0).to(device); }
/// Calls the next worker with its arguments.
at::Tensor through(Worker& worker, const at::Tensor& x);
at::Tensor row_of(const at::Tensor& x, std::int64_t row) { return x[row]; }

constexpr Function<add_there> kAddThere{"add_there"};
constexpr Function<devices_of> kDevicesOf{"devices_of"};
constexpr Function<made_on> kMadeOn{"made_on"};
constexpr Function<through> kThrough{"through"};
constexpr Function<row_of> kRowOf{"row_of"};

at::Tensor through(Worker& worker, const at::Tensor& x) {
  return worker.rpc_sync("worker2", kMadeOn, x.device()) + x;
}

/// Worker r has maps[r].
ClusterOptions world(const std::vector<Maps>& maps, int workers = 2) {
  ClusterOptions options =
      world_of(workers, FunctionTable().add(kAddThere, kDevicesOf, kMadeOn, kThrough, kRowOf));
  options.adjust = [maps](int rank, WorkerPlan& plan) {
    if (static_cast<std::size_t>(rank) < maps.size()) plan.service.device_maps = maps[rank];
  };
  return options;
}
Maps to_worker1(std::vector<DeviceMap::Pair> pairs) { return {{"worker1", DeviceMap(std::move(pairs))}}; }

/// x_from, y_to and z_to of the peer's placement tests: the devices of the arguments here, and of the
/// arguments and the result there.
struct Placement {
  c10::Device here, there, result;
};
std::vector<Placement> placements() {
  std::vector<Placement> all;
  const std::vector<c10::Device> devices{kCpu, stand_in(0), stand_in(1)};
  for (const c10::Device& here : devices) {
    for (const c10::Device& there : devices) {
      for (const c10::Device& result : devices) all.push_back({here, there, result});
    }
  }
  return all;
}
std::string name_of(const c10::Device& device) {
  return device.is_cpu() ? "Cpu" : "Device" + std::to_string(device.index());
}

class DevicePlacement : public ::testing::TestWithParam<Placement> {};
INSTANTIATE_TEST_SUITE_P(All, DevicePlacement, ::testing::ValuesIn(placements()), [](const auto& info) {
  return name_of(info.param.here) + "To" + name_of(info.param.there) + "Result" + name_of(info.param.result);
});

/// device_map_cpu, device_map_gpu_default, device_map_gpu_mixed_… of the peer: all 27.
// peer: rpc_test.py `device_maps_{cpu,gpu}_*` (the placements), `device_maps_multi_gpu`(`_self`),
//   `device_maps_return_to_gpu`(`_self`), `device_maps_remote`, `device_map_gpu_mixed_*`: same, on a stand-in device; a worker's calls to itself need no map
TEST_P(DevicePlacement, ArgumentsGoByTheMapAndResultsByItsInverse) {
  const Placement& place = GetParam();
  std::vector<DeviceMap::Pair> pairs{{place.here, place.there}};
  // The device of the result there must map back to one here: to the same number, if the map does not say.
  c10::Device back = place.result;
  if (place.result == place.there) {
    back = place.here;
  } else if (!place.result.is_cpu()) {
    for (const c10::Device& free : {stand_in(0), stand_in(1)}) {
      if (free != place.here) back = free;
    }
    pairs.emplace_back(back, place.result);
  }
  on_first(world({to_worker1(pairs)}), [&](Worker& worker) {
    const at::Tensor a = at::arange(6, at::kDouble).view({2, 3}), b = at::full({2, 3}, 10.0, at::kDouble);
    const at::Tensor x = a.to(place.here), y = b.to(place.here);
    for (const at::Tensor& sum :
         {worker.rpc_sync("worker1", kAddThere, x, y, place.there, place.result),
          worker.rpc_async("worker1", kAddThere, x, y, place.there, place.result).wait(),
          worker.remote("worker1", kAddThere, x, y, place.there, place.result).to_here()}) {
      EXPECT_EQ(sum.device(), back);
      EXPECT_TRUE(at::equal(sum.cpu(), a + b));
    }
  });
}

/// device_maps_multi_gpu.
// peer: rpc_test.py device_maps_{cpu
TEST(RpcDevices, DeviceMapsMultiGpu) {
  on_first(world({to_worker1({{stand_in(0), stand_in(1)}, {stand_in(1), stand_in(0)}})}), [](Worker& worker) {
    const std::vector<at::Tensor> sent{at::ones({2}).to(stand_in(0)), at::ones({3}).to(stand_in(1)),
                                       at::ones({4})};
    EXPECT_EQ(worker.rpc_sync("worker1", kDevicesOf, sent),
              (std::vector<c10::Device>{stand_in(1), stand_in(0), kCpu}));
    EXPECT_EQ(worker.rpc_sync("worker1", kMadeOn, stand_in(1)).device(), stand_in(0));
    EXPECT_EQ(worker.rpc_sync("worker1", kMadeOn, stand_in(0)).device(), stand_in(1));
    EXPECT_EQ(worker.rpc_sync("worker1", kMadeOn, kCpu).device(), kCpu);
  });
}

// peer: rpc_test.py `tensor_view_as_return_value`: same, on a stand-in device
TEST(RpcDevices, TensorViewAsReturnValue) {
  on_first(world({to_worker1({{stand_in(0), stand_in(1)}})}), [](Worker& worker) {
    const at::Tensor x = at::arange(12, at::kDouble).view({3, 4});
    for (const int to : {1, 0}) {
      for (std::int64_t row = 0; row < 3; ++row) {
        const at::Tensor view = worker.rpc_sync(to, kRowOf, x.to(stand_in(0)), row);
        EXPECT_EQ(view.device(), stand_in(0));
        EXPECT_TRUE(at::equal(view.cpu(), x[row]));
      }
    }
  });
}

// peer: rpc_test.py `device_mismatch`: same: LibTorch's error on the other worker, and the connection stays
TEST(RpcDevices, DeviceMismatch) {
  on_first(world({to_worker1({{stand_in(0), stand_in(1)}, {kCpu, kCpu}})}), [](Worker& worker) {
    const at::Tensor x = at::ones({2});
    const Error error = error_of([&] { worker.rpc_sync("worker1", "aten::add", {x.to(stand_in(0)), x}); });
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("privateuseone:1"), HasSubstr("cpu"), HasSubstr("'worker1'")));
    EXPECT_EQ(worker.rpc_sync("worker1", kMadeOn, stand_in(1)).device(), stand_in(0));
  });
}

/// Operators and values behind references use the same map.
// peer: rpc_test.py device_maps_{cpu
TEST(RpcDevices, OperatorsAndFetchesGoByTheMapToo) {
  on_first(world({to_worker1({{stand_in(1), stand_in(0)}})}), [](Worker& worker) {
    const at::Tensor x = at::ones({2}).to(stand_in(1));
    const at::Tensor sum = worker.rpc_sync("worker1", "aten::add", {x, x}).toTensor();
    EXPECT_EQ(sum.device(), stand_in(1));
    const RRef<at::Tensor> kept = worker.remote("worker1", kMadeOn, stand_in(0));
    EXPECT_EQ(kept.to_here().device(), stand_in(1));
  });
}

/// device_maps_gpu_…_self_*: calls to the worker itself leave tensors on their devices, without any map.
// peer: rpc_test.py device_maps_{cpu
TEST(RpcDevices, CallsToOneselfLeaveTensorsWhereTheyAre) {
  on_first(world({}), [](Worker& worker) {
    const at::Tensor x = at::ones({2}).to(stand_in(1));
    const at::Tensor sum = worker.rpc_sync("worker0", kAddThere, x, x, stand_in(1), stand_in(0));
    EXPECT_EQ(sum.device(), stand_in(0));
  });
}

/// Each hop has a separate map: worker 1's towards worker 2 is not worker 0's.
// peer: rpc_test.py device_maps_{cpu
TEST(RpcDevices, EveryHopGoesByItsOwnMap) {
  Maps first, second;
  first["worker1"] = {{stand_in(0), stand_in(1)}};
  second["worker2"] = {{stand_in(1), stand_in(1)}};
  on_first(world({first, second}, 3), [](Worker& worker) {
    const at::Tensor y = worker.rpc_sync("worker1", kThrough, at::ones({2}).to(stand_in(0)));
    EXPECT_EQ(y.device(), stand_in(0));
    EXPECT_TRUE(at::equal(y.cpu(), at::full({2}, 6.0)));
  });
}

TEST(RpcDevices, ResultsGoByTheCallersMapNotByTheCallees) {
  const Maps there{{"worker0", DeviceMap({{stand_in(1), stand_in(1)}})}};
  on_first(world({to_worker1({{stand_in(0), stand_in(1)}}), there}), [](Worker& worker) {
    EXPECT_EQ(worker.rpc_sync("worker1", kMadeOn, stand_in(1)).device(), stand_in(0));
    EXPECT_EQ(worker.remote("worker1", kMadeOn, stand_in(1)).to_here().device(), stand_in(0));
  });
}

/// device_maps_missing_config, …_remote, …_loop: an error at once, not a timeout, and the worker continues.
// peer: rpc_test.py `device_maps_missing_config`(`_loop`, `_remote`, `_not_timeout`, `_response`, `_response_loop`,
//   `_remote_response`): better: the error names tensor, device, worker, call and call site; without any map,
//   tensors arrive on the CPU
TEST(RpcDevices, DeviceMapsMissingConfig) {
  on_first(world({to_worker1({{stand_in(0), stand_in(1)}})}), [](Worker& worker) {
    const at::Tensor lost = at::ones({2}).to(stand_in(1)), mapped = at::ones({2}).to(stand_in(0));
    const TimePoint begin = now(worker);
    for (int time = 0; time < 3; ++time) {
      const Error error =
          error_of([&] { worker.rpc_sync("worker1", kAddThere, mapped, lost, stand_in(1), kCpu); });
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("tensor 1 of 2"), HasSubstr("privateuseone:1"), HasSubstr("'worker0'"),
                        HasSubstr("worker1"), HasSubstr("add_there"), HasSubstr("rpc_devices.cpp")));
      expect_error(ErrorKind::kInvalid, "privateuseone:1",
                   [&] { worker.remote("worker1", kAddThere, mapped, lost, stand_in(1), kCpu).to_here(); });
    }
    EXPECT_LT(now(worker) - begin, std::chrono::seconds(1));
    EXPECT_TRUE(worker.rpc_sync("worker1", kAddThere, mapped, mapped, stand_in(1), kCpu).is_cpu());
  });
}

/// device_maps_missing_config_response: a result without a device for it here.
// peer: rpc_test.py device_maps_missing_config
TEST(RpcDevices, DeviceMapsMissingConfigResponse) {
  on_first(world({to_worker1({{stand_in(0), stand_in(1)}})}), [](Worker& worker) {
    for (int time = 0; time < 3; ++time) {
      const Error error = error_of([&] { worker.rpc_sync("worker1", kMadeOn, stand_in(0)); });
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("a result is on privateuseone:0 of worker 'worker1'"),
                                      HasSubstr("made_on")));
      const RRef<at::Tensor> kept = worker.remote("worker1", kMadeOn, stand_in(0));
      expect_error(ErrorKind::kInvalid, "privateuseone:0", [&] { kept.to_here(); });
    }
    EXPECT_EQ(worker.rpc_sync("worker1", kMadeOn, stand_in(1)).device(), stand_in(0));
  });
}

/// device_maps_invalid_max_remote_device: the worker without the device reports it to the caller.
// peer: rpc_test.py device_maps_wrong_worker_name
TEST(RpcDevices, DeviceMapsInvalidMaxRemoteDevice) {
  on_first(world({to_worker1({{stand_in(0), stand_in(7)}, {kCpu, c10::Device("xpu:0")}})}),
           [](Worker& worker) {
             const at::Tensor x = at::ones({2});
             for (const auto& [sent, missing] :
                  {std::pair(x.to(stand_in(0)), "this process has 2 privateuseone devices"),
                   std::pair(x, "this process has no xpu devices")}) {
               expect_error(ErrorKind::kInvalid, missing,
                            [&, x = sent] { worker.rpc_sync("worker1", kDevicesOf, std::vector{x}); });
             }
           });
}

/// Without a map tensors arrive on the CPU, including results.
TEST(RpcDevices, WithoutAMapTensorsArriveOnTheCpu) {
  on_first(world({}), [](Worker& worker) {
    EXPECT_EQ(worker.rpc_sync("worker1", kDevicesOf, std::vector{at::ones({2}).to(stand_in(1))}),
              std::vector<c10::Device>{kCpu});
    EXPECT_TRUE(worker.rpc_sync("worker1", kMadeOn, stand_in(1)).is_cpu());
  });
}

/// device_maps_many_to_one, _one_to_many, and a device without its number.
// peer: rpc_test.py device_maps_wrong_worker_name
TEST(RpcDevices, MapsAreOneToOneAndNumbered) {
  using Pairs = std::vector<DeviceMap::Pair>;
  expect_error(ErrorKind::kInvalid, "one to one", [] {
    DeviceMap(Pairs{{stand_in(0), stand_in(0)}, {stand_in(1), stand_in(0)}});
  });
  expect_error(ErrorKind::kInvalid, "one to one", [] {
    DeviceMap(Pairs{{stand_in(0), stand_in(0)}, {stand_in(0), stand_in(1)}});
  });
  expect_error(ErrorKind::kInvalid, "'cuda:0'", [] { DeviceMap(Pairs{{kCpu, c10::Device("cuda")}}); });
}

/// device_maps_wrong_worker_name, device_maps_invalid_max_local_device: the worker does not start.
// peer: rpc_test.py device_maps_wrong_worker_name, _invalid_max_local_device, _invalid_max_remote_device,
//   _many_to_one, _one_to_many, _in_options: same; a device that the peer lacks is reported at the first
//   call
TEST(RpcDevices, AWorkerWithAnInvalidMapDoesNotStart) {
  const auto start_error = [](const Maps& maps) {
    SimCluster cluster(world({maps}));
    const auto failures = cluster.try_services([](rpc::WorkerService&) {});
    return failures[0] ? to_error(failures[0]) : Error(ErrorKind::kCancelled, "it started");
  };
  EXPECT_THAT(start_error({{"worker7", DeviceMap({{stand_in(0), stand_in(0)}})}}).what(),
              AllOf(HasSubstr("'worker7'"), HasSubstr("there are worker0, worker1")));
  EXPECT_THAT(start_error(to_worker1({{stand_in(2), stand_in(0)}})).what(),
              AllOf(HasSubstr("'worker0'"), HasSubstr("privateuseone:2"),
                    HasSubstr("this process has 2 privateuseone devices")));
}

/// Both workers call the other one with tensors on devices; worker 0 has a map for worker 1 before that one exists.
// peer: rpc_test.py dynamic_rpc_existing_rank_can_communicate_with_new_rank_cuda: same, on a stand-in device
TEST(RpcDevices, AWorkerOfAnOpenWorldAndOneThatJoinsLaterUseTheirMaps) {
  ClusterOptions options = world(
      {to_worker1({{stand_in(0), stand_in(1)}}), {{"worker0", DeviceMap({{stand_in(1), stand_in(0)}})}}},
      /*workers=*/1);
  options.open = true;
  SimCluster cluster(std::move(options));
  const auto call = [](Worker& worker, const std::string& peer, c10::Device here, c10::Device there) {
    const at::Tensor ones = at::ones({2, 3}).to(here);
    const at::Tensor sum = worker.rpc_sync(peer, kAddThere, ones, ones, there, there);
    EXPECT_EQ(sum.device(), here);
    EXPECT_TRUE(at::equal(sum.cpu(), at::full({2, 3}, 2.0F)));
  };
  cluster.run([&](Worker& worker) {
    Thread joiner = cluster.start(1, 0, [&](rpc::WorkerService& service) {
      call(service.worker(), "worker0", stand_in(1), stand_in(0));
      nap(service.worker(), std::chrono::seconds(5));
      service.shutdown(cluster.executor().deadline_in(std::chrono::seconds(60)));
    });
    for (int i = 0; i < 1000 && worker.world_size() < 2; ++i) nap(worker, std::chrono::milliseconds(1));
    call(worker, "worker1", stand_in(0), stand_in(1));
    joiner.join();
  });
}

}  // namespace
}  // namespace torchspan::rpc_devices
