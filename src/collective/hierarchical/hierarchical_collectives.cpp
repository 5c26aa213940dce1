#include "collective/hierarchical/hierarchical_collectives.h"

#include <algorithm>
#include <map>

#include <ATen/Functions.h>

#include "collective/serial/gathers.h"
#include "collective/tensors.h"
#include "core/api/agreement.h"
#include "device/api/tensors.h"

namespace torchspan::collective {
namespace {

/// Bytes that the leaders exchange while the local groups work on the next ones.
constexpr std::int64_t kOverlapChunk = std::int64_t{4} << 20;

/// Ranks of one host that exchange slices of a tensor, and the least size of a slice.
constexpr std::size_t kMostExchangers = 4;
constexpr std::int64_t kLeastSlice = std::int64_t{256} << 10;

/// How often an idle leader asks whether its local group broke.
constexpr Duration kIdleInterval = std::chrono::milliseconds(100);

at::Tensor bytes_for(at::IntArrayRef sizes) { return at::empty(sizes, at::TensorOptions().dtype(at::kByte)); }

at::Tensor slice_of(const at::Tensor& flat, int slice, int slices) {
  const std::int64_t begin = flat.numel() * slice / slices, end = flat.numel() * (slice + 1) / slices;
  return flat.narrow(0, begin, end - begin);
}

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) sum += count;
  return sum;
}

/// Connects this rank to `others`, if there are any. Throws on all ranks of the host if that fails on one of them.
std::unique_ptr<BlockingCollectives> connect_together(const Group& local, const std::vector<int>& others,
                                                      const ConnectLeaders& connect, std::uint64_t split) {
  std::unique_ptr<BlockingCollectives> leaders;
  const RankOutcome mine = outcome_of([&] {
    if (!others.empty()) leaders = connect(others, split);
    return Bytes();
  });
  all_or_none([&](BytesView bytes) { return local.all_gather_bytes(bytes); }, mine,
              [&](std::size_t, const Error& failure) { return mine.failure ? *mine.failure : failure; });
  return leaders;
}

}  // namespace

HierarchicalCollectives::HierarchicalCollectives(HierarchyPlan plan, Group local, ConnectLeaders connect,
                                                 std::uint64_t split)
    : plan_(std::move(plan)), local_(std::move(local)), connect_(std::move(connect)) {
  std::map<int, std::size_t> places;
  for (std::size_t rank = 0; rank < plan_.ranks.size(); ++rank) {
    const auto [place, is_new] = places.emplace(plan_.hosts[rank], hosts_.size());
    if (is_new) {
      hosts_.emplace_back();
    }
    hosts_[place->second].push_back(static_cast<int>(rank));
  }
  std::size_t smallest = hosts_[0].size();
  for (const auto& host : hosts_) {
    smallest = std::min(smallest, host.size());
    are_even_ &=
        host.size() == hosts_[0].size() && host.back() - host.front() + 1 == static_cast<int>(host.size());
  }
  if (plan_.announces) exchangers_ = static_cast<int>(std::min(smallest, kMostExchangers));
  if (hosts_.size() == 1) return;
  std::vector<int> others;  // none: this rank exchanges nothing
  for (const auto& host : hosts_) {
    if (local_.rank() < exchangers_)
      others.push_back(plan_.ranks[static_cast<std::size_t>(host[static_cast<std::size_t>(local_.rank())])]);
  }
  leaders_ = connect_together(local_, others, connect_, split);
}

int HierarchicalCollectives::host_of(int rank) const {
  for (std::size_t host = 0; host < hosts_.size(); ++host) {
    if (std::find(hosts_[host].begin(), hosts_[host].end(), rank) != hosts_[host].end()) {
      return static_cast<int>(host);
    }
  }
  return -1;
}

bool HierarchicalCollectives::reduces(at::ScalarType dtype, ReduceOp reduction) const {
  if (reduction == kAvg || device::is_half(dtype)) return false;
  if (plan_.announces) return true;
  if (loses_nan(dtype, reduction)) return false;
  if (reduction != kSum && reduction != kMin && reduction != kMax && reduction != kProduct) return false;
  // The answer must be the same on all ranks, and only leaders have BlockingCollectives.
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kInt || dtype == at::kLong ||
         dtype == at::kByte || dtype == at::kChar;
}

