#include "elastic/recovery/peer_copies.h"

#include <algorithm>
#include <fmt/format.h>
#include <span>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <torchspan/core/error.h>

namespace torchspan::elastic {
namespace {

/// Longer texts of failures are cut.
constexpr std::size_t kMostText = 4096;

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

std::optional<CopyId> PeerCopies::meet(std::int64_t newest_checkpoint, std::uint64_t round) {
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
  std::string failure;
  try {
    memory_.own(id)->load(sources_);
  } catch (...) {
    failure = describe(std::current_exception()).text;
  }
  agree(failure);
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

void PeerCopies::agree(const std::string& failure) const {
  const std::string text = failure.substr(0, kMostText);
  const std::vector<Bytes> all = group_.all_gather_bytes(std::as_bytes(std::span(text)));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    throw_invalid(
        fmt::format("rank {} cannot use the copy of its state in memory: {}", group_.ranks()[rank],
                    std::string(reinterpret_cast<const char*>(all[rank].data()), all[rank].size())));
  }
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
      throw_invalid(fmt::format(
          "rank {} copies its state after step {}, and rank {} after step {}: run the same "
          "number of steps on all ranks, with the same options",
          group_.ranks()[rank], step, group_.ranks()[static_cast<std::size_t>(group_.rank())], own.id.step));
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
