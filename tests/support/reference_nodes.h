#pragma once
#include <cstdlib>
#include <deque>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torchspan/rpc/worker.h>

#include "core/api/sim_executor.h"
#include "net/api/sim.h"
#include "rpc/references/control.h"
#include "rpc/references/references.h"
#include "tests/support/memory.h"

/// For tests: workers that have the driver, the handles and the acknowledgements of references, but no threads,
/// so that thousands fit into one process.
namespace torchspan::rpc::testing {

/// How many workers each worker deals with: the next ones in a ring.
inline constexpr std::uint32_t kNeighbors = 8;

/// Queues the jobs of all workers for the one thread that drives them.
class JobQueue final : public ContinuationExecutor {
 public:
  explicit JobQueue(Executor& executor) : executor_(executor) {}
  Executor& executor() override { return executor_; }
  void post(UniqueFunction<void()> job) override { jobs_.push_back(std::move(job)); }
  void wait(Parker&, const std::atomic<bool>&, Deadline) override { std::abort(); }
  bool run() {
    const bool any = !jobs_.empty();
    for (; !jobs_.empty(); jobs_.pop_front()) jobs_.front()();
    return any;
  }

 private:
  Executor& executor_;
  std::deque<UniqueFunction<void()>> jobs_;
};

/// State and counters that all workers share.
struct Shared {
  SimExecutor executor{7};
  net::SimNetwork network{executor, {}};
  Runtime runtime{executor, "world"};
  std::shared_ptr<JobQueue> jobs = std::make_shared<JobQueue>(executor);
  std::size_t outstanding = 0;  ///< requests that wait for their replies
  std::size_t control = 0;      ///< messages of the protocol so far
};

inline constexpr wire::MessageType kShare{0x8001};

/// Implements a worker as the reference driver over a transport, without threads.
class Node final : public WorkerBackend, public net::Handler {
 public:
  Node(Shared& shared, std::uint32_t rank)
      : shared_(shared),
        self_{"worker" + std::to_string(rank), rank},
        transport_(shared.network.make_transport(self_.name, *this, {})) {
    transport_->listen("sim:" + self_.name);
  }
  void begin(std::uint32_t workers) {
    references_ = std::make_shared<References>(weak_from_this(), self_.rank);
    references_->begin({self_.rank, 0});
    for (std::uint32_t rank = 0; rank < workers; ++rank) references_->joined({rank, 0});
  }
  bool poll() { return transport_->poll(); }
  References& references() const { return *references_; }
  std::vector<ReferencePtr>& held() { return held_; }

  /// Makes a value on `owner`.
  void make(std::uint32_t owner) {
    auto user = references_->begin_creation(owner, "int64", {});
    Request request;
    request.type = kCreateRemote;
    const wire::Handle handle{owner, user->value_id(), user->fork_id(), user->type_tag(), 0};
    class Created final : public Completion {
     public:
      Created(References& references, std::shared_ptr<UserReference> user)
          : references_(references), user_(std::move(user)) {}
      void succeed(wire::Payload&) override { references_.created(user_); }
      void fail(std::exception_ptr) override { std::abort(); }

     private:
      References& references_;
      std::shared_ptr<UserReference> user_;
    };
    transmit(owner, request, {handle}, std::make_shared<Created>(*references_, user));
    held_.push_back(user);
  }
  /// Gives a copy of a reference to `to`, which keeps it.
  void share(const ReferencePtr& reference, std::uint32_t to) {
    class Ignore final : public Completion {
     public:
      void succeed(wire::Payload&) override {}
      void fail(std::exception_ptr) override { std::abort(); }
    };
    Request request;
    request.type = kShare;
    transmit(to, request, references_->to_handles({reference}, {to, 0}), std::make_shared<Ignore>());
  }

  // WorkerBackend: what the driver needs of a worker
  Runtime& runtime() override { return shared_.runtime; }
  std::weak_ptr<ContinuationExecutor> continuations() override { return shared_.jobs; }
  const WorkerInfo& self() const override { return self_; }
  std::string name_of(std::uint32_t rank) const override { return "worker" + std::to_string(rank); }
  bool is_present(std::uint32_t) const override { return true; }
  bool is_stopping() const override { return false; }
  void send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion) override {
    ++shared_.control;
    transmit(to, request, {}, std::move(completion));
  }
  void after(Duration, UniqueFunction<void()>) override { std::abort(); }  // nothing is lost here

