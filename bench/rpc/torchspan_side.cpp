// TorchSpan as a side of the comparison.
#include <deque>

#include <ATen/ATen.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/optim/extension.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "bench/rpc/side.h"
#include "net/api/tls.h"
#include "rendezvous/api/environment.h"

namespace torchspan::bench {
namespace {

std::int64_t next(std::int64_t n) { return n + 1; }
at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
/// Reads the tensor, so that it must have arrived.
std::int64_t count(const at::Tensor& x) { return alike(x, x) ? x.numel() : -1; }
at::Tensor echo(const at::Tensor& x) { return x; }

constexpr Function<next> kNext{"next", kInline};
constexpr Function<add> kAdd{"add", kInline};
constexpr Function<count> kCount{"count"};
constexpr Function<echo> kEcho{"echo"};

/// Limit of the other workers' calls in a world.
constexpr Duration kLongest = std::chrono::minutes(3);

FunctionTable functions() { return FunctionTable().add(kNext, kAdd, kCount, kEcho); }

/// A worker that uses the transport of its place.
class Joined {
 public:
  virtual ~Joined() = default;
  virtual Worker& worker() = 0;
  virtual void shutdown() = 0;
};

class LocalSession final : public Joined {
 public:
  explicit LocalSession(const WorkerPlace& place) : session_(options(place), functions()) {}
  Worker& worker() override { return session_.worker(); }
  void shutdown() override { session_.shutdown(kLongest); }

 private:
  static WorkerOptions options(const WorkerPlace& place) {
    WorkerOptions options = WorkerOptions::from_env();
    for (int rank = 0; rank < place.size && !place.device.is_cpu(); ++rank) {
      if (rank != place.rank)
        options.device_maps["worker" + std::to_string(rank)] = {{place.device, place.device}};
    }
    return options;
  }

  Session session_;
};

/// Does what a session does, but with TLS or plain TCP although both workers are on one host.
class TlsService final : public Joined {
 public:
  explicit TlsService(net::TcpNetwork network)
      : environment_(rendezvous::read_environment(rendezvous::process_environment())),
        executor_(make_executor()),
        runtime_(*executor_, environment_.name, LogLevel::kWarning) {
    const net::Secret secret = rendezvous::load_secret(environment_);
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<autograd::AutogradExtension>());
    extensions.push_back(std::make_unique<optim::OptimExtension>());
    rpc::ServiceOptions options;
    options.name = environment_.name;
    options.rank = static_cast<std::uint32_t>(environment_.rank);
    options.listen = "tls:127.0.0.1:0";
    service_ = std::make_unique<rpc::WorkerService>(
        runtime_, functions(), options,
        [&](net::Handler& handler) {
          net::TransportOptions transport;
          transport.secret = secret;
          return net::make_tls_transport(*executor_, handler, transport, {.network = network});
        },
        std::move(extensions));
    service_->start(rendezvous::Membership::join(runtime_, rendezvous::stream_transports(*executor_, secret),
                                                 join_options()));
  }
  Worker& worker() override { return service_->worker(); }
  void shutdown() override { service_->shutdown(executor_->deadline_in(kLongest)); }

 private:
  rendezvous::MembershipOptions join_options() const {
    rendezvous::MembershipOptions join;
    join.name = environment_.name;
    join.rank = environment_.rank;
    join.world_size = environment_.world_size;
    join.store_address = environment_.store_address();
    join.address = service_->address();
    join.job = environment_.job;
    return join;
  }

  const rendezvous::WorkerEnvironment environment_;
  const std::unique_ptr<Executor> executor_;
  Runtime runtime_;
  std::unique_ptr<rpc::WorkerService> service_;
};

class TorchSpanSide final : public Side {
 public:
  explicit TorchSpanSide(std::unique_ptr<Joined> joined)
      : joined_(std::move(joined)), worker_(joined_->worker()) {}

  void small_call(std::int64_t n) override { expect(worker_.rpc_sync(1, kNext, n) == n + 1, "a small call"); }
  void add(const at::Tensor& x) override {
    const at::Tensor sum = worker_.rpc_sync(1, kAdd, x, x);
    expect(first_element(sum) == 2 * first_element(x), "an addition");
  }
  void one_way(const at::Tensor& x) override {
    expect(worker_.rpc_sync(1, kCount, x) == x.numel(), "a count");
  }
  void echo(const at::Tensor& x) override { expect(alike(worker_.rpc_sync(1, kEcho, x), x), "an echo"); }
  void in_flight_64(int calls) override {
    std::deque<Future<std::int64_t>> under_way;
    for (std::int64_t sent = 0, received = 0; received < calls; ++received) {
      for (; sent < calls && under_way.size() < 64; ++sent)
        under_way.push_back(worker_.rpc_async(1, kNext, sent));
      expect(under_way.front().wait() == received + 1, "one of 64 calls");
      under_way.pop_front();
    }
  }
  void fan_out_3(std::int64_t n) override {
    std::vector<Future<std::int64_t>> calls;
    for (std::uint32_t rank = 1; rank <= 3; ++rank) calls.push_back(worker_.rpc_async(rank, kNext, n));
    for (auto& call : calls) expect(call.wait() == n + 1, "one of three calls");
  }
  void remote_use(const at::Tensor& x) override {
    const auto sum = worker_.remote(1, kAdd, x, x);
    expect(first_element(sum.to_here()) == 2 * first_element(x), "the value of a reference");
  }
  void leave() override { joined_->shutdown(); }

 private:
  const std::unique_ptr<Joined> joined_;
  Worker& worker_;
};

}  // namespace

std::unique_ptr<Side> join_torchspan(const WorkerPlace& place) {
  std::unique_ptr<Joined> joined;
  if (place.way == Way::kLocal) {
    joined = std::make_unique<LocalSession>(place);
  } else {
    joined = std::make_unique<TlsService>(place.way == Way::kPlain ? net::TcpNetwork::kIsolated
                                                                   : net::TcpNetwork::kEncrypted);
  }
  return std::make_unique<TorchSpanSide>(std::move(joined));
}

}  // namespace torchspan::bench
