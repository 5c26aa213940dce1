#include "net/tls/tls_link.h"

#include <exception>
#include <fmt/format.h>

namespace torchspan::net {
namespace {
constexpr std::uint64_t kMaxHeldBytes = 64 << 20;
}  // namespace

TlsLink::TlsLink(std::shared_ptr<TlsChannel> channel, std::uint64_t token, bool dialed,
                 const TransportOptions& options)
    : channel_(std::move(channel)),
      token_(token),
      dialed_(dialed),
      parser_(limits_of(options), options.allocator, FrameDialect::kLanes),
      assembly_(options.allocator) {}

void TlsLink::take(std::size_t direct, BytesView rest, Handler& handler) {
  std::exception_ptr failure;
  try {
    parser_.received(direct, messages_);
    parser_.feed(rest, messages_);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    sort();
  } catch (...) {
    failure = std::current_exception();
  }
  deliver(handler);
  if (failure) {
    const Error error = to_error(failure);
    throw Error(error.kind(), fmt::format("'{}' is cut off: {}", channel_->peer(), error.message()));
  }
}

void TlsLink::sort() {
  std::vector<FrameParser::Striped> striped = parser_.take_striped();
  if (striped.empty() && assembly_.empty()) return;
  std::vector<Message> came = std::exchange(messages_, {});
  auto next = striped.begin();
  for (std::size_t i = 0; i < came.size(); ++i) {
    if (next != striped.end() && next->index == i) {
      assembly_.expect(std::move(came[i]), std::move(next++->sizes));
    } else {
      assembly_.add(std::move(came[i]));
    }
  }
  assembly_.take(messages_);
}

void TlsLink::deliver_assembled(Handler& handler) {
  assembly_.take(messages_);
  deliver(handler);
}

void TlsLink::deliver(Handler& handler) {
  const bool several = messages_.size() > 1;
  if (several) channel_->cork();
  for (Message& message : messages_) handler.on_message(channel_, std::move(message));
  messages_.clear();
  if (several) channel_->uncork();
}

bool TlsLink::is_full() const { return assembly_.held_bytes() > kMaxHeldBytes; }

Error TlsLink::end_of_stream() const {
  const std::string peer = channel_->peer();
  if (channel_->state().said_goodbye) {
    return Error(ErrorKind::kDisconnected, fmt::format("this side closed the channel to '{}'", peer));
  }
  if (heard_goodbye()) return Error(ErrorKind::kDisconnected, fmt::format("'{}' closed the channel", peer));
  const bool inside = parser_.mid_frame() || !assembly_.empty();
  return Error(ErrorKind::kDisconnected,
               fmt::format("'{}' is gone{}: its process died or was killed; see its log", peer,
                           inside ? " in the middle of a message" : ""));
}

}  // namespace torchspan::net
