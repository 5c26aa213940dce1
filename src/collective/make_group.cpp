#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <sys/stat.h>

#include <torchspan/collective.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "collective/c10d/gloo.h"
#include "collective/channels/channel_collectives.h"
#include "collective/device/device_group.h"
#include "collective/hierarchical/hierarchical_collectives.h"
#include "collective/mpi/mpi.h"
#include "collective/point_to_point/point_to_point.h"
#include "collective/serial/serial_backend.h"
#include "collective/shm/bootstrap.h"
#include "collective/shm/shm_backend.h"
#include "collective/single.h"
#include "collective/world_link.h"
#include "core/api/agreement.h"
#include "core/api/saturated_time.h"
#include "core/api/sim_executor.h"
#include "core/api/throw_invalid.h"
#include "rendezvous/api/environment.h"

namespace torchspan::collective {
namespace {

using rendezvous::Member;
using rendezvous::Membership;

constexpr const char* kCommonFolder =
    "containers and pods of one machine can share memory if they have one network namespace, or a common "
    "TORCHSPAN_RUNTIME_DIR, a folder that all of them mount";

/// The distance of consecutive ranks; 0 if it is not constant.
int step_of(const std::vector<int>& ranks) {
  const int step = ranks.size() > 1 ? ranks[1] - ranks[0] : 1;
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != step) return 0;
  }
  return step;
}

/// The options of a group, which must be equal on all ranks. Regular ranks take a constant number of bytes,
/// because each rank sends its plan.
Bytes encode_plan(const std::vector<int>& ranks, const GroupOptions& options) {
  ByteWriter writer;
  const int step = step_of(ranks);
  writer.put(step);
  writer.put(static_cast<std::uint32_t>(ranks.size()));
  for (std::size_t i = 0; i < (step == 0 ? ranks.size() : 1); ++i) writer.put(ranks[i]);
  writer.put(options.backend);
  writer.put(options.network);
  writer.put_string(options.device && !options.device->is_cpu()
                        ? c10::DeviceTypeName(options.device->type(), /*lower_case=*/true)
                        : "none");
  writer.put_string(options.name);  // 0.1.0 has none, so its plans differ
  return writer.take();
}

/// By value.
constexpr std::array<std::string_view, 8> kBackendKinds{
    "kAutomatic", "kSharedMemory", "kC10d", "kMpi", "kHierarchical", "kNccl", "kCudaIpc", "kNetwork"};
constexpr std::array<std::string_view, 3> kNetworks{"kEncrypted", "kThisHostOnly", "kIsolated"};

std::string_view name_of(std::span<const std::string_view> names, std::uint8_t value) {
  return value < names.size() ? names[value] : "unknown";
}

std::string describe_plan(BytesView plan) {
  ByteReader reader(plan);
  const std::int64_t step = reader.get<int>();
  std::string ranks;
  if (step == 0) {
    std::vector<int> list(reader.get_count(sizeof(int)));
    for (int& rank : list) rank = reader.get<int>();
    ranks = fmt::format("{}", list);
  } else {
    const std::int64_t count = reader.get<std::uint32_t>(), first = reader.get<int>();
    ranks = fmt::format("{} to {} in steps of {}", first, first + (count - 1) * step, step);
  }
  const std::string_view backend = name_of(kBackendKinds, reader.get<std::uint8_t>());
  const std::string_view network = name_of(kNetworks, reader.get<std::uint8_t>());
  const std::string device = reader.get_string();
  return fmt::format("ranks {}, backend {}, network {}, device {}{}", ranks, backend, network, device,
                     reader.left() == 0 ? ", release 0.1" : "");
}

