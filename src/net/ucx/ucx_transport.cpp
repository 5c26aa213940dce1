#include "net/ucx/ucx_transport.h"

#include <fmt/format.h>
#include <limits>
#include <openssl/rand.h>
#include <set>

#include "core/api/throw_invalid.h"
#include "net/channel_errors.h"
#include "net/ucx/ucx_part.h"

namespace torchspan::net {
namespace {

constexpr std::uint64_t kWorkerToken = TlsTransport::kForeignTokens;
/// Between looks at a UCX that cannot wake this thread.
constexpr Duration kBlindSleep = std::chrono::milliseconds(1);
/// After UCX lost a peer, TLS most likely reports the reason within this time.
constexpr Duration kGrace = std::chrono::seconds(1);
/// The longest time that messages which arrived before the end of a connection are read without a pause.
constexpr Duration kLastMessages = std::chrono::milliseconds(100);

TransportOptions options_beneath(const TransportOptions& options) {
  TransportOptions beneath;
  beneath.secret = options.secret;
  beneath.max_header = kLongestNote;
  beneath.max_message = kLongestNote;
  beneath.max_segments = 0;
  beneath.max_unsent = 4 * kLongestNote;
  beneath.max_unauthenticated = options.max_unauthenticated;
  beneath.handshake_timeout = options.handshake_timeout;
  beneath.linger = options.linger;
  return beneath;
}

TlsOptions without_lanes(TlsOptions tls) {
  tls.lanes = 0;
  return tls;
}

std::size_t rendezvous_from(const UcxOptions& ucx) {
  if (ucx.rendezvous_from != 0) return ucx.rendezvous_from;
  return ucx.network == UcxNetwork::kRdma ? std::size_t{64} << 10 : std::numeric_limits<std::size_t>::max();
}

Error timed_out(const UcxLink& link) {
  const std::string peer = link.channel->peer();
  if (!link.greeting) {
    return Error(
        ErrorKind::kTimedOut,
        fmt::format("'{}' did not send its greeting in time: it is stopped, overloaded, or not a UCX "
                    "transport",
                    peer));
  }
  if (!link.open) {
    return Error(
        ErrorKind::kTimedOut,
        fmt::format("'{}' answers over TLS, and not through UCX: UcxOptions must be the same on both "
                    "sides, and their devices on one network",
                    peer));
  }
  const UcxChannel::State state = link.channel->state();
  if (state.closing && link.heard_farewell) return closed_here(peer);
  if (state.closing) return not_acknowledged(peer);
  return Error(ErrorKind::kDisconnected,
               fmt::format("'{}' can no longer be reached through UCX: {}; it still answers over TLS", peer,
                           state.broken.value_or("")));
}

}  // namespace

UcxTransport::UcxTransport(Executor& executor, Handler& handler, TransportOptions options, UcxOptions ucx)
    : executor_(executor),
      handler_(handler),
      options_(std::move(options)),
      ucx_(std::move(ucx)),
      rendezvous_from_(rendezvous_from(ucx_)),
      segments_((ucx_.metrics != nullptr ? *ucx_.metrics : own_metrics_).counter("net.ucx.segments")),
      dropped_((ucx_.metrics != nullptr ? *ucx_.metrics : own_metrics_).counter("net.ucx.dropped")),
      front_(*this),
      tls_(executor, front_, options_beneath(options_), without_lanes(ucx_.tls), "ucx"),
      request_queue_(std::make_shared<UcxRequestQueue>(tls_.poller())),
      worker_(executor, ucx_, options_.device_memory) {
  tls_.poller().add(worker_.event_descriptor(), kWorkerToken, false);
}

UcxTransport::~UcxTransport() {
  const Error reason(ErrorKind::kDisconnected, "this side's transport has ended");
  const UcxRequestQueue::Requests left = request_queue_->close();
  for (const auto& request : left.connections) request->channel->end(reason);
  for (const auto& [token, link] : links_) {
    abandon(*link, reason);
  }
  tls_.poller().remove(worker_.event_descriptor());
}

std::shared_ptr<Channel> UcxTransport::connect(const std::string& address, Deadline deadline) {
  parse_tls_address(address, "ucx");
  const std::uint64_t token = tokens_.next();
  auto channel = make_channel(address, token);
  request_queue_->post(std::make_unique<UcxRequest>(UcxRequest{token, channel, address, deadline}));
  return channel;
}

std::shared_ptr<UcxChannel> UcxTransport::make_channel(std::string peer, std::uint64_t token) const {
  const bool carries_device_memory = worker_.device_memory() != DeviceMemoryKind::kNone;
  return std::make_shared<UcxChannel>(
      UcxChannel::Options{std::move(peer), token, limits_of(options_, carries_device_memory),
                          options_.max_unsent, rendezvous_from_},
      request_queue_);
}

void UcxTransport::wait(Deadline deadline) {
  if (may_sleep(deadline)) tls_.wait(deadline);
}

bool UcxTransport::prepare_sleep(Deadline& until) { return may_sleep(until) && tls_.prepare_sleep(until); }

bool UcxTransport::may_sleep(Deadline& until) {
  if (request_queue_->pending() || worker_.has_events()) return false;
  UcxWorker::Armed armed = worker_.arm();
  while (armed == UcxWorker::Armed::kBusy) {
    worker_.progress();
    if (worker_.has_events()) return false;
    armed = worker_.arm();
  }
  if (armed == UcxWorker::Armed::kFailed) until = earlier(until, executor_.deadline_in(kBlindSleep));
  until = earlier(until, timers_.next());
  return true;
}

bool UcxTransport::poll() {
  now_ = executor_.now();
  bool any = request_queue_->pending() && take_requests();
  any |= tls_.poll();
  any |= serve_worker();
  any |= run_timers();
  return any;
}

bool UcxTransport::take_requests() {
  UcxRequestQueue::Requests requests = request_queue_->take();
  for (const auto& request : requests.connections) dial(*request);
  for (const std::uint64_t token : requests.reviews) {
    const auto found = links_.find(token);
    if (found == links_.end()) continue;
    const LinkPtr link = found->second;
    link->channel->flush();
    review(*link);
  }
  return true;
}

void UcxTransport::attempt(const LinkPtr& link, const std::function<void()>& step) {
  try {
    step();
  } catch (const std::exception&) {
    if (links_.contains(link->token)) end(*link, to_error(std::current_exception()));
  }
}

bool UcxTransport::serve_worker() {
  worker_.progress();
  UcxWorker::Events events = worker_.take_events();
  if (events.empty()) return false;
  take_arrivals(std::move(events.arrivals));
  for (UcxTaskPtr& task : events.finished) {
    if (task->kind != UcxTask::Kind::kFetch) {
      if (task->channel) task->channel->finished(*task);
      continue;
    }
    const auto found = links_.find(task->link);
    if (found == links_.end()) continue;
    const LinkPtr link = found->second;
    if (task->status == UCS_OK) {
      segments_.add();
      link->inbox.fetched(task->label.number);
      attempt(link, [&] { fetch_and_deliver(*link); });
    } else {
      link->channel->break_off("a segment did not arrive: " + worker_.text_of(task->status));
      review(*link);
    }
  }
  for (const UcxWorker::FailedRoute& failed : events.failed) lose(failed);
  for (const UcxTaskPtr& task : events.finished) {
    if (!task->channel) continue;
    const auto found = links_.find(task->link);
    if (found != links_.end()) review(*LinkPtr(found->second));
  }
  return true;
}

void UcxTransport::take_arrivals(std::vector<UcxWorker::Arrival> arrivals) {
  std::set<std::uint64_t> touched;
  for (UcxWorker::Arrival& arrival : arrivals) {
    const auto found = by_label_.find(arrival.label.channel);
    if (found == by_label_.end()) {
      drop(arrival);
      continue;
    }
    const LinkPtr link = found->second;
    if (arrival.kind == UcxTask::Kind::kHello) {
      link->heard_hello = true;
      attempt(link, [&] { introduce(*link); });
      continue;
    }
    if (!link->open) {
      drop(arrival);
      continue;
    }
    touched.insert(link->token);
    attempt(link, [&] {
      try {
        if (arrival.kind == UcxTask::Kind::kChunk) {
          link->inbox.add_chunk(arrival.label.number, std::move(arrival.offer.bytes));
        } else {
          link->inbox.add_offer(arrival.label.number, std::move(arrival.offer));
        }
      } catch (const std::exception&) {
        const Error error = to_error(std::current_exception());
        drop(arrival);
        // Delivers what arrived before.
        const std::string peer = link->channel->peer();
        fetch_and_deliver(*link);
        throw cut_off(peer, error);
      }
    });
  }
  for (const std::uint64_t token : touched) {
    const auto found = links_.find(token);
    if (found == links_.end()) continue;
    const LinkPtr link = found->second;
    attempt(link, [&] { fetch_and_deliver(*link); });
  }
}

void UcxTransport::drop(UcxWorker::Arrival& arrival) {
  dropped_.add();
  if (arrival.offer.descriptor != nullptr) worker_.release(arrival.offer.descriptor);
}

void UcxTransport::fetch_and_deliver(UcxLink& link) {
  std::optional<Error> failure;
  try {
    fetch_all(link);
  } catch (const Error& error) {  // after what arrived before
    failure = cut_off(link.channel->peer(), error);
  }
  std::vector<Message> messages;
  try {
    link.inbox.take(messages);
  } catch (const Error& error) {
    if (!failure) failure = cut_off(link.channel->peer(), error);
  }
  for (Message& message : messages) handler_.on_message(link.channel, std::move(message));
  if (failure) throw Error(*failure);
  review(link);
}

void UcxTransport::fetch_all(UcxLink& link) {
  while (std::optional<UcxInbox::Fetch> fetch = link.inbox.next_fetch()) {
    auto task = std::make_unique<UcxTask>();
    task->kind = UcxTask::Kind::kFetch;
    task->label = {link.label, fetch->number};
    task->into = std::move(fetch->into);
    task->link = link.token;
    switch (worker_.fetch(*link.route, fetch->descriptor, task)) {
      case UcxWorker::Outcome::kDone:
        segments_.add();
        link.inbox.fetched(fetch->number);
        break;
      case UcxWorker::Outcome::kUnderWay:
        break;
      default:
        link.channel->break_off("a segment could not be received");
    }
  }
}

void UcxTransport::lose(const UcxWorker::FailedRoute& failed) {
  std::erase_if(routes_, [&](const auto& entry) { return entry.second.get() == failed.route; });
  std::vector<LinkPtr> hit;
  for (const auto& [token, link] : links_) {
    if (link->route.get() == failed.route) hit.push_back(link);
  }
  for (const LinkPtr& link : hit) {
    link->channel->break_off(fmt::format("UCX lost the connection ({})", failed.reason));
    if (!links_.contains(link->token)) continue;
    if (!link->open) timers_.set(link->token, now_ + kGrace);
    review(*link);
  }
}

void UcxTransport::review(UcxLink& link) {
  if (!link.open || !links_.contains(link.token)) return;
  const UcxChannel::State state = link.channel->state();
  const std::string peer = link.channel->peer();
  const bool heard_goodbye = link.inbox.goodbye();
  if (heard_goodbye && !std::exchange(link.said_farewell, true)) link.say(encode(UcxFarewell{}));
  if (heard_goodbye && !state.closing) {
    return end(link, closed_by_peer(peer));
  }
  if (link.heard_farewell && state.quiet && (heard_goodbye || link.wire_gone)) {
    return end(link, closed_here(peer));
  }
  if (timers_.of(link.token)) return;
  if (state.broken) {
    timers_.set(link.token, now_ + kGrace);
  } else if (state.closing && state.quiet) {
    timers_.set(link.token, now_ + options_.linger);
  }
}

void UcxTransport::end(UcxLink& link, const Error& reason) {
  const LinkPtr kept = links_.at(link.token);
  const bool announced = link.dialed || link.open;
  timers_.set(link.token, std::nullopt);
  links_.erase(link.token);
  by_label_.erase(link.label);
  by_wire_.erase(link.wire.get());
  abandon(link, reason);
  link.wire->close();
  announced ? handler_.on_closed(link.channel, reason) : handler_.on_refused(link.channel->peer(), reason);
}

void UcxTransport::abandon(UcxLink& link, const Error& reason) {
  link.channel->end(reason);
  for (void* descriptor : link.inbox.abandon()) worker_.release(descriptor);
  const bool is_paired = link.route || (link.greeting && routes_.contains(link.greeting->address));
  if (link.greeted && !is_paired) worker_.unpaired();
}

bool UcxTransport::run_timers() {
  bool any = false;
  while (const auto token = timers_.take_due(now_)) {
    any = true;
    const auto found = links_.find(*token);
    if (found != links_.end()) end(*LinkPtr(found->second), timed_out(*found->second));
  }
  return any;
}

std::unique_ptr<PolledTransport> make_ucx_part(Executor& executor, Handler& handler, TransportOptions options,
                                               UcxOptions ucx) {
  return std::make_unique<UcxTransport>(executor, handler, std::move(options), std::move(ucx));
}

std::unique_ptr<Transport> make_ucx_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              UcxOptions ucx) {
  return make_ucx_part(executor, handler, std::move(options), std::move(ucx));
}

