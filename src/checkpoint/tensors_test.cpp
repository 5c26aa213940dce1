#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>

#include "tests/support/errors.h"
#include "tests/support/processes.h"

/// Tensors of all kinds that a manager saves and restores.
namespace torchspan::checkpoint::tensors_test {

using ::testing::HasSubstr;
using torchspan::testing::invalid_text;
using torchspan::testing::TemporaryFolder;

TEST(CheckpointManager, SavesTensorsOfAnyStrides) {
  const TemporaryFolder folder;
  for (const bool asynchronous : {true, false}) {
    const at::Tensor base = torch::randn({6, 8}, torch::kDouble);
    at::Tensor x = base.t().slice(0, 1, 7, 2);
    const at::Tensor expected = x.clone();
    CheckpointManager manager({.directory = folder.path(), .asynchronous = asynchronous});
    manager.add("x", x);
    manager.save(1);
    manager.wait();
    x.zero_();
    manager.restore();
    EXPECT_TRUE(x.equal(expected));
  }
}

TEST(CheckpointManager, SavesTensorsOfAnyDtypeAndShape) {
  for (const bool asynchronous : {true, false}) {
    const TemporaryFolder folder;
    const at::Tensor numbers = torch::arange(6).reshape({2, 3});
    std::map<std::string, at::Tensor> tensors{
        {"brain", numbers.to(torch::kBFloat16)},
        {"half", numbers.to(torch::kHalf).t()},
        {"flags", numbers.remainder(2).to(torch::kBool)},
        {"scalar", torch::tensor(7.5)},
        {"empty", torch::zeros({0, 4})},
        {"expanded", torch::tensor({1.0, 2.0}).unsqueeze(1).expand({2, 3})},
        {"channels", torch::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)},
        {"odd \"name\" \n\\ \u00e9/@0", numbers}};
    std::map<std::string, at::Tensor> saved = tensors;
    CheckpointManager manager({.directory = folder.path(), .asynchronous = asynchronous, .rng = false});
    for (auto& [name, tensor] : tensors) manager.add(name, tensor);
    manager.save(1);
    manager.save(2);
    manager.wait();
    for (auto& [name, tensor] : tensors) tensor = torch::zeros_like(tensor).contiguous();
    EXPECT_EQ(manager.restore(), 2);
    for (const auto& [name, tensor] : tensors) EXPECT_TRUE(tensor.equal(saved.at(name))) << name;
  }
}

TEST(CheckpointManager, SavesAModuleUnderTheSameNamesHoweverItIsRegistered) {
  const TemporaryFolder folder;
  torch::nn::SequentialImpl saved(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  saved.forward(torch::randn({5, 3}));
  {
    CheckpointManager manager({.directory = folder.path()});
    manager.add("model", saved);
    manager.save(1);
  }
  torch::nn::Sequential restored(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  CheckpointManager manager({.directory = folder.path()});
  manager.add("model", restored);
  EXPECT_EQ(manager.restore(), 1);
  for (const auto& item : saved.named_parameters())
    EXPECT_TRUE(restored->named_parameters()[item.key()].equal(item.value())) << item.key();
  for (const auto& item : saved.named_buffers())
    EXPECT_TRUE(restored->named_buffers()[item.key()].equal(item.value())) << item.key();
}

TEST(CheckpointManager, SavesTheValuesOfConjugatedTensors) {
  const TemporaryFolder folder;
  torch::nn::Linear saved(3, 4), restored(3, 4);
  const at::Tensor values = at::randn({5}, at::kComplexFloat);
  saved->register_buffer("phases", values.conj());  // a view that shares the values
  restored->register_buffer("phases", at::zeros_like(values));
  {
    CheckpointManager manager({.directory = folder.path()});
    manager.add("model", saved);
    manager.save(1);
  }
  CheckpointManager manager({.directory = folder.path()});
  manager.add("model", restored);
  manager.restore();
  EXPECT_TRUE(at::equal(restored->named_buffers()["phases"], values.conj().resolve_conj()));
}

TEST(CheckpointManager, RefusesToRestoreIntoElementsThatShareMemory) {
  const TemporaryFolder folder;
  at::Tensor x = torch::tensor({1.0, 2.0}).unsqueeze(1).expand({2, 3});
  CheckpointManager manager({.directory = folder.path(), .rng = false});
  manager.add("x", x);
  manager.save(1);
  manager.wait();
  EXPECT_THAT(invalid_text([&] { manager.restore(); }),
              HasSubstr("this program's tensor 'x' of shape [2, 3] is expanded"));
}

TEST(CheckpointManager, RestoresAnExpandedTensorWithoutElements) {
  const TemporaryFolder folder;
  at::Tensor x = torch::zeros({1, 0}).expand({3, 0});
  CheckpointManager manager({.directory = folder.path(), .rng = false});
  manager.add("x", x);
  manager.save(1);
  manager.wait();
  EXPECT_EQ(manager.restore(), 1);
}

TEST(CheckpointManager, NamesWhatIsNotUtf8) {
  const TemporaryFolder folder;
  std::string text = "\xff\xfe";
  at::Tensor x = torch::ones({2});
  CheckpointManager values({.directory = folder.path(), .rng = false});
  values.add("label", text);
  EXPECT_THAT(invalid_text([&] { values.save(1); }), HasSubstr("the text 'label' is not UTF-8"));
  text = "caf\u00e9";
  values.save(1);
  values.wait();
  CheckpointManager tensors({.directory = folder.path() + "/other", .rng = false});
  tensors.add("x\xff", x);
  EXPECT_THAT(invalid_text([&] { tensors.save(1); }), HasSubstr("the name 'x\xff' of a tensor is not UTF-8"));
}

}  // namespace torchspan::checkpoint::tensors_test
