#pragma once
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <vector>

#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/net/transport.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/detail/rpc/service.h>

#include "core/api/rate_limited_warning.h"
#include "rpc/call_table.h"
#include "rpc/devices.h"
#include "rpc/driver_lock.h"
#include "rpc/links.h"
#include "rpc/references.h"
#include "rpc/roster.h"
#include "rpc/serving.h"
#include "rpc/shutdown_wait.h"
#include "rpc/timers.h"
#include "wire/api/tensors.h"

namespace torchspan::rpc {

class RpcAgent;

/// Sends the reply of an incoming call, once.
class ReplyCompletion final : public Completion {
 public:
  ReplyCompletion(std::shared_ptr<RpcAgent> core, IncomingPtr call)
      : core_(std::move(core)), call_(std::move(call)) {}
  ~ReplyCompletion() override;
  void succeed(wire::Payload& reply) override;
  void fail(std::exception_ptr error) override;

 private:
  std::shared_ptr<RpcAgent> core_;
  IncomingPtr call_;
  std::atomic<bool> sent_{false};
};

/// The waiters' and continuations' place: the pool, with a short spin before a waiter sleeps.
class Host final : public FutureHost {
 public:
  Host(std::shared_ptr<Runtime> runtime, PoolOptions options)
      : runtime_(std::move(runtime)), pool_(runtime_->executor, std::move(options)) {}
  Executor& executor() override { return pool_.executor(); }
  void post(UniqueFunction<void()> job) override { pool_.post(std::move(job)); }
  /// Continuations keep the environment of the thread that adds them.
  UniqueFunction<void()> bind(UniqueFunction<void()> continuation) override;
  /// A caller drives the transport itself for a while before it sleeps.
  void wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) override;
  Pool& pool() { return pool_; }
  void set_driver(std::weak_ptr<Driver> driver) { driver_ = std::move(driver); }

 private:
  const std::shared_ptr<Runtime> runtime_;  ///< for waiters that leave after the worker ended
  Pool pool_;
  std::weak_ptr<Driver> driver_;  ///< set once, before anybody waits
};

/// Totals that the workers compare to know that all is quiet.
struct Totals {
  std::uint64_t sent = 0;
  std::uint64_t handled = 0;
  bool busy = false;
};

/// The blob of a request whose caller wants no gradients.
inline constexpr const char* kNoGradBlob = "rpc.no_grad";

/// How long the calls of a connection that broke wait for the news that its peer died, and why.
inline constexpr Duration kDeathNews = std::chrono::milliseconds(500);

/// The worker itself: dispatches frames, keeps the tables, runs handlers. Its parts have locks of their own,
/// held for microseconds and never across user code, a send or each other.
class RpcAgent final : public Endpoint, public net::Handler, public Driver {
 public:
  using Serve = std::function<void(const IncomingPtr&, const std::shared_ptr<Completion>&)>;
  struct Entry {
    std::string name;
    RunOn where = RunOn::kPool;
    bool user_values = false;
    Serve serve;
  };

  RpcAgent(std::shared_ptr<Runtime> runtime, FunctionTable functions, ServiceOptions options);
  void open(const WorkerService::MakeTransport& make_transport);
  void attach(std::vector<std::unique_ptr<Extension>> extensions);
  void start(std::unique_ptr<rendezvous::Membership> membership);
  rendezvous::Membership& membership() { return *membership_; }
  void shutdown(Deadline deadline);
  /// After stop(): leaves the world for good, and drops what refers back to this object. Handles of the
  /// program may keep it for longer; all they do fails with kCancelled.
  void release();
  void stop(const std::string& why);
  /// This object never ends: it could not be stopped, so its threads still use it.
  void stay_in_memory() { itself_ = shared_from_this(); }
  void member_departed(const LinkMember& member, const Error& reason);
  void member_joined(const rendezvous::Member& member);
  void add_handler(wire::MessageType type, Entry entry);

