#include "elastic/peer_copies.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <span>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <torchspan/core/error.h>

#include "core/api/agreement.h"
#include "core/api/throw_invalid.h"
#include "elastic/tracked_state.h"

namespace torchspan::elastic {
namespace {

void put_ids(ByteWriter& out, const std::vector<CopyId>& ids) {
  out.put(static_cast<std::uint32_t>(ids.size()));
  for (const CopyId& id : ids) {
    out.put(id.step);
    out.put(id.round);
  }
}

std::vector<CopyId> get_ids(ByteReader& in) {
  std::vector<CopyId> ids(in.get_count(sizeof(std::int64_t) + sizeof(std::uint64_t)));
  for (CopyId& id : ids) {
    id.step = in.get<std::int64_t>();
    id.round = in.get<std::uint64_t>();
  }
  return ids;
}

bool contains(const std::vector<CopyId>& ids, const CopyId& id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Bytes CopyInventory::encode() const {
  ByteWriter out;
  put_ids(out, own);
  put_ids(out, held);
  out.put(newest_checkpoint);
  out.put(round);
  return out.take();
}

CopyInventory CopyInventory::decode(BytesView bytes) {
  ByteReader in(bytes);
  CopyInventory inventory;
  inventory.own = get_ids(in);
  inventory.held = get_ids(in);
  inventory.newest_checkpoint = in.get<std::int64_t>();
  inventory.round = in.get<std::uint64_t>();
  in.expect_end();
  return inventory;
}

std::optional<CopyId> newest_complete(const std::vector<CopyInventory>& ranks) {
  std::optional<CopyId> newest;
  if (ranks.empty()) return newest;
  // A complete copy of rank 0 is at rank 0 or at rank 1.
  std::vector<CopyId> candidates = ranks[0].own;
  const std::vector<CopyId>& held = ranks[1 % ranks.size()].held;
  candidates.insert(candidates.end(), held.begin(), held.end());
  for (const CopyId& id : candidates) {
    bool complete = true;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      complete =
          complete && (contains(ranks[rank].own, id) || contains(ranks[(rank + 1) % ranks.size()].held, id));
    if (complete && (!newest || *newest < id)) newest = id;
  }
  return newest;
}

namespace {

std::int64_t aligned_part(std::int64_t bytes) {
  return (bytes + StatePart::kAlignment - 1) / StatePart::kAlignment * StatePart::kAlignment;
}

void make_room(at::Tensor& tensor, std::int64_t bytes) {
  if (!tensor.defined() || tensor.numel() != bytes) {
    tensor = at::Tensor();  // before the new memory is allocated
    tensor = at::empty({bytes}, at::kByte);
  }
}

/// The bytes of `data` from `begin` as a tensor; they share memory.
at::Tensor viewed(const at::Tensor& data, std::int64_t begin, const StateListing::Entry& entry,
                  std::int64_t bytes) {
  if (bytes == 0) return at::empty(entry.shape, entry.dtype);
  return data.narrow(0, begin, bytes).view(entry.dtype).view(entry.shape);
}

/// Bytes of an entry, or an Error: listings come from other ranks.
std::int64_t bytes_of_entry(const StateListing::Entry& entry, std::int64_t most) {
  auto bytes = static_cast<std::int64_t>(c10::elementSize(entry.dtype));
  for (const std::int64_t size : entry.shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) bytes = most + 1;
    if (bytes > most) break;
  }
  if (bytes > most) throw_invalid("the copy of a state lacks a part of the tensor '{}'", entry.name);
  return bytes;
}

void check_local(const checkpoint::StateWriter& writer) {
  const std::string advice =
      "set RecoveryOptions::steps_per_copy to 0, so that it is restored from checkpoints only";
  if (!writer.remote().empty()) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("'{}' is a value on another worker, of which no copies in memory are made: {}",
                            writer.remote().front().first, advice));
  }
  for (const checkpoint::StateTensor& entry : writer.tensors()) {
    if (entry.tensor.sizes().vec() == entry.shape) continue;
    throw Error(ErrorKind::kUnsupported,
                fmt::format("'{}' is a part of a tensor, of which no copies in memory are made: {}",
                            entry.name, advice));
  }
}

}  // namespace

void StatePart::take(const CopyId& of, const NamedSources& sources) {
  const checkpoint::StateWriter writer = saved(sources);
  check_local(writer);
  const StateListing listing = StateListing::of(writer, {.step = of.step, .epoch = 0, .next = 0});
  std::int64_t total = 0;
  for (const checkpoint::StateTensor& entry : writer.tensors())
    total += aligned_part(static_cast<std::int64_t>(entry.tensor.nbytes()));
  const Bytes bytes = listing.encode();
  header = at::Tensor();  // no copy exists while its data is written
  make_room(data, total);
  const at::NoGradGuard no_grad;
  std::int64_t at = 0;
  for (std::size_t i = 0; i < listing.tensors.size(); ++i) {
    const at::Tensor& tensor = writer.tensors()[i].tensor;
    const auto size = static_cast<std::int64_t>(tensor.nbytes());
    if (size > 0) viewed(data, at, listing.tensors[i], size).copy_(tensor);
    at += aligned_part(size);
  }
  id = of;
  at::Tensor text = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(text.data_ptr(), bytes.data(), bytes.size());
  header = text;
}

void StatePart::expect(const CopyId& of, std::int64_t header_bytes, std::int64_t data_bytes) {
  header = at::Tensor();
  id = of;
  make_room(data, data_bytes);
  make_room(header, header_bytes);
}

