// Checkpoints of tensors on devices, over the stand-in devices, and of generators.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <torchspan/checkpoint.h>

#include "checkpoint/rng_source.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"
#include "tests/support/stand_in_device.h"

namespace torchspan::checkpoint::device_test {
namespace {

using namespace torchspan::testing;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// The copies run late: bytes that are written before they are there would be NaN, and values of a later step if the
/// copies were not ordered before it.
TEST(DeviceCheckpoint, SaveHasTheValuesOfTheCallAndDoesNotWaitForTheDevice) {
  StandInStreams& device = StandInStreams::get();
  device.reset(/*polls=*/5);
  const TemporaryFolder folder;
  const at::Tensor values = torch::arange(1 << 16, torch::kFloat).view({256, 256});
  at::Tensor whole = values.to(stand_in(0)), turned = values.t().to(stand_in(1)), host = values.clone();
  CheckpointManager manager({.directory = folder.path(), .rng = false});
  manager.add("whole", whole);
  manager.add("turned", turned);
  manager.add("host", host);
  std::vector<at::Tensor> more(10);
  for (std::size_t i = 0; i < more.size(); ++i) {
    more[i] = values.to(stand_in(0));
    manager.add("more" + std::to_string(i), more[i]);
  }
  for (int step = 1; step <= 3; ++step) {
    const std::size_t waits = device.host_waits();
    manager.save(step);
    whole.add_(1);
    turned.add_(1);
    host.add_(1);
    if (step == 1) {
      EXPECT_LE(device.host_waits() - waits, 2) << "one wait for each device, by the writing thread";
    }
    manager.wait();
  }
  for (const at::Tensor& tensor : {whole, turned, host}) tensor.zero_();
  EXPECT_EQ(manager.restore(), 3);
  EXPECT_TRUE(at::equal(whole.cpu(), values + 2));
  EXPECT_TRUE(at::equal(turned.cpu(), values.t() + 2));
  EXPECT_TRUE(at::equal(host, values + 2));
  EXPECT_THAT(device.take_races(), IsEmpty());
  device.reset();
}

/// Tensors of several devices and dtypes, whose copies lie in several blocks of memory.
TEST(DeviceCheckpoint, TensorsWhoseCopiesAreDividedAmongBlocksAreSavedWhole) {
  StandInStreams& device = StandInStreams::get();
  device.reset(/*polls=*/5);
  const TemporaryFolder folder;
  const std::vector<at::Tensor> values = {torch::randn({300, 1000}), torch::randn({333, 500}, torch::kDouble),
                                          torch::arange(7, torch::kByte), torch::randn({100'003})};
  std::vector<at::Tensor> tensors = {values[0].t().to(stand_in(0)).t(), values[1].to(stand_in(1)),
                                     values[2].to(stand_in(0)), values[3].clone()};
  CheckpointManager manager({.directory = folder.path(), .rng = false});
  for (std::size_t i = 0; i < tensors.size(); ++i) manager.add("t" + std::to_string(i), tensors[i]);
  for (int step = 1; step <= 2; ++step) {
    manager.save(step);
    for (const at::Tensor& tensor : tensors) tensor.add_(1);
    manager.wait();
  }
  for (const at::Tensor& tensor : tensors) tensor.zero_();
  EXPECT_EQ(manager.restore(), 2);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    EXPECT_TRUE(at::equal(tensors[i].cpu(), values[i] + 1)) << "tensor " << i;
  EXPECT_THAT(device.take_races(), IsEmpty());
  device.reset();
}

TEST(DeviceCheckpoint, SynchronousSavesHaveTheValues) {
  StandInStreams::get().reset(/*polls=*/5);
  const TemporaryFolder folder;
  at::Tensor x = torch::arange(1000, torch::kDouble).to(stand_in(0)) + 1;
  CheckpointManager manager({.directory = folder.path(), .asynchronous = false, .rng = false});
  manager.add("x", x);
  manager.save(1);
  x.zero_();
  EXPECT_EQ(manager.restore(), 1);
  EXPECT_TRUE(at::equal(x.cpu(), torch::arange(1000, torch::kDouble) + 1));
  EXPECT_THAT(StandInStreams::get().take_races(), IsEmpty());
}

/// Without a check of the device, the checkpoint would have the bytes from before the copy, with right checksums.
TEST(DeviceCheckpoint, IsNotCommittedIfADeviceFailsDuringTheCopies) {
  StandInStreams& device = StandInStreams::get();
  device.reset(/*polls=*/5);
  const TemporaryFolder folder;
  at::Tensor x = torch::ones({1000}).to(stand_in(0));
  CheckpointManager manager({.directory = folder.path(), .rng = false});
  manager.add("x", x);
  manager.save(1);
  manager.wait();
  x.add_(1);
  device.fail();
  manager.save(2);  // begins the copy, for which the writing thread waits
  EXPECT_THAT(invalid_text([&] { manager.wait(); }),
              AllOf(HasSubstr("the checkpoint of step 2 was not saved"), HasSubstr("a device failed"),
                    HasSubstr("the stand-in device has failed")));
  device.reset();
  EXPECT_EQ(manager.restore(), 1);
  EXPECT_TRUE(at::equal(x.cpu(), torch::ones({1000})));
}

std::vector<device::NamedGenerator> generators(std::uint64_t seed, int devices) {
  std::vector<device::NamedGenerator> all{{"cpu", at::detail::createCPUGenerator(seed)}};
  for (int i = 0; i < devices; ++i) {
    all.push_back(
        {"cuda:" + std::to_string(i), at::detail::createCPUGenerator(seed + 1 + static_cast<unsigned>(i))});
  }
  return all;
}
std::vector<at::Tensor> draw(const std::vector<device::NamedGenerator>& from) {
  std::vector<at::Tensor> numbers;
  for (const auto& one : from) numbers.push_back(at::rand({8}, one.generator));
  return numbers;
}

TEST(DeviceCheckpoint, TheGeneratorsOfAllDevicesContinue) {
  const TemporaryFolder folder;
  std::vector<at::Tensor> wanted;
  {
    const auto saved = generators(1, 2);
    static_cast<void>(draw(saved));
    CheckpointManager manager({.directory = folder.path(), .rng = false});
    manager.add_source("rng", rng_source_of(saved));
    manager.save(4);
    manager.wait();
    wanted = draw(saved);
  }
  std::vector<at::Tensor> of_the_new;
  for (int run = 0; run < 2; ++run) {
    const auto restored = generators(50, 3);  // this machine has another device
    CheckpointManager manager({.directory = folder.path(), .rng = false});
    manager.add_source("rng", rng_source_of(restored));
    EXPECT_EQ(manager.restore(), 4);
    const std::vector<at::Tensor> drawn = draw(restored);
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(drawn[i], wanted[i])) << i;
    of_the_new.push_back(drawn[3]);
    EXPECT_FALSE(at::equal(drawn[3], draw(generators(50, 3))[3])) << "its seed depends on the step";
  }
  EXPECT_TRUE(at::equal(of_the_new[0], of_the_new[1])) << "the same in each run";
}

TEST(DeviceCheckpoint, TheDefaultGeneratorsAreThoseOfLibTorch) {
  const auto all = device::default_generators();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all[0].device, "cpu");
  EXPECT_EQ(all[0].generator, at::detail::getDefaultCPUGenerator());
  EXPECT_EQ(all.size(), 1 + torch::cuda::device_count());
}

}  // namespace
}  // namespace torchspan::checkpoint::device_test
