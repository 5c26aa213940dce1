#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <torchspan/rpc/remote_module.h>
#include <torchspan/wire.h>

namespace fashion_mnist {

/// What a part of the model has computed, and in which process.
struct WorkReport {
  static constexpr torchspan::FixedString kWireName = "WorkReport";
  std::int64_t process = 0;  ///< process id
  std::int64_t parameters = 0;
  std::int64_t forward_calls = 0;
  double cpu_seconds = 0;  ///< of its whole process, including backward passes
};

/// Process id and CPU time of this process.
WorkReport report_process();

/// Draws the weights and biases of a module's layers (except normalizations) as LibTorch does, uniformly up
/// to 1 / sqrt(inputs of a unit), but from a generator with that seed: the same in any process, whatever
/// other random numbers it draws.
void draw_parameters(const torch::nn::Module& module, std::uint64_t seed);

/// Base of the halves of the model. Their parameters are those of draw_parameters(), on `device`, such as cpu
/// or cuda:1.
class HalfImpl : public torch::nn::Module {
 public:
  /// Takes tensors on any device. In evaluation mode no gradients are recorded.
  torch::Tensor forward(const torch::Tensor& input);
  WorkReport report() const;

 protected:
  /// Draws the parameters of the registered layers and moves them to the device.
  void place(std::uint64_t seed, const std::string& device);
  virtual torch::Tensor compute(torch::Tensor input) = 0;

 private:
  std::atomic<std::int64_t> forward_calls_{0};
  c10::Device device_{c10::kCPU};
};

/// The first half: images [n, 1, 28, 28] to features [n, 1568], by two blocks of convolution, batch
/// normalization, ReLU and pooling.
class FeaturesImpl : public HalfImpl {
 public:
  explicit FeaturesImpl(std::uint64_t seed, const std::string& device = "cpu");

 protected:
  torch::Tensor compute(torch::Tensor images) override;

 private:
  torch::nn::Conv2d first_conv_, second_conv_;
  torch::nn::BatchNorm2d first_norm_, second_norm_;
};
TORCH_MODULE(Features);

/// The second half: features [n, 1568] to the logarithms of ten probabilities [n, 10], by two linear layers.
class ClassifierImpl : public HalfImpl {
 public:
  explicit ClassifierImpl(std::uint64_t seed, const std::string& device = "cpu");

 protected:
  torch::Tensor compute(torch::Tensor features) override;

 private:
  torch::nn::Linear hidden_, output_;
};
TORCH_MODULE(Classifier);

/// The whole model: images [n, 1, 28, 28] to the logarithms of ten probabilities [n, 10], by two blocks of
/// convolution, ReLU and pooling and two linear layers. It treats the images of a batch independently, so
/// gradients do not depend on how a batch is split.
class ConvNetImpl : public torch::nn::Module {
 public:
  explicit ConvNetImpl(std::uint64_t seed, c10::Device device = c10::kCPU,
                       c10::ScalarType type = c10::kFloat);
  /// Computes in the type of the parameters.
  torch::Tensor forward(const torch::Tensor& images);

 private:
  torch::nn::Conv2d first_conv_, second_conv_;
  torch::nn::Linear hidden_, output_;
};
TORCH_MODULE(ConvNet);

// Tokens of what other workers may call.
inline constexpr torchspan::ModuleClass<Features, std::uint64_t, std::string> kFeatures{"Features"};
inline constexpr torchspan::ModuleClass<Classifier, std::uint64_t, std::string> kClassifier{"Classifier"};
inline constexpr torchspan::Function<&HalfImpl::report> kReport{"Half.report"};

}  // namespace fashion_mnist
