#pragma once
// Layers: what a pipeline computes, and where. Includes no torch/nn.
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/pipeline/batch.h>

namespace torch::nn {
class Module;
}

namespace torchspan::pipeline {

/// The skip connections of one layer for one micro-batch. A layer whose forward has a parameter `Skips&`
/// stashes tensors for a later layer and pops those of an earlier one. Declare each name where the layer is
/// added (Use::stashes, Use::pops). Valid during the forward only.
class Skips {
 public:
  Skips(std::map<std::string, at::Tensor> incoming, std::vector<std::string> may_stash)
      : incoming_(std::move(incoming)), may_stash_(std::move(may_stash)) {}

  /// Stashes `value`, which may be undefined, under `name`. Throws Error{kInvalid} for a name that is
  /// undeclared or already stashed.
  void stash(const std::string& name, at::Tensor value);
  /// Returns the tensor stashed under `name`, once. Throws Error{kInvalid} for a name that is undeclared or
  /// already popped.
  at::Tensor pop(const std::string& name);

  /// Error text that lists declared names which the forward did not use; empty: none.
  std::string unused_keys() const;
  std::map<std::string, at::Tensor>& stashed() { return stashed_; }

 private:
  std::map<std::string, at::Tensor> incoming_;
  std::vector<std::string> may_stash_;
  std::map<std::string, at::Tensor> stashed_;
};

/// One use's part of a Cache, for one micro-batch: keys and values of attention, recurrent state. A layer whose forward
/// has a parameter `LayerCache&` gets it; it stays on the layer's worker. Valid during the forward only.
class LayerCache {
 public:
  /// Not active.
  LayerCache() = default;
  explicit LayerCache(std::vector<at::Tensor>& kept) : kept_(&kept) {}

  /// False in training and in infer() without a cache: the forward then computes from its input alone.
  bool active() const { return kept_ != nullptr; }
  /// The tensors of the last call, empty in the first; replace them for the next. Do not change a tensor in place: if
  /// the call fails, the cache is as before it. Only if active().
  std::vector<at::Tensor>& tensors() { return *kept_; }

 private:
  std::vector<at::Tensor>* kept_ = nullptr;
};

/// What a forward may take besides its input.
struct LayerContext {
  LayerContext(Skips& layer_skips, LayerCache layer_cache = {}, bool is_repeated = false)
      : skips(layer_skips), cache(layer_cache), repeated(is_repeated) {}
  Skips& skips;
  LayerCache cache;
  bool repeated = false;  ///< activation checkpointing computes this forward for the second time
};

/// A layer built on its owner. A stateless function has no module.
struct BuiltLayer {
  std::shared_ptr<void> object;
  std::shared_ptr<torch::nn::Module> module;
};

/// Runs a layer, or one of its methods, on its input.
using LayerCall = std::function<Batch(void* object, const Batch& input, LayerContext context)>;

/// Description of a layer that only its owner builds, when the pipeline is created.
struct LayerSpec {
  std::string name;
  std::function<BuiltLayer()> build;
  /// Tensors that exist before it is built: those of a module, or in the constructor's arguments.
  std::function<std::vector<at::Tensor>()> existing = {};
};

/// One use of a layer, in model order.
struct LayerUse {
  int layer = 0;  ///< index into Layers::specs()
  std::string method;
  LayerCall call;
  std::vector<std::string> stashes;
  std::vector<std::string> pops;
  std::string space;  ///< namespace of `stashes` and `pops`
};

namespace layers_detail {

std::string type_name(const std::type_info& type);

template <class T>
inline constexpr bool kIsSkips = std::is_same_v<std::remove_cvref_t<T>, Skips>;
template <class T>
inline constexpr bool kIsCache = std::is_same_v<std::remove_cvref_t<T>, LayerCache>;

/// The object whose methods are called: a module holder's module, or the object itself.
template <class T>
struct ObjectHelper {
  using type = T;
  static std::shared_ptr<T> share(T value) { return std::make_shared<T>(std::move(value)); }
};
template <class T>
requires requires { typename T::ContainedType; }
struct ObjectHelper<T> {
  using type = typename T::ContainedType;
  static std::shared_ptr<type> share(T value) { return value.ptr(); }
};
template <class T>
using ObjectOf = typename ObjectHelper<std::remove_cvref_t<T>>::type;

/// Appends the parameters and buffers of a module, which may be null.
void append_tensors(std::vector<at::Tensor>& all, const torch::nn::Module* module);
/// Appends the tensors in a constructor argument: a tensor, or those of a module.
template <class T>
void append_argument(std::vector<at::Tensor>& all, const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    all.push_back(argument);
  } else if constexpr (requires { typename T::ContainedType; }) {
    if (!argument.is_empty()) append_argument(all, argument.ptr());
  } else if constexpr (requires {
                         typename T::element_type;
                         argument.get();
                       }) {
    if constexpr (std::is_convertible_v<typename T::element_type*, const torch::nn::Module*>)
      append_tensors(all, argument.get());
  }
}

/// Matches a layer's input to its parameters: a single parameter takes the whole input, several take one
/// member each; parameters Skips& and LayerCache& take what the layer's use has.
template <class... A>
struct Fit {
  static constexpr std::size_t kPlain = ((kIsSkips<A> || kIsCache<A> ? 0 : 1) + ... + 0);
  template <class T>
  struct Argument {
    static decltype(auto) get(const Batch& input, LayerContext& context, std::size_t& next) {
      if constexpr (kIsSkips<T>) {
        return static_cast<Skips&>(context.skips);
      } else if constexpr (kIsCache<T>) {
        return static_cast<LayerCache&>(context.cache);
      } else if constexpr (kPlain == 1) {
        return BatchOf<std::remove_cvref_t<T>>::to(input);
      } else {
        return Member<std::remove_cvref_t<T>>::to(input.members[next++]);
      }
    }
  };
  template <class Call>
  static Batch run(const Batch& input, LayerContext& context, const Call& call) {
    if constexpr (kPlain != 1) BatchOf<int>::check(input.size(), kPlain);
    std::size_t next = 0;
    // Braces: the arguments are evaluated left to right.
    std::tuple<decltype(Argument<A>::get(input, context, next))...> arguments{
        Argument<A>::get(input, context, next)...};
    using R = std::remove_cvref_t<decltype(std::apply(call, std::move(arguments)))>;
    return BatchOf<R>::from(std::apply(call, std::move(arguments)));
  }
};

template <class Object, class R, class Base, class... A>
LayerCall method_call(R (Base::*method)(A...)) {
  return [method](void* object, const Batch& input, LayerContext context) {
    Base& self = *static_cast<Object*>(object);
    return Fit<A...>::run(input, context,
                          [&](auto&&... a) { return (self.*method)(std::forward<decltype(a)>(a)...); });
  };
}
template <class Object, class R, class Base, class... A>
LayerCall method_call(R (Base::*method)(A...) const) {
  return [method](void* object, const Batch& input, LayerContext context) {
    const Base& self = *static_cast<Object*>(object);
    return Fit<A...>::run(input, context,
                          [&](auto&&... a) { return (self.*method)(std::forward<decltype(a)>(a)...); });
  };
}

template <class F, class R, class... A>
LayerCall function_call(F function, R (F::*)(A...) const) {
  return [function = std::move(function)](void*, const Batch& input, LayerContext context) {
    return Fit<A...>::run(input, context, function);
  };
}

/// Calls forward() of an object; an overloaded or templated one is called with tensors.
template <class Object>
LayerCall forward_call() {
  if constexpr (requires { &Object::forward; }) {
    return method_call<Object>(&Object::forward);
  } else {
    return [](void* object, const Batch& input, LayerContext) {
      Object& self = *static_cast<Object*>(object);
      using R = std::remove_cvref_t<decltype(self.forward(at::Tensor()))>;
      return BatchOf<R>::from(self.forward(BatchOf<at::Tensor>::to(input)));
    };
  }
}

}  // namespace layers_detail

