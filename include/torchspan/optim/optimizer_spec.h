#pragma once
#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/optim/functional.h>
#include <torchspan/wire.h>

namespace torchspan::optim {

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
