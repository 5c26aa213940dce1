// Data-parallel training on devices, over shared device memory and over NCCL; on stand-in devices, NCCL is the fake one.
// The checker of stand-ins finds accesses that no stream orders, and counts how often the host waits for the device.
#include <cstdlib>
#include <gmock/gmock.h>
#include <optional>

#include <torch/torch.h>

#include <torchspan/data_parallel.h>

#include "data_parallel/toy_model.h"
#include "tests/support/cluster_main.h"
#include "tests/support/device_group.h"

namespace torchspan::device_training_test {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using collective::BackendKind;
using collective::Group;
using data_parallel::DataParallelOptions;
using data_parallel::Parameter;
using data_parallel::Reducer;
using Tensors = std::vector<at::Tensor>;
namespace toy = data_parallel::testing;

std::string prefix_of(BackendKind kind) { return kind == BackendKind::kNccl ? "nccl_" : "cuda_ipc_"; }
int ranks_of(BackendKind kind) { return kind == BackendKind::kNccl && !on_cuda() ? 3 : 2; }

void on_group(BackendKind kind, const std::function<void(Group&, Executor&)>& body, int device = 0) {
  const bool nccl = kind == BackendKind::kNccl;
  collective::GroupOptions options = nccl ? nccl_options() : ipc_options();
  options.device = test_device(device);
  with_device_group(options, nccl ? nccl_services() : ipc_services(), body);
}

Tensors leaves_on(c10::Device device) {
  const std::vector<std::vector<std::int64_t>> shapes{{3, 4}, {7}, {2, 2, 2}, {5000}};
  Tensors leaves;
  for (const auto& shape : shapes)
    leaves.push_back(toy::leaf(shape).detach().to(device).set_requires_grad(true));
  return leaves;
}

at::Tensor part_of_loss(const Tensors& parameters, std::size_t i, int rank, int step) {
  const double factor = 1 + rank + 0.5 * step + 0.1 * static_cast<double>(i);
  return (parameters[i] * factor).sin().sum().to(at::kDouble);
}
at::Tensor device_loss(const Tensors& parameters, int rank, int step, std::size_t from = 0,
                       std::size_t to = 4) {
  at::Tensor loss = part_of_loss(parameters, from, rank, step);
  for (std::size_t i = from + 1; i < to; ++i) loss = loss + part_of_loss(parameters, i, rank, step);
  return loss;
}

Tensors on_cpu(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().cpu());
  return copies;
}

void require_averages(const Tensors& parameters, const Tensors& wanted, double tolerance,
                      std::size_t from = 0) {
  for (std::size_t i = from; i < parameters.size(); ++i) {
    require(parameters[i].grad().defined(), "there is a gradient " + std::to_string(i));
    const at::Tensor got = parameters[i].grad().cpu().to(at::kDouble);
    require(at::allclose(got, wanted[i], tolerance, tolerance),
            "the average of parameter " + std::to_string(i));
  }
}

void require_no_races() {
  for (const std::string& race : StandInStreams::get().take_races()) require(false, "no race: " + race);
}

/// Two passes fill one bucket. What the program does to gradients between them does not count.
void reduces_over_two_passes(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor&) {
    const Tensors parameters = leaves_on(test_device(0));
    Reducer reducer(toy::named(parameters), group,
                    {.gradient_as_bucket_view = false, .partial_backward = true});
    for (int step = 0; step < 3; ++step) {
      toy::zero(parameters, true);
      const Tensors wanted = toy::expected(on_cpu(parameters), group.size(), step);
      const Tensors outputs =
          reducer.prepare_for_backward({device_loss(parameters, group.rank(), step, 0, 2),
                                        device_loss(parameters, group.rank(), step, 2, 4)});
      outputs[0].backward();
      parameters[0].mutable_grad().detach().add_(100);
      outputs[1].backward();
      require_averages(parameters, wanted, 1e-5);
    }
    require_no_races();
  });
}