/// Returns the folder of the socket in a worker's address, such as "unix:/run/torchspan/0-1f.sock@…,tls:…",
/// in which other sockets may be created; empty if the socket does not exist there.
std::string folder_of_socket(const std::string& address) {
  constexpr std::string_view kNear = "unix:";
  if (!address.starts_with(kNear)) return {};
  std::string path = address.substr(kNear.size());
  path = path.substr(0, path.rfind(",tls:"));
  path = path.substr(0, path.rfind(",ucx:"));
  path = path.substr(0, path.rfind('@'));
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0 || !S_ISSOCK(about.st_mode)) return {};
  return path.substr(0, path.rfind('/'));
}

GroupOptions limited(GroupOptions options) {
  options.timeout = no_limit_if_zero(options.timeout);
  return options;
}

class GroupBuilder {
 public:
  GroupBuilder(std::shared_ptr<Runtime> runtime, Membership& world, GroupOptions options,
               DeviceServices services)
      : runtime_(std::move(runtime)),
        world_(world),
        options_(limited(std::move(options))),
        services_(std::move(services)),
        ranks_(options_.ranks),
        tag_(tag_of("torchspan.group")),
        connections_tag_(tag_of("torchspan.connections")) {
    if (ranks_.empty()) {
      for (const Member& member : world.members()) ranks_.push_back(member.rank);
    }
    deadline_ = runtime_->executor.deadline_in(options_.timeout);
  }

  std::shared_ptr<Backend> make() {
    check_ranks();
    link_ = WorldLink::make(runtime_, world_);
    if (ranks_.size() == 1) {
      return SingleBackend::make(
          ranks_[0], runtime_, link_,
          has_device() ? check_device_exists(*options_.device) : c10::Device(c10::kCPU));
    }
    compare_plans();
    others_wait_ = true;
    std::shared_ptr<Backend> backend;
    try {
      backend = make_backend(members_of_group());
    } catch (...) {
      if (others_wait_) announce(to_error(std::current_exception()));
      throw;
    }
    gather({}, ranks_);  // no rank has the group unless all have it
    return backend;
  }

  /// send() and recv() of the group that make() returned; null for one rank.
  std::shared_ptr<PointToPoint> messages(std::shared_ptr<Backend> backend) const {
    if (ranks_.size() == 1) return nullptr;
    PairPlan plan{.world = link_,
                  .members = GroupMembers::of(members_of_group()),
                  .rank = place_of(world_.self().rank),
                  .group = number_,
                  .timeout = options_.timeout};
    return PointToPoint::make(std::move(plan), std::move(backend));
  }

 private:
  /// Rounds of groups with different names are different rounds.
  std::string tag_of(const char* kind) const {
    if (options_.name.empty()) return kind;
    const std::string tag = fmt::format("{}:{}", kind, options_.name);
    rendezvous::check_name(tag, "GroupOptions::name, with its prefix,");
    return tag;
  }

  std::shared_ptr<Backend> make_backend(const std::vector<Member>& members) {
    if (has_device()) return make_on_device(members);
    switch (options_.backend) {
      case BackendKind::kAutomatic:
      case BackendKind::kSharedMemory:
      case BackendKind::kHierarchical:
        return make_ours(members);
      case BackendKind::kC10d: {
        shm::LocalRanks local_ranks = find_local_ranks(members);
        if (!local_ranks.one_network) require_isolation(local_ranks.reasons);
        return make_serial(connect_gloo(link_, ranks_, gloo_options(local_ranks.one_network)), members);
      }
      case BackendKind::kNetwork:
        refuse_several_hosts(members);
        return make_serial(channels::connect_channels(link_, ranks_, mesh_options()), members);
      case BackendKind::kMpi:
        if (!find_local_ranks(members).all_together()) require_isolation({});
        return make_serial(connect_mpi(ranks_, world_.self().rank, world_.world_size()), members);
      case BackendKind::kNccl:
      case BackendKind::kCudaIpc:
        throw_invalid(
            "GroupOptions::backend is for GPUs, but GroupOptions::device is not set: set it on all ranks, "
            "for example to c10::Device(c10::kCUDA, local_rank)");
    }
    throw_invalid("GroupOptions::backend is not a BackendKind; choose one of its values");
  }

