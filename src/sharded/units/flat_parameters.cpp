#include "sharded/units/flat_parameters.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <torchspan/core/error.h>

#include "data_parallel/api/group_ranks.h"

namespace torchspan::sharded {

FlatParameters::FlatParameters(const std::vector<NamedParameter>& parameters, FlatLayout layout, Terms terms)
    : layout_(std::move(layout)),
      group_(std::move(terms.group)),
      ranks_(data_parallel::ranks_of(group_, state::kDataParallel)),
      pool_(std::move(terms.pool)),
      maps_(terms.maps) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions options = parameters[0].tensor.options().requires_grad(false);
  part_ = shared_or_private(group_, layout_.part_size(), options).zero_();
  full_ = at::empty({layout_.size()}, options.dtype(terms.compute));
  whole_ = pool_->take(layout_.size(), options);
  whole_.zero_();
  for (const NamedParameter& parameter : parameters) add(parameter);
  set_memory({});
}

void FlatParameters::add(const NamedParameter& parameter) {
  const auto& [name, tensor] = parameter;
  const std::size_t index = entries_.size();
  const Segment& segment = layout_.segments()[layout_.segment_of(index)];
  const std::int64_t count = tensor.numel(), offset = layout_.offset(index) - segment.begin;
  const std::int64_t from = segment.chunk * group_.rank(), to = from + segment.chunk;
  const std::int64_t begin = std::clamp(from, offset, offset + count);
  const std::int64_t end = std::clamp(to, offset, offset + count);
  Entry entry{name, tensor, {}, {}};
  entry.full = full_.narrow(0, layout_.offset(index), count).view(tensor.sizes()).variable_data();
  entry.part = part_.narrow(0, segment.part + (begin < end ? begin - from : 0), end - begin).variable_data();
  whole_.narrow(0, layout_.offset(index), count).view(tensor.sizes()).copy_(tensor);
  state::Place place =
      state::range_of(state::place_of(tensor), tensor.sizes().vec(), begin - offset, end - offset, ranks_);
  place.elements = entry.part;
  state::set_place(tensor, std::make_shared<state::Place>(std::move(place)));
  tensor.set_data(entry.part);
  entries_.push_back(std::move(entry));
}

void FlatParameters::divide(const collective::Group* from) {
  const at::NoGradGuard no_grad;
  if (from != nullptr) from->broadcast(whole_, 0).wait();
  keep(whole_);
  pool_->give(std::exchange(whole_, {}));
  if (maps_) joined_ = JoinedParts::make(group_, part_, layout_);
  if (joined_) set_memory(at::from_blob(joined_->data(), {layout_.size()}, full_.options()));
}

at::Tensor FlatParameters::own_chunk(const at::Tensor& flat, const Segment& segment) const {
  return flat.narrow(0, segment.begin + segment.chunk * group_.rank(), segment.chunk);
}

at::Tensor FlatParameters::in_part(const Segment& segment) const {
  return part_.narrow(0, segment.part, segment.chunk);
}

void FlatParameters::set_memory(at::Tensor memory) {
  c10::StorageImpl* storage = full_.storage().unsafeGetStorageImpl();
  void* data = memory.defined() ? memory.data_ptr() : nullptr;
  storage->set_data_ptr_noswap(c10::DataPtr(data, full_.device()));
  storage->set_nbytes(memory.defined() ? memory.nbytes() : 0);
  memory_ = std::move(memory);
}

void FlatParameters::keep(const at::Tensor& flat) {
  for (const Segment& segment : layout_.segments()) in_part(segment).copy_(own_chunk(flat, segment));
}

void FlatParameters::begin_whole() {
  if (!converts() && !joined_) {
    begin_gather();
    return end_gather();
  }
  end_gather();
  if (!gathered_) check_unchanged();
  const at::NoGradGuard no_grad;
  whole_ = pool_->take(layout_.size(), part_.options());
  for (PartGather& gather : gather_into(whole_)) gather.wait();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const at::Tensor& full = entries_[i].full;
    entries_[i].tensor.set_data(
        whole_.narrow(0, layout_.offset(i), full.numel()).view(full.sizes()).variable_data());
  }
}