void reduces(BackendKind kind, const DataParallelOptions& options, int device = 0) {
  const auto body = [&](Group& group, Executor&) {
    const Tensors parameters = leaves_on(test_device(device));
    Reducer reducer(toy::named(parameters), group, options);
    for (int step = 0; step < 4; ++step) {
      toy::zero(parameters, step % 2 == 0);
      const Tensors wanted = toy::expected(on_cpu(parameters), group.size(), step);
      toy::step(reducer, device_loss(parameters, group.rank(), step));
      require_averages(parameters, wanted, 1e-5);
    }
    require_no_races();
  };
  on_group(kind, body, device);
}

/// No rank uses the first parameter, which stays without a gradient, and rank 1 does not use the last one.
void leaves_parameters_unused(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor&) {
    const Tensors parameters = leaves_on(test_device(0));
    Reducer reducer(toy::named(parameters), group, {.bucket_cap_mb = 0.01, .find_unused_parameters = true});
    for (int step = 0; step < 4; ++step) {
      toy::zero(parameters, true);
      Tensors wanted = toy::expected(on_cpu(parameters), group.size(), step);
      const Tensors copies = on_cpu(parameters);
      copies[3].set_requires_grad(true);
      part_of_loss(copies, 3, 1, step).backward();
      wanted[3] = wanted[3] - copies[3].grad().to(at::kDouble) / group.size();
      toy::step(reducer, device_loss(parameters, group.rank(), step, 1, group.rank() == 1 ? 3 : 4));
      require(!parameters[0].grad().defined(), "a parameter that no rank uses has no gradient");
      require_averages(parameters, wanted, 1e-5, 1);
    }
    require_no_races();
  });
}

/// Two backward passes for each reduction, of which the first one stays on this rank.
void accumulates(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor&) {
    const Tensors parameters = leaves_on(test_device(0));
    Reducer reducer(toy::named(parameters), group, {.bucket_cap_mb = 0.01});
    for (int step = 0; step < 4; ++step) {
      toy::zero(parameters, step % 2 == 0);
      Tensors wanted = toy::expected(on_cpu(parameters), group.size(), step);
      const Tensors second = toy::expected(on_cpu(parameters), group.size(), step + 10);
      for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] = wanted[i] + second[i];
      toy::step(reducer, device_loss(parameters, group.rank(), step), {.synchronize = false});
      toy::step(reducer, device_loss(parameters, group.rank(), step + 10));
      require_averages(parameters, wanted, 1e-5);
    }
    require_no_races();
  });
}

/// Most threads have another current device, on which CUDA would make a context if they used events there. From 2.7 on,
/// LibTorch's engine uses events of its own on stand-in devices.
void reduces_on_the_second_device(BackendKind kind) {
  reduces(kind, {.bucket_cap_mb = 0.01, .first_bucket_mb = 0.0001}, 1);
#ifndef TORCHSPAN_STAND_IN_IS_ACCELERATOR
  const auto stray = StandInStreams::get().stray_event_calls();
  require(stray == 0, std::to_string(stray) + " calls for events on threads with another current device");
#endif
}

void compresses(BackendKind kind, bool half) {
  on_group(kind, [&](Group& group, Executor&) {
    const Tensors parameters = leaves_on(test_device(0));
    Reducer reducer(toy::named(parameters), group, {.bucket_cap_mb = 0.01});
    reducer.register_comm_hook(
        half ? data_parallel::fp16_compress_hook() : data_parallel::bf16_compress_hook(), "hook");
    for (int step = 0; step < 3; ++step) {
      toy::zero(parameters, false);
      const Tensors wanted = toy::expected(on_cpu(parameters), group.size(), step);
      toy::step(reducer, device_loss(parameters, group.rank(), step));
      require_averages(parameters, wanted, half ? 5e-3 : 4e-2);
    }
    require_no_races();
  });
}

