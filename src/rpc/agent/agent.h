#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <typeindex>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/detail/rpc/service.h>

#include "rpc/agent/agent_state.h"
#include "rpc/agent/graceful_shutdown.h"
#include "rpc/agent/message_receiver.h"
#include "rpc/agent/message_sender.h"
#include "rpc/agent/request_sender.h"
#include "rpc/agent/request_server.h"
#include "rpc/agent/transport_loop.h"

namespace torchspan::rpc {

/// Implements one worker: owns the parts that send, receive and serve, starts and stops them, and follows the
/// membership. The parts have internal locks, held for microseconds and never across user code, a send or
/// each other.
class RpcAgent final : public WorkerBackend {
 public:
  RpcAgent(std::shared_ptr<Runtime> runtime, FunctionTable functions, ServiceOptions options);
  void open(const WorkerService::MakeTransport& make_transport);
  void attach(std::vector<std::unique_ptr<Extension>> extensions);
  void start(std::unique_ptr<rendezvous::Membership> membership);
  rendezvous::Membership& membership() { return *membership_; }
  void shutdown(Deadline deadline);
  void stop(const std::string& why);
  /// Leaves the world and drops what refers back to this object; call after stop(). Handles of the program
  /// may keep this object alive; every operation on them then fails with kCancelled.
  void release();
  /// Keeps this object alive until the process exits: it could not be stopped, so its threads still use it.
  void keep_alive() { itself_ = shared_from_this(); }

  // WorkerBackend
  Runtime& runtime() override { return state_.runtime; }
  std::weak_ptr<ContinuationExecutor> continuations() override { return state_.continuations; }
  Pool& pool() override { return state_.continuations->pool(); }
  const WorkerInfo& self() const override { return state_.self; }
  std::vector<WorkerInfo> workers() const override;
  WorkerInfo info(const Destination& of) const override;
  std::string name_of(std::uint32_t rank) const override { return state_.peers.name(rank); }
  std::uint32_t resolve(const Destination& to) const override;
  std::uint64_t id_of(const char* name, std::string (*signature)()) const override;
  void apply(const CallOptions& options, Request& request) override;
  std::optional<CurrentCall> current_call() override;
  DebugInfo debug() const override;
  void set_default_timeout(Duration timeout) override { default_timeout_.store(timeout); }
  Duration default_timeout() const override { return default_timeout_.load(); }
  void check_may_wait() const override {
    state_.runtime.check_process();
    loop_.check_may_wait();
  }
  bool is_present(std::uint32_t rank) const override { return state_.peers.is_present(rank); }
  bool is_stopping() const override {
    return state_.stopping.load() || !state_.runtime.executor.process().is_current();
  }
  void after(Duration delay, UniqueFunction<void()> job) override;
  void receive_here() override { state_.continuations->receive_here(); }
  void send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion) override;
  ReferencePtr own(ValuePtr value, std::string type_name, SourceLocation site) override;
  ReferencePtr create(std::uint32_t to, Request request, std::string type_name) override;
  Gathering gathering(const std::vector<std::string>& participants) override;
  GlobalId next_id() override;
  void* find_extension(const std::type_info& type) const override;

  const std::string& address() const { return address_; }
  const FunctionTable& functions() const { return state_.functions; }
  References& references() { return *state_.references; }
  ServingTable& serving() { return state_.serving; }
  RequestServer& server() { return server_; }
  Worker& worker() { return *worker_; }

 private:
  class ExtensionRegistrar;
  void join_world(const rendezvous::Member& self);
  void member_departed(const Peer& member, const Error& reason);
  void member_joined(const rendezvous::Member& member);
  void stop_pool();

  AgentState state_;
  TransportLoop loop_;
  MessageSender sender_;
  StoppedPeers stopped_peers_;
  RequestSender calls_;
  RequestServer server_;
  MessageReceiver receiver_;
  std::unique_ptr<net::Transport> transport_;
  std::string address_;
  bool open_world_ = false;
  Mutex membership_mutex_;  ///< program threads may use the membership while release() drops it
  std::shared_ptr<rendezvous::Membership> membership_;
  std::vector<std::function<void(std::uint32_t, const Error&)>> departure_callbacks_;
  GracefulShutdown::Hooks shutdown_hooks_;
  std::map<std::type_index, std::unique_ptr<Extension>> extensions_;
  std::unique_ptr<Worker> worker_;
  std::atomic<Duration> default_timeout_;
  std::atomic<bool> shut_down_{false};
  std::shared_ptr<WorkerBackend> itself_;  ///< set by keep_alive()
};

}  // namespace torchspan::rpc