namespace {

/// A random label: a counting mistake cannot name another channel.
std::uint64_t draw_label() {
  std::uint64_t label = 0;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(&label), sizeof label) != 1) {
    throw Error(ErrorKind::kUnsupported,
                "the system's random source returned no bytes for a channel's label");
  }
  return label;
}

UcxInbox::DeviceAllocator device_allocator(const std::shared_ptr<UcxChannel>& channel, Handler& handler) {
  if (!channel->carries_device_memory()) return nullptr;
  return [channel, &handler](std::uint32_t target, std::size_t size) {
    return handler.device_memory(channel, target, size);
  };
}

}  // namespace

UcxLink::UcxLink(std::shared_ptr<UcxChannel> its_channel, std::uint64_t its_token,
                 const TransportOptions& options, Handler& handler)
    : channel(std::move(its_channel)), token(its_token), inbox(options, device_allocator(channel, handler)) {}

void UcxTransport::dial(UcxRequest& request) {
  const auto link = std::make_shared<UcxLink>(request.channel, request.token, options_, handler_);
  link->dialed = true;
  try {
    link->label = draw_label();
    adopt(link, tls_.connect(request.address, request.deadline));
  } catch (const Error& error) {
    request.channel->end(error);
    handler_.on_closed(request.channel, error);
    return;
  }
  timers_.set(link->token, earlier(Deadline(now_ + 2 * options_.handshake_timeout), request.deadline).at());
}

