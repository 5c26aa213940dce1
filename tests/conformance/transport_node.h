#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "tests/conformance/transport_conformance.h"

namespace torchspan::net::conformance {

/// A header and segments that own their bytes.
struct Parcel {
  Bytes header;
  std::vector<Bytes> segments;
  friend bool operator==(const Parcel& a, const Parcel& b);
};

Bytes bytes_of(std::string_view text);
Parcel numbered(std::uint64_t number);
std::uint64_t number_of(const Parcel& parcel);
Parcel parcel_of(const Message& message);
/// Bytes that depend on their place and on `salt`.
Bytes pattern(std::size_t size, std::uint64_t salt);
/// Header and segments of random sizes, empty ones among them.
Parcel random_parcel(std::mt19937& random);
/// Sends with borrowed segments.
void send(Channel& channel, const Parcel& parcel);

/// The events of a node, in order.
struct Journal {
  struct Closed {
    std::shared_ptr<Channel> channel;
    Error reason;
  };
  struct Received {
    std::shared_ptr<Channel> channel;
    Parcel parcel;
  };
  std::vector<std::shared_ptr<Channel>> accepted;
  std::vector<Received> received;
  std::vector<Closed> closed;
  std::vector<Error> refused;

  /// The reasons for which `channel` was closed: exactly one if the transport is correct.
  std::vector<Error> reasons(const std::shared_ptr<Channel>& channel) const;
  std::vector<Parcel> parcels() const;
};

/// A transport with a thread that drives it and a journal of its events. Fails the test if a callback comes
/// from anywhere but that thread's poll().
class Node final : public Handler {
 public:
  struct Options {
    TransportOptions transport = honest_options();
    bool drive = true;  ///< if false, the transport is not polled until drive()
    /// Also called, on the driving thread, for every message, connection and end.
    std::function<void(const std::shared_ptr<Channel>&, const Message&)> on_message = {};
    std::function<void(const std::shared_ptr<Channel>&)> on_accepted = {};
    /// Handler::device_memory()
    std::function<Buffer(std::uint32_t target, std::size_t size)> device_memory = {};
    std::function<void(const std::shared_ptr<Channel>&)> on_closed = {};
    bool keep_parcels = true;  ///< put received messages into the journal
    bool keep_journal = true;  ///< if false, it stays empty: for peers that serve for a long time
  };
  Node(World& world, std::string name, Options options);
  Node(World& world, std::string name) : Node(world, std::move(name), Options()) {}
  ~Node() override;

  /// Listens at the world's address for this node, and returns it.
  std::string listen();
  std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline = Deadline::never());
  void drive();
  /// Stops polling until drive() is called again.
  void pause();
  /// Ends transport and thread; the journal's contents stay.
  void stop();
  Transport& transport() { return *transport_; }

  /// Waits until `happened` is true of the journal; fails the test after half a minute.
  void wait_until(const std::function<bool(const Journal&)>& happened);
  void wait_for_messages(std::size_t count);
  /// The reason for which the channel ended, or nullopt.
  Error wait_for_end(const std::shared_ptr<Channel>& channel);
  /// The first accepted channel, or null.
  std::shared_ptr<Channel> wait_for_caller();
  Journal journal() const;
  /// Removes the received messages from the journal. For bulk: journal() copies them.
  std::vector<Parcel> take_parcels();

  void on_accepted(const std::shared_ptr<Channel>& channel) override;
  void on_message(const std::shared_ptr<Channel>& channel, Message message) override;
  Buffer device_memory(const std::shared_ptr<Channel>& channel, std::uint32_t target,
                       std::size_t size) override;
  void on_closed(const std::shared_ptr<Channel>& channel, const Error& reason) override;
  void on_refused(const std::string& peer, const Error& reason) override;

 private:
  /// Checks that callbacks come from poll(), one at a time.
  class Callback {
   public:
    explicit Callback(Node& node);
    ~Callback() { node_.calling_ = false; }

   private:
    Node& node_;
  };

  void run();
  void note(const std::function<void(Journal&)>& entry);

  World& world_;
  const std::string name_;
  const Options options_;
  const std::unique_ptr<Parker> reader_;  ///< of the thread in wait_until()
  std::unique_ptr<Transport> transport_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> polling_{0};       ///< the thread in poll(), by its system id
  std::atomic<bool> calling_{false};  ///< a callback is running
  mutable Mutex mutex_;
  Journal journal_ TORCHSPAN_GUARDED_BY(mutex_);
  Thread thread_;
};

}  // namespace torchspan::net::conformance