  // net::Handler
  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_closed(const std::shared_ptr<net::Channel>&, const Error& reason) override {
    ADD_FAILURE() << reason.what();
  }
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override {
    const wire::FrameView frame = wire::decode_frame(message.header);
    wire::Payload payload;
    payload.value.assign(frame.value.begin(), frame.value.end());
    if ((frame.header.flags & wire::kFlagReply) != 0) {
      const auto call = calls_.extract(frame.header.call);
      --shared_.outstanding;
      return call.mapped()->succeed(payload);
    }
    const PeerId from{static_cast<std::uint32_t>(frame.header.instance), 0};
    wire::Frame reply;
    reply.header.type = frame.header.type;
    reply.header.flags = wire::kFlagReply;
    reply.header.call = frame.header.call;
    reply.value = serve(frame, payload, from).value;
    channel->send(wire::encode_frame(reply), {});
  }

  // WorkerBackend: unused here
  Pool& pool() override { std::abort(); }
  std::vector<WorkerInfo> workers() const override { std::abort(); }
  WorkerInfo info(const Destination&) const override { std::abort(); }
  std::uint32_t resolve(const Destination&) const override { std::abort(); }
  std::uint64_t id_of(const char*, std::string (*)()) const override { std::abort(); }
  void apply(const CallOptions&, Request&) override { std::abort(); }
  std::optional<CurrentCall> current_call() override { std::abort(); }
  DebugInfo debug() const override { std::abort(); }
  void set_default_timeout(Duration) override { std::abort(); }
  Duration default_timeout() const override { std::abort(); }
  ReferencePtr own(ValuePtr, std::string, SourceLocation) override { std::abort(); }
  ReferencePtr create(std::uint32_t, Request, std::string) override { std::abort(); }
  Gathering gathering(const std::vector<std::string>&) override { std::abort(); }
  GlobalId next_id() override { std::abort(); }
  void* find_extension(const std::type_info&) const override { std::abort(); }

 private:
  void transmit(std::uint32_t to, const Request& request, const std::vector<wire::Handle>& handles,
                std::shared_ptr<Completion> completion) {
    auto& channel = channels_[to];
    if (!channel)
      channel =
          transport_->connect("sim:" + name_of(to), shared_.executor.deadline_in(std::chrono::seconds(60)));
    wire::Frame frame;
    frame.header.type = request.type;
    frame.header.instance = self_.rank;
    frame.header.call = ++last_call_;
    frame.handles = handles;
    frame.value = request.payload.value;
    calls_.emplace(last_call_, std::move(completion));
    ++shared_.outstanding;
    channel->send(wire::encode_frame(frame), {});
  }
  wire::Payload serve(const wire::FrameView& frame, wire::Payload& payload, PeerId from) {
    using Kind = RRefMessage::Kind;
    const auto control = [&](const auto& message, Kind kind) {
      references_->driver().receive({kind, {}, message.value, message.fork, 0, {}}, from);
      return wire::to_payload(Unit());
    };
    switch (static_cast<std::uint16_t>(frame.header.type)) {
      case static_cast<std::uint16_t>(kCreateRemote):
        references_->arriving_creation(frame.handles.at(0), from, {})->set(make_value<std::int64_t>(35));
        return wire::to_payload(Unit());
      case static_cast<std::uint16_t>(kShare):
        for (const auto& reference : references_->from_handles(frame.handles, from))
          held_.push_back(std::static_pointer_cast<Reference>(reference));
        return wire::to_payload(Unit());
      case static_cast<std::uint16_t>(ForkRequest::kType): {
        const auto message = wire::from_payload<ForkRequest>(payload);
        auto refusal = references_->driver().receive(
            {Kind::kForkRequest, {0, message.incarnation}, message.value, message.fork, message.number, {}},
            from);
        EXPECT_FALSE(refusal);
        return wire::to_payload(refusal);
      }
      case static_cast<std::uint16_t>(ChildAccept::kType):
        return control(wire::from_payload<ChildAccept>(payload), Kind::kChildAccept);
      default:
        return control(wire::from_payload<UserDelete>(payload), Kind::kUserDelete);
    }
  }

