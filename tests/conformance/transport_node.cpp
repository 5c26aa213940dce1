#include "tests/conformance/transport_node.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>

namespace torchspan::net::conformance {
namespace {
constexpr Duration kNodePatience = std::chrono::seconds(30);
}  // namespace

Secret common_secret() { return Secret::from_bytes(bytes_of("the secret of this test suite")); }

TransportOptions honest_options() {
  TransportOptions options;
  options.secret = common_secret();
  return options;
}

Bytes bytes_of(std::string_view text) {
  const BytesView view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

// The tests are compiled without optimization, so they fill and compare words and not single bytes.
bool operator==(const Parcel& a, const Parcel& b) {
  const auto equal = [](const Bytes& one, const Bytes& other) {
    return one.size() == other.size() &&
           (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
  };
  return equal(a.header, b.header) && std::ranges::equal(a.segments, b.segments, equal);
}

Bytes pattern(std::size_t size, std::uint64_t salt) {
  Bytes bytes(size);
  // An odd factor gives no two words of a message the same value.
  std::uint64_t word = (salt + 1) * 0xd1342543de82ef95;
  for (std::size_t at = 0; at < size; at += sizeof word, word += 0x9e3779b97f4a7c15)
    std::memcpy(bytes.data() + at, &word, std::min(sizeof word, size - at));
  return bytes;
}

Parcel numbered(std::uint64_t number) {
  ByteWriter writer;
  writer.put(number);
  return {writer.take(), {}};
}

std::uint64_t number_of(const Parcel& parcel) { return ByteReader(parcel.header).get<std::uint64_t>(); }

Parcel parcel_of(const Message& message) {
  Parcel parcel{message.header, {}};
  for (const Buffer& buffer : message.segments)
    parcel.segments.emplace_back(buffer.data, buffer.data + buffer.size);
  return parcel;
}

Parcel random_parcel(std::mt19937& random) {
  const auto fill = [&](std::size_t most) {
    return pattern(random() % 4 == 0 ? 0 : random() % (most + 1), random());
  };
  Parcel parcel{fill(500), std::vector<Bytes>(random() % 6)};
  for (Bytes& segment : parcel.segments) segment = fill(random() % 5 == 0 ? 200'000 : 3'000);
  return parcel;
}

void send(Channel& channel, const Parcel& parcel) {
  std::vector<Segment> segments;
  for (const Bytes& bytes : parcel.segments) segments.push_back({bytes.data(), bytes.size(), nullptr});
  channel.send(parcel.header, segments);
}

std::vector<Error> Journal::reasons(const std::shared_ptr<Channel>& channel) const {
  std::vector<Error> reasons;
  for (const Closed& end : closed) {
    if (end.channel == channel) reasons.push_back(end.reason);
  }
  return reasons;
}

std::vector<Parcel> Journal::parcels() const {
  std::vector<Parcel> parcels;
  for (const Received& one : received) parcels.push_back(one.parcel);
  return parcels;
}

Node::Node(World& world, std::string name, Options options)
    : world_(world),
      name_(std::move(name)),
      options_(std::move(options)),
      reader_(world.executor().make_parker()),
      transport_(world.make_transport(name_, *this, options_.transport)) {
  if (options_.drive) drive();
}

Node::~Node() { stop(); }

void Node::drive() {
  stopping_.store(false, std::memory_order_release);
  thread_ = world_.executor().spawn(name_, [this] { run(); });
}

void Node::run() {
  while (!stopping_.load(std::memory_order_acquire)) {
    polling_ = ::gettid();
    transport_->poll();
    polling_ = 0;
    transport_->wait(Deadline::never());
  }
}

void Node::pause() {
  stopping_.store(true, std::memory_order_release);
  if (transport_) transport_->wake();
  thread_.join();
}

void Node::stop() {
  pause();
  transport_.reset();
}

std::string Node::listen() { return transport_->listen(world_.listen_address(name_)); }

std::shared_ptr<Channel> Node::connect(const std::string& address, Deadline deadline) {
  return transport_->connect(address, deadline);
}

Node::Callback::Callback(Node& node) : node_(node) {
  EXPECT_EQ(node.polling_.load(), ::gettid()) << "a callback of '" << node.name_ << "' outside its poll()";
  EXPECT_FALSE(node.calling_.exchange(true)) << "a callback of '" << node.name_ << "' inside another";
}

void Node::note(const std::function<void(Journal&)>& entry) {
  if (!options_.keep_journal) return;
  {
    MutexLock lock(mutex_);
    entry(journal_);
  }
  reader_->unpark();
}

void Node::on_accepted(const std::shared_ptr<Channel>& channel) {
  const Callback callback(*this);
  if (options_.on_accepted) options_.on_accepted(channel);
  note([&](Journal& journal) { journal.accepted.push_back(channel); });
}

void Node::on_message(const std::shared_ptr<Channel>& channel, Message message) {
  const Callback callback(*this);
  if (options_.on_message) options_.on_message(channel, message);
  note([&](Journal& journal) {
    journal.received.push_back({channel, options_.keep_parcels ? parcel_of(message) : Parcel()});
  });
}

Buffer Node::device_memory(const std::shared_ptr<Channel>&, std::uint32_t target, std::size_t size) {
  const Callback callback(*this);
  return options_.device_memory ? options_.device_memory(target, size) : Buffer();
}

void Node::on_closed(const std::shared_ptr<Channel>& channel, const Error& reason) {
  const Callback callback(*this);
  if (options_.on_closed) options_.on_closed(channel);
  note([&](Journal& journal) { journal.closed.push_back({channel, reason}); });
}

void Node::on_refused(const std::string& peer, const Error& reason) {
  const Callback callback(*this);
  EXPECT_FALSE(peer.empty());
  note([&](Journal& journal) { journal.refused.push_back(reason); });
}

void Node::wait_until(const std::function<bool(const Journal&)>& happened) {
  const Deadline deadline = world_.executor().deadline_in(kNodePatience);
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (happened(journal_)) return;
    }
    if (!reader_->park(deadline)) {
      MutexLock lock(mutex_);
      ADD_FAILURE() << "'" << name_ << "' timed out: " << journal_.accepted.size() << " accepted, "
                    << journal_.received.size() << " received, " << journal_.closed.size() << " closed, "
                    << journal_.refused.size() << " refused";
      return;
    }
  }
}

void Node::wait_for_messages(std::size_t count) {
  wait_until([&](const Journal& journal) { return journal.received.size() >= count; });
}

Error Node::wait_for_end(const std::shared_ptr<Channel>& channel) {
  wait_until([&](const Journal& journal) { return !journal.reasons(channel).empty(); });
  const std::vector<Error> reasons = journal().reasons(channel);
  return reasons.empty() ? Error(ErrorKind::kInvalid, "it did not end") : reasons.front();
}

std::shared_ptr<Channel> Node::wait_for_caller() {
  wait_until([](const Journal& journal) { return !journal.accepted.empty(); });
  return journal().accepted.at(0);
}

std::vector<Parcel> Node::take_parcels() {
  MutexLock lock(mutex_);
  std::vector<Parcel> parcels;
  for (Journal::Received& one : journal_.received) parcels.push_back(std::move(one.parcel));
  journal_.received.clear();
  return parcels;
}

Journal Node::journal() const {
  MutexLock lock(mutex_);
  return journal_;
}

}  // namespace torchspan::net::conformance
