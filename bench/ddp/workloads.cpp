#include "bench/ddp/workloads.h"

#include <stdexcept>

#include <ATen/ATen.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

namespace torchspan::bench {
namespace {

namespace nn = torch::nn;

struct Mlp final : Net {
  Mlp() {
    first = register_module("first", nn::Linear(1024, 2048));
    second = register_module("second", nn::Linear(2048, 2048));
    third = register_module("third", nn::Linear(2048, 10));
  }
  at::Tensor forward(at::Tensor x) override { return third(at::relu(second(at::relu(first(std::move(x)))))); }
  nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};

nn::Conv2d conv(int from, int to, int kernel, int stride) {
  return nn::Conv2d(nn::Conv2dOptions(from, to, kernel).stride(stride).padding(kernel / 2).bias(false));
}

struct Block : nn::Module {
  Block(int from, int to, int stride) {
    conv1 = register_module("conv1", conv(from, to, 3, stride));
    norm1 = register_module("norm1", nn::BatchNorm2d(to));
    conv2 = register_module("conv2", conv(to, to, 3, 1));
    norm2 = register_module("norm2", nn::BatchNorm2d(to));
    if (from == to && stride == 1) return;
    shortcut = register_module("shortcut", conv(from, to, 1, stride));
    norm3 = register_module("norm3", nn::BatchNorm2d(to));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = norm2(conv2(at::relu(norm1(conv1(x)))));
    return at::relu(y + (shortcut.is_empty() ? x : norm3(shortcut(x))));
  }
  nn::Conv2d conv1{nullptr}, conv2{nullptr}, shortcut{nullptr};
  nn::BatchNorm2d norm1{nullptr}, norm2{nullptr}, norm3{nullptr};
};

struct Resnet18 final : Net {
  Resnet18() {
    stem = register_module("stem", conv(3, 64, 3, 1));
    norm = register_module("norm", nn::BatchNorm2d(64));
    int from = 64;
    for (const int to : {64, 128, 256, 512}) {
      for (const int stride : {to == 64 ? 1 : 2, 1}) {
        blocks.push_back(register_module("block" + std::to_string(blocks.size()),
                                         std::make_shared<Block>(from, to, stride)));
        from = to;
      }
    }
    head = register_module("head", nn::Linear(512, 10));
  }
  at::Tensor forward(at::Tensor x) override {
    x = at::relu(norm(stem(x)));
    for (const auto& block : blocks) x = block->forward(x);
    return head(x.mean({2, 3}));
  }
  nn::Conv2d stem{nullptr};
  nn::BatchNorm2d norm{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  nn::Linear head{nullptr};
};

struct Many final : Net {
  Many() {
    for (int i = 0; i < 1000; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(32, 32)));
    }
  }
  at::Tensor forward(at::Tensor x) override {
    for (nn::Linear& layer : layers) x = x + at::tanh(layer(x)) * 0.01;
    return x;
  }
  std::vector<nn::Linear> layers;
};

}  // namespace

std::vector<std::string> workload_names() { return {"mlp", "resnet18", "many"}; }

int workload_steps(const std::string& name) { return name == "mlp" ? 12 : name == "resnet18" ? 5 : 15; }

Workload make_workload(const std::string& name) {
  torch::manual_seed(7);
  if (name == "mlp") return {std::make_shared<Mlp>(), at::randn({64, 1024}), at::randn({64, 10})};
  if (name == "resnet18")
    return {std::make_shared<Resnet18>(), at::randn({8, 3, 32, 32}), at::randn({8, 10})};
  if (name == "many") return {std::make_shared<Many>(), at::randn({16, 32}), at::randn({16, 32})};
  throw std::out_of_range("there is no model '" + name + "'; there are mlp, resnet18 and many");
}

}  // namespace torchspan::bench
