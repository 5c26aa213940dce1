#include "checkpoint/commit/ranks.h"

#include <algorithm>
#include <fmt/format.h>
#include <memory>
#include <utility>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/rpc/worker.h>

#include "core/api/throw_invalid.h"

namespace torchspan::checkpoint {
namespace {

class SingleRank final : public Ranks {
 public:
  std::size_t index() const override { return 0; }
  const std::vector<std::string>& names() const override { return names_; }
  std::vector<Bytes> gather(const std::string&, const Bytes& mine) override { return {mine}; }

 private:
  const std::vector<std::string> names_{"this process"};
};

/// The membership carries at most 64 KiB per rank and round, so longer bytes take several rounds.
constexpr std::size_t kRoundBytes = std::size_t{60} << 10;

class WorkerRanks final : public Ranks {
 public:
  WorkerRanks(const Worker& worker, std::vector<std::string> participants, std::string name, Duration timeout)
      : backend_(worker.backend()), name_(std::move(name)), timeout_(timeout) {
    std::vector<WorkerInfo> members;
    if (participants.empty()) members = worker.workers();
    for (const std::string& participant : participants) members.push_back(worker.info(participant));
    std::sort(members.begin(), members.end(),
              [](const WorkerInfo& a, const WorkerInfo& b) { return a.rank < b.rank; });
    bool found = false;
    for (const WorkerInfo& member : members) {
      if (static_cast<int>(member.rank) == worker.rank()) {
        index_ = participants_.size();
        found = true;
      }
      participants_.push_back(member.name);
      names_.push_back(fmt::format("rank {} ('{}')", member.rank, member.name));
    }
    if (!found) {
      throw_invalid(
          "the participants of the checkpoint manager '{}' do not include this worker, '{}'; create it on "
          "participants only",
          name_, worker.name());
    }
    const rpc::Gathering gathering = backend_->gathering(participants_);
    const auto note = [weak = std::weak_ptr<Departed>(departed_), ranks = gathering.ranks](
                          const rendezvous::Member& member, const Error& reason) {
      const auto departed = weak.lock();  // a callback may run while its owner ends
      if (!departed || !std::ranges::binary_search(ranks, member.rank)) return;
      MutexLock lock(departed->mutex);
      ++departed->all.count;
      departed->all.last = reason;
    };
    gathering.membership->watch({.died = note,
                                 .left =
                                     [note](const rendezvous::Member& member) {
                                       note(member,
                                            Error(ErrorKind::kDisconnected,
                                                  fmt::format("{} has left", rendezvous::describe(member))));
                                     },
                                 .owner = std::weak_ptr<const void>(departed_)});
  }

  std::size_t index() const override { return index_; }
  const std::vector<std::string>& names() const override { return names_; }
  Departures departures() const override {
    MutexLock lock(departed_->mutex);
    return departed_->all;
  }

  std::vector<Bytes> gather(const std::string& tag, const Bytes& mine) override {
    const Deadline deadline = backend_->runtime().executor.deadline_in(timeout_);
    const auto round = [&](BytesView piece) {
      return backend_->all_gather_bytes(fmt::format("checkpoint.{}.{}", name_, tag),
                                        Bytes(piece.begin(), piece.end()), participants_, deadline);
    };
    return gather_pieces(round, mine, {.most = kRoundBytes, .with_total = true});
  }

 private:
  struct Departed {
    Mutex mutex;
    Departures all TORCHSPAN_GUARDED_BY(mutex);
  };

  const std::shared_ptr<rpc::WorkerBackend> backend_;
  const std::shared_ptr<Departed> departed_ = std::make_shared<Departed>();
  const std::string name_;
  const Duration timeout_;
  std::vector<std::string> participants_;
  std::vector<std::string> names_;
  std::size_t index_ = 0;
};

}  // namespace

std::unique_ptr<Ranks> make_single_rank() { return std::make_unique<SingleRank>(); }

std::unique_ptr<Ranks> make_worker_ranks(const Worker& worker, std::vector<std::string> participants,
                                         std::string name, Duration timeout) {
  return std::make_unique<WorkerRanks>(worker, std::move(participants), std::move(name), timeout);
}

}  // namespace torchspan::checkpoint