  // Endpoint
  Runtime& runtime() override { return runtime_; }
  std::weak_ptr<FutureHost> host() override { return host_; }
  Pool& pool() override { return host_->pool(); }
  const WorkerInfo& self() const override { return self_; }
  std::vector<WorkerInfo> workers() const override { return roster_.all(); }
  WorkerInfo info(const Destination& of) const override { return roster_.info(of); }
  std::string name_of(std::uint32_t rank) const override { return roster_.name(rank); }
  std::uint32_t resolve(const Destination& to) const override;
  std::uint64_t id_of(const char* name, std::string (*signature)()) const override;
  void apply(const CallOptions& options, Request& request) override;
  std::optional<CurrentCall> current_call() override;
  DebugInfo debug() const override;
  void set_default_timeout(Duration timeout) override { default_timeout_.store(timeout); }
  Duration default_timeout() const override { return default_timeout_.load(); }
  bool is_present(std::uint32_t rank) const override;
  bool is_stopping() const override { return stopping_.load(); }
  void after(Duration delay, UniqueFunction<void()> job) override;
  void send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion) override;
  ReferencePtr own(ValuePtr value, std::string type_name, SourceLocation site) override;
  ReferencePtr create(std::uint32_t to, Request request, std::string type_name) override;
  std::map<std::string, Bytes> all_gather_bytes(const std::string& tag, const Bytes& mine,
                                                const std::vector<std::string>& participants,
                                                Deadline deadline) override;
  GlobalId next_id() override { return references_->next_id(); }
  void* find_extension(const std::type_info& type) const override;

  // net::Handler
  void on_accepted(const std::shared_ptr<net::Channel>& channel) override {}
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override;
  void on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) override;
  void on_refused(const std::string& peer, const Error& reason) override;

  // Driver
  bool drive() override;
  void begin_driving() override { drivers_.fetch_add(1, std::memory_order_relaxed); }
  void end_driving(bool unserved) override;
  void check_may_wait() const override;

  const std::string& address() const { return address_; }
  const FunctionTable& functions() const { return functions_; }
  References& references() { return *references_; }
  ServingTable& serving() { return serving_; }
  Worker& worker() { return *worker_; }
  const ServiceOptions& options() const { return options_; }
  Totals totals() const;
  const std::vector<std::function<Future<void>()>>& shutdown_hooks() const { return shutdown_hooks_; }

 private:
  friend class ReplyCompletion;
  friend class CoreRegistrar;
  struct Outgoing {
    wire::Frame frame;
    wire::PackedTensors tensors;
  };
  /// The answer that a call failed.
  struct Failure {
    std::shared_ptr<net::Channel> channel;
    wire::Frame frame;
    std::string call;   ///< for people
    Deadline deadline;  ///< the caller's: after it nobody waits
  };
  /// What a peer sent whose joining we have not heard of yet.
  struct Parked {
    std::shared_ptr<net::Channel> channel;
    Hello hello;
    Deadline until;
    std::vector<net::Message> messages;
    std::uint64_t bytes = 0;
  };

  /// What this worker has not finished, for people; empty when nothing.
  std::string unfinished() const;
  void leave_world(Deadline deadline, ShutdownWait& wait, std::vector<RRefInfo>& leaks);
  void wait_for_hook(const Future<void>& hook, Deadline deadline, ShutdownWait& wait);
  bool wait_until_quiet(Deadline deadline);
  std::vector<Bytes> exchange_totals(Deadline deadline, ShutdownWait& wait);
  std::vector<RRefInfo> agree_on_quiet(Deadline deadline, bool list, ShutdownWait& wait);
  std::string tell_failure(const Error& failure, const ShutdownWait& wait) const;
  void stop_pool();
  void report_leaks(const char* why);
  void throw_leaks(const std::vector<RRefInfo>& leaks) const;
  std::vector<RRefInfo> leave_open_world(Deadline deadline, ShutdownWait& wait);
  void lead();
  using InlineCalls = std::vector<std::pair<IncomingPtr, const Entry*>>;
  /// Takes in no more messages; what came and is not served yet is dropped.
  void close_transport();
  /// One poll by the leader, and the short handlers that it brought. False when there was nothing.
  bool lead_once();
  /// Sleeps in the transport until something comes or is due.
  void rest_in_transport();
  void run_inline(const IncomingPtr& call, const Entry& entry);
  bool is_inline(const IncomingCall& call);
  /// The leader of a world of one: calls to oneself have deadlines too.
  void watch_deadlines();
  /// The leader, if it sleeps, must be awake by then.
  void wake_leader_by(Deadline deadline);
  void wake_leader();
  void fail_expired();
  void fail_calls(CallTable::Calls calls, const Error& reason);
  std::exception_ptr annotate(const PendingCall& call, const std::exception_ptr& error) const;
  Bytes make_header(wire::Frame& frame) const;
  /// Interceptors, handles and tensors of a message on its way out; undone by undo() when the send fails.
  Outgoing prepare(const CallInfo& info, PeerId to, wire::Payload& payload, bool user_values);
  void undo(const CallInfo& info, const wire::Frame& frame);
  /// Puts the call into the table and its frame onto `channel`, or a fresh one if that turns out broken.
  /// False when the call has ended meanwhile. What throws leaves the call with the caller.
  bool start_call(std::uint64_t id, PendingCall& call, const Outgoing& out, Links::Link link);
  /// Lets the token end the call.
  void watch_stop(std::uint64_t id, const std::array<std::stop_token, 2>& tokens);
  void cancel(std::uint64_t id);
  /// The token of a call that this thread serves; stopped at its deadline too.
  std::stop_token stop_token_of(const IncomingPtr& served);
  bool await_news(std::uint64_t id, PendingCall& call, const std::exception_ptr& error);
  void check_may_start(const Request& request, TimePoint now) const;
  void warn_of_detached(const CallInfo& info);
  void answered(IncomingCall& call);
  void check_stopped_peers();
  void watch_stopped_peers();
  void transmit(const std::shared_ptr<net::Channel>& channel, const wire::Frame& frame,
                const wire::PackedTensors& tensors);
  /// Now, or as soon as the connection takes it: who waits without a deadline must hear of it.
  void send_failure(Failure failure);
  void do_send(std::uint32_t to, Request request, std::shared_ptr<Completion> completion,
               const wire::Handle* creation);

  void receive_hello(const std::shared_ptr<net::Channel>& channel, net::Message message);
  void admit_parked();
  void loop_back(const Bytes& header, const wire::PackedTensors& tensors);
  void dispatch(PeerId peer, const std::shared_ptr<net::Channel>& channel, net::Message message);
  void receive_reply(PeerId peer, net::Message& message, const wire::FrameView& frame);
  void receive_request(IncomingPtr call);
  void take_handles(IncomingCall& call);
  void refuse(const IncomingPtr& call, std::exception_ptr error);
  /// A creation that is answered with an error has come, whether it began or not: whoever waits for its value
  /// hears why there is none. Gives what to answer.
  std::exception_ptr count_failed_creation(const IncomingCall& call, const std::exception_ptr& cause);
  /// The thread that called the handler is done with the call.
  void leave_call(IncomingCall& call, const Entry& entry);
  void unpack(IncomingCall& call);
  /// Waits, holding no thread, until the references among the arguments are confirmed; then serves.
  void run(const IncomingPtr& call, const Entry& entry);
  void serve(const IncomingPtr& call, const Entry& entry, const std::shared_ptr<ReplyCompletion>& reply,
             const std::vector<Future<void>>& references);
  void forget_channel(const std::shared_ptr<net::Channel>& channel, std::optional<std::uint32_t> peer,
                      const Error& reason);
  void protocol_error(const std::shared_ptr<net::Channel>& channel, const Error& error);

  const std::shared_ptr<Runtime> runtime_owner_;
  Runtime& runtime_{*runtime_owner_};
  RateLimitedWarning refusals_{runtime_.log, runtime_.executor};
  Counter& bytes_sent_{runtime_.metrics.counter("rpc.bytes_sent")};  ///< frames and tensors, retries included
  const FunctionTable functions_;
  const ServiceOptions options_;
  const Devices devices_;
  WorkerInfo self_;
  Roster roster_;
  std::uint64_t instance_ = 0;
  std::uint32_t incarnation_ = 0;
  bool open_world_ = false;
  std::string address_;
  std::shared_ptr<Host> host_;
  Mutex membership_mutex_;  ///< for threads of the program that use the membership while release() ends it
  std::shared_ptr<rendezvous::Membership> membership_;
  std::unique_ptr<net::Transport> transport_;
  std::unique_ptr<Links> links_;
  CallTable calls_;
  ServingTable serving_;
  Timers timers_;
  std::shared_ptr<References> references_;
  std::unordered_map<std::uint16_t, Entry> handlers_;
  std::vector<Interceptor*> interceptors_;
  std::vector<std::function<void(std::uint32_t, const Error&)>> departure_callbacks_;
  std::vector<std::function<Future<void>()>> shutdown_hooks_;
  std::map<std::type_index, std::unique_ptr<Extension>> extensions_;
  std::unique_ptr<Worker> worker_;
  std::atomic<Duration> default_timeout_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> shut_down_{false};
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<std::uint64_t> sent_{0};
  std::atomic<std::uint64_t> handled_{0};
  std::atomic<std::uint64_t> running_{0};
  std::atomic<std::uint64_t> late_replies_{0};
  std::atomic<std::size_t> unsent_failures_{0};
  std::atomic<bool> warned_of_detached_{false};
  DriverLock driver_lock_;
  bool driven_by_caller_ = false;           ///< the holder of the driver lock
  InlineCalls inline_calls_;                ///< the same
  std::map<std::uint64_t, int> long_runs_;  ///< leader only: what speaks against functions declared kInline
  std::set<std::uint64_t> not_short_;       ///< the same: functions declared kInline
  std::atomic<int> drivers_{0};
  std::atomic<bool> aside_{false};  ///< the leader lets waiting callers drive
  std::unique_ptr<Parker> leader_parker_;
  std::atomic<TimePoint> leader_until_{TimePoint::min()};  ///< until when it sleeps; min(): it is awake
  std::atomic<bool> watching_stopped_{false};
  std::map<std::uint32_t, TimePoint> stopped_since_;  ///< leader only
  std::vector<Parked> parked_;                        ///< the holder of the driver lock
  std::unique_ptr<Parker> timer_;                     ///< where the leader of a world of one sleeps
  std::shared_ptr<Endpoint> itself_;                  ///< set by stay_in_memory()
  Thread leader_;
};

/// Installs the handlers of calls, creations, fetches, operators and the reference protocol.
void install_handlers(RpcAgent& core);

}  // namespace torchspan::rpc
