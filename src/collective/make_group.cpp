#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <numeric>
#include <optional>

#include <torchspan/collective/group.h>
#include <torchspan/core/sim_executor.h>
#include <torchspan/rendezvous/membership.h>

#include "collective/c10d/gloo.h"
#include "collective/hierarchical/hierarchical_wire.h"
#include "collective/mpi/mpi.h"
#include "collective/serial/serial_back_end.h"
#include "collective/shm/meeting.h"
#include "collective/shm/shm_back_end.h"
#include "collective/single.h"

namespace torchspan::collective {
namespace {

using rendezvous::Member;
using rendezvous::Membership;

constexpr Duration kRollCall = std::chrono::seconds(1);

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
        return on_one_host() ? make_shared_memory(ranks_) : make_hierarchical();
      case BackEndKind::kSharedMemory:
        return make_shared_memory(ranks_);
      case BackEndKind::kC10d:
        require_isolation();
        return make_serial(connect_gloo(runtime_, world_, ranks_, options_.timeout));
      case BackEndKind::kMpi:
        require_isolation();
        return make_serial(connect_mpi(ranks_, world_.self().rank, world_.world_size()));
      case BackEndKind::kHierarchical:
        return make_hierarchical();
    }
    throw Error(ErrorKind::kInvalid, "GroupOptions::back_end is none of the back ends there are");
  }

 private:
  void check_ranks() const {
    std::vector<int> sorted = ranks_;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      throw Error(ErrorKind::kInvalid, fmt::format("ranks {} name a rank twice", ranks_));
    }
    if (!std::binary_search(sorted.begin(), sorted.end(), world_.self().rank)) {
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("this worker (rank {}) is not among the ranks {} of the group: only they make it",
                      world_.self().rank, ranks_));
    }
  }

  /// Everybody's bytes, by rank of the group; the membership gathers by rank of the world.
  std::vector<Bytes> gather(BytesView mine, const std::vector<int>& ranks) {
    std::vector<Bytes> sorted = world_.all_gather("torchspan.group", mine, ranks, deadline_);
    std::vector<std::size_t> order(ranks.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return ranks[a] < ranks[b]; });
    std::vector<Bytes> answers(sorted.size());
    for (std::size_t i = 0; i < order.size(); ++i) answers[order[i]] = std::move(sorted.at(i));
    return answers;
  }

  void compare_plans() {
    const std::vector<Bytes> plans = gather(encode_plan(ranks_, options_), ranks_);
    for (std::size_t i = 1; i < plans.size(); ++i) {
      if (plans[i] == plans[0]) continue;
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("the ranks of a group must make it with the same options, but {} gave {}, and {} "
                      "gave {}",
                      describe(world_.member(ranks_[0])), describe_plan(plans[0]),
                      describe(world_.member(ranks_[i])), describe_plan(plans[i])));
    }
  }

  bool on_one_host() const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [&](int rank) { return world_.member(rank).host_id == world_.self().host_id; });
  }

  /// Throws unless the user said that strangers cannot reach the network between the hosts.
  void require_isolation() const {
    if (on_one_host() || options_.network == Network::kIsolated) return;
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("the ranks {} are on several hosts, and the engines between hosts neither "
                    "authenticate nor encrypt: if the network between them is closed to strangers, say "
                    "so by GroupOptions::network = Network::kIsolated",
                    ranks_));
  }

  std::shared_ptr<BackEnd> make_serial(std::unique_ptr<Wire> wire) {
    SerialOptions serial{.ranks = ranks_, .rank = place_of(world_.self().rank), .timeout = options_.timeout};
    for (const int rank : ranks_) serial.people.push_back(describe(world_.member(rank)));
    serial.gone = [&world = world_, ranks = ranks_](int rank) -> std::optional<std::string> {
      const int world_rank = ranks[static_cast<std::size_t>(rank)];
      if (world.is_present(world_rank)) return std::nullopt;
      return "it died or left";
    };
    serial.roll_call = [&runtime = runtime_, &world = world_](std::uint64_t call, std::vector<int> ranks) {
      std::sort(ranks.begin(), ranks.end());
      try {
        world.barrier(fmt::format("torchspan.roll_call.{}", call), std::move(ranks),
                      runtime.executor.deadline_in(kRollCall));
      } catch (const Error& error) {
        return error.message();
      }
      return std::string();
    };
    return std::make_shared<SerialBackEnd>(runtime_, std::move(wire), std::move(serial));
  }

  int place_of(int world_rank) const {
    return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), world_rank) - ranks_.begin());
  }

  /// A group of its own for each host, then one between their first ranks.
  std::shared_ptr<BackEnd> make_hierarchical() {
    require_isolation();
    HierarchyPlan plan{.ranks = ranks_, .hosts = {}, .rank = place_of(world_.self().rank)};
    std::vector<std::string> hosts;
    std::vector<int> here;
    for (const int rank : ranks_) {
      const std::string host = world_.member(rank).host_id;
      const auto known = std::find(hosts.begin(), hosts.end(), host);
      plan.hosts.push_back(static_cast<int>(known - hosts.begin()));
      if (known == hosts.end()) hosts.push_back(host);
      if (host == world_.self().host_id) here.push_back(rank);
    }
    Group local(here.size() == 1 ? std::make_shared<SingleBackEnd>(here[0]) : make_shared_memory(here));
    ConnectLeaders connect = [&runtime = runtime_, &world = world_,
                              timeout = options_.timeout](const std::vector<int>& leaders) {
      return connect_gloo(runtime, world, leaders, timeout);
    };
    return make_serial(
        std::make_unique<HierarchicalWire>(std::move(plan), std::move(local), std::move(connect)));
  }

  std::shared_ptr<BackEnd> make_shared_memory(const std::vector<int>& ranks) {
    if (dynamic_cast<SimExecutor*>(&runtime_.executor) != nullptr) {
      throw Error(
          ErrorKind::kUnsupported,
          "ranks that share memory wait in the kernel, which cannot be simulated: use another back end");
    }
    shm::MeetingPlan plan;
    for (const int rank : ranks) {
      const Member member = world_.member(rank);
      plan.people.push_back({rank, member.epoch, describe(member)});
      if (rank == world_.self().rank) plan.self = static_cast<int>(plan.people.size()) - 1;
      if (member.host_id != world_.self().host_id) {
        throw Error(ErrorKind::kUnsupported,
                    fmt::format("{} and {} are on different hosts and cannot share memory",
                                describe(world_.self()), describe(member)));
      }
    }
    plan.shared_bytes = options_.shared_bytes;
    plan.deadline = deadline_;
    const shm::Gather by_rank = [this, &ranks](BytesView mine) { return gather(mine, ranks); };
    const std::shared_ptr<shm::Hub> hub = meet(runtime_, plan, by_rank);
    listen_to_deaths(hub);
    std::vector<int> members(ranks.size());
    std::iota(members.begin(), members.end(), 0);
    return shm::ShmBackEnd::make(hub, std::move(members), options_.timeout, by_rank);
  }

  void listen_to_deaths(const std::weak_ptr<shm::Hub>& weak) {
    world_.watch({.died =
                      [weak](const Member& member, const Error& reason) {
                        if (const auto hub = weak.lock()) {
                          hub->note_gone_by_epoch(member.epoch, reason.message());
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
