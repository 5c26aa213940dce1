#include <array>
#include <filesystem>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <torchspan/checkpoint.h>
#include <torchspan/optim.h>

#include "checkpoint/files/disk.h"
#include "state/api/place.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::manager_test {

using ::testing::HasSubstr;
using torchspan::testing::error_of;
using torchspan::testing::error_text;
using torchspan::testing::invalid_text;
using torchspan::testing::TemporaryFolder;

/// A model with buffers, a shared parameter and dropout, so that exact resumption needs all of them.
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    in = register_module("in", torch::nn::Linear(4, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    out = register_module("out", torch::nn::Linear(torch::nn::LinearOptions(8, 4).bias(false)));
    tied = register_parameter("tied", out->weight);
  }
  at::Tensor forward(const at::Tensor& x) {
    return out->forward(torch::dropout(torch::tanh(norm->forward(in->forward(x))), 0.3, is_training())) +
           tied.sum();
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor tied;
};
TORCH_MODULE(Model);

/// A training program whose state is in every kind of object.
struct Program {
  explicit Program(std::uint64_t seed)
      : model((torch::manual_seed(seed), Model())),
        adam(*model, optim::AdamW{.lr = 0.05}),
        schedule(adam, optim::StepLR{.step_size = 2, .gamma = 0.5}),
        other(torch::nn::Linear(4, 2)),
        sgd(other->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
        alone(torch::nn::Linear(2, 1)),
        functional(optim::Adagrad{.lr = 0.1}.build(alone->parameters())) {}

  void add_to(CheckpointManager& manager) {
    manager.add("model", model);
    manager.add("adam", adam);
    manager.add("schedule", schedule);
    manager.add("other", other);
    manager.add("sgd", sgd);
    manager.add("alone", alone);
    manager.add("functional", *functional);
    manager.add("scaler", scaler);
    manager.add("epoch", epoch);
    manager.add("best", best);
    manager.add("label", label);
    manager.add("mean", mean);
  }
  void step() {
    adam.zero_grad();
    sgd.zero_grad();
    const at::Tensor x = torch::randn({16, 4});
    const at::Tensor y = alone->forward(other->forward(model->forward(x))).square().mean();
    y.backward();
    adam.step();
    schedule.step();
    sgd.step();
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : alone->parameters()) {
      gradients.push_back(parameter.grad());
      parameter.mutable_grad().reset();
    }
    functional->step(gradients);
    mean.mul_(0.9).add_(y.detach(), 0.1);
    best = std::min(best, y.item<double>());
    ++epoch;
    label += "x";
  }
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const auto* module : {static_cast<const torch::nn::Module*>(model.get()),
                               static_cast<const torch::nn::Module*>(other.get()),
                               static_cast<const torch::nn::Module*>(alone.get())}) {
      for (const at::Tensor& tensor : module->parameters()) all.push_back(tensor);
      for (const at::Tensor& tensor : module->buffers()) all.push_back(tensor);
    }
    all.push_back(mean);
    return all;
  }

  Model model;
  optim::Optimizer adam;
  optim::LRScheduler schedule;
  torch::nn::Linear other;
  torch::optim::SGD sgd;
  torch::nn::Linear alone;
  std::unique_ptr<optim::FunctionalOptimizer> functional;
  optim::GradScaler scaler;
  std::int64_t epoch = 0;
  double best = 1e9;
  std::string label = "run ";
  at::Tensor mean = torch::zeros({});
};

void expect_equal(const Program& a, const Program& b) {
  const auto left = a.tensors(), right = b.tensors();
  for (std::size_t i = 0; i < left.size(); ++i) EXPECT_TRUE(left[i].equal(right[i])) << "tensor " << i;
  EXPECT_EQ(a.epoch, b.epoch);
  EXPECT_EQ(a.best, b.best);
  EXPECT_EQ(a.label, b.label);
}

