#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <numeric>

#include <torchspan/collective/group.h>
#include <torchspan/core/sim_executor.h>
#include <torchspan/rendezvous/membership.h>

#include "collective/shm/meeting.h"
#include "collective/shm/shm_back_end.h"
#include "collective/single.h"

namespace torchspan::collective {
namespace {

using rendezvous::Member;
using rendezvous::Membership;

/// What every rank says about the group to be, and must say alike.
Bytes encode_plan(const std::vector<int>& ranks, const GroupOptions& options) {
  ByteWriter writer;
  writer.put(static_cast<std::uint32_t>(ranks.size()));
  for (const int rank : ranks) writer.put(rank);
  writer.put(options.back_end);
  writer.put(options.network);
  return writer.take();
}

std::string describe_plan(BytesView plan) {
  ByteReader reader(plan);
  std::vector<int> ranks(reader.get_count(sizeof(int)));
  for (int& rank : ranks) rank = reader.get<int>();
  const auto back_end = reader.get<std::uint8_t>(), network = reader.get<std::uint8_t>();
  return fmt::format("ranks {}, back end {}, network {}", ranks, back_end, network);
}

class Maker {
 public:
  Maker(Runtime& runtime, Membership& world, GroupOptions options)
      : runtime_(runtime), world_(world), options_(std::move(options)), ranks_(options_.ranks) {
    if (ranks_.empty()) {
      for (const Member& member : world.members()) ranks_.push_back(member.rank);
    }
    deadline_ = runtime.executor.deadline_in(options_.timeout);
  }

  std::shared_ptr<BackEnd> make() {
    check_ranks();
    if (ranks_.size() == 1) return std::make_shared<SingleBackEnd>(ranks_[0]);
    compare_plans();
    switch (options_.back_end) {
      case BackEndKind::kAutomatic:
      case BackEndKind::kSharedMemory: return make_shared_memory();
      default:
        throw Error(ErrorKind::kUnsupported,
                    "this build has no such back end for groups; use BackEndKind::kSharedMemory");
    }
  }

 private:
  void check_ranks() const {
    std::vector<int> sorted = ranks_;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      throw Error(ErrorKind::kInvalid, fmt::format("ranks {} name a rank twice", ranks_));
    }
    if (!std::binary_search(sorted.begin(), sorted.end(), world_.self().rank)) {
      throw Error(ErrorKind::kInvalid,
                  fmt::format("this worker (rank {}) is not among the ranks {} of the group: only they make it",
                              world_.self().rank, ranks_));
    }
  }

  /// Everybody's bytes, by rank of the group; the membership gathers by rank of the world.
  std::vector<Bytes> gather(BytesView mine) {
    std::vector<Bytes> sorted = world_.all_gather("torchspan.group", mine, ranks_, deadline_);
    std::vector<std::size_t> order(ranks_.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return ranks_[a] < ranks_[b]; });
    std::vector<Bytes> answers(sorted.size());
    for (std::size_t i = 0; i < order.size(); ++i) answers[order[i]] = std::move(sorted.at(i));
    return answers;
  }

  void compare_plans() {
    const std::vector<Bytes> plans = gather(encode_plan(ranks_, options_));
    for (std::size_t i = 1; i < plans.size(); ++i) {
      if (plans[i] == plans[0]) continue;
      throw Error(ErrorKind::kInvalid,
                  fmt::format("the ranks of a group must make it with the same options, but {} gave {}, and {} "
                              "gave {}",
                              describe(world_.member(ranks_[0])), describe_plan(plans[0]),
                              describe(world_.member(ranks_[i])), describe_plan(plans[i])));
    }
  }

  std::shared_ptr<BackEnd> make_shared_memory() {
    if (dynamic_cast<SimExecutor*>(&runtime_.executor) != nullptr) {
      throw Error(ErrorKind::kUnsupported,
                  "ranks that share memory wait in the kernel, which cannot be simulated: use another back end");
    }
    shm::MeetingPlan plan;
    for (const int rank : ranks_) {
      const Member member = world_.member(rank);
      plan.people.push_back({rank, member.epoch, describe(member)});
      if (member.host_id != world_.self().host_id) {
        throw Error(ErrorKind::kUnsupported,
                    fmt::format("{} and {} are on different hosts and cannot share memory",
                                describe(world_.self()), describe(member)));
      }
    }
    plan.self = static_cast<int>(std::find(ranks_.begin(), ranks_.end(), world_.self().rank) - ranks_.begin());
    plan.shared_bytes = options_.shared_bytes;
    plan.deadline = deadline_;
    const shm::Gather by_rank = [this](BytesView mine) { return gather(mine); };
    const std::shared_ptr<shm::Hub> hub = meet(runtime_, plan, by_rank);
    listen_to_deaths(hub);
    std::vector<int> members(ranks_.size());
    std::iota(members.begin(), members.end(), 0);
    return shm::ShmBackEnd::make(hub, std::move(members), options_.timeout, by_rank);
  }

  void listen_to_deaths(const std::weak_ptr<shm::Hub>& weak) {
    world_.watch({.died =
                      [weak](const Member& member, const Error& reason) {
                        if (const auto hub = weak.lock()) {
                          hub->note_gone_by_epoch(member.epoch, "it died: " + reason.message());
                        }
                      },
                  .left =
                      [weak](const Member& member) {
                        if (const auto hub = weak.lock()) {
                          hub->note_gone_by_epoch(member.epoch, "it left the world");
                        }
                      }});
  }

  Runtime& runtime_;
  Membership& world_;
  const GroupOptions options_;
  std::vector<int> ranks_;
  Deadline deadline_;
};

}  // namespace

Group Group::make(Runtime& runtime, Membership& world, GroupOptions options) {
  try {
    return Group(Maker(runtime, world, std::move(options)).make());
  } catch (const Error& error) {
    throw Error(error).with_worker(world.self().name).with_call("Group::make");
  }
}

}  // namespace torchspan::collective