void UcxTransport::wire_accepted(const std::shared_ptr<Channel>& wire) {
  const std::uint64_t token = tokens_.next();
  const auto channel = make_channel(wire->peer(), token);
  const auto link = std::make_shared<UcxLink>(channel, token, options_, handler_);
  try {
    link->label = draw_label();
    adopt(link, wire);
    link->greet(worker_);
  } catch (const Error& error) {
    by_wire_.erase(wire.get());
    by_label_.erase(link->label);
    links_.erase(token);
    wire->close();
    return handler_.on_refused(wire->peer(), error);
  }
  timers_.set(link->token, now_ + options_.handshake_timeout);
}

void UcxTransport::adopt(const LinkPtr& link, std::shared_ptr<Channel> wire) {
  link->wire = std::move(wire);
  by_wire_.emplace(link->wire.get(), link);
  by_label_.emplace(link->label, link);
  links_.emplace(link->token, link);
}

void UcxLink::greet(const UcxWorker& worker) {
  const UcxLibrary& library = worker.library();
  wire->send(encode(UcxGreeting{library.major, library.minor, label, worker.address()}), {});
  greeted = true;
}

UcxTransport::LinkPtr UcxTransport::find(const std::shared_ptr<Channel>& wire) const {
  const auto found = by_wire_.find(wire.get());
  return found == by_wire_.end() ? nullptr : found->second;
}

