#pragma once
// RemoteModule: a module on another worker. Includes no torch/nn.
#include <array>
#include <cstddef>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <torchspan/rpc/worker.h>

namespace torchspan {

/// Creates RRefs to the parameters of a local module, in the order of its parameters(). The references are
/// counted, so the parameters exist as long as any worker references them. Use them as targets of an
/// optim::DistributedOptimizer or as arguments of functions that read or set parameters.
template <class Module>
std::vector<RRef<at::Tensor>> parameter_rrefs(const Worker& worker, const Module& module,
                                              SourceLocation site = SourceLocation::current()) {
  std::vector<RRef<at::Tensor>> rrefs;
  const auto add = [&](const auto& object) {
    for (const at::Tensor& parameter : object.parameters()) rrefs.emplace_back(worker, parameter, site);
  };
  if constexpr (requires { module.parameters(); }) {
    add(module);
  } else {
    add(*module);
  }
  return rrefs;
}

namespace rpc {

/// A name with a suffix, concatenated at compile time.
class TokenName {
 public:
  constexpr TokenName(std::string_view name, std::string_view ending) {
    if (name.size() + ending.size() >= text_.size())
      throw std::invalid_argument("the name of a ModuleClass is too long");
    for (const std::string_view part : {name, ending}) {
      for (const char letter : part) text_[size_++] = letter;
    }
  }
  constexpr const char* c_str() const { return text_.data(); }

 private:
  std::array<char, 128> text_{};
  std::size_t size_ = 0;
};

/// Modules whose forward has exactly one signature; Sequential's forward is a template and has none.
template <class M>
concept HasOneForward = requires {
  typename Signature<decltype(&ObjectOf<M>::forward)>::Returned;
};

template <class M>
std::vector<RRef<at::Tensor>> parameters_of(Worker& worker, const RRef<M>& module) {
  return parameter_rrefs(worker, module.local_value());
}
template <class M>
void set_training(const RRef<M>& module, bool training) {
  module.local_value()->train(training);
}
template <class M>
void clear_gradients(const RRef<M>& module) {
  module.local_value()->zero_grad();
}

}  // namespace rpc

/// Names a module class of which other workers may create objects for a RemoteModule. M is a module holder
/// or a shared_ptr to a module; Args are its constructor's parameters:
///   inline constexpr torchspan::ModuleClass<Encoder, int64_t> kEncoder{"Encoder"};
///   functions.add(kEncoder);
/// registers the constructor as "Encoder", and "Encoder.forward", ".parameters", ".train", ".zero_grad".
template <class M, class... Args>
class ModuleClass {
  static_assert(rpc::HasOneForward<M>,
                "a ModuleClass needs a module with one forward(), neither overloaded nor a template: wrap a "
                "Sequential in a "
                "module of your own whose forward() calls it");

 public:
  constexpr explicit(false) ModuleClass(const char*) {}
  auto tokens() const { return std::tuple<>(); }
};
template <class M, class... Args>
requires rpc::HasOneForward<M>
class ModuleClass<M, Args...> {
 public:
  using Impl = rpc::ObjectOf<M>;
  static constexpr auto kForward = &Impl::forward;

  constexpr explicit(false) ModuleClass(const char* name)
      : name_(name),
        forward_(name, ".forward"),
        parameters_(name, ".parameters"),
        train_(name, ".train"),
        zero_grad_(name, ".zero_grad") {}

  Class<M, Args...> constructor() const { return {name_}; }
  Function<kForward> forward() const { return {forward_.c_str()}; }
  Function<&rpc::parameters_of<M>> parameters() const { return {parameters_.c_str()}; }
  Function<&rpc::set_training<M>> train() const { return {train_.c_str()}; }
  Function<&rpc::clear_gradients<M>> zero_grad() const { return {zero_grad_.c_str()}; }
  /// The tokens for FunctionTable::add.
  auto tokens() const { return std::tuple(constructor(), forward(), parameters(), train(), zero_grad()); }

