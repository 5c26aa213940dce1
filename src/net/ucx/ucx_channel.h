#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>

#include "net/framing.h"
#include "net/stream/outbox.h"
#include "net/ucx/ucx_worker.h"

namespace torchspan::net {

struct UcxRequest;
using UcxRequestQueue = RequestQueue<UcxRequest>;

/// The sending half of a channel over UCX. Thread-safe. Passes messages to UCX in the calling thread unless
/// another thread uses UCX; the driver sends the rest.
class UcxChannel final : public Channel, public std::enable_shared_from_this<UcxChannel> {
 public:
  struct Options {
    std::string peer;
    std::uint64_t token;  ///< the channel's, for the request queue
    FrameLimits limits;
    std::uint64_t max_unsent;
    std::size_t rendezvous_from;  ///< smallest segment that is sent beside the stream
  };
  UcxChannel(Options options, std::shared_ptr<UcxRequestQueue> request_queue);

  void send(BytesView header, std::span<const Segment> segments) override;
  std::size_t unsent_bytes() const override { return unsent_.load(std::memory_order_relaxed); }
  bool opened() const override { return opened_.load(std::memory_order_acquire); }
  void close() override;
  bool carries_device_memory() const override { return options_.limits.device_memory; }
  std::string peer() const override { return options_.peer; }

  /// What the driver reviews after every event.
  struct State {
    bool closing = false;  ///< close() was called
    bool quiet = false;    ///< UCX has completed all sends, including a goodbye
    std::optional<std::string> broken;
  };
  State state() const;
  /// The peer expects messages with the label `peer_label`: sends what is queued. Worker and route outlive
  /// end().
  void open(UcxWorker& worker, std::shared_ptr<UcxRoute> route, std::uint64_t peer_label);
  /// Sends queued bytes as far as UCX accepts them.
  void flush();
  /// UCX completed a task of this channel.
  void finished(const UcxTask& task);
  /// Nothing more can be sent, and the driver will end the channel.
  void break_off(const std::string& why);
  /// The channel has ended: later calls of send() throw `reason`.
  void end(const Error& reason);

 private:
  /// A segment that is sent beside the stream of frames.
  struct Apart {
    Segment segment;
    std::uint64_t position;  ///< in the stream, after the segment's announcement
    bool done = false;
  };
  void queue(const Segment& header, std::span<const Segment> segments) TORCHSPAN_REQUIRES(mutex_);
  /// `patient`: waits for other threads that use UCX; only the driver does, and it sends what other threads
  /// left.
  void flush_locked(bool patient, Released& released) TORCHSPAN_REQUIRES(mutex_);
  bool send_chunks(bool patient, Released& released) TORCHSPAN_REQUIRES(mutex_);
  bool send_segments(bool patient, Released& released) TORCHSPAN_REQUIRES(mutex_);
  void prepare_chunk(Released& released) TORCHSPAN_REQUIRES(mutex_);
  void segment_done(std::uint64_t number) TORCHSPAN_REQUIRES(mutex_);
  bool more_to_send() const TORCHSPAN_REQUIRES(mutex_);
  bool may_go_on() const TORCHSPAN_REQUIRES(mutex_);
  bool quiet() const TORCHSPAN_REQUIRES(mutex_);
  void drop_all(Released& released) TORCHSPAN_REQUIRES(mutex_);
  [[noreturn]] void throw_ended() const TORCHSPAN_REQUIRES(mutex_);

  const Options options_;
  const std::shared_ptr<UcxRequestQueue> request_queue_;
  std::atomic<std::size_t> unsent_{0};
  std::atomic<bool> opened_{false};
  mutable Mutex mutex_;
  UcxWorker* worker_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  std::shared_ptr<UcxRoute> route_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t peer_label_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  Outbox outbox_ TORCHSPAN_GUARDED_BY(mutex_);          ///< the part of the stream that is not in chunks yet
  UcxTaskPtr next_chunk_ TORCHSPAN_GUARDED_BY(mutex_);  ///< ready to be sent
  std::uint64_t chunks_ TORCHSPAN_GUARDED_BY(mutex_) = 0;       ///< made so far
  std::uint64_t queued_ TORCHSPAN_GUARDED_BY(mutex_) = 0;       ///< bytes of the stream so far
  std::uint64_t sent_ TORCHSPAN_GUARDED_BY(mutex_) = 0;         ///< of these, taken over by UCX
  std::deque<Apart> apart_ TORCHSPAN_GUARDED_BY(mutex_);        ///< from the first that is not done
  std::uint64_t first_apart_ TORCHSPAN_GUARDED_BY(mutex_) = 1;  ///< the number of the first in apart_
  std::size_t offered_ TORCHSPAN_GUARDED_BY(mutex_) = 0;        ///< segments in apart_ that UCX took over
  std::size_t offered_bytes_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  ///< bytes of those that are not fetched yet
  std::size_t under_way_ TORCHSPAN_GUARDED_BY(mutex_) = 0;      ///< tasks that UCX has
  std::size_t chunks_under_way_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  bool posted_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< the driver is asked to flush
  bool closing_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::optional<std::string> broken_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<std::string> ended_ TORCHSPAN_GUARDED_BY(mutex_);  ///< why the channel ended
};

/// Asks the driver to make a channel by dialing `address`.
struct UcxRequest {
  std::uint64_t token;
  std::shared_ptr<UcxChannel> channel;
  std::string address;
  Deadline deadline;
};

}  // namespace torchspan::net