int HierarchicalCollectives::exchangers_of(std::int64_t bytes) const {
  return static_cast<int>(std::clamp<std::int64_t>(bytes / kLeastSlice, 1, exchangers_));
}

void HierarchicalCollectives::reduce_in_chunks(const at::Tensor& result, std::int64_t most,
                                               const ReduceHere& reduce_here, const Exchange& exchange) {
  const auto begin_at = [&](std::int64_t at) { return reduce_here(at, std::min(most, result.numel() - at)); };
  std::vector<Future<at::Tensor>> spread;
  Future<at::Tensor> reduced = begin_at(0);
  for (std::int64_t at = 0; at < result.numel(); at += most) {
    const at::Tensor current = reduced.wait();
    if (at + most < result.numel()) reduced = begin_at(at + most);
    const at::Tensor chunk = result.narrow(0, at, std::min(most, result.numel() - at));
    const int slices = exchangers_of(static_cast<std::int64_t>(current.nbytes()));
    for (int slice = 0; slice < slices; ++slice) {
      const at::Tensor its = slice_of(chunk, slice, slices);
      if (local_.rank() == slice) exchange(current, its.storage_offset() - chunk.storage_offset(), its);
      spread.push_back(local_.broadcast(its, slice));
    }
  }
  for (const auto& done : spread) done.wait();
}

void HierarchicalCollectives::all_reduce(at::Tensor tensor, ReduceOp reduction) {
  if (hosts_.size() == 1) return void(local_.all_reduce(tensor, reduction).wait());
  const at::Tensor flat = tensor.view({-1});
  reduce_in_chunks(
      flat, std::max<std::int64_t>(kOverlapChunk / flat.element_size(), 1),
      [&](std::int64_t begin, std::int64_t size) {
        return local_.all_reduce(flat.narrow(0, begin, size), reduction);
      },
      [&](const at::Tensor&, std::int64_t, const at::Tensor& its) { leaders_->all_reduce(its, reduction); });
}

/// The hosts exchange half as much as in all_reduce(): each gets the slices of its ranks, which must be neighbors.
bool HierarchicalCollectives::reduce_scatter(const at::Tensor& tensor, const at::Tensor& part,
                                             ReduceOp reduction) {
  if (hosts_.size() == 1) {
    part.copy_(local_.reduce_scatter(tensor, reduction).wait());
    return true;
  }
  if (!plan_.announces || !are_even_) return false;  // other engines may lack it, and only leaders could tell
  const auto hosts = static_cast<std::int64_t>(hosts_.size());
  const at::Tensor rows = tensor.view({hosts, -1});
  const at::Tensor of_host = at::empty({rows.size(1)}, tensor.options());
  reduce_in_chunks(
      of_host, std::max<std::int64_t>(kOverlapChunk / (rows.element_size() * hosts), 1),
      [&](std::int64_t begin, std::int64_t size) {
        return local_.all_reduce(rows.narrow(1, begin, size).clone(at::MemoryFormat::Contiguous), reduction);
      },
      [&](const at::Tensor& reduced, std::int64_t begin, const at::Tensor& its) {
        leaders_->reduce_scatter(reduced.narrow(1, begin, its.numel()).contiguous(), its, reduction);
      });
  part.view({-1}).copy_(of_host.narrow(0, local_.rank() * part.numel(), part.numel()));
  return true;
}

/// The leader of the root's host passes the result on to it.
bool HierarchicalCollectives::reduce(const at::Tensor& tensor, int root, ReduceOp reduction) {
  const bool gets = root == plan_.rank;
  const at::Tensor work = leads() && !gets ? tensor.clone() : tensor;
  local_.reduce(work, 0, reduction).wait();
  const int host = host_of(root);
  if (exchanges() && !leaders_->reduce(work, host, reduction)) leaders_->all_reduce(work, reduction);
  const auto& ranks = hosts_[static_cast<std::size_t>(host)];
  if (host != host_of(plan_.rank) || ranks[0] == root) return true;
  const at::Tensor none = at::empty({0}, tensor.options());
  std::vector<at::Tensor> parts;
  for (const int rank : ranks) {
    if (leads()) parts.push_back(rank == root ? work : none);
  }
  local_.scatter(gets ? tensor : none.clone(), parts, 0).wait();
  return true;
}

