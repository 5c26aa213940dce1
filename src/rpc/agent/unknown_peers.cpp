#include "rpc/agent/unknown_peers.h"

#include <fmt/format.h>
#include <utility>

namespace torchspan::rpc {
namespace {

/// How long a peer may send before this worker learns that it joined, and how much.
constexpr Duration kTimeLimit = std::chrono::seconds(5);
constexpr std::uint64_t kByteLimit = std::uint64_t{64} << 20;

}  // namespace

UnknownPeers::UnknownPeers(AgentState& state, TransportLoop& loop, Deliver deliver, Reject reject)
    : state_(state), loop_(loop), deliver_(std::move(deliver)), reject_(std::move(reject)) {}

void UnknownPeers::receive(const std::shared_ptr<net::Channel>& channel, net::Message message) {
  for (Waiting& waiting : waiting_) {
    if (waiting.channel != channel) continue;
    waiting.bytes += message.header.size();
    for (const Buffer& segment : message.segments) waiting.bytes += segment.size;
    if (waiting.bytes > kByteLimit)
      throw Error(ErrorKind::kOverloaded, "the peer sent too much before this worker learned that it joined");
    return waiting.messages.push_back(std::move(message));
  }
  const wire::FrameView frame = wire::decode_frame(message.header, state_.wire);
  if (frame.header.type != Hello::kType) {
    throw Error(ErrorKind::kInvalid, "the peer's first message is not a hello");
  }
  wire::Payload payload;
  payload.value.assign(frame.value.begin(), frame.value.end());
  const auto hello = wire::from_payload<Hello>(payload);
  if (state_.channels->greet(channel, hello)) {
    if (state_.runtime.log.enabled(LogLevel::kDebug))
      state_.runtime.log.debug(fmt::format("worker '{}' (rank {}) connected", hello.name, hello.rank));
    return;
  }
  const Deadline until = state_.runtime.executor.deadline_in(kTimeLimit);
  waiting_.push_back({channel, hello, until, {}, 0});
  loop_.at(until, [this] { admit(); });
}

void UnknownPeers::admit() {
  DriverLockGuard hold(loop_.driver_lock(), state_.runtime.executor);
  const TimePoint now = state_.runtime.executor.now();
  std::vector<Waiting> still, admitted;
  for (Waiting& waiting : std::exchange(waiting_, {})) {
    if (state_.channels->greet(waiting.channel, waiting.hello)) {
      admitted.push_back(std::move(waiting));
    } else if (!waiting.until.passed(now)) {
      still.push_back(std::move(waiting));
    } else {
      reject_(waiting.channel,
              Error(ErrorKind::kDenied,
                    fmt::format(
                        "a peer calls itself '{}' (rank {}, instance {:x}), which is not a member of this "
                        "world; a worker of an earlier run may still be alive",
                        waiting.hello.name, waiting.hello.rank, waiting.hello.instance)));
    }
  }
  waiting_ = std::move(still);
  for (Waiting& waiting : admitted) {
    for (net::Message& message : waiting.messages) deliver_(waiting.channel, std::move(message));
  }
  // Inline calls among the messages wait for the loop, which runs them after a poll.
  if (!admitted.empty()) loop_.wake();
}

void UnknownPeers::closed(const std::shared_ptr<net::Channel>& channel) {
  std::erase_if(waiting_, [&](const Waiting& waiting) { return waiting.channel == channel; });
}

void UnknownPeers::clear() {
  std::vector<Waiting> waiting;  // its channels are destroyed without the lock
  DriverLockGuard hold(loop_.driver_lock(), state_.runtime.executor);
  waiting.swap(waiting_);
}

}  // namespace torchspan::rpc
