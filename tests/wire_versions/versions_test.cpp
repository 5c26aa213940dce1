// Workers of neighboring releases in one world, on the simulated network: the same program over every pair of versions,
// the version and features of every frame, and worlds that are refused.
#include <map>
#include <set>

#include "rpc/peers/peer_channels.h"
#include "tests/parity/autograd_world.h"
#include "tests/wire_versions/negation.h"

namespace torchspan::wire_versions::versions_test {
namespace {

using namespace torchspan::testing;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;

using Ranges = std::vector<ProtocolRange>;

at::Tensor scale(const at::Tensor& x, const at::Tensor& by) { return x * by; }
at::Tensor twice(const at::Tensor& by) { return by * 2; }
at::Tensor scale_there(Worker& worker, const std::string& to, const at::Tensor& x, const at::Tensor& by);
at::Tensor use(const RRef<at::Tensor>& x) { return x.to_here() + 1; }
void fail(std::int64_t number) { throw std::runtime_error("number " + std::to_string(number)); }
void wait_until_cancelled(Worker& worker) {
  const auto current = worker.current_call();
  while (!current->stop.stop_requested()) nap(worker, milliseconds(1));
}
constexpr Function<scale> kScale{"scale"};
constexpr Function<twice> kTwice{"twice"};
constexpr Function<scale_there> kScaleThere{"scale_there"};
constexpr Function<use> kUse{"use"};
constexpr Function<fail> kFail{"fail"};
constexpr Function<wait_until_cancelled> kWaitUntilCancelled{"wait_until_cancelled"};
at::Tensor scale_there(Worker& worker, const std::string& to, const at::Tensor& x, const at::Tensor& by) {
  return worker.rpc_sync(to, kScale, x, by);
}

FunctionTable functions() {
  return FunctionTable().add(kScale, kTwice, kScaleThere, kUse, kFail, kWaitUntilCancelled);
}

/// Workers that announce these ranges.
ClusterOptions world(const Ranges& ranges) {
  ClusterOptions options = world_of(static_cast<int>(ranges.size()), functions());
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<AutogradExtension>());
    extensions.push_back(std::make_unique<Negation>());
    return extensions;
  };
  options.adjust = [ranges](int rank, WorkerPlan& plan) {
    plan.join.wire = ranges[static_cast<std::size_t>(rank)];
  };
  return options;
}

int rank_of(const std::string& address) {
  constexpr std::string_view kPrefix = "sim:worker";
  if (!address.starts_with(kPrefix) || address.ends_with(".membership")) return -1;
  return std::stoi(address.substr(kPrefix.size()));
}

/// Counts the frames between workers, and checks that each is of the newest common version and uses common features.
struct Observer {
  Observer(SimCluster& cluster, const Ranges& ranges) {
    cluster.network().observe([this, ranges](const net::SimMessage& message) {
      const int from = rank_of(message.from), to = rank_of(message.to);
      if (from < 0 || to < 0) return;
      const auto common =
          common_protocol(ranges[static_cast<std::size_t>(from)], ranges[static_cast<std::size_t>(to)]);
      ASSERT_TRUE(common) << from << " sends to " << to;
      const wire::FrameHeader header = wire::decode_frame(message.header, {1, 2, kFeature}).header;
      EXPECT_EQ(header.version, common->version)
          << from << " to " << to << ", type " << static_cast<int>(header.type);
      EXPECT_EQ(header.features & ~common->features, 0u) << from << " to " << to;
      ++frames;
      if (header.features != 0) ++featured;
      types.insert(static_cast<int>(header.type) | ((header.flags & wire::kFlagError) != 0 ? kError : 0));
    });
  }
  static constexpr int kError = 1 << 16;
  std::atomic<int> frames{0}, featured{0};
  std::set<int> types;  ///< of one simulated thread at a time
};

std::string name_of(const Ranges& ranges) {
  std::string text;
  for (const ProtocolRange& range : ranges) text += describe_versions(range) + "; ";
  return text;
}

