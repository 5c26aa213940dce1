#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/arange.h>

#include <torchspan/optim/optimizer.h>
#include <torchspan/rpc/rref.h>
#include <torchspan/wire.h>

/// Example values of any type that can be sent: every number in them differs from the others and, if it is wide enough,
/// every byte of it from the others, so that exchanged or resized fields change the bytes.
namespace torchspan::wire_versions {

class Examples {
 public:
  template <class T>
  T next() {
    return make(Tag<T>());
  }

 private:
  template <class T>
  struct Tag {};

  template <class T>
  T make(Tag<T>) {
    if constexpr (std::is_same_v<T, bool>) {
      return ++last_ % 2 == 1;
    } else if constexpr (std::is_floating_point_v<T>) {
      return static_cast<T>(++last_) + T{0.25};
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(0x1726354453627100u | (++last_ & 0xFF));
    } else if constexpr (std::is_enum_v<T>) {
      return static_cast<T>(1);
    } else {
      return of_struct<T>(static_cast<Wire<T>*>(nullptr));
    }
  }
  template <class T, FixedString kName, auto... kMembers>
  T of_struct(const WireStruct<T, kName, kMembers...>*) {
    T value{};
    const auto fill = [&]<class... Member>(Member&... members) { ((members = next<Member>()), ...); };
    if constexpr (sizeof...(kMembers) == 0) {
      std::apply(fill, wire::members_of(value));
    } else {
      fill(value.*kMembers...);
    }
    return value;
  }

  std::string make(Tag<std::string>) { return "text" + std::to_string(++last_); }
  Unit make(Tag<Unit>) { return {}; }
  at::Tensor make(Tag<at::Tensor>) {
    const auto first = static_cast<std::int64_t>(++last_);
    return at::arange(first, first + 3, at::kFloat);
  }
  at::ScalarType make(Tag<at::ScalarType>) { return at::kBFloat16; }
  c10::IValue make(Tag<c10::IValue>) {
    std::tuple value{next<std::int64_t>(), next<std::string>(), next<at::Tensor>(),
                     next<double>()};  // left to right
    return c10::IValue(std::move(value));
  }
  Error make(Tag<Error>) {
    return Error(ErrorKind::kTimedOut, next<std::string>())
        .with_worker(next<std::string>())
        .with_call(next<std::string>())
        .with_elapsed(next<Duration>())
        .with_frame(next<RemoteFrame>());
  }
  optim::StateDict make(Tag<optim::StateDict>) {
    optim::StateDict state;
    const auto name = next<std::string>();
    state.insert(name, next<at::Tensor>());
    return state;
  }
  rpc::ReferencePtr make(Tag<rpc::ReferencePtr>) {
    return nullptr;
  }  // what it refers to is in the frame's handle
  template <class T>
  RRef<T> make(Tag<RRef<T>>) {
    return {};
  }
  template <class Rep, class Period>
  std::chrono::duration<Rep, Period> make(Tag<std::chrono::duration<Rep, Period>>) {
    return std::chrono::duration<Rep, Period>(next<std::int64_t>());
  }
  template <class T>
  std::vector<T> make(Tag<std::vector<T>>) {
    std::vector<T> values;
    values.push_back(next<T>());
    values.push_back(next<T>());
    return values;
  }
  template <class T>
  std::optional<T> make(Tag<std::optional<T>>) {
    return next<T>();
  }
  template <class K, class V>
  std::map<K, V> make(Tag<std::map<K, V>>) {
    std::map<K, V> values;
    K key = next<K>();
    values.emplace(std::move(key), next<V>());
    return values;
  }
  template <class A, class B>
  std::pair<A, B> make(Tag<std::pair<A, B>>) {
    A first = next<A>();
    return {std::move(first), next<B>()};
  }

  std::uint64_t last_ = 0;
};

}  // namespace torchspan::wire_versions