void UcxTransport::note_arrived(const std::shared_ptr<Channel>& wire, const Message& message) {
  if (const LinkPtr link = find(wire)) attempt(link, [&] { take_note(*link, message); });
}

void UcxTransport::take_note(UcxLink& link, const Message& message) {
  const std::string peer = link.channel->peer();
  const UcxNote note = decode_ucx_note(message.header, peer);
  if (const auto* greeting = std::get_if<UcxGreeting>(&note); greeting != nullptr && !link.greeting) {
    const UcxLibrary& library = worker_.library();
    check_ucx_versions(*greeting, {library.major, library.minor, 0, {}}, peer);
    link.greeting = *greeting;
    // A dialer learns first to whom it gives its address, so that it knows whose connections to expect.
    if (link.dialed) link.greet(worker_);
    return introduce(link);
  }
  if (std::holds_alternative<UcxGreeting>(note) || !link.channel->state().closing) {
    throw_invalid("'{}' sent a note at the wrong time", peer);
  }
  link.heard_farewell = true;
  review(link);
}

void UcxTransport::introduce(UcxLink& link) {
  if (!link.greeting || link.open) return;
  const Bytes& address = link.greeting->address;
  if (!link.route && (link.heard_hello || worker_.address() <= address)) {
    try {
      link.route = route_to(address);
    } catch (const Error& error) {
      throw Error(error.kind(), fmt::format("'{}': {}", link.channel->peer(), error.message()));
    }
    auto hello = std::make_unique<UcxTask>();
    hello->kind = UcxTask::Kind::kHello;
    hello->label = {link.greeting->channel, 0};
    hello->link = link.token;
    worker_.send(*link.route, hello, true);
  }
  if (!link.route || !link.heard_hello) return;
  link.open = true;
  timers_.set(link.token, std::nullopt);
  if (!link.dialed) handler_.on_accepted(link.channel);
  link.channel->open(worker_, link.route, link.greeting->channel);
  review(link);
}