/// Calls, references, a failure, a cancellation and a backward pass from the first worker through the others.
void use_everything(Worker& worker) {
  const at::Tensor by = at::tensor({2, 3}, at::kLong);
  const at::Tensor x = at::tensor({1.5, 2.5}, at::kDouble).requires_grad_();
  const std::string next = "worker1", last = SimCluster::name(worker.world_size() - 1);
  EXPECT_TRUE(at::equal(worker.rpc_sync(next, kTwice, by), by * 2));
  EXPECT_TRUE(at::equal(worker.rpc_sync(next, "aten::add", {by, by}).toTensor(), by * 2));
  const RRef<at::Tensor> there = worker.remote(next, kTwice, by);
  EXPECT_TRUE(at::equal(worker.rpc_sync(last, kUse, there), by * 2 + 1));
  EXPECT_TRUE(at::equal(there.to_here(), by * 2));
  EXPECT_THAT(error_text([&] { worker.rpc_sync(next, kFail, 7); }), HasSubstr("number 7"));
  std::stop_source stop;
  auto cancelled = worker.with({.stop = stop.get_token()}).rpc_async(next, kWaitUntilCancelled);
  nap(worker, milliseconds(50));
  stop.request_stop();
  EXPECT_EQ(error_of([&] { cancelled.wait(); }).kind(), ErrorKind::kCancelled);
  for (const autograd::PassMode mode : {autograd::PassMode::kSmart, autograd::PassMode::kFast}) {
    Context context(worker);
    const at::Tensor y = worker.rpc_sync(next, kScaleThere, last, x, by);
    context.backward(y.sum(), {.mode = mode});
    expect_equal(context.gradient(x), by.to(at::kDouble));
  }
}

void expect_works(const Ranges& ranges, bool features_used) {
  SCOPED_TRACE(name_of(ranges));
  SimCluster cluster(world(ranges));
  Observer observer(cluster, ranges);
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 0) use_everything(worker);
  });
  EXPECT_GT(observer.frames, 20);
  EXPECT_EQ(observer.featured > 0, features_used);
  // The kinds of frames that different code makes: hellos, calls, cancellations, control messages, errors, gradients.
  for (const int type : {0x0001, 0x0002, 0x0010, 0x0022, 0x0010 | Observer::kError, 0x0101, 0x0104})
    EXPECT_TRUE(observer.types.contains(type)) << "no frame of type " << std::hex << type;
}

TEST(WireVersions, OfNeighborsWorkTogether) {
  expect_works({kOld, kBoth}, false);
  expect_works({kBoth, kOld}, false);
  expect_works({kOld, kOld}, false);
}

TEST(WireVersions, AreTheNewestCommonOneWithItsFeatures) {
  expect_works({kBoth, kBoth}, true);
  expect_works({kBoth, kNew}, true);
  expect_works({kNew, kBoth}, true);
  expect_works({{1, 2, 0}, kBoth}, false);
}

TEST(WireVersions, AreChosenForEachPair) {
  expect_works({kBoth, kBoth, kOld}, true);
  expect_works({kOld, kBoth, kBoth}, true);
  expect_works({kBoth, kOld, kBoth}, true);
}

TEST(WireVersions, WithoutACommonOneAreRefusedOnBothSidesBeforeTheFirstCall) {
  for (const Ranges& ranges : {Ranges{kOld, kNew}, Ranges{kNew, kOld}}) {
    SimCluster cluster(world(ranges));
    const auto failures = cluster.try_services([](rpc::WorkerService&) { ADD_FAILURE() << "it joined"; });
    for (const std::exception_ptr& failure : failures) {
      const Error error = error_of([&] { std::rethrow_exception(failure); });
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
      // The one that joined first is named last.
      const std::string text = error.what();
      const bool reversed = text.find("worker1 (") < text.find("worker0 (");
      const std::string one = describe_versions(ranges[reversed ? 1 : 0]);
      const std::string other = describe_versions(ranges[reversed ? 0 : 1]);
      EXPECT_THAT(text, AllOf(HasSubstr("worker0 (rank 0"), HasSubstr("worker1 (rank 1"),
                              HasSubstr("speaks " + one + " of the wire format"),
                              HasSubstr("speaks " + other + ":"), HasSubstr("two neighboring ones")));
    }
  }
}

TEST(WireFeatures, OfAMessageAreCheckedBeforeItIsSent) {
  const Ranges ranges{kBoth, kBoth, kOld};
  SimCluster cluster(world(ranges));
  Observer observer(cluster, ranges);
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 0) {
      const Deadline deadline = worker.runtime().executor.deadline_in(seconds(10));
      EXPECT_EQ(worker.request(Destination("worker1"), News{6}, deadline).wait(), 7);
      EXPECT_EQ(worker.request(Destination("worker0"), News{7}, deadline).wait(), 8)
          << "of this worker itself";
      const Error error = error_of([&] { worker.request(Destination("worker2"), News{6}, deadline).wait(); });
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("worker 'worker2' (rank 2)"), HasSubstr("0x80000000"),
                                      HasSubstr("'news'"), HasSubstr("update that worker")));
    }
  });
  EXPECT_GT(observer.featured, 0);
}

TEST(UnknownMessages, AreAnErrorOfTheirCallOnly) {
  SimCluster cluster(world({kBoth, kOld}));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const Deadline deadline = worker.runtime().executor.deadline_in(seconds(10));
    const Error error =
        error_of([&] { worker.request(Destination("worker1"), UnannouncedNews{6}, deadline).wait(); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("'worker1' does not serve messages of type 0x8002")));
    use_everything(worker);
  });
}