TEST(CheckpointManager, ResumesTrainingBitForBit) {
  for (const bool asynchronous : {true, false}) {
    const TemporaryFolder folder;
    const CheckpointOptions options{.directory = folder.path() + "/run", .asynchronous = asynchronous};
    Program straight(1);
    for (int step = 0; step < 7; ++step) straight.step();
    Program before(1);
    {
      CheckpointManager manager(options);
      before.add_to(manager);
      EXPECT_EQ(manager.restore_or(0), 0);
      for (int step = 1; step <= 4; ++step) {
        before.step();
        if (step == 3) manager.save(step);
      }
    }
    Program after(99);
    CheckpointManager manager(options);
    after.add_to(manager);
    const std::int64_t first = manager.restore_or(0);
    EXPECT_EQ(first, 3);
    for (std::int64_t step = first; step < 7; ++step) after.step();
    expect_equal(after, straight);
  }
}

TEST(CheckpointManager, SavesTheStateOfTheCallAlthoughItIsWrittenLater) {
  const TemporaryFolder folder;
  const at::Tensor values = torch::arange(1 << 20, torch::kFloat);
  CheckpointManager manager({.directory = folder.path(), .rng = false});
  at::Tensor saved = values.clone();
  manager.add("x", saved);
  manager.save(1);
  saved.zero_();
  manager.wait();
  EXPECT_EQ(manager.restore(), 1);
  EXPECT_TRUE(saved.equal(values));
}

TEST(CheckpointManager, UsesTheTensorThatARegisteredVariableHasThen) {
  const TemporaryFolder folder;
  CheckpointManager manager({.directory = folder.path(), .rng = false});
  at::Tensor mean = torch::zeros({3}), given = torch::zeros({3});
  const at::Tensor first = given;
  manager.add("mean", mean);
  manager.add_source("given", tensor_source(given));
  mean = 0.9 * mean + 1;
  given = given + 1;
  manager.save(1);
  manager.wait();
  EXPECT_TRUE(Checkpoint::newest(folder.path()).read("mean").equal(torch::ones({3})));
  EXPECT_TRUE(Checkpoint::newest(folder.path()).read("given").equal(first)) << "this one is held by value";
  mean = torch::zeros({3});
  EXPECT_EQ(manager.restore(), 1);
  EXPECT_TRUE(mean.equal(torch::ones({3})));
  mean.reset();
  EXPECT_THAT(invalid_text([&] { manager.restore(); }), HasSubstr("the tensor 'mean' is undefined; assign"));
  EXPECT_THAT(invalid_text([&] { manager.save(2); }), HasSubstr("the tensor 'mean' is undefined"));
}

TEST(CheckpointManager, KeepsTheLastCheckpointsAndThoseWithTheBestMetric) {
  const TemporaryFolder folder;
  CheckpointManager manager({.directory = folder.path(), .keep_last = 2, .keep_best = 1});
  at::Tensor x = torch::ones({3});
  manager.add("x", x);
  for (int step = 1; step <= 6; ++step) manager.save(step, {.metric = std::abs(step - 2.0)});
  manager.wait();
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("step-00000002", "step-00000005", "step-00000006",
                                                     "latest", "lock"));
}

TEST(CheckpointManager, RefusesADirectoryToWhichAnotherOneWrites) {
  const TemporaryFolder folder;
  at::Tensor x = torch::ones({3});
  const auto make = [&] {
    auto manager = std::make_unique<CheckpointManager>(CheckpointOptions{.directory = folder.path()});
    manager->add("x", x);
    return manager;
  };
  auto first = make();
  const auto second = make();
  first->save(1);
  first->wait();
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(invalid_text([&] { second->save(2); }),
                ::testing::AllOf(HasSubstr(fmt::format("of process {} on ", getpid())),
                                 HasSubstr(folder.path()), HasSubstr("choose another directory")));
  }
  EXPECT_EQ(second->restore(), 1) << "reading is allowed";
  first.reset();
  second->save(2);
  second->wait();
  EXPECT_EQ(make()->restore(), 2);
}