std::shared_ptr<UcxRoute> UcxTransport::route_to(const Bytes& address) {
  const auto known = routes_.find(address);
  if (known != routes_.end()) return known->second;
  return routes_.emplace(address, worker_.open_route(address)).first->second;
}

void UcxLink::say(const Bytes& note) const {
  try {
    wire->send(note, {});
  } catch (const Error&) {
    // The wire has ended, and reports that itself.
  }
}

void UcxTransport::wire_closed(const std::shared_ptr<Channel>& wire, const Error& reason) {
  const LinkPtr link = find(wire);
  if (!link) return;
  by_wire_.erase(wire.get());
  link->wire_gone = true;
  if (!link->open) return end(*link, reason);
  // Delivers what arrived through UCX before the end; other peers may send all the time.
  const Deadline limit = executor_.deadline_in(kLastMessages);
  while (serve_worker() && links_.contains(link->token) && !limit.passed(executor_.now())) {
  }
  if (!links_.contains(link->token)) return;
  const UcxChannel::State state = link->channel->state();
  if (state.closing && link->heard_farewell) {
    if (!timers_.of(link->token)) timers_.set(link->token, now_ + options_.linger);
    return review(*link);
  }
  if (!state.closing || !state.quiet) return end(*link, reason);
  end(*link, closed_here(link->channel->peer()));
}

}  // namespace torchspan::net
