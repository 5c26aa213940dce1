#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iterator>
#include <nlohmann/json.hpp>

#include <ATen/core/ivalue.h>
#include <ATen/ops/_neg_view.h>
#include <torch/nn.h>

#include <torchspan/checkpoint.h>

#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::model_folder_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using torchspan::testing::invalid_text;
using torchspan::testing::Process;
using torchspan::testing::TemporaryFolder;

torch::nn::Sequential model() {
  return torch::nn::Sequential(torch::nn::Linear(3, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 2));
}

void expect_same(const torch::nn::Module& a, const torch::nn::Module& b) {
  for (const auto& item : a.named_parameters())
    EXPECT_TRUE(item.value().equal(b.named_parameters()[item.key()])) << item.key();
  for (const auto& item : a.named_buffers())
    EXPECT_TRUE(item.value().equal(b.named_buffers()[item.key()])) << item.key();
}

TEST(ModelFolder, LoadsByNameWhatWasSavedInOneFileOrSeveral) {
  for (const std::uint64_t limit : {std::uint64_t{1} << 30, std::uint64_t{100}}) {
    const TemporaryFolder folder;
    const auto saved = model();
    save_model(*saved, folder.path(), {.max_file_bytes = limit});
    auto loaded = model();
    load_model(*loaded, folder.path());
    expect_same(*saved, *loaded);
    EXPECT_EQ(std::filesystem::exists(folder.path() + "/model.safetensors"), limit > 100);
    EXPECT_EQ(load_safetensors(folder.path()).size(), 9u);
  }
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename());
  return names;
}

TEST(ModelFolder, HasNothingOfTheModelThatWasSavedThereBefore) {
  const TemporaryFolder folder;
  // One file, many, fewer, and one again.
  for (const std::uint64_t limit : std::vector<std::uint64_t>{1 << 30, 1, 150, 1 << 30}) {
    const auto saved = model();
    save_model(*saved, folder.path(), {.max_file_bytes = limit});
    auto loaded = model();
    load_model(*loaded, folder.path());
    expect_same(*saved, *loaded);
    const TemporaryFolder fresh;
    save_model(*saved, fresh.path(), {.max_file_bytes = limit});
    EXPECT_THAT(names_in(folder.path()), ::testing::UnorderedElementsAreArray(names_in(fresh.path())));
  }
}

TEST(ModelFolder, HasNoModelRatherThanPartsOfTwoIfAFileCannotBeReplaced) {
  const TemporaryFolder folder;
  const SaveModelOptions options{.max_file_bytes = 1};
  save_model(*model(), folder.path(), options);
  const std::string second = folder.path() + "/model-00002-of-00009.safetensors";
  std::filesystem::rename(second, folder.path() + "/old");
  std::filesystem::create_directory(second);  // in the way
  EXPECT_THAT(invalid_text([&] { save_model(*model(), folder.path(), options); }), HasSubstr(second));
  EXPECT_THAT(names_in(folder.path()), Each(Not(EndsWith(".partial"))));
  std::filesystem::remove(second);
  std::filesystem::rename(folder.path() + "/old", second);
  auto loaded = model();
  EXPECT_THAT(invalid_text([&] { load_model(*loaded, folder.path()); }), HasSubstr("is neither"));
}

TEST(ModelFolder, LeavesNoTemporaryFileIfATensorFileCannotBeReplaced) {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/x.safetensors";
  std::filesystem::create_directory(file);  // in the way
  EXPECT_THAT(invalid_text([&] { save_safetensors(file, {{"w", torch::ones({3})}}); }), HasSubstr(file));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("x.safetensors"));
}

std::string text_in(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ModelFolder, RemovesNoTemporaryFileThatItHasNotMade) {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/x.safetensors",
                    second = "/model-00002-of-00002.safetensors.partial";
  const at::Tensor sparse = torch::eye(3).to_sparse();
  std::ofstream(file + ".partial") << "theirs";
  EXPECT_THROW(save_safetensors(file, {{"w", sparse}}), Error);
  EXPECT_EQ(text_in(file + ".partial"), "theirs");
  std::ofstream(folder.path() + second) << "theirs";
  torch::nn::Module holder;
  holder.register_buffer("a", torch::ones({3}));
  holder.register_buffer("b", torch::ones({3}, torch::kComplexDouble));
  EXPECT_THROW(save_model(holder, folder.path(), {.max_file_bytes = 1}), Error);
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/model-00001-of-00002.safetensors.partial"));
  EXPECT_EQ(text_in(folder.path() + second), "theirs");
}

