#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/checkpoint/sources.h>
#include <torchspan/core/error.h>

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

  bool owns_names() const override { return false; }

 private:
  const std::function<Value()> get_;
  const std::function<void(const Value&)> set_;
};

class TensorSource final : public StateSource {
 public:
  explicit TensorSource(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  void save(StateWriter& writer) const override { writer.add("", tensor_); }
  void load(const StateReader& reader) override { reader.read_into("", tensor_); }

  bool owns_names() const override { return false; }

 private:
  const at::Tensor tensor_;
};

class TensorVariableSource final : public StateSource {
 public:
  explicit TensorVariableSource(at::Tensor& variable) : variable_(variable) {}
  void save(StateWriter& writer) const override { writer.add("", variable_); }
  void load(const StateReader& reader) override {
    if (!variable_.defined()) {
      throw_invalid(
          fmt::format("the tensor '{}' is undefined; assign one of the saved shape before restoring it",
                      reader.full_name("")));
    }
    reader.read_into("", variable_);
  }

  bool owns_names() const override { return false; }

 private:
  at::Tensor& variable_;
};

using state::StateDict;

class StateDictSource final : public StateSource {
 public:
  StateDictSource(std::function<StateDict()> get, std::function<void(const StateDict&)> set)
      : get_(std::move(get)), set_(std::move(set)) {}

  void save(StateWriter& writer) const override {
    for (const auto& entry : get_()) writer.add(entry.key(), entry.value());
  }
  void load(const StateReader& reader) override {
    StateDict state;
    // Clones: `set_` may keep the tensors, and a mapping would keep the file on the disk after it was deleted.
    for (const std::string& name : reader.names()) state.insert(name, reader.read(name).clone());
    set_(state);
  }

 private:
  const std::function<StateDict()> get_;
  const std::function<void(const StateDict&)> set_;
};

class RemoteSource final : public StateSource {
 public:
  explicit RemoteSource(RemoteValue value) : value_(std::move(value)) {}
  void save(StateWriter& writer) const override { writer.add_remote("", value_); }
  void load(const StateReader& reader) override { reader.read_remote("", value_); }

 private:
  const RemoteValue value_;
};

class RRefSource final : public StateSource {
 public:
  explicit RRefSource(const RRefBase& variable) : variable_(variable) {}
  void save(StateWriter& writer) const override { writer.add_remote("", variable_.state()); }
  void load(const StateReader& reader) override { reader.read_remote("", variable_.state()); }

  bool owns_names() const override { return false; }

 private:
  const RRefBase& variable_;
};

}  // namespace

SourcePtr value_source(std::function<Value()> get, std::function<void(const Value&)> set) {
  return std::make_unique<ValueSource>(std::move(get), std::move(set));
}
SourcePtr tensor_source(at::Tensor tensor) { return std::make_unique<TensorSource>(std::move(tensor)); }
SourcePtr tensor_variable_source(at::Tensor& variable) {
  return std::make_unique<TensorVariableSource>(variable);
}
SourcePtr state_dict_source(std::function<StateDict()> get, std::function<void(const StateDict&)> set) {
  return std::make_unique<StateDictSource>(std::move(get), std::move(set));
}
SourcePtr remote_source(RemoteValue value) { return std::make_unique<RemoteSource>(std::move(value)); }
SourcePtr rref_source(const RRefBase& variable) { return std::make_unique<RRefSource>(variable); }

}  // namespace torchspan::checkpoint