  void check_ranks() const {
    std::vector<int> sorted = ranks_;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      throw_invalid("the ranks {} contain a rank twice", ranks_);
    }
    if (!std::binary_search(sorted.begin(), sorted.end(), world_.self().rank)) {
      throw_invalid(
          "this worker (rank {}) is not among the ranks {} of the group: only these may call make()",
          world_.self().rank, ranks_);
    }
  }

  /// Returns the bytes of `ranks`, all or some of the group. Throws on all of them if one has failed since the last round.
  std::vector<Bytes> gather(BytesView mine, const std::vector<int>& ranks) {
    others_wait_ = ranks.size() < ranks_.size();
    std::vector<Bytes> all = all_or_none(
        [&](BytesView bytes) { return gather_in_order(world_, tag_, bytes, ranks, deadline_); },
        {.result = Bytes(mine.begin(), mine.end())},
        [&](std::size_t rank, const Error& failure) {
          return Error(failure.kind(), fmt::format("{} could not make its part of the group: {}",
                                                   describe(world_.member(ranks[rank])), failure.message()));
        });
    others_wait_ = true;
    return all;
  }

  /// Contributes to the next round, in which the other ranks wait for this one.
  void announce(const Error& failure) {
    try {
      world_.all_gather_bytes_async(tag_, encode_outcome({.failure = failure}), ranks_, deadline_,
                                    [](const auto&, const auto&) {});
    } catch (const Error& error) {  // this worker is leaving, which ends the round
      runtime_->log.debug(fmt::format("a failed group was not announced: {}", error.message()));
    }
  }

  void compare_plans() {
    ByteWriter mine(encode_plan(ranks_, options_));
    // Only the first rank's time counts; equal contributions of the others make the answer small.
    const bool first_rank = world_.self().rank == ranks_[0];
    mine.put(first_rank ? runtime_->executor.now().time_since_epoch().count() : std::int64_t{0});
    std::vector<Bytes> plans = gather_in_order(world_, tag_, mine.bytes(), ranks_, deadline_);
    ByteReader first(plans[0]);
    first.get_bytes(plans[0].size() - sizeof number_);
    number_ = first.get<std::uint64_t>() ^ world_.member(ranks_[0]).instance;
    for (Bytes& plan : plans) plan.resize(plan.size() - sizeof number_);
    if (const auto other = first_difference(plans)) {
      throw_invalid(
          "the ranks of a group must make it with the same options (GroupOptions::device with the same type "
          "of device on all ranks, or on none), but {} has {}, and {} has {}",
          describe(world_.member(ranks_[0])), describe_plan(plans[0]),
          describe(world_.member(ranks_[*other])), describe_plan(plans[*other]));
    }
  }

  std::vector<Member> members_of_group() const {
    std::vector<Member> members;
    for (const int rank : ranks_) members.push_back(world_.member(rank));
    return members;
  }

  bool has_device() const { return options_.device && !options_.device->is_cpu(); }

  std::shared_ptr<Backend> make_on_device(const std::vector<Member>& members) {
    DeviceGroupPlan plan{.device = *options_.device,
                         .backend = options_.backend,
                         .members = GroupMembers::of(members),
                         .rank = place_of(world_.self().rank),
                         .process_group = options_.process_group,
                         .timeout = options_.timeout,
                         .world = link_,
                         .gather = [this](BytesView mine) { return gather(mine, ranks_); },
                         .control = [&] { return make_ours(members); }};
    for (const Member& member : members) plan.hosts.push_back(member.host_id);
    return make_device_backend(services_, plan);
  }

  static std::vector<shm::PeerIdentity> identities_of(const std::vector<Member>& members) {
    std::vector<shm::PeerIdentity> peers;
    for (const Member& member : members) peers.push_back({member.rank, member.instance, describe(member)});
    return peers;
  }

  shm::LocalRanks find_local_ranks(const std::vector<Member>& members, const std::string& refusal = {}) {
    shm::LocalRanksPlan plan{
        .peers = identities_of(members), .hosts = {}, .self = place_of(world_.self().rank)};
    for (const Member& member : members) plan.hosts.push_back(member.host_id);
    plan.folder = folder_of_socket(world_.self().address);
    plan.refusal = refusal;
    return shm::find_local_ranks(runtime_->executor, plan,
                                 [this](BytesView mine) { return gather(mine, ranks_); });
  }

  /// Throws unless the options say that the network between the hosts is isolated. `reasons`: why ranks of
  /// one machine do not share memory.
  void require_isolation(const std::vector<std::string>& reasons) const {
    if (options_.network == Network::kIsolated) return;
    const std::string why = first_of(reasons);
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("the ranks {} are on several hosts{}, and Gloo and Open MPI neither authenticate nor "
                    "encrypt: use the default GroupOptions::backend; or, if no other hosts can reach the "
                    "network between them, set GroupOptions::network = Network::kIsolated",
                    ranks_, why.empty() ? "" : fmt::format(" ({}; {})", why, kCommonFolder)));
  }

  /// Throws if the options forbid traffic between hosts and `members` report several.
  void refuse_several_hosts(const std::vector<Member>& members) const {
    if (options_.network != Network::kThisHostOnly) return;
    for (const Member& member : members) {
      if (member.host_id == members[0].host_id) continue;
      throw Error(ErrorKind::kUnsupported,
                  fmt::format("{} and {} are on different hosts, but GroupOptions::network is kThisHostOnly: "
                              "set it to kEncrypted",
                              describe(members[0]), describe(member)));
    }
  }

  static std::string first_of(const std::vector<std::string>& reasons) {
    const auto first =
        std::find_if(reasons.begin(), reasons.end(), [](const auto& text) { return !text.empty(); });
    return first == reasons.end() ? std::string() : *first;
  }

  std::shared_ptr<Backend> make_serial(std::unique_ptr<BlockingCollectives> collectives,
                                       const std::vector<Member>& members) {
    return SerialBackend::make(runtime_, std::move(collectives),
                               {.members = GroupMembers::of(members),
                                .rank = place_of(world_.self().rank),
                                .timeout = options_.timeout,
                                .world = link_});
  }

  GlooOptions gloo_options(bool loopback) const {
    return {.timeout = options_.timeout, .loopback = loopback, .rounds = {.tag = tag_of("torchspan.gloo")}};
  }

  channels::MeshOptions mesh_options() const {
    return {.timeout = options_.timeout, .rounds = {.tag = connections_tag_}};
  }

  int place_of(int world_rank) const {
    return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), world_rank) - ranks_.begin());
  }

  /// Shared memory if all ranks share it and the options do not request hierarchical; else one group per
  /// host, and one between the hosts' first ranks.
  std::shared_ptr<Backend> make_ours(const std::vector<Member>& members) {
    if (dynamic_cast<SimExecutor*>(&runtime_->executor) != nullptr) {
      throw Error(
          ErrorKind::kUnsupported,
          "ranks that share memory wait in the kernel, which cannot be simulated: use another backend");
    }
    if (options_.backend == BackendKind::kSharedMemory) refuse_other_hosts(members);
    std::string refusal;
    shm::BootstrapOptions plan{.peers = identities_of(members),
                               .self = place_of(world_.self().rank),
                               .memory = {},
                               .deadline = deadline_};
    try {
      plan.memory = shm::Arena::make(options_.shared_bytes);
    } catch (const shm::NoDescriptorLeft&) {
      throw;
    } catch (const Error& error) {
      refusal = error.message();
    }
    shm::LocalRanks local_ranks = find_local_ranks(members, refusal);
    const bool loopback = local_ranks.one_network;
    const shm::BootstrapResult met = bootstrap(link_, plan, std::move(local_ranks),
                                               [this](BytesView mine) { return gather(mine, ranks_); });
    const bool together = std::count(met.leaders.begin(), met.leaders.end(), met.leaders[0]) ==
                          static_cast<std::ptrdiff_t>(met.leaders.size());
    if (!together && options_.backend == BackendKind::kSharedMemory) {
      throw Error(ErrorKind::kUnsupported, fmt::format("the ranks of this group cannot share memory: {}; {}",
                                                       first_of(met.reasons), kCommonFolder));
    }
    if (together && options_.backend != BackendKind::kHierarchical) return share_memory(met);
    if (!loopback) refuse_several_hosts(members);
    const bool gloo = options_.network == Network::kIsolated && has_gloo();
    HierarchyPlan hierarchy{.ranks = ranks_, .hosts = met.leaders, .rank = plan.self, .announces = !gloo};
    Group local(met.peer_memory ? share_memory(met)
                                : SingleBackend::make(world_.self().rank, runtime_, link_));
    ConnectLeaders connect = [link = link_, options = mesh_options()](const std::vector<int>& leaders,
                                                                      std::uint64_t split) mutable {
      options.rounds.split = split;
      return channels::connect_channels(link, leaders, options);
    };
    if (gloo) {
      connect = [link = link_, options = gloo_options(loopback)](const auto& leaders,
                                                                 std::uint64_t split) mutable {
        options.rounds.split = split;
        return connect_gloo(link, leaders, options);
      };
    }
    return make_serial(
        std::make_unique<HierarchicalCollectives>(std::move(hierarchy), std::move(local), std::move(connect)),
        members);
  }

  void refuse_other_hosts(const std::vector<Member>& members) const {
    for (const Member& member : members) {
      if (member.host_id == members[0].host_id) continue;
      throw Error(ErrorKind::kUnsupported,
                  fmt::format("{} and {} are on different hosts and cannot share memory",
                              describe(members[0]), describe(member)));
    }
  }

  /// The group of the ranks that share memory with this one.
  std::shared_ptr<Backend> share_memory(const shm::BootstrapResult& met) {
    std::vector<int> ranks, peer_ranks(static_cast<std::size_t>(met.peer_memory->size()));
    for (int rank = 0; rank < met.peer_memory->size(); ++rank)
      ranks.push_back(met.peer_memory->peer(rank).world_rank);
    std::iota(peer_ranks.begin(), peer_ranks.end(), 0);
    link_->add(met.peer_memory);
    return shm::ShmBackend::make(met.peer_memory, std::move(peer_ranks), options_.timeout,
                                 [&](BytesView mine) { return gather(mine, ranks); });
  }

  const std::shared_ptr<Runtime> runtime_;
  Membership& world_;
  std::shared_ptr<WorldLink> link_;
  const GroupOptions options_;
  const DeviceServices services_;
  std::vector<int> ranks_;
  const std::string tag_, connections_tag_;  ///< of this group's rounds
  bool others_wait_ = false;                 ///< in the next round of all ranks
  std::uint64_t number_ = 0;                 ///< differs for every group of the first rank
  Deadline deadline_;
};

}  // namespace

Group make_group(std::shared_ptr<Runtime> runtime, Membership& world, GroupOptions options,
                 DeviceServices services) {
  try {
    GroupBuilder builder(runtime, world, std::move(options), std::move(services));
    const std::shared_ptr<Backend> backend = builder.make();
    Group group(backend, runtime, builder.messages(backend));
    if (runtime->log.enabled(LogLevel::kDebug)) {
      runtime->log.debug(fmt::format("group of {} ranks, this is rank {} ({})", group.size(), group.rank(),
                                     group.backend()->name()));
    }
    return group;
  } catch (const Error& error) {
    throw Error(error).with_worker(world.self().name).with_call("Group::make");
  }
}

Group Group::make(GroupRuntime runtime, Membership& world, GroupOptions options) {
  runtime.runtime->check_process();
  return make_group(std::move(runtime.runtime), world, std::move(options),
                    {.runtime = device::cuda_device_runtime()});
}

}  // namespace torchspan::collective
