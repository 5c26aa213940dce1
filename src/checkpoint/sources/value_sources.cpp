#include <array>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/CPUGeneratorImpl.h>

#include <torchspan/checkpoint/sources.h>
#include <torchspan/core/error.h>

#include "checkpoint/files/checksum.h"

namespace torchspan::checkpoint {
namespace {

class ValueSource final : public StateSource {
 public:
  ValueSource(std::function<Value()> get, std::function<void(const Value&)> set)
      : get_(std::move(get)), set_(std::move(set)) {}
  void save(StateWriter& writer) const override { writer.add_value("", get_()); }
  void load(const StateReader& reader) override {
    try {
      set_(reader.value(""));
    } catch (const Error& error) {
      throw Error(error.kind(), fmt::format("value '{}': {}", reader.full_name(""), error.message()));
    }
  }

 private:
  const std::function<Value()> get_;
  const std::function<void(const Value&)> set_;
};

class TensorSource final : public StateSource {
 public:
  explicit TensorSource(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  void save(StateWriter& writer) const override { writer.add("", tensor_); }
  void load(const StateReader& reader) override { reader.read_into("", tensor_); }

 private:
  const at::Tensor tensor_;
};

class RemoteSource final : public StateSource {
 public:
  explicit RemoteSource(RemoteValue value) : value_(std::move(value)) {}
  void save(StateWriter& writer) const override { writer.add_remote("", value_); }
  void load(const StateReader& reader) override { reader.read_remote("", value_); }

 private:
  const RemoteValue value_;
};

class RngSource final : public StateSource {
 public:
  void save(StateWriter& writer) const override { writer.add("cpu", state(generator())); }
  /// A rank that did not exist when the checkpoint was saved gets a seed that depends on its number, the step and
  /// its present seed.
  void load(const StateReader& reader) override {
    at::Generator cpu = generator();
    const std::lock_guard lock(cpu.mutex());
    if (reader.has("cpu")) return cpu.set_state(reader.read("cpu").clone());
    ByteWriter place;
    place.put_string(reader.full_name("cpu"));
    place.put(reader.step());
    place.put(static_cast<std::uint64_t>(cpu.current_seed()));
    cpu.set_current_seed(checksum_of(place.bytes()));
  }

 private:
  static at::Generator generator() { return at::detail::getDefaultCPUGenerator(); }
  static at::Tensor state(at::Generator cpu) {
    const std::lock_guard lock(cpu.mutex());
    return cpu.get_state();
  }
};

constexpr std::array<const char*, 4> kValueTypes{"a flag", "an integer", "a floating-point number", "a text"};

}  // namespace

SourcePtr value_source(std::function<Value()> get, std::function<void(const Value&)> set) {
  return std::make_unique<ValueSource>(std::move(get), std::move(set));
}
SourcePtr tensor_source(at::Tensor tensor) { return std::make_unique<TensorSource>(std::move(tensor)); }
SourcePtr remote_source(RemoteValue value) { return std::make_unique<RemoteSource>(std::move(value)); }
SourcePtr rng_source() { return std::make_unique<RngSource>(); }

namespace detail {

template <class T>
T value_as(const Value& value) {
  if (const T* held = std::get_if<T>(&value)) return *held;
  throw_invalid(fmt::format("the checkpoint has {}, but the program expects {}", kValueTypes[value.index()],
                            kValueTypes[Value(T{}).index()]));
}
template bool value_as<bool>(const Value&);
template std::int64_t value_as<std::int64_t>(const Value&);
template double value_as<double>(const Value&);
template std::string value_as<std::string>(const Value&);

}  // namespace detail
}  // namespace torchspan::checkpoint