TEST(ModelFolder, KeepsAFolderThatHasTheNameOfATemporaryFile) {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/x.safetensors";
  std::filesystem::create_directory(file + ".partial");
  std::ofstream(file + ".partial/notes") << "theirs";
  const NamedTensors tensors{{"w", torch::ones({3})}};
  EXPECT_THAT(invalid_text([&] { save_safetensors(file, tensors); }),
              HasSubstr("cannot create '" + file + ".partial'"));
  EXPECT_EQ(text_in(file + ".partial/notes"), "theirs");
}

TEST(ModelFolder, HasTheValuesOfConjugatedTensorsAndRestoresIntoThem) {
  const TemporaryFolder folder;
  const at::Tensor values = at::randn({5}, at::kComplexFloat), negative = at::imag(values.conj());
  ASSERT_TRUE(values.conj().is_conj() && negative.is_neg());
  save_safetensors(folder.path() + "/x.safetensors", {{"c", values.conj()}, {"n", negative}});
  const NamedTensors read = load_safetensors(folder.path() + "/x.safetensors");
  EXPECT_TRUE(read.at("c").equal(values.conj().resolve_conj()));
  EXPECT_TRUE(read.at("n").equal(negative.resolve_neg()));
  torch::nn::Module holder;
  const at::Tensor memory = at::zeros({5}, at::kComplexFloat);
  holder.register_buffer("c", memory.conj());
  holder.register_buffer("n", at::_neg_view(at::zeros({5})));
  load_model(holder, folder.path() + "/x.safetensors");
  EXPECT_TRUE(memory.equal(values));
  EXPECT_TRUE(holder.named_buffers()["n"].resolve_neg().equal(negative.resolve_neg()));
}

TEST(ModelFolder, NamesWhatDoesNotFit) {
  const TemporaryFolder folder;
  save_model(*model(), folder.path());
  torch::nn::Sequential other(torch::nn::Linear(3, 8));
  EXPECT_THAT(invalid_text([&] { load_model(*other, folder.path()); }),
              AllOf(HasSubstr(folder.path()), HasSubstr("the module lacks '1.bias'")));
  load_model(*other, folder.path(), {.allow_unexpected = true});
  EXPECT_THAT(invalid_text([&] { load_model(*other, folder.path() + "/none"); }), HasSubstr("is neither"));
  auto doubles = model();
  doubles->to(torch::kDouble);
  EXPECT_THAT(invalid_text([&] { load_model(*doubles, folder.path()); }), HasSubstr("Float"));
  load_model(*doubles, folder.path(), {.cast = true});
  EXPECT_TRUE(doubles[0]
                  ->named_parameters()["weight"]
                  .to(torch::kFloat)
                  .equal(other[0]->named_parameters()["weight"]));
}

TEST(ModelFolder, ChangesNothingIfATensorToConvertIntoIsExpanded) {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/x.safetensors";
  save_safetensors(file,
                   {{"a", torch::ones({2}, torch::kDouble)}, {"b", torch::ones({3, 2}, torch::kDouble)}});
  torch::nn::Module holder;
  const at::Tensor a = holder.register_buffer("a", torch::zeros({2}));
  holder.register_buffer("b", torch::zeros({3, 1}).expand({3, 2}));
  EXPECT_THAT(invalid_text([&] { load_model(holder, file, {.cast = true}); }),
              HasSubstr("this program's tensor 'b' of shape [3, 2] is expanded"));
  EXPECT_TRUE(a.eq(0).all().item<bool>());
}

TEST(ModelFolder, KeepsWhatTheFileLacksIfAllowed) {
  const TemporaryFolder folder;
  torch::nn::Sequential part(torch::nn::Linear(3, 8));
  save_model(*part, folder.path());
  auto whole = model();
  const at::Tensor before = whole->named_parameters()["1.weight"].detach().clone();
  EXPECT_THAT(invalid_text([&] { load_model(*whole, folder.path()); }), HasSubstr("'1.weight'"));
  load_model(*whole, folder.path(), {.allow_missing = true});
  EXPECT_TRUE(whole->named_parameters()["0.weight"].equal(part->named_parameters()["0.weight"]));
  EXPECT_TRUE(whole->named_parameters()["1.weight"].equal(before));
}

TEST(ModelFolder, MapsNames) {
  const TemporaryFolder folder;
  save_safetensors(folder.path() + "/x.safetensors",
                   {{"transformer.w", torch::ones({2, 3})}, {"transformer.b", torch::zeros({2})}});
  torch::nn::Linear linear(3, 2);
  load_model(*linear, folder.path() + "/x.safetensors",
             {.saved_name = [](const std::string& name) { return "transformer." + name.substr(0, 1); }});
  EXPECT_TRUE(linear->weight.eq(1).all().item<bool>());
}