 private:
  const char* name_;
  rpc::TokenName forward_, parameters_, train_, zero_grad_;
};

namespace rpc {

/// Base of RemoteModule with forward() and forward_async(), whose parameters are those of the module's
/// forward.
template <class Self, auto kForward, class Inputs>
class RemoteForward;
template <class Self, auto kForward, class... Inputs>
class RemoteForward<Self, kForward, std::tuple<Inputs...>> {
 public:
  ResultOf<kForward> forward(const Inputs&... inputs, SourceLocation site = SourceLocation::current()) const {
    return forward_async(inputs..., site).wait();
  }
  Future<ResultOf<kForward>> forward_async(const Inputs&... inputs,
                                           SourceLocation site = SourceLocation::current()) const {
    return static_cast<const Self&>(*this).call_forward(site, inputs...);
  }
  /// Compile error for a call with the wrong number of arguments.
  template <class... Given>
  requires(sizeof...(Given) != sizeof...(Inputs)) ResultOf<kForward> forward(const Given&...)
  const {
    static_assert(sizeof...(Given) == sizeof...(Inputs),
                  "the module's forward() takes another number of arguments");
  }
  template <class... Given>
  requires(sizeof...(Given) != sizeof...(Inputs)) Future<ResultOf<kForward>> forward_async(const Given&...)
  const {
    static_assert(sizeof...(Given) == sizeof...(Inputs),
                  "the module's forward() takes another number of arguments");
  }
};

}  // namespace rpc

/// A module on another worker that is used like a local one. It is an RRef to the module, so it is a valid
/// optimizer target and function argument. Inside an autograd::Context its forward is part of the backward
/// pass. Verbs throw as Caller's do; errors name the worker and "Encoder.forward", and the first use throws
/// what the constructor threw.
///   torchspan::RemoteModule encoder(worker, "worker1", kEncoder, 256);
///   auto hidden = encoder.forward(input);
template <class M, class... Params>
class RemoteModule
    : public RRef<M>,
      public rpc::RemoteForward<RemoteModule<M, Params...>, &rpc::ObjectOf<M>::forward,
                                typename rpc::SignatureOf<&rpc::ObjectOf<M>::forward>::Arguments> {
 public:
  using Token = ModuleClass<M, Params...>;

  /// Creates the module on `on` and returns at once. `token` must outlive this object; use a constant.
  template <class... Args>
  RemoteModule(const Caller& worker, const Destination& on, const Token& token, Args&&... args)
      : RRef<M>(worker.remote(on, token.constructor(), std::forward<Args>(args)...)),
        token_(&token),
        caller_(worker) {}
  /// Wraps an existing reference to a module.
  RemoteModule(const Caller& worker, const Token& token, RRef<M> module)
      : RRef<M>(std::move(module)), token_(&token), caller_(worker) {}

  /// Returns a handle to the same module with other call options: encoder.with({.timeout = 5s}).forward(x).
  RemoteModule with(CallOptions options) const {
    return RemoteModule(Caller(caller_.backend(), std::move(options)), *token_, *this);
  }
  /// RRefs to the remote parameters, in the order of the module's parameters(); one round trip.
  std::vector<RRef<at::Tensor>> parameter_rrefs(SourceLocation site = SourceLocation::current()) const {
    return caller_.call_on_from(site, *this, token_->parameters()).wait();
  }
  void train(bool training = true, SourceLocation site = SourceLocation::current()) const {
    caller_.call_on_from(site, *this, token_->train(), training).wait();
  }
  void eval(SourceLocation site = SourceLocation::current()) const { train(false, site); }
  /// Clears `.grad` of the remote parameters. Does not affect the gradients of an autograd context.
  void zero_grad(SourceLocation site = SourceLocation::current()) const {
    caller_.call_on_from(site, *this, token_->zero_grad()).wait();
  }

 private:
  template <class, auto, class>
  friend class rpc::RemoteForward;
  template <class... Inputs>
  auto call_forward(SourceLocation site, const Inputs&... inputs) const {
    return caller_.call_on_from(site, *this, token_->forward(), inputs...);
  }

  const Token* token_;
  Caller caller_;
};

}  // namespace torchspan