TEST(CheckpointManager, DeletesWhatDeadProcessesLeftWhenItRestores) {
  const TemporaryFolder folder;
  std::int64_t number = 7;
  {
    CheckpointManager writer({.directory = folder.path()});
    writer.add("number", number);
    writer.save(3);
    writer.wait();
  }
  const std::string partial = folder.path() + "/step-00000004.partial-0123456789abcdef";
  const std::string trash = folder.path() + "/trash-step-00000001";
  for (const std::string& path : {partial, trash, folder.path() + "/notes"})
    std::filesystem::create_directories(path + "/inner");
  CheckpointManager reader({.directory = folder.path()});
  reader.add("number", number);
  EXPECT_EQ(reader.restore(), 3);
  EXPECT_FALSE(std::filesystem::exists(partial));
  EXPECT_FALSE(std::filesystem::exists(trash));
  EXPECT_TRUE(std::filesystem::exists(folder.path() + "/notes"));
  // Restoring does not keep the lock.
  CheckpointManager next({.directory = folder.path()});
  next.add("number", number);
  next.save(5);
  next.wait();
}

TEST(CheckpointManager, LeavesTheFoldersOfALivingWriterWhenItRestores) {
  const TemporaryFolder folder;
  std::int64_t number = 7;
  CheckpointManager writer({.directory = folder.path()});
  writer.add("number", number);
  writer.save(3);
  writer.wait();
  const std::string partial = folder.path() + "/step-00000004.partial-0123456789abcdef";
  std::filesystem::create_directories(partial);  // of its next save
  CheckpointManager reader({.directory = folder.path()});
  reader.add("number", number);
  EXPECT_EQ(reader.restore(), 3);
  EXPECT_TRUE(std::filesystem::exists(partial));
  EXPECT_EQ(writer.restore(), 3);
  EXPECT_TRUE(std::filesystem::exists(partial)) << "a manager deletes such folders in save() only";
}