/// A Python that has the package safetensors, or empty.
std::string python_with_safetensors() {
  std::vector<std::string> candidates;
  if (const char* given = std::getenv("TORCHSPAN_PYTHON")) candidates.emplace_back(given);
  if (const char* bin = std::getenv("TORCHSPAN_BIN_DIR"))
    candidates.push_back(std::string(bin) + "/../../safetensors/bin/python");
  candidates.emplace_back("python3");
  for (const std::string& python : candidates) {
    const std::string command = fmt::format("'{}' -c 'import safetensors.numpy' 2>/dev/null", python);
    if (std::system(command.c_str()) == 0) return python;
  }
  return {};
}

constexpr const char* kScript = R"(
import json, sys
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
folder, checkpoint = sys.argv[1:]

# What TorchSpan wrote: every dtype that numpy has, by its index.
tensors = {}
index = json.load(open(checkpoint + "/model.safetensors.index.json"))
for name, file in index["weight_map"].items():
    with safe_open(checkpoint + "/" + file, framework="np") as opened:
        assert opened.metadata()["format"] == "pt"
        tensors[name] = opened.get_tensor(name)
assert sum(t.nbytes for t in tensors.values()) == index["metadata"]["total_size"]
for name, dtype in [("f", "float32"), ("d", "float64"), ("l", "int64"), ("i", "int32"), ("s", "int16"),
                    ("c", "int8"), ("u", "uint8"), ("h", "float16"), ("b", "bool")]:
    expected = (np.arange(6).reshape(2, 3) % 2 if name == "b" else np.arange(6).reshape(2, 3)).astype(dtype)
    assert tensors["x." + name].dtype == np.dtype(dtype), name
    assert (tensors["x." + name] == expected).all(), name
assert tensors["x.scalar"].shape == () and tensors["x.scalar"] == 7.5
assert tensors["x.empty"].shape == (0, 4)

# What TorchSpan reads.
save_file({"0.weight": np.arange(24, dtype="float32").reshape(8, 3), "0.bias": np.ones(8, "float32"),
           "odd": np.arange(5, dtype="uint8"), "after": np.arange(3, dtype="float64"),
           "scalar": np.array(2.5, "float64"), "empty": np.zeros((3, 0), "int64")},
          folder + "/model.safetensors", {"format": "np"})
)";

TEST(ModelFolder, IsReadAndWrittenByThePythonPackage) {
  const std::string python = python_with_safetensors();
  if (python.empty()) {
    GTEST_SKIP() << "no Python with the package safetensors: run tools/install-deps safetensors, or set "
                    "TORCHSPAN_PYTHON";
  }
  const TemporaryFolder folder;
  const at::Tensor numbers = torch::arange(6).reshape({2, 3});
  NamedTensors tensors{{"f", numbers.to(torch::kFloat)},
                       {"d", numbers.to(torch::kDouble)},
                       {"l", numbers},
                       {"i", numbers.to(torch::kInt)},
                       {"s", numbers.to(torch::kShort)},
                       {"c", numbers.to(torch::kChar)},
                       {"u", numbers.to(torch::kByte)},
                       {"h", numbers.to(torch::kHalf)},
                       {"b", numbers.remainder(2).to(torch::kBool)},
                       {"scalar", torch::tensor(7.5)},
                       {"empty", torch::zeros({0, 4})}};
  CheckpointManager manager({.directory = folder.path() + "/run"});
  for (auto& [name, tensor] : tensors) manager.add("x." + name, tensor);
  manager.save(1);
  manager.wait();
  std::ofstream(folder.path() + "/script.py") << kScript;
  const auto executor = make_executor();
  Process process({"/usr/bin/env", python, folder.path() + "/script.py", folder.path(),
                   folder.path() + "/run/step-00000001"},
                  {}, folder.path() + "/output");
  ASSERT_TRUE(process.wait(*executor, std::chrono::seconds(60)));
  ASSERT_EQ(process.exit_code(), 0) << process.output();

  const NamedTensors read = load_safetensors(folder.path());
  EXPECT_TRUE(read.at("odd").equal(torch::arange(5).to(torch::kByte)));
  EXPECT_TRUE(read.at("after").equal(torch::arange(3).to(torch::kDouble)));
  EXPECT_EQ(read.at("scalar").item<double>(), 2.5);
  EXPECT_EQ(read.at("empty").sizes().vec(), (std::vector<std::int64_t>{3, 0}));
  torch::nn::Sequential linear(torch::nn::Linear(3, 8));
  load_model(*linear, folder.path(), {.allow_unexpected = true});
  EXPECT_TRUE(
      linear[0]->named_parameters()["weight"].equal(torch::arange(24).to(torch::kFloat).reshape({8, 3})));
}

}  // namespace torchspan::checkpoint::model_folder_test