/// A model whose parts run on two streams: their gradients come from these streams.
void reduces_from_two_streams(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor&) {
    const c10::impl::VirtualGuardImpl guard(test_device(0).type());
    const c10::Stream own = guard.getStream(test_device(0)),
                      side = guard.getStreamFromGlobalPool(test_device(0));
    const auto order = [](const c10::Stream& later, const c10::Stream& earlier) {
      c10::Event event(test_device(0).type());
      event.record(earlier);
      event.block(later);
    };
    const Tensors parameters = leaves_on(test_device(0));
    order(side, own);
    {
      const c10::StreamGuard on_side(side);  // the leaf nodes of these parameters run there
      for (std::size_t i = 2; i < 4; ++i) torch::autograd::impl::grad_accumulator(parameters[i]);
    }
    Reducer reducer(toy::named(parameters), group, {});
    for (int step = 0; step < 3; ++step) {
      toy::zero(parameters, true);
      const Tensors wanted = toy::expected(on_cpu(parameters), group.size(), step);
      at::Tensor second;
      order(side, own);
      {
        const c10::StreamGuard on_side(side);
        second = device_loss(parameters, group.rank(), step, 2, 4);
      }
      order(own, side);
      toy::step(reducer, device_loss(parameters, group.rank(), step, 0, 2) + second);
      require_averages(parameters, wanted, 1e-5);
    }
    // LibTorch's engine has streams for CUDA only: it frees memory of the side stream without order.
  });
}

/// Counts waits of the host in forward, backward and the reduction: plain, with a hook, with accumulation, and with a
/// parameter that rank 1 does not use.
void never_waits(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor&) {
    for (const std::string mode : {"plain", "fp16", "accumulation", "unused"}) {
      const Tensors parameters = leaves_on(test_device(0));
      Reducer reducer(toy::named(parameters), group,
                      {.bucket_cap_mb = 0.01, .find_unused_parameters = mode == "unused"});
      if (mode == "fp16") reducer.register_comm_hook(data_parallel::fp16_compress_hook(), "fp16");
      const std::size_t used = mode == "unused" && group.rank() == 1 ? 3 : 4;
      for (int step = 0; step < 6; ++step) {
        if (step == 3) StandInStreams::get().reset();  // the first ones rebuild buckets
        toy::zero(parameters, false);
        if (mode == "accumulation")
          toy::step(reducer, device_loss(parameters, group.rank(), step), {.synchronize = false});
        toy::step(reducer, device_loss(parameters, group.rank(), step, 0, used));
      }
      const auto waits = StandInStreams::get().host_waits();
      require(waits == 0, mode + ": the host never waits, but it waited " + std::to_string(waits) + " times");
    }
  });
}

/// After the first steps, a step creates no event.
void reuses_events(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor&) {
    const Tensors parameters = leaves_on(test_device(0));
    Reducer reducer(toy::named(parameters), group, {.bucket_cap_mb = 0.01, .first_bucket_mb = 0.0001});
    const auto train = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        toy::zero(parameters, false);
        toy::step(reducer, device_loss(parameters, group.rank(), step));
      }
      return StandInStreams::get().events_made();
    };
    const std::size_t before = train(10);
    const std::size_t made = train(40) - before;
    // More may be in use at once than before, but not one in each step.
    require(made < 20, "40 steps reuse events, but they created " + std::to_string(made));
  });
}

at::Tensor random(at::IntArrayRef sizes, int seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed)), at::kFloat);
}
at::Tensor batch_of(int rank, int step) { return random({4, 6}, 100 + 10 * step + rank); }

/// Two layers, made on a device: LibTorch 1.13 cannot move modules to the stand-in device.
struct NetImpl : torch::nn::Module {
  NetImpl(int seed, c10::Device device) {
    first = register_parameter("first", random({6, 5}, seed).to(device));
    second = register_parameter("second", random({5, 2}, seed + 1).to(device));
    mean = register_buffer("mean", random({2}, seed + 2).to(device));
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(first).tanh().matmul(second) - mean; }
  at::Tensor first, second, mean;
};
TORCH_MODULE(Net);

