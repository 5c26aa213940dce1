#pragma once
// Function, Class and FunctionTable: what other workers may call. Includes no torch/nn.
#include <concepts>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

#include <torchspan/core/task.h>
#include <torchspan/detail/core/source_location.h>
#include <torchspan/detail/rpc/error_types.h>
#include <torchspan/detail/rpc/value.h>

namespace torch::jit {
struct CompilationUnit;
struct Module;
}  // namespace torch::jit

namespace torchspan {

class Worker;
template <class T>
class RRef;

/// Where a function runs. A function that takes microseconds and never waits may be declared kInline: it
/// then runs on the thread that read its request, without a hand-off to the pool:
///   inline constexpr torchspan::Function<next> kNext{"next", torchspan::kInline};
/// A wait inside it throws kInvalid. If it takes longer than 10 ms three times in a row, it is served on the
/// pool from then on, and a warning is logged.
enum class Serve : std::uint8_t { kOnPool, kInline };
inline constexpr Serve kInline = Serve::kInline;

namespace rpc {

template <class F>
struct Signature;
template <class R, class... Args>
struct Signature<R (*)(Args...)> {
  using Returned = std::remove_cvref_t<R>;
  using Object = void;
  using Arguments = std::tuple<std::remove_cvref_t<Args>...>;
  /// Forwards the arguments. By-value parameters belong to the function and may be destroyed before it
  /// returns.
  template <class F>
  static decltype(auto) apply(F&& function, Arguments& arguments) {
    return std::apply([&](auto&... all) -> decltype(auto) { return function(static_cast<Args&&>(all)...); },
                      arguments);
  }
  static constexpr bool kTakesWorker = false;
};
template <class R, class... Args>
struct Signature<R (*)(Worker&, Args...)> : Signature<R (*)(Args...)> {
  static constexpr bool kTakesWorker = true;
};
template <class R, class C, class... Args>
struct Signature<R (C::*)(Args...)> : Signature<R (*)(Args...)> {
  using Object = C;
  static constexpr bool kTakesWorker = false;
};
template <class R, class... Args>
struct Signature<R (*)(Args...) noexcept> : Signature<R (*)(Args...)> {};
template <class R, class C, class... Args>
struct Signature<R (C::*)(Args...) const> : Signature<R (C::*)(Args...)> {};
template <class R, class C, class... Args>
struct Signature<R (C::*)(Args...) noexcept> : Signature<R (C::*)(Args...)> {};
template <class R, class C, class... Args>
struct Signature<R (C::*)(Args...) const noexcept> : Signature<R (C::*)(Args...)> {};
/// Lambdas, through the function pointer they convert to.
template <class F>
requires requires(const F& lambda) { +lambda; } && std::is_class_v<F>
struct Signature<F> : Signature<decltype(+std::declval<const F&>())> {
};

/// What a Function can name: a callable with exactly one signature.
template <auto kFunction>
concept Nameable = requires {
  typename Signature<std::remove_cv_t<decltype(kFunction)>>::Returned;
};

}  // namespace rpc

/// Names a function that other workers may call: a name on the wire, a type at compile time.
///   inline constexpr torchspan::Function<mean_of> kMeanOf{"mean_of"};
/// A free function or a captureless lambda may take `Worker&` as its first parameter; it receives the
/// worker it runs on, and callers omit it. It may return T, Future<T> or Task<T>; callers get T. Member
/// functions are called on the value of an RRef.
template <auto kFunction>
struct Function {
  static_assert(
      rpc::Nameable<kFunction>,
      "a Function names a function, a member function, or a lambda without captures and `auto` parameters");
  constexpr explicit(false) Function(const char* name, Serve serve = Serve::kOnPool)
      : name(name), serve(serve) {}
  /// Copies the token and records the call site. This is how the verbs of an RRef, whose other parameters are the
  /// function's, get the call site.
  constexpr explicit(false) Function(const Function& token, SourceLocation site = SourceLocation::current())
      : name(token.name), serve(token.serve), site(site) {}
  Function& operator=(const Function&) = delete;

