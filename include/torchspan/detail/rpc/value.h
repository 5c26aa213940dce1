#pragma once
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>

#include <torchspan/core/error.h>
#include <torchspan/detail/rpc/size_of.h>
#include <torchspan/wire.h>

namespace torchspan::rpc {

/// Demangled name of a C++ type; names types that cannot be sent (modules) in signatures and type tags.
std::string demangle(const std::type_info& type);

/// Name of a type in signatures, tags and messages: its wire name, or its C++ name.
template <class T>
std::string type_name_of() {
  if constexpr (wire::Transferable<T>) {
    return wire::type_name<T>();
  } else {
    return demangle(typeid(T));
  }
}

template <class T>
struct ObjectOfHelper {
  using type = T;
};
template <class T>
requires requires { typename T::ContainedType; }
struct ObjectOfHelper<T> {
  using type = typename T::ContainedType;
};
template <class T>
requires requires { typename T::element_type; }
struct ObjectOfHelper<T> {
  using type = typename T::element_type;
};
/// The type whose members are called on a T: the module behind a holder, or the target of a smart pointer.
template <class T>
using ObjectOf = typename ObjectOfHelper<T>::type;

/// A value of any type on its owner. Shared by its references; destroyed outside every lock.
class Value {
 public:
  virtual ~Value() = default;
  /// Writes the value; throws Error{kUnsupported} for a type that cannot be sent.
  virtual void encode(wire::Encoder& encoder) const = 0;
  virtual const std::type_info& type() const = 0;
  virtual void* address() = 0;
  virtual std::string type_name() const = 0;
  /// Current size of its data in bytes, if known. Not while other threads may change it.
  virtual KnownSize size() const = 0;
  /// The object as class C, which is its class or a base of it; null otherwise.
  template <class C>
  C* object() {
    if (object_type() == typeid(C)) return static_cast<C*>(object_address());
    try {
      throw_object();
    } catch (C* base) {
      return base;
    } catch (...) {
    }
    return nullptr;
  }

 protected:
  virtual const std::type_info& object_type() const = 0;
  virtual void* object_address() = 0;
  [[noreturn]] virtual void throw_object() = 0;  ///< finds a base class of an erased type
};

template <class T>
class ValueOf final : public Value {
 public:
  template <class... Args>
  explicit ValueOf(std::in_place_t, Args&&... args) : value(std::forward<Args>(args)...) {}

  void encode(wire::Encoder& encoder) const override {
    if constexpr (wire::Transferable<T>) {
      wire::encode<T>(encoder, value);
    } else {
      throw Error(ErrorKind::kUnsupported,
                  "a value of type '" + type_name() +
                      "' cannot be sent: keep it behind its RRef and call functions on it "
                      "there, or specialize torchspan::Wire for it");
    }
  }
  const std::type_info& type() const override { return typeid(T); }
  void* address() override { return &value; }
  std::string type_name() const override { return type_name_of<T>(); }
  KnownSize size() const override { return size_of(value); }

  T value;

 protected:
  using Object = ObjectOf<T>;
  const std::type_info& object_type() const override { return typeid(Object); }
  void* object_address() override { return object_pointer(); }
  void throw_object() override { throw object_pointer(); }

 private:
  Object* object_pointer() {
    if constexpr (std::is_same_v<Object, T>) {
      return &value;
    } else {
      return std::addressof(*value);
    }
  }
};

template <class T, class... Args>
std::shared_ptr<Value> make_value(Args&&... args) {
  return std::make_shared<ValueOf<T>>(std::in_place, std::forward<Args>(args)...);
}

}  // namespace torchspan::rpc