class Layers;

/// Result of Layers::add and Layers::reuse: refines that use of the layer. Valid while its Layers exists.
template <class Object>
class Use {
 public:
  /// Names of the tensors that the layer stashes for later layers, through Skips.
  template <class... Names>
  Use& stashes(Names... names);
  /// Names of the tensors that the layer pops from earlier layers.
  template <class... Names>
  Use& pops(Names... names);
  /// Namespace of this use's stash and pop names, so that two uses of a layer do not collide.
  Use& in_space(std::string space);
  /// Name of the layer in errors, plans and drawings; default: its type's name.
  Use& named(std::string name);
  int layer() const { return layer_; }

 private:
  friend class Layers;
  Use(Layers& layers, int layer, std::size_t use) : layers_(&layers), layer_(layer), use_(use) {}
  Layers* layers_;
  int layer_;
  std::size_t use_;
};

/// A parameter of a layer, for Layers::tie().
struct TiedParameter {
  template <class Object>
  TiedParameter(const Use<Object>& use, std::string parameter)
      : layer(use.layer()), name(std::move(parameter)) {}
  int layer = 0;
  std::string name;  ///< in the layer: "weight", "decoder.weight"
};

/// The layers of a model in the order in which a micro-batch passes them. A layer is a class with
/// constructor arguments, built on its owner only. It may be reused any number of times, from any position
/// and through any method, with one owner and one set of parameters. A layer's forward takes and returns
/// tensors, tuples of them, numbers and optionals (pipeline/batch.h).
class Layers {
 public:
  /// Adds a layer of class T (a torch::nn::Module, its holder, or any class with a forward), constructed
  /// from `arguments`, which are copied.
  template <class T, class... Args>
  Use<layers_detail::ObjectOf<T>> add(Args... arguments) {
    using Object = layers_detail::ObjectOf<T>;
    const auto kept = std::make_shared<const std::tuple<Args...>>(std::move(arguments)...);
    return append<Object>(
        layers_detail::type_name(typeid(T)),
        [kept] {
          return std::apply([](const auto&... a) { return layers_detail::ObjectHelper<T>::share(T(a...)); },
                            *kept);
        },
        [kept] {
          std::vector<at::Tensor> all;
          std::apply([&](const auto&... a) { (layers_detail::append_argument(all, a), ...); }, *kept);
          return all;
        });
  }
  /// Adds an existing module, by holder or shared_ptr. Every worker has one; only the owner's is used.
  template <class T>
  requires requires { typename T::ContainedType; }
  Use<typename T::ContainedType> add_existing(T holder) { return add_existing(holder.ptr()); }
  template <class Object>
  Use<Object> add_existing(std::shared_ptr<Object> module) {
    return append<Object>(
        layers_detail::type_name(typeid(Object)), [module] { return module; },
        [module] {
          std::vector<at::Tensor> all;
          layers_detail::append_argument(all, module);
          return all;
        });
  }
  /// Adds a function without parameters to train: a lambda or a function object with a single, non-template
  /// call operator.
  template <class F>
  Use<void> add_function(std::string name, F function) {
    specs_.push_back({std::move(name), [] { return BuiltLayer(); }});
    uses_.push_back(
        {last_layer(), "", layers_detail::function_call(std::move(function), &F::operator()), {}, {}, ""});
    return Use<void>(*this, last_layer(), uses_.size() - 1);
  }
  /// Adds a layer that functions build and call: one whose class is known when the program runs.
  Use<void> add(LayerSpec spec, LayerCall call) {
    specs_.push_back(std::move(spec));
    uses_.push_back({last_layer(), "", std::move(call), {}, {}, ""});
    return Use<void>(*this, last_layer(), uses_.size() - 1);
  }
  /// Uses the layer of an earlier use again, through its forward.
  template <class Object>
  Use<Object> reuse(const Use<Object>& earlier) {
    LayerUse use = uses_[first_use(earlier.layer())];
    use.stashes.clear();
    use.pops.clear();
    use.space.clear();
    uses_.push_back(std::move(use));
    return Use<Object>(*this, earlier.layer(), uses_.size() - 1);
  }
  /// Uses it again through another method, named `method_name` in errors.
  template <class Object, class Method>
  requires std::is_member_function_pointer_v<Method> Use<Object> reuse(const Use<Object>& earlier,
                                                                       std::string method_name,
                                                                       Method method) {
    return reuse(earlier, std::move(method_name), layers_detail::method_call<Object>(method));
  }
  /// The same with a function that calls the layer.
  template <class Object>
  Use<Object> reuse(const Use<Object>& earlier, std::string method_name, LayerCall call) {
    uses_.push_back({earlier.layer(), std::move(method_name), std::move(call), {}, {}, ""});
    return Use<Object>(*this, earlier.layer(), uses_.size() - 1);
  }