void HierarchicalCollectives::broadcast(at::Tensor tensor, int root) {
  const int host = host_of(root);
  const bool here = host == host_of(plan_.rank);
  if (here) {
    const auto& ranks = hosts_[static_cast<std::size_t>(host)];
    local_.broadcast(tensor, static_cast<int>(std::find(ranks.begin(), ranks.end(), root) - ranks.begin()))
        .wait();
  }
  if (exchanges()) leaders_->broadcast(tensor, host);
  if (!here) local_.broadcast(tensor, 0).wait();
}

void HierarchicalCollectives::all_gather(at::Tensor mine, at::Tensor all) {
  const std::int64_t length = mine.numel();
  const at::Tensor rows = at::stack(local_.all_gather(mine).wait());
  const auto here = static_cast<std::size_t>(host_of(plan_.rank));
  std::vector<at::Tensor> blocks;
  for (std::size_t host = 0; host < hosts_.size(); ++host) {
    const auto count = static_cast<std::int64_t>(hosts_[host].size());
    blocks.push_back(host == here ? rows.view({-1}) : bytes_for({count * length}));
  }
  if (exchanges()) gather_blocks(*leaders_, blocks, host_of(plan_.rank));
  for (std::size_t host = 0; host < hosts_.size(); ++host) {
    for (std::size_t i = 0; i < hosts_[host].size(); ++i) {
      all[hosts_[host][i]].copy_(blocks[host].narrow(0, static_cast<std::int64_t>(i) * length, length));
    }
  }
  if (hosts_.size() > 1) local_.broadcast(all, 0).wait();
}

/// Parts for this host stay on it; those for other hosts go through the leaders.
void HierarchicalCollectives::all_to_all(at::Tensor mine, at::Tensor all, const ByteCounts& counts) {
  const std::vector<at::Tensor> outgoing = mine.split_with_sizes(counts.sent_by(plan_.rank));
  const std::vector<at::Tensor> incoming = all.split_with_sizes(counts.received_by(plan_.rank));
  const std::vector<int>& neighbors = hosts_[static_cast<std::size_t>(host_of(plan_.rank))];
  std::vector<at::Tensor> for_neighbors;
  for (const int rank : neighbors) for_neighbors.push_back(outgoing[static_cast<std::size_t>(rank)]);
  const std::vector<at::Tensor> from_neighbors = local_.all_to_all(std::move(for_neighbors)).wait();
  for (std::size_t i = 0; i < neighbors.size(); ++i) {
    incoming[static_cast<std::size_t>(neighbors[i])].copy_(from_neighbors[i]);
  }
  const ByteCounts between = counts_between_hosts(counts);
  if (between.total() != 0) exchange_with_other_hosts(outgoing, incoming, counts, between);
}

/// The leaders gather what leaves their hosts, exchange it in the order of the ranks that send and then of those that
/// receive, and scatter what arrives.
void HierarchicalCollectives::exchange_with_other_hosts(const std::vector<at::Tensor>& outgoing,
                                                        const std::vector<at::Tensor>& incoming,
                                                        const ByteCounts& counts, const ByteCounts& between) {
  const int here = host_of(plan_.rank);
  const std::vector<int>& neighbors = hosts_[static_cast<std::size_t>(here)];
  std::vector<std::vector<int>> others = hosts_;
  others.erase(others.begin() + here);
  const auto count = [&](int from, int to) {
    return counts.at(static_cast<std::size_t>(from), static_cast<std::size_t>(to));
  };
  std::vector<at::Tensor> leaving;
  if (sum_of(between.sent_by(here)) != 0) {
    for (const auto& ranks : others) {
      for (const int to : ranks) leaving.push_back(outgoing[static_cast<std::size_t>(to)]);
    }
    const std::vector<at::Tensor> gathered = local_.gather(at::cat(leaving), 0).wait();
    leaving.clear();
    std::vector<std::int64_t> taken(gathered.size());
    for (const auto& ranks : others) {
      for (std::size_t i = 0; i < gathered.size(); ++i) {
        std::int64_t size = 0;
        for (const int to : ranks) size += count(neighbors[i], to);
        leaving.push_back(gathered[i].narrow(0, taken[i], size));
        taken[i] += size;
      }
    }
  }
  const at::Tensor arrived = bytes_for({sum_of(between.received_by(here))});
  if (exchanges())
    leaders_->all_to_all(leaving.empty() ? bytes_for({0}) : at::cat(leaving), arrived, between);
  if (arrived.numel() == 0) return;
  std::vector<std::vector<at::Tensor>> pieces(leads() ? neighbors.size()
                                                      : 0);  // of what arrived, by receiver
  std::int64_t at = 0;
  for (const auto& ranks : others) {
    for (const int from : ranks) {
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        pieces[i].push_back(arrived.narrow(0, at, count(from, neighbors[i])));
        at += pieces[i].back().numel();
      }
    }
  }
  std::vector<at::Tensor> for_ranks;
  for (const auto& of_rank : pieces) for_ranks.push_back(at::cat(of_rank));
  std::vector<at::Tensor> places;
  std::int64_t size = 0;
  for (const auto& ranks : others) {
    for (const int from : ranks) {
      places.push_back(incoming[static_cast<std::size_t>(from)]);
      size += places.back().numel();
    }
  }
  const at::Tensor own = bytes_for({size});
  local_.scatter(own, for_ranks, 0).wait();
  at = 0;
  for (const at::Tensor& part : places) {
    part.copy_(own.narrow(0, at, part.numel()));
    at += part.numel();
  }
}

