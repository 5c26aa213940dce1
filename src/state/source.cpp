#include <array>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/MemoryOverlap.h>
#include <torch/serialize/archive.h>

#include <torchspan/core/error.h>
#include <torchspan/state/source.h>

#include "core/api/throw_invalid.h"
#include "state/api/place.h"
#include "state/api/save_load.h"

namespace torchspan::state {
namespace {

constexpr std::array<const char*, 4> kValueTypes{"a flag", "an integer", "a floating-point number", "a text"};

Sizes sizes_of(const at::Tensor& tensor) { return tensor.sizes().vec(); }

/// Elements that share memory cannot get different values.
void require_separate_elements(const std::string& where, const std::string& name, const at::Tensor& target) {
  if (target.layout() != at::kStrided || target.numel() == 0) return;
  if (at::has_internal_overlap(target) != at::MemOverlap::Yes) return;
  throw_invalid(
      "{}: this program's tensor '{}' of shape {} is expanded: several elements have the same memory; "
      "restore into a clone(), and expand it afterwards",
      where, name, describe(sizes_of(target)));
}

}  // namespace

void StateWriter::add(const std::string& name, const at::Tensor& tensor, std::uint64_t fingerprint) {
  if (!tensor.defined()) throw_invalid("the tensor '{}' is undefined", join_names(prefix_, name));
  add_shard(name, tensor, tensor.layout() == at::kStrided ? sizes_of(tensor) : Sizes(),
            Sizes(static_cast<std::size_t>(tensor.dim()), 0));
  tensors_.back().fingerprint = fingerprint;
}

void StateWriter::add_shard(const std::string& name, const at::Tensor& shard, Sizes shape, Sizes offset) {
  const std::string full = join_names(prefix_, name);
  if (!shard.defined()) throw_invalid("the tensor '{}' is undefined", full);
  if (shard.layout() != at::kStrided) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("the tensor '{}' is not dense, so no checkpoint can have "
                            "it; convert it with to_dense()",
                            full));
  }
  if (!fits({offset, sizes_of(shard)}, shape)) {
    throw_invalid("the shard of shape {} at {} of '{}' is not within its shape {}",
                  state::describe(sizes_of(shard)), state::describe(offset), full, state::describe(shape));
  }
  const auto [first, is_new] = places_.emplace(full, tensors_.size());
  const bool whole = sizes_of(shard) == shape;
  if (!is_new && (whole || sizes_of(tensors_[first->second].tensor) == shape))
    throw_invalid("the name '{}' is saved twice; register one object under another name", full);
  tensors_.push_back({full, shard.detach(), std::move(shape), std::move(offset)});
}

void StateWriter::add_value(const std::string& name, Value value) {
  const std::string full = join_names(prefix_, name);
  if (!values_.emplace(full, std::move(value)).second)
    throw_invalid("the value '{}' is saved twice; register one under another name", full);
}

void StateWriter::add_remote(const std::string& name, RemoteValue value) {
  const std::string full = join_names(prefix_, name);
  if (!value) throw_invalid("the RRef saved as '{}' is empty", full);
  remote_.emplace_back(full, std::move(value));
}

std::string StateReader::full_name(const std::string& name) const { return join_names(prefix_, name); }

std::vector<std::string> StateReader::names() const {
  std::vector<std::string> all = all_names();
  if (prefix_.empty()) return all;
  std::vector<std::string> mine;
  const std::string dotted = prefix_ + ".";
  for (const std::string& name : all) {
    if (name.starts_with(dotted)) mine.push_back(name.substr(dotted.size()));
  }
  return mine;
}

bool StateReader::has(const std::string& name) const { return contains(full_name(name)); }

std::vector<std::int64_t> StateReader::shape(const std::string& name) const {
  return shape_of(full_name(name));
}

at::Tensor StateReader::read(const std::string& name) const { return read_tensor(full_name(name)); }

void StateReader::check(const std::string& name, const at::Tensor& target, bool cast) const {
  const std::string full = full_name(name);
  if (!contains(full)) throw_invalid("{} has no tensor '{}'", describe(), full);
  const Sizes saved = shape_of(full);
  if (saved != sizes_of(target) || (!cast && dtype_of(full) != target.scalar_type())) {
    throw_invalid("{}: the tensor '{}' has shape {} and dtype {}, but this program's has {} and {}",
                  describe(), full, state::describe(saved), c10::toString(dtype_of(full)),
                  state::describe(sizes_of(target)), c10::toString(target.scalar_type()));
  }
  require_separate_elements(describe(), full, target);
}

