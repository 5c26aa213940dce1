#include "bench/peers/torch_rpc.h"

#include <stdexcept>

#if defined(USE_RPC) && defined(USE_TENSORPIPE)
#include <deque>

#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_remote_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/runtime/operator.h>

namespace torchspan::bench {
namespace {

namespace peer = torch::distributed::rpc;
using Call = c10::intrusive_ptr<c10::ivalue::Future>;
using Operator = std::shared_ptr<torch::jit::Operator>;

constexpr float kCallSeconds = 30;

Operator find_operator(const std::string& name, const std::string& overload) {
  for (const auto& found : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (found->schema().overload_name() == overload) return found;
  }
  throw std::runtime_error("this LibTorch has no operator " + name);
}

std::string name_of(int rank) { return "worker" + std::to_string(rank); }

std::shared_ptr<peer::TensorPipeAgent> start_agent(const WorkerPlace& place) {
  using Names = c10::optional<std::vector<std::string>>;
  const bool tcp = place.way != Way::kLocal;
  peer::TensorPipeRpcBackendOptions options(
      peer::kDefaultNumWorkerThreads, tcp ? Names({"uv"}) : c10::nullopt,
      tcp ? Names({"basic"}) : c10::nullopt, kCallSeconds, peer::kDefaultInitMethod);
  auto store = c10::make_intrusive<c10d::FileStore>(place.folder + "/torch-rpc-store", place.size);
  store->setTimeout(std::chrono::seconds(20));
  std::unordered_map<std::string, peer::DeviceMap> maps;
  std::vector<c10::Device> devices;
  if (!place.device.is_cpu()) {
    devices.push_back(place.device);
    static_cast<void>(at::zeros({1}, place.device));  // a request with tensors of the device may arrive first
    for (int rank = 0; rank < place.size; ++rank) maps[name_of(rank)] = {{place.device, place.device}};
    for (const auto& [name, map] : maps) options.setDeviceMap(name, map);
  }
  auto agent = std::make_shared<peer::TensorPipeAgent>(
      store, name_of(place.rank), static_cast<peer::worker_id_t>(place.rank), place.size, options, maps,
      devices, std::make_unique<peer::RequestCallbackNoPython>());
  peer::RpcAgent::setCurrentRpcAgent(agent);
  agent->setTypeResolver(
      std::make_shared<peer::TypeResolver>([](const c10::QualifiedName& name) -> c10::StrongTypePtr {
        throw std::runtime_error("no type " + name.qualifiedName() + " was expected");
      }));
  agent->start();
  return agent;
}

class TorchRpc final : public Side {
 public:
  explicit TorchRpc(const WorkerPlace& place) : agent_(start_agent(place)) {}

  void small_call(std::int64_t n) override { expect(integer(next(1, n)) == n + 1, "a small call"); }
  void add(const at::Tensor& x) override {
    const at::Tensor sum = value(start(1, add_, {x, x, 1})).toTensor();
    expect(first_element(sum) == 2 * first_element(x), "an addition");
  }
  void one_way(const at::Tensor& x) override {
    expect(integer(start(1, count_, {x})) == x.numel(), "a count");
  }
  void echo(const at::Tensor& x) override {
    expect(alike(value(start(1, echo_, {x})).toTensor(), x), "an echo");
  }
  void in_flight_64(int calls) override {
    std::deque<Call> under_way;
    for (std::int64_t sent = 0, received = 0; received < calls; ++received) {
      for (; sent < calls && under_way.size() < 64; ++sent) under_way.push_back(next(1, sent));
      expect(integer(under_way.front()) == received + 1, "one of 64 calls");
      under_way.pop_front();
    }
  }
  void fan_out_3(std::int64_t n) override {
    std::vector<Call> calls;
    for (int rank = 1; rank <= 3; ++rank) calls.push_back(next(rank, n));
    for (const Call& call : calls) expect(integer(call) == n + 1, "one of three calls");
  }
  void remote_use(const at::Tensor& x) override {
    auto& context = peer::RRefContext::getInstance();
    const auto& to = agent_->getWorkerInfo(name_of(1));
    auto reference = context.createUserRRef(to.id_, c10::TensorType::get());
    const auto fork = reference->forkId();
    std::vector<c10::IValue> arguments{x, x, 1};
    auto created = agent_->send(
        to, peer::ScriptRemoteCall(add_, std::move(arguments), reference->rrefId(), fork).toMessage());
    context.addPendingUser(fork, reference);
    created->addCallback(
        [fork](c10::ivalue::Future& future) { peer::callback::confirmPendingUser(future, fork); });
    auto fetched = agent_->send(to, peer::ScriptRRefFetchCall(0, reference->rrefId()).toMessage());
    fetched->waitAndThrow();
    auto kind = peer::MessageType::UNKNOWN;
    const auto reply = peer::deserializeResponse(*message_of(fetched), kind);
    const at::Tensor sum = static_cast<peer::ScriptRRefFetchRet&>(*reply).values().front().toTensor();
    expect(first_element(sum) == 2 * first_element(x), "the value of a reference");
  }
  void leave() override {}

 private:
  Call start(int rank, const Operator& what, std::vector<c10::IValue> arguments) {
    return agent_->send(agent_->getWorkerInfo(name_of(rank)),
                        peer::ScriptCall(what, std::move(arguments)).toMessage());
  }
  Call next(int rank, std::int64_t n) { return start(rank, next_, {n, 1}); }
  static c10::intrusive_ptr<peer::Message> message_of(const Call& call) {
    const c10::IValue held = call->constValue();
    return held.toCustomClass<peer::Message>();
  }
  static c10::IValue value(const Call& call) {
    call->waitAndThrow();
    return peer::deserializeRespToIValue(*message_of(call));
  }
  static std::int64_t integer(const Call& call) { return value(call).toInt(); }

  const Operator next_ = find_operator("aten::add", "int"), add_ = find_operator("aten::add", "Tensor"),
                 count_ = find_operator("aten::numel", ""), echo_ = find_operator("aten::alias", "");
  const std::shared_ptr<peer::TensorPipeAgent> agent_;
};

}  // namespace

bool has_torch_rpc() { return true; }
std::unique_ptr<Side> join_torch_rpc(const WorkerPlace& place) { return std::make_unique<TorchRpc>(place); }

}  // namespace torchspan::bench

#else

namespace torchspan::bench {

bool has_torch_rpc() { return false; }
std::unique_ptr<Side> join_torch_rpc(const WorkerPlace&) {
  throw std::runtime_error("this LibTorch was built without its RPC");
}

}  // namespace torchspan::bench

#endif
