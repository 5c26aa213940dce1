#pragma once
// Functional optimizers, whose state is apart from the parameters; from torch::optim, too. Includes no torch/nn.
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/error.h>
#include <torchspan/state/source.h>
#include <torchspan/wire.h>

namespace torchspan::optim {

/// State of one parameter by name: tensors, and the step count as a one-element integer tensor "step".
using ParameterState = std::map<std::string, at::Tensor>;

/// An optimizer over a fixed list of parameters. It updates them in place from explicit gradients and
/// neither reads nor writes `.grad`. State is created at a parameter's first gradient. Not thread-safe.
class FunctionalOptimizer {
 public:
  /// `name` appears in errors. The list may be empty, as on a worker whose pipeline stage has no parameters. Throws
  /// Error{kInvalid} for a parameter, which it names, that is undefined, not a leaf, not floating-point, or listed twice.
  FunctionalOptimizer(std::string name, std::vector<at::Tensor> parameters);
  virtual ~FunctionalOptimizer() = default;
  FunctionalOptimizer(const FunctionalOptimizer&) = delete;
  FunctionalOptimizer& operator=(const FunctionalOptimizer&) = delete;

  /// Updates every parameter whose gradient is defined; gradient i belongs to parameter i. An undefined
  /// gradient leaves the parameter, its state and its step count unchanged. All gradients are checked
  /// before anything changes: Error{kInvalid} or Error{kUnsupported} names the parameter. Runs without
  /// recording gradients; the parameters' version counters advance.
  void step(std::span<const at::Tensor> gradients);
  /// Updates one parameter.
  void step_one(std::size_t index, const at::Tensor& gradient);
  /// Throws what step() would throw for these gradients; changes nothing.
  void check(std::span<const at::Tensor> gradients) const;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::string& name() const { return name_; }
  /// Names of the parameters in errors, one each, in addition to their index.
  void set_parameter_names(std::vector<std::string> names) { parameter_names_ = std::move(names); }
  /// "parameter 3 'layer.weight' (shape [2, 3], Double)".
  std::string describe(std::size_t index) const;

  /// The learning rate. An optimizer without one (the default) returns NaN and set_lr() throws
  /// Error{kUnsupported}.
  virtual double lr() const;
  virtual void set_lr(double lr);
  /// Leaves version counters unchanged in steps, so that graphs that saved a parameter continue with its
  /// new value (Niu et al., Hogwild!, NIPS 2011). By default enabling it throws Error{kUnsupported}.
  virtual void set_hogwild(bool on);
  /// The state of all parameters, for checkpoints: "lr" and "parameter.<index>.<entry>". Holds a reference.
  state::SourcePtr state_source();
  /// State of a parameter, not copied; empty before its first step and for a stateless optimizer.
  virtual ParameterState state(std::size_t index) const;
  /// Restores a copy of what state() returned. Throws Error{kInvalid} naming parameter and entry if it does
  /// not match, and then changes nothing.
  virtual void load_state(std::size_t index, const ParameterState& state);

 protected:
  /// Why this optimizer cannot use a sparse gradient of a parameter, with a remedy; empty: it can.
  virtual std::string refuse_sparse(const at::Tensor& parameter) const = 0;
  /// Why this optimizer cannot use a dense gradient of a parameter, with a remedy; empty: it can.
  virtual std::string refuse_dense(const at::Tensor& parameter) const;
  /// Applies a defined gradient that matches the parameter's shape, dtype and device.
  virtual void update(std::size_t index, at::Tensor& parameter, const at::Tensor& gradient) = 0;
  /// Applies all defined gradients; by default one at a time.
  virtual void update_all(std::span<const at::Tensor> gradients);

  std::vector<at::Tensor>& parameters() { return parameters_; }

 private:
  void check_one(std::size_t index, const at::Tensor& gradient) const;