TEST(CheckpointManager, WarnsOfTensorsThatItDoesNotRestore) {
  const TemporaryFolder folder;
  torch::nn::Linear model(3, 4);
  std::array<at::Tensor, 4> tensors;
  for (at::Tensor& tensor : tensors) tensor = torch::ones({3});
  const auto add = [&](CheckpointManager& manager, bool all) {
    manager.add("model", model);
    for (std::size_t i = 0; all && i < tensors.size(); ++i)
      manager.add(fmt::format("tensor{}", i), tensors[i]);
  };
  {
    CheckpointManager manager({.directory = folder.path()});
    add(manager, true);
    manager.save(1);
  }
  const auto warning = [&](bool all) {
    CheckpointManager manager({.directory = folder.path()});
    add(manager, all);
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(manager.restore(), 1);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(warning(true), "");
  EXPECT_THAT(warning(false),
              ::testing::AllOf(HasSubstr("'step-00000001' was restored without 4 of its tensors"),
                               HasSubstr(": 'tensor0', 'tensor1', 'tensor2' and 1 more; register")));
}

TEST(CheckpointManager, DoesNotWarnOfTensorsOfWhichNoRankHasElements) {
  const TemporaryFolder folder;
  torch::nn::Linear model(3, 4);
  model->register_parameter("nothing", torch::empty({0, 3}));
  // As FullyShardedDataParallel leaves it: a part without boxes.
  const at::Tensor nothing = model->named_parameters()["nothing"];
  auto place = std::make_shared<state::Place>();
  place->shape = {0, 3};
  place->divided = true;
  state::set_place(nothing, place);
  CheckpointManager manager({.directory = folder.path()});
  manager.add("model", model);
  manager.save(1);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(manager.restore(), 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

/// LibTorch's optimizer and schedule.
struct TorchProgram {
  TorchProgram() { model->weight.detach().fill_(2); }
  void add_to(CheckpointManager& manager) {
    manager.add("model", model);
    manager.add("sgd", sgd);
    manager.add("schedule", schedule);
  }
  void step() {
    sgd.zero_grad();
    model->weight.square().sum().backward();
    sgd.step();
    schedule.step();
  }
  torch::nn::Linear model{torch::nn::LinearOptions(2, 2).bias(false)};
  torch::optim::SGD sgd{model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5)};
  torch::optim::StepLR schedule{sgd, 3, 0.1};
};

TEST(CheckpointManager, RestoresLearningRateSchedulesOfLibTorch) {
  for (int saved = 1; saved < 8; ++saved) {
    const TemporaryFolder folder;
    TorchProgram straight, before, after;
    for (int step = 0; step < 8; ++step) straight.step();
    {
      CheckpointManager manager({.directory = folder.path()});
      before.add_to(manager);
      for (int step = 0; step < saved; ++step) before.step();
      manager.save(saved);
    }
    CheckpointManager manager({.directory = folder.path()});
    after.add_to(manager);
    ASSERT_EQ(manager.restore(), saved);
    for (int step = saved; step < 8; ++step) after.step();
    EXPECT_TRUE(after.model->weight.equal(straight.model->weight)) << "saved after step " << saved;
  }
}

TEST(CheckpointManager, WarnsAtTheRestoreThatItCannotSave) {
  const TemporaryFolder folder;
  checkpoint::Disk().write_file(folder.path() + "/file", "text");
  const auto warning = [&](const std::string& name) {
    CheckpointManager manager({.directory = folder.path() + name});
    ::testing::internal::CaptureStderr();
    try {
      manager.restore();
    } catch (const Error&) {  // this folder cannot even be listed
    }
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(warning("/run"), "");
  EXPECT_THAT(warning("/file/run"),
              ::testing::AllOf(HasSubstr("saving one will fail"), HasSubstr(folder.path() + "/file/run")));
}

TEST(CheckpointManager, UsesTheNewestUndamagedCheckpoint) {
  const TemporaryFolder folder;
  CheckpointManager manager({.directory = folder.path()});
  at::Tensor x = torch::zeros({100});
  manager.add("x", x);
  for (int step = 1; step <= 3; ++step) {
    x.fill_(step);
    manager.save(step);
    manager.wait();
  }
  const auto file = [&](int step) {
    return fmt::format("{}/step-0000000{}/model-00001-of-00001.safetensors", folder.path(), step);
  };
  std::filesystem::resize_file(file(3), 5000);
  EXPECT_EQ(manager.restore(), 2);
  EXPECT_EQ(x[7].item<float>(), 2);
  std::filesystem::remove(file(2));
  std::filesystem::copy_file(file(1), file(2));
  EXPECT_EQ(manager.restore(), 1);
  std::filesystem::remove(file(1));
  const Error error = error_of([&] { manager.restore(); });
  EXPECT_THAT(error.message(), ::testing::AllOf(HasSubstr("no checkpoint in"), HasSubstr("can be used"),
                                                HasSubstr("truncated")));
}

TEST(CheckpointManager, NamesWhatDoesNotFitAndChangesNoTensorOfThatModule) {
  const TemporaryFolder folder;
  torch::nn::Linear saved(3, 4);
  {
    CheckpointManager manager({.directory = folder.path()});
    manager.add("model", saved);
    manager.save(1);
  }
  const auto restore = [&](auto model) {
    CheckpointManager manager({.directory = folder.path()});
    manager.add("model", model);
    return invalid_text([&] { manager.restore(); });
  };
  const auto wrong = torch::nn::Linear(3, 5);
  const at::Tensor bias = wrong->bias.detach().clone();
  EXPECT_THAT(restore(wrong),
              HasSubstr("'model.weight' has shape [4, 3] and dtype Float, but this program's has "
                        "[5, 3] and Float"));
  EXPECT_TRUE(wrong->bias.equal(bias));
  torch::nn::Linear doubles(3, 4);
  doubles->to(torch::kDouble);
  EXPECT_THAT(restore(doubles), HasSubstr("dtype Float, but this program's has [4, 3] and Double"));
  EXPECT_THAT(restore(torch::nn::Linear(torch::nn::LinearOptions(3, 4).bias(false))),
              HasSubstr("the module lacks 'model.bias'"));
  EXPECT_THAT(
      restore(torch::nn::Sequential(torch::nn::Linear(3, 4))),
      HasSubstr("it lacks 'model.0.weight', 'model.0.bias'; the module lacks 'model.bias', 'model.weight'"));
}

TEST(CheckpointManager, ChecksWhatIsRegistered) {
  const TemporaryFolder folder;
  CheckpointManager manager({.directory = folder.path()});
  at::Tensor x = torch::zeros({2}), sparse = torch::zeros({2, 2}).to_sparse();
  manager.add("x", x);
  EXPECT_THAT(invalid_text([&] { manager.add("x", x); }), HasSubstr("'x' is registered twice"));
  const torch::nn::Linear layer(2, 2);
  manager.add("m", layer);
  EXPECT_THAT(invalid_text([&] { manager.add("m.ema", x); }),
              HasSubstr("'m.ema' cannot be registered together with 'm'"));
  manager.add("y.ema", x);
  EXPECT_THAT(
      invalid_text([&] { manager.add("y", layer); }),
      HasSubstr(
          "'y.ema' cannot be registered together with 'y', whose tensors have names that begin with 'y.'"));
  manager.add_per_rank("y", x);
  manager.add("y_ema", layer);
  manager.add("sparse", sparse);
  EXPECT_THAT(error_text([&] { manager.save(1); }), HasSubstr("the tensor 'sparse' is not dense"));
  EXPECT_THAT(invalid_text([] { CheckpointManager none({.directory = ""}); }), HasSubstr("directory"));
  EXPECT_THAT(invalid_text([&] { CheckpointManager none({.directory = folder.path(), .keep_last = 0}); }),
              HasSubstr("keep_last is 0"));
}

TEST(CheckpointManager, NamesAValueOfAnotherType) {
  const TemporaryFolder folder;
  std::int64_t epoch = 3;
  {
    CheckpointManager manager({.directory = folder.path()});
    manager.add("epoch", epoch);
    manager.save(1);
  }
  std::string text;
  CheckpointManager manager({.directory = folder.path()});
  manager.add("epoch", text);
  EXPECT_THAT(invalid_text([&] { manager.restore(); }),
              HasSubstr("value 'epoch': the checkpoint has an integer, but the program expects a text"));
}

TEST(CheckpointManager, KeepsTheStateOfAFunctionalOptimizerThatTheCheckpointLacks) {
  const TemporaryFolder folder;
  {
    std::int64_t number = 7;
    CheckpointManager manager({.directory = folder.path()});
    manager.add("number", number);
    manager.save(1);
  }
  torch::nn::Linear layer(2, 1);
  const auto optimizer = optim::Adagrad{.lr = 0.1}.build(layer->parameters());
  const std::vector<at::Tensor> gradients{torch::ones({1, 2}), torch::ones({1})};
  optimizer->step(gradients);
  CheckpointManager manager({.directory = folder.path()});
  manager.add("optimizer", *optimizer);
  EXPECT_THAT(invalid_text([&] { manager.restore(); }), HasSubstr("'optimizer.lr'"));
  EXPECT_FALSE(optimizer->state(0).empty());
}

TEST(CheckpointManager, KeepsTheStateOfAFunctionalOptimizerIfThatOfALaterParameterDoesNotMatch) {
  const TemporaryFolder folder;
  const auto make = [](std::int64_t outputs) {
    return optim::Adagrad{.lr = 0.1}.build({torch::zeros({2}), torch::zeros({outputs})});
  };
  {
    const auto other = make(4);
    other->step(std::vector<at::Tensor>{torch::ones({2}), torch::ones({4})});
    CheckpointManager manager({.directory = folder.path()});
    manager.add("optimizer", *other);
    manager.save(1);
  }
  const auto optimizer = make(3);
  const std::vector<at::Tensor> gradients{torch::full({2}, 5.0), torch::ones({3})};
  optimizer->step(gradients);
  const optim::ParameterState before = optimizer->state(0);
  CheckpointManager manager({.directory = folder.path()});
  manager.add("optimizer", *optimizer);
  EXPECT_THAT(invalid_text([&] { manager.restore(); }), HasSubstr("shape [4]"));
  const optim::ParameterState after = optimizer->state(0);
  ASSERT_EQ(after.size(), before.size());
  for (const auto& [name, tensor] : before) EXPECT_TRUE(after.at(name).equal(tensor)) << name;
}

}  // namespace torchspan::checkpoint::manager_test
