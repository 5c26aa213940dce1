#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>

#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::checkpoint_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torchspan::testing::invalid_text;
using torchspan::testing::TemporaryFolder;

TEST(Checkpoint, IsReadWithoutTheProgramThatSavedIt) {
  const TemporaryFolder folder;
  torch::nn::Linear model(3, 2);
  std::int64_t epoch = 4;
  {
    CheckpointManager manager({.directory = folder.path(), .rng = false});
    manager.add("model", model);
    manager.add("epoch", epoch);
    manager.save(1);
    manager.save(2, {.metric = 0.5});
  }
  const Checkpoint newest = Checkpoint::newest(folder.path());
  EXPECT_EQ(newest.step(), 2);
  EXPECT_EQ(newest.world_size(), 1);
  EXPECT_EQ(newest.metric(), 0.5);
  EXPECT_THAT(newest.names(), ElementsAre("model.bias", "model.weight"));
  EXPECT_EQ(std::get<std::int64_t>(newest.values().at("epoch")), 4);
  EXPECT_TRUE(newest.read("model.weight").equal(model->weight));
  torch::nn::Linear other(3, 2);
  newest.load("model", other);
  EXPECT_TRUE(other->weight.equal(model->weight));
  EXPECT_THAT(invalid_text([&] { newest.load("net", other); }),
              HasSubstr("it lacks 'net.weight', 'net.bias'"));

  const std::string data = newest.folder() + "/model-00001-of-00001.safetensors";
  const auto flip_last_bit = [&] {
    std::fstream file(data, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const auto last = static_cast<char>(file.get());
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(last ^ 1)).flush();
  };
  flip_last_bit();
  const Checkpoint changed(newest.folder());  // its sizes and headers are right
  EXPECT_THAT(invalid_text([&] { changed.verify(); }), HasSubstr("model-00001"));
  EXPECT_EQ(Checkpoint::newest(folder.path()).step(), 1);
  flip_last_bit();
  changed.verify();
  EXPECT_EQ(Checkpoint::newest(folder.path()).step(), 2);

  std::filesystem::resize_file(newest.folder() + "/model-00001-of-00001.safetensors", 4000);
  EXPECT_EQ(Checkpoint::newest(folder.path()).step(), 1);
  EXPECT_THAT(invalid_text([&] { Checkpoint damaged(Checkpoint::list(folder.path()).front()); }),
              HasSubstr("truncated"));
  std::filesystem::remove(Checkpoint::list(folder.path()).back() + "/manifest.json");
  EXPECT_THAT(invalid_text([&] { Checkpoint::newest(folder.path()); }), HasSubstr("truncated"))
      << "why the newest one cannot be used";
  EXPECT_THAT(invalid_text([] { Checkpoint::newest("no/such/folder"); }), HasSubstr("it has none"));
}

/// Whether this process has mapped a file whose path contains `text`.
bool has_mapped(const std::string& text) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(text) != std::string::npos) return true;
  }
  return false;
}

TEST(Checkpoint, ReturnsTensorsThatShareNoMemory) {
  const TemporaryFolder folder;
  const at::Tensor large = torch::arange(1 << 20, torch::kFloat), small = torch::arange(3, torch::kFloat);
  at::Tensor large_variable = large.clone(), small_variable = small.clone();
  {
    CheckpointManager manager({.directory = folder.path(), .rng = false});
    manager.add("large", large_variable);
    manager.add("small", small_variable);
    manager.save(1);
  }
  std::optional<Checkpoint> opened = Checkpoint::newest(folder.path());
  for (const auto& [name, expected] : {std::pair("large", large), std::pair("small", small)}) {
    const at::Tensor first = opened->read(name), second = opened->read(name);
    first.fill_(-1);
    EXPECT_TRUE(second.equal(expected)) << name;
    second.fill_(-2);
    EXPECT_TRUE(first.eq(-1).all().item<bool>()) << name;
    EXPECT_TRUE(opened->read(name).equal(expected)) << name;
    at::Tensor target = torch::zeros_like(expected);
    opened->load(name, target);
    EXPECT_TRUE(target.equal(expected)) << name;
  }
  const std::string file = opened->folder() + "/model-00001-of-00001.safetensors";
  // The path gets another file; the checkpoint has mapped the old one.
  save_safetensors(file, {{"large", torch::zeros_like(large)}, {"small", torch::zeros_like(small)}});
  const at::Tensor kept_large = opened->read("large");
  const at::Tensor kept_small = opened->read("small");
  opened.reset();
  EXPECT_TRUE(kept_large.equal(large));
  EXPECT_TRUE(kept_small.equal(small));
  EXPECT_FALSE(has_mapped(folder.path()));
}

TEST(Checkpoint, KeepsNoTensorInMemoryForAnotherOne) {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/x.safetensors";
  const at::Tensor values = torch::arange(1 << 19, torch::kFloat);
  save_safetensors(file, {{"a", values}, {"b", values + 1}, {"small", values.slice(0, 0, 5)}});
  NamedTensors tensors = load_safetensors(file);
  tensors.erase("a");
  EXPECT_TRUE(tensors.at("b").equal(values + 1));
  EXPECT_TRUE(has_mapped(file));
  tensors.erase("b");
  EXPECT_FALSE(has_mapped(file));
  EXPECT_TRUE(tensors.at("small").equal(values.slice(0, 0, 5)));
}

TEST(Checkpoint, MapsTensorsHoweverManyWereReadBefore) {
  const TemporaryFolder folder;
  at::Tensor x = torch::ones({1 << 18});
  {
    CheckpointManager manager({.directory = folder.path(), .rng = false});
    manager.add("x", x);
    manager.save(1);
  }
  std::optional<Checkpoint> opened = Checkpoint::newest(folder.path());
  for (int i = 0; i < 5000; ++i) EXPECT_TRUE(opened->read("x").defined());
  const at::Tensor last = opened->read("x");
  opened.reset();
  EXPECT_TRUE(has_mapped(folder.path()));
  EXPECT_TRUE(last.equal(x));
}

}  // namespace torchspan::checkpoint::checkpoint_test