  const char* name;
  Serve serve;
  SourceLocation site;
};

/// Names a class whose objects other workers may create with these constructor arguments.
///   inline constexpr torchspan::Class<Encoder, int64_t> kEncoder{"Encoder"};
template <class T, class... Args>
struct Class {
  const char* name;
};

namespace rpc {

template <class R>
struct ResultHelper {
  using type = R;
};
template <class T>
struct ResultHelper<Future<T>> {
  using type = T;
};
template <class T>
struct ResultHelper<Task<T>> {
  using type = T;
};

template <auto kFunction>
using SignatureOf = Signature<std::remove_cv_t<decltype(kFunction)>>;
/// What a caller gets: T for a function that returns T, Future<T> or Task<T>.
template <auto kFunction>
using ResultOf = typename ResultHelper<typename SignatureOf<kFunction>::Returned>::type;
template <auto kFunction>
inline constexpr bool kIsMember = !std::is_void_v<typename SignatureOf<kFunction>::Object>;

using ValuePtr = std::shared_ptr<Value>;

/// One execution on the callee. The function's own decoder reads `arguments`.
struct Execution {
  Worker& worker;
  wire::Decoder& arguments;
  std::weak_ptr<ContinuationExecutor> continuations;
  std::shared_ptr<TaskEnvironment> environment;
};

/// The result of an execution: available now or later.
struct Outcome {
  ValuePtr value;
  Future<ValuePtr> later;
};

/// A function in the callee's table.
struct FunctionEntry {
  std::string name;
  std::string signature;  ///< "(int64, Tensor) -> Tensor"; part of the identity
  std::uint64_t id = 0;   ///< digest of name and signature; sent on the wire
  std::function<Outcome(Execution&)> run;
  Serve serve = Serve::kOnPool;
  std::string (*describe)() = nullptr;  ///< the function that produced `signature`
};

/// A TorchScript function, or a method of a module, in the callee's table.
struct ScriptEntry {
  std::string name;
  std::string schema;
  std::function<c10::IValue(std::vector<c10::IValue> args, const std::map<std::string, c10::IValue>& kwargs)>
      run;
};

std::uint64_t function_id(std::string_view name, std::string_view signature);
/// Throws Error{kInvalid} that names both types: a member function was called on an object of another type.
[[noreturn]] void throw_wrong_object(const Value& value, const std::type_info& wanted);
/// Throws Error{kUnsupported}: this worker declares the function, and does not serve it.
Outcome refuse_declared(Execution& execution);
/// Decodes the next reference and returns its value, which this worker must own and which must be ready.
ValuePtr decode_object(Execution& invocation);

template <class... Args>
std::string signature_text(std::tuple<Args...>*, const std::string& result, const std::string& object) {
  std::string text = object + "(";
  std::string_view comma;
  ((text.append(comma).append(type_name_of<Args>()), comma = ", "), ...);
  return text + ") -> " + result;
}

template <auto kFunction>
std::string signature_of() {
  using S = SignatureOf<kFunction>;
  std::string object;
  if constexpr (kIsMember<kFunction>) object = demangle(typeid(typename S::Object)) + "::";
  return signature_text(static_cast<typename S::Arguments*>(nullptr),
                        type_name_of<Stored<ResultOf<kFunction>>>(), object);
}

template <class T, class... Args>
std::string constructor_signature() {
  return signature_text(static_cast<std::tuple<std::remove_cvref_t<Args>...>*>(nullptr), type_name_of<T>(),
                        "new ");
}

/// Stores what `body` returns; void becomes Unit.
template <class R, class F>
ValuePtr value_from(F&& body) {
  if constexpr (std::is_void_v<R>) {
    body();
    return make_value<Unit>();
  } else {
    return make_value<R>(body());
  }
}

/// Calls the function with arguments that outlive every suspension of a coroutine.
template <auto kFunction, class Arguments>
decltype(auto) apply_function(Worker& worker, Value* object, Arguments& arguments) {
  using S = SignatureOf<kFunction>;
  if constexpr (kIsMember<kFunction>) {
    using C = typename S::Object;
    C* target = object->template object<C>();
    if (target == nullptr) throw_wrong_object(*object, typeid(C));
    return S::apply(
        [&](auto&&... args) -> decltype(auto) {
          return std::invoke(kFunction, *target, std::forward<decltype(args)>(args)...);
        },
        arguments);
  } else if constexpr (S::kTakesWorker) {
    return S::apply(
        [&](auto&&... args) -> decltype(auto) {
          return kFunction(worker, std::forward<decltype(args)>(args)...);
        },
        arguments);
  } else {
    return S::apply(
        [](auto&&... args) -> decltype(auto) { return kFunction(std::forward<decltype(args)>(args)...); },
        arguments);
  }
}

template <auto kFunction, class Arguments>
Task<ValuePtr> run_coroutine(Worker& worker, ValuePtr object, Arguments arguments) {
  using R = ResultOf<kFunction>;
  if constexpr (std::is_void_v<R>) {
    co_await apply_function<kFunction>(worker, object.get(), arguments);
    co_return make_value<Unit>();
  } else {
    co_return make_value<R>(co_await apply_function<kFunction>(worker, object.get(), arguments));
  }
}

template <class... Args>
std::tuple<Args...> decode_arguments(wire::Decoder& decoder, std::tuple<Args...>*) {
  std::tuple<Args...> arguments{wire::decode<Args>(decoder)...};  // braces: left to right
  decoder.expect_end();
  return arguments;
}

template <auto kFunction>
Outcome run_function(Execution& invocation) {
  using S = SignatureOf<kFunction>;
  using Returned = typename S::Returned;
  using R = ResultOf<kFunction>;
  ValuePtr object;
  if constexpr (kIsMember<kFunction>) object = decode_object(invocation);
  auto arguments = decode_arguments(invocation.arguments, static_cast<typename S::Arguments*>(nullptr));
  if constexpr (std::is_same_v<Returned, Task<R>>) {
    auto task = run_coroutine<kFunction>(invocation.worker, std::move(object), std::move(arguments));
    return {nullptr, start(std::move(task), invocation.continuations, invocation.environment)};
  } else if constexpr (std::is_same_v<Returned, Future<R>>) {
    Future<R> future = apply_function<kFunction>(invocation.worker, object.get(), arguments);
    if (!future.valid())
      throw_invalid("the function returned an empty Future; return one of a call or of a Promise");
    return {nullptr, future.then([](Future<R> done) { return value_from<R>([&] { return done.wait(); }); })};
  } else {
    return {value_from<R>([&]() -> decltype(auto) {
              return apply_function<kFunction>(invocation.worker, object.get(), arguments);
            }),
            {}};
  }
}

template <class T, class... Args>
Outcome run_constructor(Execution& invocation) {
  auto arguments =
      decode_arguments(invocation.arguments, static_cast<std::tuple<std::remove_cvref_t<Args>...>*>(nullptr));
  return {std::apply([](auto&... args) { return make_value<T>(std::move(args)...); }, arguments), {}};
}

}  // namespace rpc

/// The functions and classes that other workers may call here. Build it in main(), identically on every
/// worker; nothing else is callable. It is immutable once a worker has it.
class FunctionTable {
 public:
  /// Adds tokens. Throws Error{kInvalid} for an empty or duplicate name.
  template <class... Tokens>
  FunctionTable& add(const Tokens&... tokens) {
    (add_one(tokens), ...);
    return *this;
  }
  /// Adds tokens of functions that other workers serve, such as those of Python programs, and this one only calls: they need
  /// no definition here. Throws as add().
  template <auto... kFunctions>
  FunctionTable& declare(const Function<kFunctions>&... tokens) {
    (insert({tokens.name, rpc::signature_of<kFunctions>(), 0, &rpc::refuse_declared, Serve::kOnPool,
             &rpc::signature_of<kFunctions>}),
     ...);
    return *this;
  }
  /// Adds every function of a unit under its qualified name: rpc_sync(to, "__torch__.score", {x}).
  FunctionTable& add_script(const std::shared_ptr<torch::jit::CompilationUnit>& unit);
  /// Adds the methods of a module that every worker has: rpc_sync(to, "model.forward", {x}) runs the
  /// callee's module.
  FunctionTable& add_script(const std::string& name, const torch::jit::Module& module);
  /// Sends exceptions of type E, which needs a Wire<E>, to the caller, which catches an E with the Error that describes
  /// the failure nested in it (std::rethrow_if_nested). Types are tried in the order they were added: add derived types
  /// first.
  template <class E>
  FunctionTable& add_error(std::string name) {
    errors_.add<E>(std::move(name));
    return *this;
  }
  /// The entry with that id, or null.
  const rpc::FunctionEntry* find(std::uint64_t id) const;
  const rpc::FunctionEntry* find_named(std::string_view name) const;
  /// The TorchScript entry of that name, or null.
  const rpc::ScriptEntry* find_script(std::string_view name) const;
  const rpc::ErrorTypes& errors() const { return errors_; }
  /// "name signature" of every entry, sorted. Workers compare these when they connect.
  std::vector<std::string> descriptions() const;
  /// Digest of descriptions().
  std::uint64_t digest() const;

