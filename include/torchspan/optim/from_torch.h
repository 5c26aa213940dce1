#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/optim/functional.h>

namespace torch::optim {
class Optimizer;
class OptimizerOptions;
}  // namespace torch::optim

namespace torchspan::optim {

/// Adapts an optimizer with torch::optim's interface. It passes each step's gradients in the parameters'
/// `.grad`, restores the old `.grad` afterwards, and leaves it undefined for parameters without a gradient.
/// Its state is one tensor of bytes, stored with the first parameter. Optimizers that need a closure are
/// not supported.
class TorchOptimizer final : public FunctionalOptimizer {
 public:
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
  /// Throws what `make` throws.
  TorchOptimizer(std::string name, std::vector<at::Tensor> parameters, const Make& make);
  ~TorchOptimizer() override;

  double lr() const override;
  void set_lr(double lr) override;
  ParameterState state(std::size_t index) const override;
  void load_state(std::size_t index, const ParameterState& state) override;

 private:
  std::string refuse_sparse(const at::Tensor&) const override { return {}; }
  void update(std::size_t, at::Tensor&, const at::Tensor&) override {}
  void update_all(std::span<const at::Tensor> gradients) override;

  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

namespace detail {
/// Learning rate of the options; NaN if they have none.
double rate_of(const torch::optim::OptimizerOptions& options);
std::string to_bytes(const torch::optim::OptimizerOptions& options);
void from_bytes(const std::string& bytes, torch::optim::OptimizerOptions& options);
}  // namespace detail

/// Makes a class with torch::optim's interface a kind of optimizer, for OptimizerTable::add and for specs:
///   using TorchAdam = FromTorch<torch::optim::Adam, torch::optim::AdamOptions, "torch.Adam">;
/// `T` is constructible from parameters and `O`. `O` serializes itself (OptimizerOptions::serialize) and is
/// default-constructible or constructible from a learning rate.
template <class T, class O, FixedString kKind>
struct FromTorch {
  static constexpr std::string_view kName = kKind.text;

  FromTorch() : FromTorch(empty()) {}
  FromTorch(O options) : options(std::move(options)), lr(detail::rate_of(this->options)) {}

  /// LibTorch's optimizers check their options in their constructors.
  void validate() const {}
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const {
    return std::make_unique<TorchOptimizer>(
        std::string(kName), std::move(parameters),
        [this](std::vector<at::Tensor> list) { return std::make_unique<T>(std::move(list), options); });
  }

  O options;
  double lr;  ///< the rate of the options

 private:
  static O empty() {
    if constexpr (std::is_default_constructible_v<O>) {
      return O();
    } else {
      return O(0.0);
    }
  }
};

}  // namespace torchspan::optim

template <class T, class O, torchspan::FixedString kKind>
struct torchspan::Wire<torchspan::optim::FromTorch<T, O, kKind>> {
  static std::string name() { return "optim.FromTorch<" + std::string(kKind.text) + ">"; }
  static void encode(wire::Encoder& encoder, const optim::FromTorch<T, O, kKind>& value) {
    wire::encode<std::string>(encoder, optim::detail::to_bytes(value.options));
  }
  static optim::FromTorch<T, O, kKind> decode(wire::Decoder& decoder) {
    optim::FromTorch<T, O, kKind> value;
    optim::detail::from_bytes(wire::decode<std::string>(decoder), value.options);
    value.lr = optim::detail::rate_of(value.options);
    return value;
  }
};