  Shared& shared_;
  const WorkerInfo self_;
  std::shared_ptr<References> references_;
  std::vector<ReferencePtr> held_;
  std::map<std::uint32_t, std::shared_ptr<net::Channel>> channels_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Completion>> calls_;
  std::uint64_t last_call_ = 0;
  const std::unique_ptr<net::Transport> transport_;
};

/// What a number of references cost.
struct ReferenceCost {
  double messages = 0;         ///< of the protocol, per reference
  std::size_t remembered = 0;  ///< most numbers that one worker keeps at the end
  double bytes = 0;            ///< of memory in use at the end, of all workers
};

class NetworkWorld {
 public:
  explicit NetworkWorld(std::uint32_t workers) : random_(workers) {
    for (std::uint32_t rank = 0; rank < workers; ++rank)
      nodes_.push_back(std::make_shared<Node>(shared_, rank));
    for (const auto& node : nodes_) node->begin(workers);
  }
  SimExecutor& executor() { return shared_.executor; }
  net::SimNetwork& network() { return shared_.network; }

  /// Makes `references` references, four to each value, and drops them again; some thousands are alive at any
  /// time.
  ReferenceCost share_and_drop(std::size_t references) {
    const std::size_t before = shared_.control;
    for (std::size_t made = 0; made < references; made += 4 * nodes_.size()) {
      for (const auto& node : nodes_) node->make((node->self().rank + 1 + wave_ % kNeighbors) % size());
      ++wave_;
      settle();
      for (const auto& node : nodes_) share_last(*node);
      settle();
      if (made >= 2 * 4 * nodes_.size()) drop(4);
    }
    drop(SIZE_MAX);
    ReferenceCost cost;
    cost.messages = static_cast<double>(shared_.control - before) / static_cast<double>(references);
    for (const auto& node : nodes_) {
      const RRefTable::Counts counts = node->references().counts();
      EXPECT_EQ(counts.owners + counts.forks + counts.users + counts.pending_users + counts.pending_children,
                0u);
      cost.remembered = std::max(cost.remembered, counts.remembered);
    }
    cost.bytes = static_cast<double>(torchspan::testing::heap_in_use());
    return cost;
  }

 private:
  std::uint32_t size() const { return static_cast<std::uint32_t>(nodes_.size()); }
  /// Shares the value that the worker just made with three workers, neither the worker nor the owner.
  void share_last(Node& node) {
    const ReferencePtr reference = made_by(node);
    for (std::uint32_t shared = 0, next = node.self().rank + 1; shared < 3; ++next) {
      if (next % size() == reference->owner()) continue;
      node.share(reference, next % size());
      ++shared;
    }
  }
  static ReferencePtr made_by(Node& node) {
    for (auto it = node.held().rbegin();; ++it) {
      if ((*it)->value_id().worker == node.self().rank && (*it)->fork_id().worker == node.self().rank)
        return *it;
    }
  }
  /// Drops `count` references of each worker, at random.
  void drop(std::size_t count) {
    for (const auto& node : nodes_) {
      auto& held = node->held();
      for (std::size_t i = 0; i < count && !held.empty(); ++i) {
        std::swap(held[random_() % held.size()], held.back());
        held.pop_back();
      }
    }
    settle();
  }
  /// Runs until nothing is in flight.
  void settle() {
    while (shared_.outstanding != 0 || shared_.jobs->run()) {
      for (const auto& node : nodes_) node->poll();
      shared_.jobs->run();
      shared_.executor.sleep(std::chrono::microseconds(20));
    }
  }

  Shared shared_;
  std::mt19937_64 random_;
  std::uint32_t wave_ = 0;
  std::vector<std::shared_ptr<Node>> nodes_;
};

}  // namespace torchspan::rpc::testing