ByteCounts HierarchicalCollectives::counts_between_hosts(const ByteCounts& counts) const {
  ByteCounts between(hosts_.size());
  for (std::size_t from = 0; from < hosts_.size(); ++from) {
    for (std::size_t to = 0; to < hosts_.size(); ++to) {
      if (from == to) continue;
      for (const int sender : hosts_[from]) {
        for (const int receiver : hosts_[to]) {
          between.at(from, to) +=
              counts.at(static_cast<std::size_t>(sender), static_cast<std::size_t>(receiver));
        }
      }
    }
  }
  return between;
}

std::unique_ptr<BlockingCollectives> HierarchicalCollectives::split(const std::vector<int>& members,
                                                                    std::uint64_t number) {
  HierarchyPlan part;
  part.announces = plan_.announces;
  int color = members[0];
  for (const int member : members) {
    if (member == plan_.rank) part.rank = static_cast<int>(part.ranks.size());
    part.ranks.push_back(plan_.ranks[static_cast<std::size_t>(member)]);
    part.hosts.push_back(plan_.hosts[static_cast<std::size_t>(member)]);
    color = std::min(color, member);
  }
  Group local = local_.split(color, part.rank);
  return std::make_unique<HierarchicalCollectives>(std::move(part), std::move(local), connect_, number);
}

void HierarchicalCollectives::begin(std::uint64_t call) {
  if (leaders_) leaders_->begin(call);
}

std::optional<Error> HierarchicalCollectives::failure() {
  return leaders_ ? leaders_->failure() : std::nullopt;
}

/// A leader that waits for other leaders also ends its call when its local group breaks, and one that waits for its local
/// group when another host announces a failure.
void HierarchicalCollectives::watch(std::function<void()> wake,
                                    std::function<std::optional<Error>()> interrupted) {
  static_cast<void>(interrupted);
  if (!leaders_) return;
  leaders_->watch(
      [this, leaders = leaders_.get(), wake = std::move(wake)] {
        const auto cause = ending_.load() ? std::nullopt : leaders->call_failure();
        if (cause) local_.abort(*cause);
        wake();
      },
      [local = local_] { return local.backend()->failure(); });
}

/// Processes that share memory do not wake each other's idle threads. A rank that is connected to other hosts must learn that
/// its local group broke, because they wait for it.
Duration HierarchicalCollectives::idle_interval() const {
  return leaders_ ? kIdleInterval : Duration::zero();
}

std::optional<Error> HierarchicalCollectives::idle_failure() {
  if (auto announced = failure()) return announced;
  return local_.backend()->failure();
}

void HierarchicalCollectives::abort(const Error& cause) {
  local_.abort(cause);
  if (leaders_) leaders_->abort(cause);
}

/// The local group breaks for earlier calls, too; a leader that is in one of them announces it when that call ends.
void HierarchicalCollectives::fail_call(const Error& cause, std::uint64_t call) {
  local_.abort(cause);
  if (leaders_) leaders_->fail_call(cause, call);
}

/// The local group receives the end of the world from its WorldLink.
void HierarchicalCollectives::end(const Error& reason) {
  ending_.store(true);
  if (leaders_) leaders_->end(reason);
}

}  // namespace torchspan::collective