void StatePart::load(const NamedSources& sources) const {
  StateListing listing = StateListing::decode(header);
  std::vector<at::Tensor> tensors;
  std::int64_t at = 0;
  for (const StateListing::Entry& entry : listing.tensors) {
    const std::int64_t bytes = bytes_of_entry(entry, data.numel() - at);
    // Objects may keep what they read, and the copy's memory is used again.
    tensors.push_back(viewed(data, at, entry, bytes).clone());
    at = std::min(at + aligned_part(bytes), data.numel());
  }
  elastic::load(sources, std::move(listing), std::move(tensors));
}

namespace {

enum CopyTag : int { kSizesTag = 1, kHeaderTag, kDataTag };

using Sent = std::vector<Future<at::Tensor>>;

void send_part(const collective::Group& group, const StatePart& part, int to, Sent& sent) {
  sent.push_back(group.send(part.header, to, kHeaderTag));
  if (part.data.numel() > 0) sent.push_back(group.send(part.data, to, kDataTag));
}

/// `part` has room for what arrives.
void receive_part(const collective::Group& group, const StatePart& part, int from, Sent& received) {
  received.push_back(group.recv(part.header, from, kHeaderTag));
  if (part.data.numel() > 0) received.push_back(group.recv(part.data, from, kDataTag));
}

void wait_for(const Sent& all) {
  for (const Future<at::Tensor>& one : all) one.wait();
}

}  // namespace

PeerCopies::~PeerCopies() {
  if (thread_.joinable()) {
    group_.abort(
        Error(ErrorKind::kCancelled, fmt::format("rank {} stopped copying its state", group_.rank())));
    thread_.join();
  }
}

void PeerCopies::add(std::string name, checkpoint::SourcePtr source) {
  sources_.emplace_back(std::move(name), std::move(source));
}

std::optional<CopyId> PeerCopies::exchange(std::int64_t newest_checkpoint, std::uint64_t round) {
  CopyInventory mine = memory_.inventory();
  mine.newest_checkpoint = newest_checkpoint;
  mine.round = round;
  inventories_.clear();
  for (const Bytes& bytes : group_.all_gather_bytes(mine.encode()))
    inventories_.push_back(CopyInventory::decode(bytes));
  return newest_complete(inventories_);
}

void PeerCopies::load(const CopyId& id) {
  fetch_missing(id);
  const RankOutcome loaded = outcome_of([&] {
    memory_.own(id)->load(sources_);
    return Bytes();
  });
  all_or_none([&](BytesView mine) { return group_.all_gather_bytes(mine); }, loaded,
              [&](std::size_t rank, const Error& failure) {
                return Error(ErrorKind::kInvalid,
                             fmt::format("rank {} cannot use the copy of its state in memory: {}",
                                         group_.ranks()[rank], failure.message()));
              });
  memory_.keep(id);
}

void PeerCopies::fetch_missing(const CopyId& id) {
  const auto lacks = [&](int rank) {
    const std::vector<CopyId>& own = inventories_[static_cast<std::size_t>(rank)].own;
    return std::find(own.begin(), own.end(), id) == own.end();
  };
  const auto sizes = [] { return at::empty({2}, at::kLong); };
  Sent sent;
  if (lacks(previous())) {
    const StatePart& part = *memory_.held(id);
    at::Tensor numbers = sizes();
    numbers.data_ptr<std::int64_t>()[0] = part.header.numel();
    numbers.data_ptr<std::int64_t>()[1] = part.data.numel();
    sent.push_back(group_.send(numbers, previous(), kSizesTag));
    send_part(group_, part, previous(), sent);
  }
  if (lacks(group_.rank())) {
    at::Tensor numbers = sizes();
    group_.recv(numbers, next(), kSizesTag).wait();
    StatePart part;
    part.expect(id, numbers.data_ptr<std::int64_t>()[0], numbers.data_ptr<std::int64_t>()[1]);
    Sent received;
    receive_part(group_, part, next(), received);
    wait_for(received);
    memory_.put_own(std::move(part));
  }
  wait_for(sent);
}

void PeerCopies::begin(std::int64_t step) {
  finish();
  memory_.next_own.take({step, inventories_.at(0).round}, sources_);
  thread_ = executor_.spawn("state copies", [this] {
    try {
      send_around();
    } catch (...) {
      failure_ = std::current_exception();
      group_.abort(to_error(failure_));  // the other ranks may wait for this one
    }
  });
}

void PeerCopies::finish() {
  thread_.join();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void PeerCopies::send_around() {
  const at::NoGradGuard no_grad;
  const StatePart& own = memory_.next_own;
  ByteWriter mine;
  mine.put(own.id.step);
  mine.put(own.header.numel());
  mine.put(own.data.numel());
  const std::vector<Bytes> all = group_.all_gather_bytes(mine.bytes());
  StatePart incoming = std::move(memory_.next_held);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    ByteReader in(all[rank]);
    const auto step = in.get<std::int64_t>();
    if (step != own.id.step) {
      throw_invalid(
          "rank {} copies its state after step {}, and rank {} after step {}: run the same number of steps "
          "on all ranks, with the same options",
          group_.ranks()[rank], step, group_.ranks()[static_cast<std::size_t>(group_.rank())], own.id.step);
    }
    if (static_cast<int>(rank) != previous()) continue;
    const auto header = in.get<std::int64_t>();
    incoming.expect(own.id, header, in.get<std::int64_t>());
  }
  Sent transfers;
  send_part(group_, own, next(), transfers);
  receive_part(group_, incoming, previous(), transfers);
  wait_for(transfers);
  memory_.next_held = std::move(incoming);
  // A rank that has passed this barrier knows that all parts exist twice. One at which it fails keeps both copies.
  group_.barrier();
  memory_.commit();
}

}  // namespace torchspan::elastic