void FlatParameters::end_whole() {
  const at::NoGradGuard no_grad;
  if (!converts() && !joined_) return keep(memory_);
  keep(whole_);
  if (gathered_ && !joined_) full_.copy_(whole_);
  for (const Entry& entry : entries_) entry.tensor.set_data(gathered_ ? entry.full : entry.part);
  pool_->give(std::exchange(whole_, {}));
}

void FlatParameters::free() {
  end_gather();
  const at::NoGradGuard no_grad;
  if (gathered_ || whole_.defined()) {
    for (const Entry& entry : entries_) entry.tensor.set_data(entry.part);
  }
  if (whole_.defined()) pool_->give(std::exchange(whole_, {}));
  if (!gathered_) return;
  gathered_ = false;
  if (joined_) return joined_->forget();
  at::Tensor memory = memory_;
  set_memory({});
  pool_->give(std::move(memory));
}

bool FlatParameters::holds(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  const c10::StorageImpl* memory = tensor.storage().unsafeGetStorageImpl();
  return memory == full_.storage().unsafeGetStorageImpl() ||
         (whole_.defined() && memory == whole_.storage().unsafeGetStorageImpl());
}

bool FlatParameters::set_name(const at::Tensor& parameter, const std::string& name) {
  for (Entry& entry : entries_) {
    if (!entry.tensor.is_same(parameter)) continue;
    entry.name = name;
    return true;
  }
  return false;
}

void FlatParameters::check_unchanged() const {
  for (const Entry& entry : entries_) {
    const bool same =
        entry.tensor.storage().unsafeGetStorageImpl() == part_.storage().unsafeGetStorageImpl() &&
        entry.tensor.storage_offset() == entry.part.storage_offset() &&
        entry.tensor.sizes() == entry.part.sizes() && entry.tensor.scalar_type() == part_.scalar_type();
    if (same) continue;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("parameter '{}' was moved, converted or replaced after FullyShardedDataParallel divided "
                    "it; convert the module before it is wrapped, and change values in place",
                    entry.name));
  }
}

/// The shared segment first: its length is that of no other unit, so a rank that gathers another one fails here.
std::vector<PartGather> FlatParameters::gather_into(const at::Tensor& flat) const {
  std::vector<PartGather> gathers;
  const std::vector<Segment>& segments = layout_.segments();
  for (auto segment = segments.rbegin(); segment != segments.rend(); ++segment) {
    at::Tensor part = in_part(*segment);
    if (part.scalar_type() != flat.scalar_type()) part = own_chunk(flat, *segment).copy_(part);
    gathers.emplace_back(group_, flat.narrow(0, segment->begin, segment->chunk * group_.size()),
                         std::move(part));
  }
  return gathers;
}

void FlatParameters::begin_gather() {
  if (whole_.defined() && !converts()) return;
  if (whole_.defined()) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("a forward inside of with_full_parameters() needs parameter '{}' in the dtype of "
                            "the mixed precision policy; run the forward before or after",
                            entries_[0].name));
  }
  if (gathered_ || is_gathering()) return;
  check_unchanged();
  const at::NoGradGuard no_grad;
  if (joined_) {  // no bytes, but a length that no other unit has
    const at::Tensor none = at::empty({0, layout_.segments()[layout_.shared()].chunk}, part_.options());
    others_ready_ = group_.all_reduce(none);
    return;
  }
  memory_ = pool_->take(layout_.size(), full_.options());
  gathers_ = gather_into(memory_);
}

void FlatParameters::end_gather() {
  if (!is_gathering()) return;
  if (others_ready_.valid()) std::exchange(others_ready_, {}).wait();
  for (PartGather& gather : std::exchange(gathers_, {})) gather.wait();
  const at::NoGradGuard no_grad;
  if (!joined_) set_memory(memory_);
  for (const Entry& entry : entries_) entry.tensor.set_data(entry.full);
  gathered_ = true;
}

}  // namespace torchspan::sharded
