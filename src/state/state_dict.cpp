#include <fmt/format.h>

#include <torch/serialize/archive.h>

#include <torchspan/core/error.h>
#include <torchspan/state/state_dict.h>

namespace torchspan::state {
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
    if (contains(name))
      throw Error(ErrorKind::kInvalid, fmt::format("the optimizer state has '{}' twice", name));
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
    throw Error(ErrorKind::kInvalid, "the archive contains no optimizer state");
  }
  StateDict::Entries entries;
  for (std::size_t i = 0; i < names.toListRef().size(); ++i) {
    entries.emplace_back(names.toListRef()[i].toStringRef(), unpacked(tensors.toTupleRef().elements()[i]));
  }
  state = StateDict(std::move(entries));
  return archive;
}

}  // namespace torchspan::state
