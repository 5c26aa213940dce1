#include "collective/ipc/ipc_engine.h"

#include <algorithm>
#include <fmt/format.h>

#include <ATen/ATen.h>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/device/streams.h>

#include "collective/device/device_engine.h"
#include "core/api/agreement.h"
#include "core/api/throw_invalid.h"
#include "device/api/tensors.h"

namespace torchspan::collective::ipc {
namespace {

int world_rank(const Backend& control, int rank) { return control.ranks()[static_cast<std::size_t>(rank)]; }

}  // namespace

at::Tensor device_view(std::byte* data, std::int64_t count, at::ScalarType dtype, c10::Device device) {
  return device::view_memory(data, {count}, {1}, dtype, device);
}

at::Tensor device_bytes(const at::Tensor& tensor) {
  // A contiguous tensor of one element may have any strides.
  const at::Tensor flat = tensor.as_strided({tensor.numel()}, {1});
  return flat.scalar_type() == at::kByte ? flat : flat.view(at::kByte);
}

Staging::Staging(const EngineParts& parts, std::size_t area_bytes) : parts_(parts), area_bytes_(area_bytes) {
  Backend& control = *parts.control;
  const std::size_t bytes = 2 * area_bytes_;
  const auto share = [&](const RankOutcome& mine, const char* what) {
    return all_or_none(
        [&](BytesView sent) { return control.all_gather_bytes(sent, parts.timeout); }, mine,
        [&](std::size_t rank, const Error& failure) {
          return Error(
              ErrorKind::kUnsupported,
              fmt::format("the ranks cannot map each other's device memory: rank {}{}{}; run them in "
                          "one container, which shares process numbers and memory, or use "
                          "BackendKind::kNccl",
                          control.ranks()[rank], what, failure.message()));
        });
  };
  std::shared_ptr<std::byte> own;
  const std::vector<Bytes> handles = share(outcome_of([&] {
                                             own = parts.runtime->allocate(parts.device, bytes);
                                             return parts.runtime->export_memory(parts.device, own.get());
                                           }),
                                           ": ");
  share(outcome_of([&] {
          for (int rank = 0; rank < control.size(); ++rank) {
            try {
              memory_.push_back(rank == control.rank()
                                    ? own
                                    : parts.runtime->open_memory(
                                          parts.device, handles[static_cast<std::size_t>(rank)], bytes));
            } catch (...) {
              throw_invalid("rank {}: {}", world_rank(control, rank),
                            torchspan::describe(std::current_exception()).text);
            }
          }
          return Bytes();
        }),
        " cannot map the memory of ");
}

Staging::~Staging() {
  for (std::size_t rank = 0; rank < memory_.size(); ++rank) {
    if (static_cast<int>(rank) != parts_.control->rank()) memory_[rank].reset();
  }
  static_cast<void>(all_ranks_end(parts_));
}

at::Tensor Staging::view(int rank, std::size_t offset, std::size_t bytes) const {
  return device_view(memory_[static_cast<std::size_t>(rank)].get() + offset, static_cast<std::int64_t>(bytes),
                     at::kByte, parts_.device);
}

namespace {

at::Tensor as(const at::Tensor& bytes, at::ScalarType dtype) {
  return device_view(static_cast<std::byte*>(bytes.data_ptr()),
                     bytes.numel() / static_cast<std::int64_t>(c10::elementSize(dtype)), dtype,
                     bytes.device());
}

}  // namespace

std::unique_ptr<IpcEngine> IpcEngine::make(EngineParts parts, IpcOptions options) {
  return std::unique_ptr<IpcEngine>(new IpcEngine(std::move(parts), options));
}

void IpcEngine::wait_for_device() const {
  const auto check = [this](Duration waited) {
    parts_.failure->throw_if_set();
    if (const auto cause = parts_.control->failure()) throw Error(*cause);
    if (waited < kLeftLimit) return;
    if (const auto lost = parts_.departed()) throw Error(*lost);
  };
  const auto late = [this] {
    return Error(ErrorKind::kTimedOut,
                 fmt::format("{} of rank {} has not finished its work for {:.3g} s: work that was enqueued "
                             "before this call does not end, or the device is busy with other programs",
                             parts_.device.str(), parts_.control->ranks()[static_cast<std::size_t>(rank())],
                             to_seconds(parts_.timeout)));
  };
  const device::Mark end(device::current_stream(parts_.device), events_);
  wait_on_host(end, parts_.control->runtime().executor, parts_.timeout, check, late);
}

void IpcEngine::barrier() const {
  wait_for_device();
  parts_.control->barrier(parts_.timeout);
}

void IpcEngine::reduce_chunk(const at::Tensor& chunk, ReduceOp reduction) const {
  const auto item = static_cast<std::size_t>(chunk.element_size());
  const at::ScalarType dtype = chunk.scalar_type();
  struct Range {
    std::size_t offset, bytes;
  };
  const auto range = [&](int of) {
    const std::int64_t from = chunk.numel() * of / size(), to = chunk.numel() * (of + 1) / size();
    return Range{static_cast<std::size_t>(from) * item, static_cast<std::size_t>(to - from) * item};
  };
  staging_.sent(rank(), 0, chunk.nbytes()).copy_(device_bytes(chunk));
  barrier();
  const Range mine = range(rank());
  if (mine.bytes != 0) {
    std::vector<at::Tensor> sources;
    for (int from = 0; from < size(); ++from) {
      sources.push_back(as(staging_.sent(from, mine.offset, mine.bytes), dtype));
    }
    as(staging_.reduced(rank(), mine.offset, mine.bytes), dtype)
        .copy_(reduce_in_rank_order(sources, reduction));
  }
  barrier();
  const at::Tensor target = device_bytes(chunk);
  for (int from = 0; from < size(); ++from) {
    const Range theirs = range(from);
    if (theirs.bytes == 0) continue;
    target.narrow(0, static_cast<std::int64_t>(theirs.offset), static_cast<std::int64_t>(theirs.bytes))
        .copy_(staging_.reduced(from, theirs.offset, theirs.bytes));
  }
}

void IpcEngine::all_reduce(const at::Tensor& tensor, ReduceOp reduction) {
  const at::Tensor flat = tensor.view({-1});
  const auto step =
      static_cast<std::int64_t>(staging_.area_bytes() / static_cast<std::size_t>(flat.element_size()));
  for (std::int64_t at = 0; at < flat.numel(); at += step) {
    reduce_chunk(flat.narrow(0, at, std::min(step, flat.numel() - at)), reduction);
  }
}

void IpcEngine::reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) {
  const auto item = static_cast<std::size_t>(tensor.element_size());
  const at::ScalarType dtype = tensor.scalar_type();
  const std::int64_t length = part.numel();
  const at::Tensor rows = tensor.view({size(), length});
  const auto step =
      std::max<std::int64_t>(static_cast<std::int64_t>(staging_.area_bytes() / item) / size(), 1);
  for (std::int64_t at = 0; at < length; at += step) {
    const std::int64_t count = std::min(step, length - at);
    const std::size_t bytes = static_cast<std::size_t>(count) * item;
    for (int to = 0; to < size(); ++to) {
      staging_.sent(rank(), static_cast<std::size_t>(to) * bytes, bytes)
          .copy_(device_bytes(rows[to].narrow(0, at, count)));
    }
    barrier();
    std::vector<at::Tensor> sources;
    for (int from = 0; from < size(); ++from) {
      sources.push_back(as(staging_.sent(from, static_cast<std::size_t>(rank()) * bytes, bytes), dtype));
    }
    part.view({-1}).narrow(0, at, count).copy_(reduce_in_rank_order(sources, reduction));
    barrier();
  }
}