/// The whole module, with an optimizer; the ranks start from different values.
void trains_a_module(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor&) {
    Net alone(7, c10::kCPU), net(7 + 10 * group.rank(), test_device(0));
    DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 0.0001});
    torch::optim::SGD ours(net->parameters(), 0.1), theirs(alone->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      ours.zero_grad();
      theirs.zero_grad();
      ddp.forward(batch_of(group.rank(), step).to(test_device(0))).pow(2).sum().backward();
      for (int rank = 0; rank < group.size(); ++rank)
        (alone->forward(batch_of(rank, step)).pow(2).sum() / group.size()).backward();
      ours.step();
      theirs.step();
    }
    const auto got = net->parameters(), wanted = alone->parameters();
    for (std::size_t i = 0; i < got.size(); ++i)
      require(at::allclose(got[i].cpu(), wanted[i], 1e-4, 1e-5), "parameter " + std::to_string(i));
    require_no_races();
  });
}

void require_error(const std::vector<std::string>& words, const std::function<void()>& call) {
  const std::string text = toy::error_text(call);
  for (const std::string& word : words) require(text.find(word) != std::string::npos, word + " in: " + text);
}

void refuses_several_devices(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor&) {
    const Tensors parameters{toy::leaf({3}).detach().to(test_device(0)).set_requires_grad(true),
                             toy::leaf({3}).detach().to(test_device(group.rank())).set_requires_grad(true)};
    require_error({"rank 1 cannot begin", "'p1' is on " + test_device(1).str(),
                   "'p0' is on " + test_device(0).str(), "one process for each device"},
                  [&] { Reducer reducer(toy::named(parameters), group, {}); });
    const Tensors elsewhere{toy::leaf({3}).detach().to(test_device(1)).set_requires_grad(true)};
    require_error({"rank 0 cannot begin", "'p0' is on " + test_device(1).str(), "GroupOptions::device"},
                  [&] { Reducer reducer(toy::named(elsewhere), group, {}); });
    const c10::Device mixed = group.rank() == 0 ? test_device(0) : c10::Device(c10::kCPU);
    const Tensors partly{toy::leaf({3}).detach().to(mixed).set_requires_grad(true)};
    require_error({"rank 1", "'p0' is", "cpu"}, [&] { Reducer reducer(toy::named(partly), group, {}); });
  });
}

/// A rank dies between two steps; the other one names it, and its host does not hang.
void survivor_names_the_dead(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor&) {
    const Tensors parameters = leaves_on(test_device(0));
    Reducer reducer(toy::named(parameters), group, {});
    for (int step = 0;; ++step) {
      if (step == 2 && group.rank() == 1) ::_exit(0);
      toy::zero(parameters, true);
      if (step < 2) {
        toy::step(reducer, device_loss(parameters, group.rank(), step));
        continue;
      }
      require_error({"worker1"}, [&] { toy::step(reducer, device_loss(parameters, group.rank(), step)); });
      ::_exit(0);  // the world is broken; there is nothing to leave
    }
  });
}

/// A rank dies while NCCL runs a bucket's all-reduce. The others name it, and can destroy what they have.
void dies_in_an_all_reduce(BackendKind kind) {
  on_group(kind, [&](Group& group, Executor& executor) {
    const Tensors parameters = leaves_on(test_device(0));
    const DataParallelOptions options{.bucket_cap_mb = 0.01, .first_bucket_mb = 0.0001};
    std::optional<Reducer> reducer(std::in_place, toy::named(parameters), group, options);
    for (int step = 0; step < 2; ++step) {
      toy::zero(parameters, true);
      toy::step(*reducer, device_loss(parameters, group.rank(), step));
    }
    require(reducer->stats().bucket_bytes.size() > 1, "there are several buckets");
    const FakeNccl faults;
    if (group.rank() == 1) faults.set("die", 2);  // in the second bucket
    toy::zero(parameters, true);
    const TimePoint began = executor.now();
    require_error({"worker1"}, [&] { toy::step(*reducer, device_loss(parameters, group.rank(), 2)); });
    require(group.rank() != 1, "rank 1 has died");
    reducer.reset();
    require(executor.now() - began < std::chrono::seconds(30), "the others learn of the death at once");
    end_rank(group.rank(), executor);
  });
}