 private:
  /// A token that expands to several tokens.
  template <class Token>
  requires requires(const Token& token) { token.tokens(); }
  void add_one(const Token& token) {
    std::apply([this](const auto&... tokens) { this->add(tokens...); }, token.tokens());
  }
  template <auto kFunction>
  void add_one(const Function<kFunction>& token) {
    insert({token.name, rpc::signature_of<kFunction>(), 0, &rpc::run_function<kFunction>, token.serve,
            &rpc::signature_of<kFunction>});
  }
  template <class T, class... Args>
  void add_one(const Class<T, Args...>& token) {
    insert({token.name, rpc::constructor_signature<T, Args...>(), 0, &rpc::run_constructor<T, Args...>,
            Serve::kOnPool, &rpc::constructor_signature<T, Args...>});
  }
  /// A function whose types are known at run time.
  void add_one(const rpc::FunctionEntry& entry) { insert(entry); }
  void insert(rpc::FunctionEntry entry);
  void insert_script(rpc::ScriptEntry entry);

  std::map<std::uint64_t, rpc::FunctionEntry> by_id_;
  std::map<std::string, std::uint64_t, std::less<>> by_name_;
  std::map<std::string, rpc::ScriptEntry, std::less<>> scripts_;
  rpc::ErrorTypes errors_;
};

}  // namespace torchspan