/// A release that adds a field to a message within a version is faulty; its calls fail, and nothing else.
TEST(UnknownFields, AreAnErrorOfTheirCallOnly) {
  SimCluster cluster(world({kBoth, kBoth}));
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    rpc::Request request = rpc::make_request(News{6});
    request.payload.value.push_back(std::byte{1});
    request.deadline = worker.runtime().executor.deadline_in(seconds(10));
    const auto completion =
        std::make_shared<rpc::PromiseCompletion<std::int64_t>>(worker.backend()->continuations());
    worker.backend()->send(1, std::move(request), completion);
    const Error error = error_of([&] { completion->future().wait(); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
    use_everything(worker);
  });
}

/// A member of the world that sends frames as it likes.
class FaultyMember final : public net::Handler {
 public:
  FaultyMember(SimCluster& cluster, Runtime& runtime)
      : cluster_(cluster), transport_(cluster.network().make_transport("faulty", *this, {})) {
    rendezvous::MembershipOptions join;
    join.name = "faulty";
    join.rank = 1;
    join.world_size = rendezvous::kOpenWorld;
    join.store_address = "sim:store";
    join.address = transport_->listen("sim:faulty");
    join.instance = 4711;
    membership_ = rendezvous::Membership::join(
        runtime,
        [&](const std::string&, net::Handler& handler) {
          return cluster_.network().make_transport("faulty.membership", handler, {});
        },
        join);
  }
  /// Sends a hello, then the frame; returns why the connection ended, or nullopt if it has not within a second.
  std::optional<Error> send(const wire::Frame& frame) {
    closed_.reset();
    const Deadline until = cluster_.executor().deadline_in(seconds(1));
    const auto channel = transport_->connect("sim:worker0", until);
    wire::Frame hello;
    hello.header.type = rpc::Hello::kType;
    hello.header.flags = wire::kFlagOneWay;
    hello.value = wire::to_payload(rpc::Hello{"faulty", 1, 4711}).value;
    channel->send(wire::encode_frame(hello), {});
    channel->send(wire::encode_frame(frame), {});
    while (!closed_ && !until.passed(cluster_.executor().now())) {
      while (transport_->poll()) {
      }
      transport_->wait(until);
    }
    return closed_;
  }
  void leave() { membership_->leave(cluster_.executor().deadline_in(seconds(10))); }

  void on_accepted(const std::shared_ptr<net::Channel>&) override {}
  void on_message(const std::shared_ptr<net::Channel>&, net::Message) override { ++answers; }
  void on_closed(const std::shared_ptr<net::Channel>&, const Error& reason) override { closed_ = reason; }
  int answers = 0;

 private:
  SimCluster& cluster_;
  const std::unique_ptr<net::Transport> transport_;
  std::unique_ptr<rendezvous::Membership> membership_;
  std::optional<Error> closed_;
};

/// Frames that their receiver never announced to read end the connection, and nothing else.
TEST(UnknownFeatures, AndVersionsCloseTheConnectionThatUsesThem) {
  ClusterOptions options = world({kOld});
  options.open = true;
  SimCluster cluster(std::move(options));
  cluster.run([&](Worker& worker) {
    FaultyMember faulty(cluster, worker.runtime());
    while (worker.workers().size() < 2) nap(worker, milliseconds(1));
    wire::Frame frame;
    frame.header.type = UnannouncedNews::kType;
    frame.header.call = 1;
    EXPECT_FALSE(faulty.send(frame));
    EXPECT_EQ(faulty.answers, 1) << "an error, because the type is unknown";
    frame.header.features = kFeature;
    EXPECT_TRUE(faulty.send(frame));
    frame.header.features = 0;
    frame.header.version = 2;
    EXPECT_TRUE(faulty.send(frame));
    frame.header.version = 1;
    frame.header.flags = 1u << 30;
    EXPECT_FALSE(faulty.send(frame)) << "unknown flags are ignored";
    EXPECT_EQ(faulty.answers, 2);
    const at::Tensor by = at::tensor({2, 3}, at::kLong);
    EXPECT_TRUE(at::equal(worker.rpc_sync("worker0", kTwice, by), by * 2));
    faulty.leave();
  });
}

