#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>
#include <torchspan/checkpoint/checkpoint.h>

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
  EXPECT_THAT(invalid_text([] { Checkpoint::newest("no/such/folder"); }), HasSubstr("it has none"));
}

}  // namespace torchspan::checkpoint::checkpoint_test
