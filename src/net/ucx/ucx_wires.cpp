#include <fmt/format.h>
#include <openssl/rand.h>

#include "net/ucx/ucx_transport.h"

/// The part of UcxTransport that uses the TLS channels.
namespace torchspan::net {
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
    throw Error(ErrorKind::kInvalid, fmt::format("'{}' sent a note at the wrong time", peer));
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
  // Delivers what arrived through UCX before the end.
  while (serve_worker() && links_.contains(link->token)) {
  }
  if (!links_.contains(link->token)) return;
  const UcxChannel::State state = link->channel->state();
  if (state.closing && link->heard_farewell) {
    if (!timers_.of(link->token)) timers_.set(link->token, now_ + options_.linger);
    return review(*link);
  }
  if (!state.closing || !state.quiet) return end(*link, reason);
  end(*link, Error(ErrorKind::kDisconnected,
                   fmt::format("this side closed the channel to '{}'", link->channel->peer())));
}

}  // namespace torchspan::net