void IpcEngine::copy_pieces(const Pieces& pieces, int rank, std::int64_t from, bool into_area) const {
  const std::int64_t to = from + static_cast<std::int64_t>(staging_.area_bytes());
  for (const Piece& piece : pieces) {
    const std::int64_t begin = std::max(from, piece.at), end = std::min(to, piece.at + piece.bytes.numel());
    if (begin >= end) continue;
    const at::Tensor area =
        staging_.sent(rank, static_cast<std::size_t>(begin - from), static_cast<std::size_t>(end - begin));
    const at::Tensor here = piece.bytes.narrow(0, begin - piece.at, end - begin);
    into_area ? area.copy_(here) : here.copy_(area);
  }
}

void IpcEngine::exchange(const Pieces& mine, const std::vector<Pieces>& wanted, std::int64_t longest) const {
  const auto step = static_cast<std::int64_t>(staging_.area_bytes());
  for (std::int64_t from = 0; from < longest; from += step) {
    copy_pieces(mine, rank(), from, /*into_area=*/true);
    barrier();
    for (int of = 0; of < size(); ++of) {
      if (of != rank()) copy_pieces(wanted[static_cast<std::size_t>(of)], of, from, /*into_area=*/false);
    }
    barrier();
  }
}

void IpcEngine::broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) {
  std::vector<Pieces> pieces(static_cast<std::size_t>(size()));
  std::vector<std::int64_t> totals(pieces.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto root = static_cast<std::size_t>(roots[i]);
    pieces[root].push_back({totals[root], device_bytes(tensors[i])});
    totals[root] += static_cast<std::int64_t>(tensors[i].nbytes());
  }
  exchange(pieces[static_cast<std::size_t>(rank())], pieces, *std::max_element(totals.begin(), totals.end()));
}

void IpcEngine::all_to_all(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) {
  ByteWriter writer;
  Pieces mine;
  std::int64_t total = 0;
  for (const at::Tensor& part : sent) {
    mine.push_back({total, device_bytes(part)});
    writer.put(total);
    total += static_cast<std::int64_t>(part.nbytes());
  }
  writer.put(total);
  std::vector<Pieces> wanted;
  std::int64_t longest = 0;
  for (const Bytes& bytes : parts_.control->all_gather_bytes(writer.bytes(), parts_.timeout)) {
    ByteReader reader(bytes);
    std::int64_t place = 0, theirs = 0;
    for (int to = 0; to <= size(); ++to) {
      theirs = reader.get<std::int64_t>();
      if (to == rank()) place = theirs;
    }
    longest = std::max(longest, theirs);
    wanted.push_back({{place, device_bytes(received[wanted.size()])}});
  }
  const auto self = static_cast<std::size_t>(rank());
  if (sent[self].numel() != 0) received[self].copy_(sent[self]);
  exchange(mine, wanted, longest);
}

}  // namespace torchspan::collective::ipc
