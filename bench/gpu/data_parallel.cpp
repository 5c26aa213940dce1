#include "bench/gpu/data_parallel.h"

#include <memory>

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <torchspan/data_parallel.h>
#include <torchspan/session.h>

namespace torchspan::bench {
namespace {

namespace nn = torch::nn;

nn::Conv2d conv(int from, int to, int kernel, int stride) {
  return nn::Conv2d(nn::Conv2dOptions(from, to, kernel).stride(stride).padding(kernel / 2).bias(false));
}

/// Three convolutions, of which the first and the last change the number of channels, beside a shortcut.
struct Bottleneck final : nn::Module {
  Bottleneck(int from, int middle, int stride) {
    const int to = 4 * middle;
    conv1 = register_module("conv1", conv(from, middle, 1, 1));
    conv2 = register_module("conv2", conv(middle, middle, 3, stride));
    conv3 = register_module("conv3", conv(middle, to, 1, 1));
    norm1 = register_module("norm1", nn::BatchNorm2d(middle));
    norm2 = register_module("norm2", nn::BatchNorm2d(middle));
    norm3 = register_module("norm3", nn::BatchNorm2d(to));
    if (from == to && stride == 1) return;
    shortcut = register_module("shortcut", conv(from, to, 1, stride));
    shortcut_norm = register_module("shortcut_norm", nn::BatchNorm2d(to));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = at::relu(norm1(conv1(x)));
    y = norm3(conv3(at::relu(norm2(conv2(y)))));
    return at::relu(y + (shortcut.is_empty() ? x : shortcut_norm(shortcut(x))));
  }
  nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr}, shortcut{nullptr};
  nn::BatchNorm2d norm1{nullptr}, norm2{nullptr}, norm3{nullptr}, shortcut_norm{nullptr};
};

/// He et al., "Deep Residual Learning for Image Recognition" (2016), table 1, 50 layers.
struct Resnet50 final : nn::Module {
  Resnet50() {
    stem = register_module("stem", conv(3, 64, 7, 2));
    norm = register_module("norm", nn::BatchNorm2d(64));
    int from = 64;
    const int middles[] = {64, 128, 256, 512}, counts[] = {3, 4, 6, 3};
    for (int stage = 0; stage < 4; ++stage) {
      for (int i = 0; i < counts[stage]; ++i) {
        const int stride = i == 0 && stage > 0 ? 2 : 1;
        blocks.push_back(register_module("block" + std::to_string(blocks.size()),
                                         std::make_shared<Bottleneck>(from, middles[stage], stride)));
        from = 4 * middles[stage];
      }
    }
    head = register_module("head", nn::Linear(from, 1000));
  }
  at::Tensor forward(at::Tensor x) {
    x = at::max_pool2d(at::relu(norm(stem(x))), 3, 2, 1);
    for (const auto& block : blocks) x = block->forward(x);
    return head(x.mean({2, 3}));
  }
  nn::Conv2d stem{nullptr};
  nn::BatchNorm2d norm{nullptr};
  std::vector<std::shared_ptr<Bottleneck>> blocks;
  nn::Linear head{nullptr};
};

std::shared_ptr<Resnet50> make_net(c10::Device device) {
  torch::manual_seed(7);
  auto net = std::make_shared<Resnet50>();
  net->to(device);
  return net;
}

/// One optimizer step of `net`, which is the model or its wrapper.
template <class Net>
std::function<void()> step_of(Net& net, std::vector<at::Tensor> parameters, const at::Tensor& images,
                              const at::Tensor& classes) {
  auto optimizer = std::make_shared<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(1e-3));
  return [&net, optimizer, images, classes] {
    optimizer->zero_grad();
    at::cross_entropy_loss(net.forward(images), classes).backward();
    optimizer->step();
  };
}

}  // namespace

Samples measure_data_parallel(Executor& executor, c10::Device device, Duration limit,
                              const std::function<void()>& finish) {
  Session session(WorkerOptions::from_env());
  collective::GroupOptions options;
  if (!device.is_cpu()) options.device = device;
  const collective::Group group = session.group(options);
  const std::int64_t batch = device.is_cpu() ? 1 : 32, side = device.is_cpu() ? 64 : 224;
  // Batch norm needs more than one value for each channel, which one image of 64 x 64 has at the last stage.
  const at::Tensor images = at::randn({batch, 3, side, side}).to(device);
  const at::Tensor classes = at::arange(batch).to(device);

  const auto plain = make_net(device), replica = make_net(device);
  DistributedDataParallel wrapped(replica, group);
  const auto timed = [&](std::function<void()> step) -> Timed {
    return [&, step = std::move(step)] {
      finish();
      const TimePoint began = executor.now();
      step();
      finish();
      return micros(began, executor.now());
    };
  };
  Samples samples;
  take_turns(executor, samples,
             {{"ddp_step/resnet50", timed(step_of(wrapped, replica->parameters(), images, classes))},
              {"ddp_step/resnet50/plain", timed(step_of(*plain, plain->parameters(), images, classes))}},
             50, limit);
  return samples;
}

}  // namespace torchspan::bench
