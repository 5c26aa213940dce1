#include "fashion_mnist/model.h"

#include <cmath>
#include <sys/resource.h>
#include <unistd.h>

#include <ATen/core/ivalue.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/options/conv.h>
#include <torch/types.h>

#include "fashion_mnist/dataset.h"

namespace fashion_mnist {
namespace {

constexpr std::int64_t kFirstChannels = 16, kSecondChannels = 32, kKernel = 3, kHidden = 128;
constexpr std::int64_t kPooledSide = kSide / 4;

torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out) {
  // The batch norm that follows has a bias of its own.
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kKernel).padding(kKernel / 2).bias(false));
}

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

}  // namespace

torch::Tensor HalfImpl::forward(const torch::Tensor& input) {
  ++forward_calls_;
  const torch::AutoGradMode mode(is_training() && torch::GradMode::is_enabled());
  return compute(input);
}

WorkReport report_process() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return {.process = getpid(), .cpu_seconds = seconds(usage.ru_utime) + seconds(usage.ru_stime)};
}

WorkReport HalfImpl::report() const {
  WorkReport report = report_process();
  for (const torch::Tensor& parameter : parameters()) report.parameters += parameter.numel();
  report.forward_calls = forward_calls_;
  return report;
}

void HalfImpl::initialize(std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const auto& layer : children()) {
    const auto own = layer->named_parameters(false);
    const torch::Tensor* weight = own.find("weight");
    if (weight == nullptr || weight->dim() < 2) continue;
    const std::int64_t inputs = weight->numel() / weight->size(0);
    const double bound = 1 / std::sqrt(static_cast<double>(inputs));
    for (const auto& parameter : own) parameter.value().uniform_(-bound, bound, generator);
  }
}

FeaturesImpl::FeaturesImpl(std::uint64_t seed)
    : first_conv_(register_module("first_conv", convolution(1, kFirstChannels))),
      second_conv_(register_module("second_conv", convolution(kFirstChannels, kSecondChannels))),
      first_norm_(register_module("first_norm", torch::nn::BatchNorm2d(kFirstChannels))),
      second_norm_(register_module("second_norm", torch::nn::BatchNorm2d(kSecondChannels))) {
  initialize(seed);
}

torch::Tensor FeaturesImpl::compute(torch::Tensor images) {
  images = torch::max_pool2d(torch::relu(first_norm_(first_conv_(images))), 2);
  images = torch::max_pool2d(torch::relu(second_norm_(second_conv_(images))), 2);
  return images.flatten(1);
}

ClassifierImpl::ClassifierImpl(std::uint64_t seed)
    : hidden_(
          register_module("hidden", torch::nn::Linear(kSecondChannels * kPooledSide * kPooledSide, kHidden))),
      output_(register_module("output", torch::nn::Linear(kHidden, kClasses))) {
  initialize(seed);
}

torch::Tensor ClassifierImpl::compute(torch::Tensor features) {
  return torch::log_softmax(output_(torch::relu(hidden_(features))), 1);
}

}  // namespace fashion_mnist
