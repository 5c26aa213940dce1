#include "net/tls/tls_transport.h"

#include <netinet/in.h>

#include "core/api/throw_invalid.h"
#include "net/receive_buffers.h"
#include "net/stream/socket.h"

namespace torchspan::net {
namespace {

/// While there are no connections, only listening sockets can have events, and polling them costs a system call.
constexpr std::size_t kPollsBetweenAccepts = 64;

TlsOptions checked(TlsOptions options) {
  if (options.lanes > kMostLanes) {
    throw_invalid("TlsOptions::lanes is {}: it may be at most {}", options.lanes, kMostLanes);
  }
  if (options.heartbeat <= Duration::zero() || options.dead_after < 2 * options.heartbeat) {
    throw_invalid("TlsOptions::heartbeat must be more than zero, and dead_after at least twice as long");
  }
  if (options.ports.first > options.ports.last || (options.ports.first == 0 && options.ports.last != 0)) {
    throw_invalid("TlsOptions::ports are {} to {}: the first must be at least 1 and at most the last",
                  options.ports.first, options.ports.last);
  }
  return options;
}

Address at_port(Address address, std::uint16_t port) {
  address.port = port;
  if (address.socket.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(address.socket).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(address.socket).sin_port = htons(port);
  }
  address.text = tcp_text(address.socket, "tls");
  return address;
}

/// Listens at the first free port of the range.
std::unique_ptr<ListeningSocket> listen_within(const Address& address, const PortRange& ports) {
  for (std::uint32_t port = ports.first; port <= ports.last; ++port) {
    try {
      return std::make_unique<ListeningSocket>(at_port(address, static_cast<std::uint16_t>(port)));
    } catch (const Error& error) {
      if (port != ports.last) continue;
      throw_invalid(
          "no port of TlsOptions::ports ({} to {}) is free on this host: widen the range "
          "(TORCHSPAN_PORT_RANGE); the last one: {}",
          ports.first, ports.last, error.message());
    }
  }
  throw_invalid("TlsOptions::ports is empty");
}

}  // namespace

TlsTransport::TlsTransport(Executor& executor, Handler& handler, TransportOptions options, TlsOptions tls,
                           std::string scheme)
    : executor_(executor),
      options_(with_receive_buffers(std::move(options))),
      scheme_(std::move(scheme)),
      poller_(executor.make_poller()),
      request_queue_(std::make_shared<TlsRequestQueue>(*poller_)),
      ports_(checked(tls).ports),
      driver_({executor, handler, options_, *poller_, tokens_, timers_}, tls, request_queue_),
      resolver_(executor) {}

TlsTransport::~TlsTransport() {
  const Error reason(ErrorKind::kDisconnected, "this side's transport has ended");
  const TlsRequestQueue::Requests left = request_queue_->close();
  for (const auto& request : left.connections) {
    if (request->dial) request->dial->channel->end(reason);
  }
  driver_.end_all(reason);
}

std::string TlsTransport::listen(const std::string& text) {
  const TlsPlace place = parse_tls_address(text, scheme_);
  std::optional<Address> address = numeric_address(place);
  try {
    if (!address) address = look_up(place).front();
  } catch (const Error& error) {
    throw_invalid(error.message());
  }
  auto socket = place.port == 0 && ports_.first != 0 ? listen_within(*address, ports_)
                                                     : std::make_unique<ListeningSocket>(*address);
  std::string bound = with_port(place, socket->address().port);
  request_queue_->post(std::move(socket));
  return bound;
}

bool TlsTransport::can_reach(const std::string& address) const {
  try {
    parse_tls_address(address, scheme_);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::shared_ptr<Channel> TlsTransport::connect(const std::string& text, Deadline deadline) {
  auto request = std::make_unique<TlsRequest>();
  const std::uint64_t token = request->token = tokens_.next();
  TlsRequest::Dial& dial = request->dial.emplace();
  dial.place = parse_tls_address(text, scheme_);
  dial.deadline = deadline;
  dial.channel = make_tls_channel(text, token, options_, request_queue_);
  std::shared_ptr<Channel> channel = dial.channel;
  if (const auto address = numeric_address(dial.place)) dial.addresses = {*address};
  const bool by_name = dial.addresses.empty();
  const TlsPlace place = dial.place;
  request_queue_->post(std::move(request));
  if (by_name) resolve(place, token);
  return channel;
}

void TlsTransport::resolve(const TlsPlace& place, std::uint64_t token) {
  const auto post_answer = [request_queue = request_queue_, token](Resolver::Answer answer) {
    auto request = std::make_unique<TlsRequest>();
    request->token = token;
    request->resolved = TlsRequest::Resolved{std::move(answer.addresses), std::move(answer.failure)};
    request_queue->post(std::move(request));
  };
  try {
    resolver_.look_up(place, post_answer);
  } catch (const Error& error) {
    post_answer({{}, error});
  }
}

void TlsTransport::wake() {
  woken_.store(true, std::memory_order_release);
  poller_->wake();
}

void TlsTransport::wait(Deadline deadline) {
  if (prepare_sleep(deadline)) ready_ = poller_->wait(events_, deadline);
  end_sleep(false);
}

bool TlsTransport::prepare_sleep(Deadline& until) {
  // poll() may have consumed the poller's wake-up, so wake() is remembered here.
  if (woken_.exchange(false, std::memory_order_acquire) || ready_ != 0 || request_queue_->pending() ||
      driver_.has_work()) {
    return false;
  }
  until = earlier(until, driver_.next_due());
  if (const auto* buffers = ReceiveBuffers::of(options_))
    until = earlier(until, buffers->tidy(executor_.now()));
  return true;
}

void TlsTransport::end_sleep(bool ready) {
  woken_.store(false, std::memory_order_relaxed);
  if (ready) polls_ = kPollsBetweenAccepts;
}

bool TlsTransport::poll() {
  const bool requested = request_queue_->pending();
  if (requested) driver_.carry_out(request_queue_->take());
  if (ready_ == 0 && must_poll_sockets()) ready_ = poller_->wait(events_, kNoWait);
  polls_ = must_poll_sockets() || ready_ != 0 ? 0 : polls_ + 1;
  const std::size_t count = std::exchange(ready_, 0);
  return driver_.serve(std::span(events_).first(count)) || requested;
}

bool TlsTransport::must_poll_sockets() const {
  return driver_.has_connections() || polls_ >= kPollsBetweenAccepts;
}

std::unique_ptr<Transport> make_tls_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              TlsOptions tls) {
  return std::make_unique<TlsTransport>(executor, handler, std::move(options), std::move(tls));
}

}  // namespace torchspan::net
