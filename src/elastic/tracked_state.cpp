#include "elastic/tracked_state.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <torchspan/core/error.h>

#include "checkpoint/api/names_and_values.h"
#include "core/api/throw_invalid.h"
#include "state/api/memory_reader.h"

namespace torchspan::elastic {

Bytes StateListing::encode() const {
  ByteWriter out;
  for (const std::int64_t number : {position.step, position.epoch, position.next}) out.put(number);
  out.put(static_cast<std::uint32_t>(tensors.size()));
  for (const Entry& entry : tensors) {
    out.put_string(entry.name);
    out.put(static_cast<std::int8_t>(entry.dtype));
    out.put(static_cast<std::uint32_t>(entry.shape.size()));
    for (const std::int64_t size : entry.shape) out.put(size);
  }
  out.put(static_cast<std::uint32_t>(values.size()));
  for (const auto& [name, value] : values) {
    out.put_string(name);
    checkpoint::put_value(out, value);
  }
  return out.take();
}

StateListing StateListing::decode(BytesView bytes) {
  ByteReader in(bytes);
  StateListing listing;
  for (std::int64_t* number : {&listing.position.step, &listing.position.epoch, &listing.position.next})
    *number = in.get<std::int64_t>();
  listing.tensors.resize(in.get_count(9));
  for (Entry& entry : listing.tensors) {
    entry.name = in.get_string();
    const auto dtype = in.get<std::int8_t>();
    if (dtype < 0 || dtype >= static_cast<std::int8_t>(at::ScalarType::Undefined))
      throw_invalid("the tensor '{}' of a state has the unknown dtype {}", entry.name, dtype);
    entry.dtype = static_cast<at::ScalarType>(dtype);
    entry.shape.resize(in.get_count(sizeof(std::int64_t)));
    for (std::int64_t& size : entry.shape) {
      size = in.get<std::int64_t>();
      if (size < 0) throw_invalid("the tensor '{}' of a state has the size {}", entry.name, size);
    }
  }
  for (std::size_t left = in.get_count(5); left > 0; --left) {
    std::string name = in.get_string();
    listing.values.insert_or_assign(std::move(name), checkpoint::get_value(in));
  }
  in.expect_end();
  return listing;
}

StateListing StateListing::of(const checkpoint::StateWriter& writer, const ElasticPosition& position) {
  StateListing listing{.position = position, .tensors = {}, .values = writer.values()};
  for (const checkpoint::StateTensor& entry : writer.tensors())
    listing.tensors.push_back({entry.name, entry.tensor.scalar_type(), entry.tensor.sizes().vec()});
  return listing;
}

namespace {

[[noreturn]] void throw_remote(const std::string& name) {
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format("'{}' is a value on another worker: an elastic trainer copies local objects only", name));
}

/// A state that another rank sent, as objects read it.
class ReceivedState final : public state::MemoryReader {
 public:
  ReceivedState(StateListing listing, std::vector<at::Tensor> tensors) : step_(listing.position.step) {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      tensors_.emplace(std::move(listing.tensors[i].name), std::move(tensors[i]));
    values_ = std::move(listing.values);
  }
  std::int64_t step() const override { return step_; }

 protected:
  void read_on_owner(const std::string& full_name, const checkpoint::RemoteValue&) const override {
    throw_remote(full_name);
  }
  std::string describe() const override { return "the state of the rank that this one joined"; }

 private:
  const std::int64_t step_;
};

}  // namespace

checkpoint::StateWriter saved(const NamedSources& sources) {
  checkpoint::StateWriter writer;
  for (const auto& [name, source] : sources) {
    writer.set_prefix(name);
    source->save(writer);
  }
  return writer;
}

void load(const NamedSources& sources, StateListing listing, std::vector<at::Tensor> tensors) {
  ReceivedState reader(std::move(listing), std::move(tensors));
  for (const auto& [name, source] : sources) {
    reader.set_prefix(name);
    source->load(reader);
  }
}

void TrackedState::add(std::string name, checkpoint::SourcePtr source) {
  const bool taken =
      std::any_of(sources_.begin(), sources_.end(), [&](const auto& one) { return one.first == name; });
  if (taken || name.empty()) {
    throw_invalid("an object was added to the elastic trainer under the {} name '{}': choose another",
                  taken ? "taken" : "empty", name);
  }
  for (const auto& [other, registered] : sources_)
    checkpoint::require_separate_names(name, *source, other, *registered);
  sources_.emplace_back(std::move(name), std::move(source));
}

void TrackedState::copy_from_first(const collective::Group& group, ElasticPosition& position) {
  const at::NoGradGuard no_grad;
  group.rank() == 0 ? send(group, position) : receive(group, position);
}

void TrackedState::send(const collective::Group& group, const ElasticPosition& position) const {
  const checkpoint::StateWriter writer = saved(sources_);
  if (!writer.remote().empty()) throw_remote(writer.remote().front().first);
  std::vector<at::Tensor> tensors;
  for (const checkpoint::StateTensor& entry : writer.tensors())
    tensors.push_back(entry.tensor.detach().resolve_conj().resolve_neg().cpu().contiguous());
  const Bytes bytes = StateListing::of(writer, position).encode();
  at::Tensor size = at::empty({1}, at::kLong),
             header = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  size.fill_(header.numel());
  std::memcpy(header.data_ptr(), bytes.data(), bytes.size());
  std::vector<Future<at::Tensor>> sent{group.broadcast(size, 0), group.broadcast(header, 0)};
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) sent.push_back(group.broadcast(tensor, 0));
  }
  for (const auto& one : sent) one.wait();
}

void TrackedState::receive(const collective::Group& group, ElasticPosition& position) {
  at::Tensor size = at::empty({1}, at::kLong);
  group.broadcast(size, 0).wait();
  at::Tensor header = at::empty({size.item<std::int64_t>()}, at::kByte);
  group.broadcast(header, 0).wait();
  StateListing listing = StateListing::decode(header);
  std::vector<at::Tensor> tensors;
  std::vector<Future<at::Tensor>> received;
  for (const StateListing::Entry& entry : listing.tensors) {
    tensors.push_back(at::empty(entry.shape, entry.dtype));
    if (tensors.back().numel() > 0) received.push_back(group.broadcast(tensors.back(), 0));
  }
  for (const auto& one : received) one.wait();
  const ElasticPosition theirs = listing.position;
  load(sources_, std::move(listing), std::move(tensors));
  position = theirs;
}

}  // namespace torchspan::elastic
