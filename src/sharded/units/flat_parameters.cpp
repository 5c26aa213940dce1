#include "sharded/units/flat_parameters.h"

#include <algorithm>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <torchspan/core/error.h>

#include "collective/api/shares_memory.h"
#include "core/api/throw_invalid.h"
#include "data_parallel/api/group_ranks.h"

namespace torchspan::sharded {

at::Tensor BufferPool::take(std::int64_t count, const at::TensorOptions& options) {
  const std::size_t bytes = static_cast<std::size_t>(count) * options.dtype().itemsize();
  std::vector<at::Tensor> dropped;
  {
    MutexLock lock(mutex_);
    taken_ += bytes;
    most_taken_ = std::max(most_taken_, taken_);
    peak_ = std::max(peak_, taken_ + counted_);
    for (auto spare = spare_.begin(); spare != spare_.end(); ++spare) {
      if (spare->numel() != count || spare->dtype() != options.dtype() || spare->device() != options.device())
        continue;
      at::Tensor found = std::move(*spare);
      spare_.erase(spare);
      spare_bytes_ -= bytes;
      return found;
    }
    trim(dropped);
  }
  dropped.clear();
  const c10::InferenceMode normal(false);  // a later pass of training may get the tensor
  return at::empty({count}, options);
}

void BufferPool::give(at::Tensor buffer) {
  std::vector<at::Tensor> dropped;
  MutexLock lock(mutex_);
  taken_ -= buffer.nbytes();
  spare_bytes_ += buffer.nbytes();
  spare_.push_back(std::move(buffer));
  trim(dropped);
}

void BufferPool::clear() {
  std::vector<at::Tensor> dropped;
  MutexLock lock(mutex_);
  most_taken_ = taken_;
  trim(dropped);
}

void BufferPool::trim(std::vector<at::Tensor>& dropped) {
  while (!spare_.empty() && taken_ + spare_bytes_ > most_taken_) {
    spare_bytes_ -= spare_.front().nbytes();
    dropped.push_back(std::move(spare_.front()));
    spare_.erase(spare_.begin());
  }
}

void BufferPool::count(std::size_t bytes) {
  MutexLock lock(mutex_);
  counted_ += bytes;
  peak_ = std::max(peak_, taken_ + counted_);
}

void BufferPool::drop(std::size_t bytes) {
  MutexLock lock(mutex_);
  counted_ -= bytes;
}

std::size_t BufferPool::peak_bytes() const {
  MutexLock lock(mutex_);
  return peak_;
}

FlatLayout::FlatLayout(const std::vector<std::int64_t>& counts, const Terms& terms,
                       std::set<std::int64_t>& lengths)
    : ranks_(terms.ranks), segment_of_(counts.size()), offsets_(counts.size()) {
  const auto chunk_of = [&](std::int64_t count) {
    const std::int64_t unit = ranks_ * terms.step;
    return (count + unit - 1) / unit * terms.step;
  };
  Segment shared;
  std::int64_t small = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] >= terms.alone) {
      Segment segment;
      segment.chunk = chunk_of(counts[i]);
      segment.parameters = {i};
      append(std::move(segment));
      offsets_[i] = segments_.back().begin;
    } else {
      shared.parameters.push_back(i);
      offsets_[i] = small;
      small += counts[i];
    }
  }
  shared.chunk = std::max(chunk_of(small), terms.step);
  while (!lengths.insert(shared.chunk).second) shared.chunk += terms.step;
  append(std::move(shared));
  for (const std::size_t i : segments_.back().parameters) offsets_[i] += segments_.back().begin;
}

void FlatLayout::append(Segment segment) {
  segment.begin = size();
  segment.part = part_size_;
  part_size_ += segment.chunk;
  for (const std::size_t i : segment.parameters) segment_of_[i] = segments_.size();
  segments_.push_back(std::move(segment));
}

namespace {

std::size_t page_size() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

collective::SharesMemory* maps_of(const collective::Group& group) {
  return dynamic_cast<collective::SharesMemory*>(group.backend().get());
}

bool in_pages(const FlatLayout& layout, std::size_t item) {
  for (const Segment& segment : layout.segments()) {
    if (static_cast<std::size_t>(segment.chunk) * item % page_size() != 0) return false;
  }
  return true;
}

}  // namespace

std::int64_t JoinedParts::step(const collective::Group& group, at::ScalarType dtype) {
  if (group.size() == 1 || maps_of(group) == nullptr) return 0;
  return static_cast<std::int64_t>(page_size() / c10::elementSize(dtype));
}

std::unique_ptr<JoinedParts> JoinedParts::make(const collective::Group& group, const at::Tensor& part,
                                               const FlatLayout& layout) {
  const auto item = static_cast<std::size_t>(part.element_size());
  collective::SharesMemory* const maps = maps_of(group);
  if (maps == nullptr || !in_pages(layout, item)) return nullptr;
  const std::vector<std::byte*> parts = maps->peer_memory_of(part);
  if (parts.empty()) return nullptr;
  std::unique_ptr<JoinedParts> joined(new JoinedParts);
  const at::NoGradGuard no_grad;
  const at::Tensor mapped = at::full({1}, joined->map(parts, item, layout) ? 1 : 0, at::kInt);
  group.all_reduce(mapped, collective::kMin).wait();
  if (mapped.item<int>() == 0) return nullptr;
  return joined;
}

/// With an old size of 0, mremap() maps shared pages a second time.
bool JoinedParts::map(const std::vector<std::byte*>& parts, std::size_t item, const FlatLayout& layout) {
  const std::size_t bytes = static_cast<std::size_t>(layout.size()) * item;
  void* const range = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return false;
  data_ = range;
  bytes_ = bytes;
  for (const Segment& segment : layout.segments()) {
    const std::size_t chunk = static_cast<std::size_t>(segment.chunk) * item;
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      std::byte* const from = parts[rank] + static_cast<std::size_t>(segment.part) * item;
      std::byte* const to =
          static_cast<std::byte*>(range) + static_cast<std::size_t>(segment.begin) * item + rank * chunk;
      if (::mremap(from, 0, chunk, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) return false;
      if (::mprotect(to, chunk, PROT_READ) != 0) return false;
    }
  }
  return true;
}

void JoinedParts::forget() const { ::madvise(data_, bytes_, MADV_DONTNEED); }

JoinedParts::~JoinedParts() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

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
    throw_invalid(
        "parameter '{}' was moved, converted or replaced after FullyShardedDataParallel divided it; convert "
        "the module before it is wrapped, and change values in place",
        entry.name);
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