/// Updates a world worker by worker: every process that joins speaks more than the one before it.
TEST(WireVersions, ChangeWhenAWorkerIsUpdated) {
  ClusterOptions options = world({kBoth, kOld});
  options.open = true;
  options.adjust = [](int rank, WorkerPlan& plan) {
    const bool updated = rank == 0 || plan.join.instance > 1000;
    plan.join.wire = updated ? kBoth : kOld;
  };
  SimCluster cluster(std::move(options));
  std::map<int, int> versions;  // of calls from the first worker: how many
  cluster.network().observe([&](const net::SimMessage& message) {
    if (rank_of(message.from) != 0 || rank_of(message.to) != 1) return;
    ++versions[wire::decode_frame(message.header, {1, 2, kFeature}).header.version];
  });
  const auto call = [](Worker& worker) {
    const at::Tensor by = at::tensor({2, 3}, at::kLong);
    EXPECT_TRUE(at::equal(worker.rpc_sync("worker1", kTwice, by), by * 2));
  };
  const auto is_there = [](Worker& worker) { return worker.workers().size() == 2; };
  std::atomic<int> calls{0};
  Thread updated;
  const auto failures = cluster.try_services([&](rpc::WorkerService& service) {
    Worker& worker = service.worker();
    if (worker.rank() == 1) {
      while (calls < 1) nap(worker, milliseconds(1));
      return service.shutdown(cluster.executor().deadline_in(seconds(60)));
    }
    while (!is_there(worker)) nap(worker, milliseconds(1));
    call(worker);
    EXPECT_EQ(versions[2], 0) << "before the update";
    const int old = versions[1];
    EXPECT_GT(old, 0);
    ++calls;
    while (is_there(worker)) nap(worker, milliseconds(1));
    updated = cluster.start(1, 1, [&](rpc::WorkerService& other) {
      while (calls < 2) nap(other.worker(), milliseconds(1));
      other.shutdown(cluster.executor().deadline_in(seconds(60)));
    });
    while (!is_there(worker)) nap(worker, milliseconds(1));
    versions.clear();
    call(worker);
    EXPECT_EQ(versions[1], 0) << "after the update";
    EXPECT_GT(versions[2], 0);
    ++calls;
    updated.join();
    service.shutdown(cluster.executor().deadline_in(seconds(60)));
  });
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

std::int64_t added(std::int64_t x) { return x + 1; }
std::int64_t of_integers(std::int64_t x) { return x; }
double of_doubles(double x) { return x; }
constexpr Function<added> kAdded{"added"};
constexpr Function<of_integers> kOfIntegers{"changed"};
constexpr Function<of_doubles> kOfDoubles{"changed"};

/// Workers that join with their function tables, as sessions do.
ClusterOptions world_of_tables(const std::function<void(int, FunctionTable&)>& extend) {
  ClusterOptions options = world({kOld, kBoth});
  options.adjust = [extend, adjust = options.adjust](int rank, WorkerPlan& plan) {
    adjust(rank, plan);
    extend(rank, plan.functions);
    plan.join.functions = plan.functions.descriptions();
    plan.join.functions_digest = plan.functions.digest();
    plan.join.require_same_functions = false;
  };
  return options;
}

TEST(FunctionTables, MayDifferByAddedFunctionsThatFailOnlyWhereTheyAreMissing) {
  SimCluster cluster(world_of_tables([](int rank, FunctionTable& table) {
    if (rank == 1) table.add(kAdded);
  }));
  cluster.run([&](Worker& worker) {
    if (worker.rank() == 0) return use_everything(worker);
    EXPECT_EQ(worker.rpc_sync("worker1", kAdded, 1), 2);
    const auto names_both = AllOf(HasSubstr("worker 'worker0' does not have this function"),
                                  HasSubstr("which worker 'worker1' called"), HasSubstr("updated"));
    const Error of_call = error_of([&] { worker.rpc_sync("worker0", kAdded, 1); });
    EXPECT_EQ(of_call.kind(), ErrorKind::kInvalid);
    EXPECT_EQ(of_call.call(), "added");
    EXPECT_THAT(std::string(of_call.what()), names_both);
    const Error of_creation = error_of([&] { worker.remote("worker0", kAdded, 1).to_here(); });
    EXPECT_EQ(of_creation.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(std::string(of_creation.what()), names_both);
  });
}

TEST(FunctionTables, WithAChangedSignatureAreRefusedOnBothSides) {
  SimCluster cluster(world_of_tables(
      [](int rank, FunctionTable& table) { rank == 0 ? table.add(kOfIntegers) : table.add(kOfDoubles); }));
  for (const auto& failure :
       cluster.try_services([](rpc::WorkerService&) { ADD_FAILURE() << "it joined"; })) {
    const Error error = error_of([&] { std::rethrow_exception(failure); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("'changed'"), HasSubstr("worker0 (rank 0"), HasSubstr("int64"),
                                    HasSubstr("worker1 (rank 1"), HasSubstr("float64")));
  }
}

}  // namespace
}  // namespace torchspan::wire_versions::versions_test