const std::map<std::string, Scenario>& scenarios() {
  static const std::map<std::string, Scenario> all = [] {
    std::map<std::string, Scenario> made;
    for (const BackendKind kind : {BackendKind::kCudaIpc, BackendKind::kNccl}) {
      const std::map<std::string, std::function<void(BackendKind)>> of_both{
          {"views", [](auto over) { reduces(over, {.bucket_cap_mb = 0.01, .first_bucket_mb = 0.0001}); }},
          {"copies",
           [](auto over) { reduces(over, {.first_bucket_mb = 0.0001, .gradient_as_bucket_view = false}); }},
          {"second_device", reduces_on_the_second_device},
          {"finds_unused",
           [](auto over) { reduces(over, {.bucket_cap_mb = 0.01, .find_unused_parameters = true}); }},
          {"unused", leaves_parameters_unused},
          {"accumulation", accumulates},
          {"two_passes", reduces_over_two_passes},
          {"static_graph", [](auto over) { reduces(over, {.bucket_cap_mb = 0.01, .static_graph = true}); }},
          {"fp16", [](auto over) { compresses(over, true); }},
          {"bf16", [](auto over) { compresses(over, false); }},
          {"two_streams", reduces_from_two_streams},
          {"never_waits", never_waits},
          {"reuses_events", reuses_events},
          {"module", trains_a_module}};
      for (const auto& [name, scenario] : of_both) {
        made[prefix_of(kind) + name] = [kind, scenario = scenario] { scenario(kind); };
      }
    }
    made["cuda_ipc_several_devices"] = [] { refuses_several_devices(BackendKind::kCudaIpc); };
    made["cuda_ipc_death"] = [] { survivor_names_the_dead(BackendKind::kCudaIpc); };
    made["nccl_death_in_all_reduce"] = [] { dies_in_an_all_reduce(BackendKind::kNccl); };
    return made;
  }();
  return all;
}

class DeviceTraining : public ::testing::TestWithParam<std::string> {};
std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& [name, scenario] : scenarios()) all.push_back(name);
  return all;
}
INSTANTIATE_TEST_SUITE_P(Scenarios, DeviceTraining, ::testing::ValuesIn(names()),
                         [](const auto& info) { return info.param; });

/// Why the scenario cannot run on these devices; empty if it can.
std::string missing_for(const std::string& scenario, BackendKind kind) {
  const auto is = [&](const char* name) { return scenario == prefix_of(kind) + name; };
#ifdef TORCHSPAN_STAND_IN_IS_ACCELERATOR
  if (is("reuses_events"))
    return "since 2.7, LibTorch's engine creates events on stand-in devices, and the test would count them";
#endif
  const bool nccl = kind == BackendKind::kNccl;
  const int devices = is("several_devices") || is("second_device") ? 2 : 1;
  // A process of a group over NCCL sees one GPU only.
  const bool needs_stand_ins =
      is("never_waits") || is("reuses_events") || is("death_in_all_reduce") || (nccl && is("second_device"));
  const std::string missing = TestDevices::missing(devices, needs_stand_ins);
  return missing.empty() && nccl ? nccl_missing(ranks_of(kind)) : missing;
}

// peer: ddp `backend_1gpu_module`, `DistributedDataParallel_non_default_stream`, `ddp_device`: same, over stand-in
//   devices and the fake NCCL: three processes against one
// peer: ddp `backend_{2,4}gpu_module`: differs: parameters on several devices of one process are rejected
TEST_P(DeviceTraining, OfSeveralProcessesIsRight) {
  const bool nccl = GetParam().starts_with(prefix_of(BackendKind::kNccl));
  const BackendKind kind = nccl ? BackendKind::kNccl : BackendKind::kCudaIpc;
  if (const auto missing = missing_for(GetParam(), kind); !missing.empty()) GTEST_SKIP() << missing;
  const int ranks = ranks_of(kind);
  ProcessWorld world(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    world.start(rank, "device_training." + GetParam(),
                nccl ? own_gpu(rank, ranks) : std::map<std::string, std::string>());
  }
  expect_all_end_well(world);
}

const testing::Scenarios kScenarios("device_training", scenarios());

}  // namespace
}  // namespace torchspan::device_training_test
