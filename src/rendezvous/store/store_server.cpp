#include "rendezvous/store/store_server.h"

#include <fmt/format.h>

namespace torchspan::rendezvous {
namespace {

constexpr int kPollsBetweenTicks = 64;

std::string listen(net::Transport& transport, const std::string& address) {
  try {
    return transport.listen(address);
  } catch (const Error& error) {
    const bool tls = address.starts_with("tls:"), port = tls || address.starts_with("tcp:");
    throw Error(
        error.kind(),
        fmt::format("rank 0 cannot serve the store at {}: {}{}{}", address, error.message(),
                    port ? "; the port is MASTER_PORT, the same for all workers" : "",
                    tls ? ", and the host is MASTER_ADDR: if that is not an address of this machine, set "
                          "TORCHSPAN_LISTEN_HOST on rank 0 to one that is"
                        : ""));
  }
}

StoreOptions with_clock_samples(StoreOptions options, Runtime& runtime) {
  options.on_clock_sample = [&runtime](const ClockSample& sample) { runtime.clock_samples.add(sample); };
  return options;
}

}  // namespace

StoreServer::StoreServer(Runtime& runtime, const TransportFactory& transports, const std::string& address,
                         StoreOptions options)
    : runtime_(runtime),
      refusals_(runtime.log, runtime.executor),
      malformed_(runtime.log, runtime.executor),
      store_(
          with_clock_samples(std::move(options), runtime),
          {.send = [this](ConnectionId connection, const SharedBytes& message) { send(connection, message); },
           .close =
               [this](ConnectionId connection) {
                 const auto found = channels_.find(connection);
                 if (found != channels_.end()) found->second->close();
               }}),
      finished_(runtime.executor.make_parker()),
      transport_(transports("store", *this)),
      address_(listen(*transport_, address)) {
  thread_ = runtime_.executor.spawn("torchspan store", [this] { serve(); });
}

StoreServer::~StoreServer() {
  stopping_ = true;
  transport_->wake();
  thread_.join();
}

std::string StoreServer::finish(Deadline deadline) {
  finishing_ = true;
  transport_->wake();
  if (finished_->park(deadline)) return "";
  // Only the serving thread may read the store: it stores the result before it ends.
  stopping_ = true;
  transport_->wake();
  thread_.join();
  MutexLock lock(mutex_);
  return left_behind_;
}

/// Names the workers for which rank 0 waits to join or to leave.
void StoreServer::warn_of_awaited(std::optional<Awaiting>& wait) {
  const std::vector<int> missing = finishing_ ? std::vector<int>() : store_.missing();
  if (!finishing_ && missing.empty()) return wait.reset();
  const TimePoint now = runtime_.executor.now();
  if (!wait) wait = Awaiting{now};
  if (!wait->warnings.due(now - wait->began)) return;
  if (finishing_) {
    runtime_.log.warning(fmt::format(
        "rank 0 leaves after all others, because it serves the store; these have not left yet: {}",
        list_members(store_.present())));
  } else {
    runtime_.log.warning(fmt::format("rank 0 waits for these ranks to join: {}; there: {}",
                                     list_some(missing), list_members(store_.present())));
  }
}

void StoreServer::serve() {
  std::optional<Awaiting> wait;
  while (!stopping_) {
    // The store's deadlines pass in time, however many messages peers send.
    for (int i = 0; i < kPollsBetweenTicks && !stopping_ && transport_->poll(); ++i) {
    }
    store_.tick(runtime_.executor.now());
    if (finishing_ && store_.is_finished()) {
      finishing_ = false;
      finished_->unpark();
    }
    warn_of_awaited(wait);
    const Deadline next = store_.next_deadline();
    transport_->wait(wait ? earlier(next, Deadline(wait->began + wait->warnings.next())) : next);
  }
  const auto present = store_.present();
  MutexLock lock(mutex_);
  left_behind_ = present.empty() ? "" : list_members(present);
}

/// Large messages to many workers, such as the welcome, are one block of memory that all channels send.
void StoreServer::send(ConnectionId connection, const SharedBytes& message) {
  constexpr std::size_t kLarge = std::size_t{16} << 10;
  const auto found = channels_.find(connection);
  if (found == channels_.end()) return;
  try {
    if (message->size() < kLarge) {
      found->second->send(*message, {});
    } else {
      const Segment segment{message->data(), message->size(), message};
      found->second->send(kInSegment, {&segment, 1});
    }
  } catch (const Error& error) {
    // A channel that cannot send will report its end; an overloaded one is closed.
    runtime_.log.debug(fmt::format("store cannot answer {}: {}", found->second->peer(), error.message()));
    if (error.kind() != ErrorKind::kDisconnected) found->second->close();
  }
}

void StoreServer::on_accepted(const std::shared_ptr<net::Channel>& channel) {
  const ConnectionId connection = next_connection_++;
  channels_[connection] = channel;
  connections_[channel.get()] = connection;
}

void StoreServer::on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  const auto found = connections_.find(channel.get());
  if (found == connections_.end()) return;
  try {
    if (!message.segments.empty()) throw_invalid("a message to the store has no segments");
    store_.on_message(found->second, message.header, runtime_.executor.now());
  } catch (const Error& error) {
    malformed_.write(
        fmt::format("store closes the connection from {}: {}", channel->peer(), error.message()));
    channel->close();
  }
}

void StoreServer::on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) {
  const auto found = connections_.find(channel.get());
  if (found == connections_.end()) return;
  const ConnectionId connection = found->second;
  connections_.erase(found);
  channels_.erase(connection);
  store_.on_closed(connection, reason, runtime_.executor.now());
}

void StoreServer::on_refused(const std::string& peer, const Error& reason) {
  refusals_.write(fmt::format("the store rejected a connection from '{}': {}", peer, reason.message()));
}

}  // namespace torchspan::rendezvous
