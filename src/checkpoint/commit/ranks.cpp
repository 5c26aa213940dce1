#include "checkpoint/commit/ranks.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>
#include <span>
#include <utility>

#include <torchspan/core/error.h>
#include <torchspan/rpc/worker.h>

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
      : endpoint_(worker.endpoint()), name_(std::move(name)), timeout_(timeout) {
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
          fmt::format("the participants of the checkpoint manager '{}' do not include this worker, "
                      "'{}'; create it on participants only",
                      name_, worker.name()));
    }
  }

  std::size_t index() const override { return index_; }
  const std::vector<std::string>& names() const override { return names_; }

  std::vector<Bytes> gather(const std::string& tag, const Bytes& mine) override {
    const Deadline deadline = endpoint_->runtime().executor.deadline_in(timeout_);
    std::vector<Bytes> all(size());
    std::size_t longest = 0;
    for (std::size_t round = 0; round == 0 || round * kRoundBytes < longest; ++round) {
      ByteWriter out;
      out.put(static_cast<std::uint64_t>(mine.size()));
      const std::size_t from = std::min(mine.size(), round * kRoundBytes);
      out.put_bytes(BytesView(mine).subspan(from, std::min(kRoundBytes, mine.size() - from)));
      const auto parts = endpoint_->all_gather_bytes(fmt::format("checkpoint.{}.{}", name_, tag), out.take(),
                                                     participants_, deadline);
      for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        ByteReader in(parts[rank]);
        longest = std::max<std::size_t>(longest, in.get<std::uint64_t>());
        const BytesView part = in.get_bytes(in.left());
        all[rank].insert(all[rank].end(), part.begin(), part.end());
      }
    }
    return all;
  }

 private:
  const std::shared_ptr<rpc::Endpoint> endpoint_;
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

std::vector<RankOutcome> exchange_outcomes(Ranks& ranks, const std::string& tag, const RankOutcome& mine) {
  ByteWriter out;
  out.put(mine.failure ? mine.failure->kind() : ErrorKind{});
  if (mine.failure) {
    out.put_string(mine.failure->message());
  } else {
    out.put_bytes(mine.result);
  }
  std::vector<RankOutcome> outcomes;
  for (const Bytes& bytes : ranks.gather(tag, out.take())) {
    ByteReader in(bytes);
    RankOutcome& outcome = outcomes.emplace_back();
    const auto kind = in.get<ErrorKind>();
    if (kind != ErrorKind{}) {
      outcome.failure = Error(kind, in.get_string());
    } else {
      const BytesView result = in.get_bytes(in.left());
      outcome.result.assign(result.begin(), result.end());
    }
  }
  return outcomes;
}

std::optional<Error> joint_failure(const std::vector<RankOutcome>& outcomes, const Ranks& ranks,
                                   const std::string& what) {
  std::string text = what;
  std::optional<ErrorKind> kind;
  std::set<std::string> said;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (!outcomes[rank].failure) continue;
    const std::string& message = outcomes[rank].failure->message();
    if (!said.insert(message).second) continue;
    text += kind ? "; " : ": ";
    text += ranks.size() == 1 ? message : fmt::format("{}: {}", ranks.names()[rank], message);
    if (!kind) kind = outcomes[rank].failure->kind();
  }
  if (!kind) return std::nullopt;
  return Error(*kind, text);
}

}  // namespace torchspan::checkpoint
