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
#include <torchspan/wire/types.h>

namespace torchspan::optim {

/// The options of one kind of optimizer: a plain struct that travels (Wire<O>), knows the kind's name, throws
/// Error{kInvalid} naming a wrong option from validate(), and builds the optimizer, validated, from
/// parameters.
template <class O>
concept OptimizerOptions = wire::Transferable<O> && std::default_initializable<O> &&
    requires(const O& options, std::vector<at::Tensor> parameters) {
  { O::kName } -> std::convertible_to<std::string_view>;
  options.validate();
  { options.build(std::move(parameters)) } -> std::same_as<std::unique_ptr<FunctionalOptimizer>>;
};

/// Which optimizer, with which options: made from any options struct; built here, or carried to the
/// parameters' owners and built there from their OptimizerTable.
struct OptimizerSpec {
  using Build = std::function<std::unique_ptr<FunctionalOptimizer>(std::vector<at::Tensor>)>;

  OptimizerSpec() = default;
  /// Throws Error{kInvalid} when the options are wrong.
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

  /// Builds the optimizer where the spec was made; a spec that travelled is for an OptimizerTable, and
  /// throws Error{kInvalid} here.
  std::unique_ptr<FunctionalOptimizer> build(std::vector<at::Tensor> parameters) const;

  std::string kind;        ///< O::kName
  std::uint64_t type = 0;  ///< digest of the options' type: tells two versions of a program apart
  Bytes options;           ///< as Wire<O> writes them
  /// The options' learning rate, or not a number when they have none.
  double lr = std::numeric_limits<double>::quiet_NaN();

 private:
  OptimizerSpec(std::string_view kind, std::uint64_t type, wire::Payload payload);

  Build build_;
};

/// The kinds of optimizers that a worker can build. Made in main() and handed to the worker's optimizer
/// extension; the same on all workers. Not changed once a worker has it.
class OptimizerTable {
 public:
  /// The kinds of this library.
  OptimizerTable();
  /// Adds a kind. Throws Error{kInvalid} when its name is taken.
  template <OptimizerOptions O>
  OptimizerTable& add() {
    insert(O::kName, {wire::type_tag<O>(), [](const Bytes& bytes, std::vector<at::Tensor> parameters) {
                        wire::Payload payload;
                        payload.value = bytes;
                        return wire::from_payload<O>(payload).build(std::move(parameters));
                      }});
    return *this;
  }
  /// Throws Error{kInvalid} for a kind that is not here (naming those that are), for options of another
  /// version of the program, and whatever the optimizer's constructor throws.
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
    : torchspan::WireStruct<torchspan::optim::OptimizerSpec, "optim.Recipe",
                            &torchspan::optim::OptimizerSpec::kind, &torchspan::optim::OptimizerSpec::type,
                            &torchspan::optim::OptimizerSpec::options, &torchspan::optim::OptimizerSpec::lr> {
};
