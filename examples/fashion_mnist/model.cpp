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
constexpr std::int64_t kFeatureCount = kSecondChannels * kPooledSide * kPooledSide;

torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, bool bias) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kKernel).padding(kKernel / 2).bias(bias));
}

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

}  // namespace

torch::Tensor HalfImpl::forward(const torch::Tensor& input) {
  ++forward_calls_;
  const torch::AutoGradMode mode(is_training() && torch::GradMode::is_enabled());
  return compute(input.to(device_));
}

void HalfImpl::place(std::uint64_t seed, const std::string& device) {
  draw_parameters(*this, seed);
  device_ = c10::Device(device);
  to(device_);
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

void draw_parameters(const torch::nn::Module& module, std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const auto& layer : module.children()) {
    const auto own = layer->named_parameters(false);
    const torch::Tensor* weight = own.find("weight");
    if (weight == nullptr || weight->dim() < 2) continue;
    const std::int64_t inputs = weight->numel() / weight->size(0);
    const double bound = 1 / std::sqrt(static_cast<double>(inputs));
    for (const auto& parameter : own) parameter.value().uniform_(-bound, bound, generator);
  }
}

// Each batch norm has a bias, so the convolution before it needs none.
FeaturesImpl::FeaturesImpl(std::uint64_t seed, const std::string& device)
    : first_conv_(register_module("first_conv", convolution(1, kFirstChannels, false))),
      second_conv_(register_module("second_conv", convolution(kFirstChannels, kSecondChannels, false))),
      first_norm_(register_module("first_norm", torch::nn::BatchNorm2d(kFirstChannels))),
      second_norm_(register_module("second_norm", torch::nn::BatchNorm2d(kSecondChannels))) {
  place(seed, device);
}

torch::Tensor FeaturesImpl::compute(torch::Tensor images) {
  images = torch::max_pool2d(torch::relu(first_norm_(first_conv_(images))), 2);
  images = torch::max_pool2d(torch::relu(second_norm_(second_conv_(images))), 2);
  return images.flatten(1);
}

ClassifierImpl::ClassifierImpl(std::uint64_t seed, const std::string& device)
    : hidden_(register_module("hidden", torch::nn::Linear(kFeatureCount, kHidden))),
      output_(register_module("output", torch::nn::Linear(kHidden, kClasses))) {
  place(seed, device);
}

torch::Tensor ClassifierImpl::compute(torch::Tensor features) {
  return torch::log_softmax(output_(torch::relu(hidden_(features))), 1);
}

ConvNetImpl::ConvNetImpl(std::uint64_t seed, c10::Device device, c10::ScalarType type)
    : first_conv_(register_module("first_conv", convolution(1, kFirstChannels, true))),
      second_conv_(register_module("second_conv", convolution(kFirstChannels, kSecondChannels, true))),
      hidden_(register_module("hidden", torch::nn::Linear(kFeatureCount, kHidden))),
      output_(register_module("output", torch::nn::Linear(kHidden, kClasses))) {
  draw_parameters(*this, seed);
  to(device, type);
}

torch::Tensor ConvNetImpl::forward(const torch::Tensor& images) {
  torch::Tensor features = images.to(first_conv_->weight.scalar_type());
  features = torch::max_pool2d(torch::relu(first_conv_(features)), 2);
  features = torch::max_pool2d(torch::relu(second_conv_(features)), 2).flatten(1);
  return torch::log_softmax(output_(torch::relu(hidden_(features))), 1);
}

}  // namespace fashion_mnist
