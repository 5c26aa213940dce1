#pragma once
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace torchspan {

template <class Signature>
class UniqueFunction;

/// A callable held by value that may be move-only; calling an empty one is undefined.
template <class R, class... Args>
class UniqueFunction<R(Args...)> {
 public:
  UniqueFunction() = default;
  UniqueFunction(std::nullptr_t) {}
  template <class F>
  requires(!std::is_same_v<std::decay_t<F>, UniqueFunction> &&
           std::is_invocable_r_v<R, std::decay_t<F>&, Args...>) UniqueFunction(F&& f)
      : body_(std::make_unique<Body<std::decay_t<F>>>(std::forward<F>(f))) {}

  explicit operator bool() const { return body_ != nullptr; }
  R operator()(Args... args) { return body_->call(std::forward<Args>(args)...); }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual R call(Args... args) = 0;
  };
  template <class F>
  struct Body final : Base {
    explicit Body(F f) : function(std::move(f)) {}
    R call(Args... args) override {
      if constexpr (std::is_void_v<R>) {
        function(std::forward<Args>(args)...);
      } else {
        return function(std::forward<Args>(args)...);
      }
    }
    F function;
  };
  std::unique_ptr<Base> body_;
};

}  // namespace torchspan