  /// Ties parameters of layers on any stages: each layer keeps its copy; all copies start with the values of the
  /// first and get the sum of all their gradients in every step, so that equal optimizers keep them equal.
  void tie(std::vector<TiedParameter> parameters) { ties_.push_back(std::move(parameters)); }

  const std::vector<LayerSpec>& specs() const { return specs_; }
  const std::vector<LayerUse>& uses() const { return uses_; }
  const std::vector<std::vector<TiedParameter>>& ties() const { return ties_; }

 private:
  template <class Object>
  friend class Use;

  template <class Object, class Make>
  Use<Object> append(std::string name, Make make, std::function<std::vector<at::Tensor>()> existing) {
    specs_.push_back({std::move(name),
                      [make = std::move(make)] {
                        const std::shared_ptr<Object> object = make();
                        BuiltLayer built;
                        built.object = object;
                        if constexpr (std::is_convertible_v<Object*, torch::nn::Module*>)
                          built.module = object;
                        return built;
                      },
                      std::move(existing)});
    uses_.push_back({last_layer(), "", layers_detail::forward_call<Object>(), {}, {}, ""});
    return Use<Object>(*this, last_layer(), uses_.size() - 1);
  }
  int last_layer() const { return static_cast<int>(specs_.size()) - 1; }
  std::size_t first_use(int layer) const {
    std::size_t use = 0;
    while (uses_[use].layer != layer) ++use;
    return use;
  }

  std::vector<LayerSpec> specs_;
  std::vector<LayerUse> uses_;
  std::vector<std::vector<TiedParameter>> ties_;
};

template <class Object>
template <class... Names>
Use<Object>& Use<Object>::stashes(Names... names) {
  (layers_->uses_[use_].stashes.emplace_back(std::move(names)), ...);
  return *this;
}
template <class Object>
template <class... Names>
Use<Object>& Use<Object>::pops(Names... names) {
  (layers_->uses_[use_].pops.emplace_back(std::move(names)), ...);
  return *this;
}
template <class Object>
Use<Object>& Use<Object>::in_space(std::string space) {
  layers_->uses_[use_].space = std::move(space);
  return *this;
}
template <class Object>
Use<Object>& Use<Object>::named(std::string name) {
  layers_->specs_[static_cast<std::size_t>(layer_)].name = std::move(name);
  return *this;
}

}  // namespace torchspan::pipeline

namespace torchspan {
using pipeline::Layers;
using pipeline::Skips;
}  // namespace torchspan