  const std::string name_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> parameter_names_;
};

/// Throws Error{kInvalid} naming the option unless the value is finite and >= 0.
void check_not_negative(std::string_view optimizer, std::string_view option, double value);
/// Throws Error{kInvalid} naming the option unless the value is in [0, 1).
void check_share(std::string_view optimizer, std::string_view option, double value);
/// Throws Error{kInvalid} naming the option unless the value is finite and > 0.
void check_positive(std::string_view optimizer, std::string_view option, double value);

/// Options of one kind of optimizer: a plain struct with a Wire<O> and the kind's name. Its validate()
/// throws Error{kInvalid} naming a wrong option; its build() validates and builds the optimizer from
/// parameters.
template <class O>
concept OptimizerOptions = wire::Transferable<O> && std::default_initializable<O> &&
    requires(const O& options, std::vector<at::Tensor> parameters) {
  { O::kName } -> std::convertible_to<std::string_view>;
  options.validate();
  { options.build(std::move(parameters)) } -> std::same_as<std::unique_ptr<FunctionalOptimizer>>;
};

/// Which optimizer, with which options. Made from any options struct; built locally, or sent to the
/// parameters' owners and built there from their OptimizerTable.
struct OptimizerSpec {
  using Build = std::function<std::unique_ptr<FunctionalOptimizer>(std::vector<at::Tensor>)>;

  OptimizerSpec() = default;
  /// Throws Error{kInvalid} for wrong options.
  template <OptimizerOptions O>
  OptimizerSpec(const O& options)
      : OptimizerSpec(O::kName, wire::type_tag<O>(), (options.validate(), wire::to_payload(options))) {
    if constexpr (requires {
                    { options.lr } -> std::convertible_to<double>;
                  })
      lr = options.lr;
    if constexpr (requires {
                    { options.lr() } -> std::convertible_to<double>;
                  })
      lr = options.lr();
    build_ = [options](std::vector<at::Tensor> parameters) { return options.build(std::move(parameters)); };
  }

  /// Builds the optimizer in the process where the spec was made. A received spec throws Error{kInvalid}:
  /// build it with an OptimizerTable.
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;

  std::string kind;        ///< O::kName
  std::uint64_t type = 0;  ///< digest of the options' type; detects version skew
  Bytes options;           ///< encoded by Wire<O>
  /// Learning rate of the options; NaN if they have none.
  double lr = std::numeric_limits<double>::quiet_NaN();

 private:
  OptimizerSpec(std::string_view kind, std::uint64_t type, wire::Payload payload);

  Build build_;
};

/// The kinds of optimizers that a worker can build. Build it in main(), identically on all workers, and
/// pass it to the OptimExtension. It is immutable once a worker has it.
class OptimizerTable {
 public:
  /// The kinds in this library.
  OptimizerTable();
  /// Adds a kind. Throws Error{kInvalid} if its name is taken.
  template <OptimizerOptions O>
  OptimizerTable& add() {
    insert(O::kName, {wire::type_tag<O>(), [](const Bytes& bytes, std::vector<at::Tensor> parameters) {
                        wire::Payload payload;
                        payload.value = bytes;
                        return wire::from_payload<O>(payload).build(std::move(parameters));
                      }});
    return *this;
  }
  /// Builds an optimizer. Throws Error{kInvalid} for an unknown kind (listing the known ones) and for
  /// options of another version of the program, and what the optimizer's constructor throws.
  std::unique_ptr<FunctionalOptimizer> build(const OptimizerSpec& spec,
                                             std::vector<at::Tensor> parameters) const;
  std::vector<std::string> kinds() const;

 private:
  struct Entry {
    std::uint64_t type;
    std::function<std::unique_ptr<FunctionalOptimizer>(const Bytes&, std::vector<at::Tensor>)> build;
  };
  void insert(std::string_view kind, Entry entry);

  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace torchspan::optim

template <>
struct torchspan::Wire<torchspan::optim::OptimizerSpec>
    : torchspan::WireStruct<torchspan::optim::OptimizerSpec, "optim.OptimizerSpec",
                            &torchspan::optim::OptimizerSpec::kind, &torchspan::optim::OptimizerSpec::type,
                            &torchspan::optim::OptimizerSpec::options, &torchspan::optim::OptimizerSpec::lr> {
};

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