void StateReader::read_into(const std::string& name, const at::Tensor& target) const {
  check(name, target);
  read_box(full_name(name), target, Sizes(static_cast<std::size_t>(target.dim()), 0));
}

void StateReader::read_shard_into(const std::string& name, const at::Tensor& shard,
                                  const std::vector<std::int64_t>& offset) const {
  const std::string full = full_name(name);
  if (!contains(full)) throw_invalid("{} has no tensor '{}'", describe(), full);
  const Sizes saved = shape_of(full);
  if (!fits({offset, sizes_of(shard)}, saved) || dtype_of(full) != shard.scalar_type()) {
    throw_invalid(
        "{}: the tensor '{}' has shape {} and dtype {}; a shard of shape {} and dtype {} at {} is not part "
        "of it",
        describe(), full, state::describe(saved), c10::toString(dtype_of(full)),
        state::describe(sizes_of(shard)), c10::toString(shard.scalar_type()), state::describe(offset));
  }
  require_separate_elements(describe(), full, shard);
  read_box(full, shard, offset);
}

void StateReader::read_remote(const std::string& name, const RemoteValue& value) const {
  const std::string full = full_name(name);
  if (!value) throw_invalid("the RRef restored as '{}' is empty; create its value first", full);
  read_on_owner(full, value);
}

Value StateReader::value(const std::string& name) const {
  const std::string full = full_name(name);
  const Value* found = find_value(full);
  if (found == nullptr) throw_invalid("{} has no value '{}'", describe(), full);
  return *found;
}

template <class T>
T value_as(const Value& value) {
  if (const T* held = std::get_if<T>(&value)) return *held;
  throw_invalid("the checkpoint has {}, but the program expects {}", kValueTypes[value.index()],
                kValueTypes[Value(T{}).index()]);
}
template bool value_as<bool>(const Value&);
template std::int64_t value_as<std::int64_t>(const Value&);
template double value_as<double>(const Value&);
template std::string value_as<std::string>(const Value&);

namespace {

/// Archives cannot store sparse tensors, so this stores the three parts of one.
c10::IValue packed(const at::Tensor& tensor) {
  if (!tensor.is_sparse()) return c10::ivalue::Tuple::create({tensor});
  const at::Tensor whole = tensor.coalesce();
  return c10::ivalue::Tuple::create({whole.indices(), whole.values(), whole.sizes().vec()});
}

at::Tensor unpacked(const c10::IValue& value) {
  const auto& parts = value.toTupleRef().elements();
  if (parts.size() == 1) return parts[0].toTensor();
  return at::_sparse_coo_tensor_unsafe(parts.at(0).toTensor(), parts.at(1).toTensor(),
                                       parts.at(2).toIntVector())
      ._coalesced_(true);
}

}  // namespace

StateDict::StateDict(Entries entries) : StateDict() {
  for (auto& [name, tensor] : entries) {
    if (contains(name)) throw_invalid("the optimizer state has '{}' twice", name);
    insert(std::move(name), std::move(tensor));
  }
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const StateDict& state) {
  c10::List<std::string> names;
  std::vector<c10::IValue> tensors;
  for (const auto& entry : state) {
    names.push_back(entry.key());
    tensors.push_back(packed(entry.value()));
  }
  archive.write("names", c10::IValue(names));
  archive.write("tensors", c10::IValue(c10::ivalue::Tuple::create(std::move(tensors))));
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, StateDict& state) {
  c10::IValue names, tensors;
  if (!archive.try_read("names", names) || !archive.try_read("tensors", tensors) || !names.isList() ||
      !tensors.isTuple() || names.toListRef().size() != tensors.toTupleRef().elements().size()) {
    throw_invalid("the archive contains no optimizer state");
  }
  StateDict::Entries entries;
  for (std::size_t i = 0; i < names.toListRef().size(); ++i) {
    entries.emplace_back(names.toListRef()[i].toStringRef(), unpacked(tensors.toTupleRef().elements()[i]));
  }
  state = StateDict(std::move(entries));
  return archive;
}

}  // namespace torchspan::state
