#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/net/transport.h>

#include "net/framing.h"
#include "net/stream/outbox.h"
#include "net/stream/request_queue.h"
#include "net/ucx/ucx_worker.h"

namespace torchspan::net {

struct UcxRequest;
using UcxRequestQueue = RequestQueue<UcxRequest>;

/// The sending half of a channel over UCX, shared by all threads. Hands messages to UCX in the calling thread
/// if no other is at it; the driver sends the rest.
class UcxChannel final : public Channel, public std::enable_shared_from_this<UcxChannel> {
 public:
  struct Options {
    std::string peer;
    std::uint64_t token;  ///< the channel's, for the request queue
    FrameLimits limits;
    std::uint64_t max_unsent;
    std::size_t rendezvous_from;  ///< size of segments that go beside the stream
  };
  UcxChannel(Options options, std::shared_ptr<UcxRequestQueue> request_queue);

  void send(BytesView header, std::span<const Segment> segments) override;
  std::size_t unsent_bytes() const override { return unsent_.load(std::memory_order_relaxed); }
  void close() override;
  std::string peer() const override { return options_.peer; }

  /// What the driver has to know after every event.
  struct State {
    bool closing = false;  ///< close() was called
    bool quiet = false;    ///< UCX is done with all that was sent, a goodbye included
    std::optional<std::string> broken;
  };
  State state() const;
  /// The peer awaits messages labelled `peer_label`: sends what was queued. Worker and route outlive end().
  void open(UcxWorker& worker, std::shared_ptr<UcxRoute> route, std::uint64_t peer_label);
  /// Sends what UCX takes.
  void flush();
  /// UCX is done with a task of this channel.
  void finished(const UcxTask& task);
  /// Nothing more can be sent, and the driver will end the channel.
  void break_off(const std::string& why);
  /// Nothing more goes through; `reason` is what later callers of send() are told.
  void end(const Error& reason);

 private:
  /// A segment beside the stream of frames.
  struct Apart {
    Segment segment;
    std::uint64_t position;  ///< in the stream, behind the segment's announcement
    bool done = false;
  };
  bool goes_apart(const Segment& segment) const { return segment.size >= options_.rendezvous_from; }
  void queue(BytesView header, std::span<const Segment> segments) TORCHSPAN_REQUIRES(mutex_);
  /// Of the driver, which is patient, or of others, who leave to it what they do not come to.
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
  [[noreturn]] void throw_overloaded(std::uint64_t size) const;

  const Options options_;
  const std::shared_ptr<UcxRequestQueue> request_queue_;
  std::atomic<std::size_t> unsent_{0};
  mutable Mutex mutex_;
  UcxWorker* worker_ TORCHSPAN_GUARDED_BY(mutex_) = nullptr;
  std::shared_ptr<UcxRoute> route_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t peer_label_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  Outbox outbox_ TORCHSPAN_GUARDED_BY(mutex_);                  ///< the stream, as far as it is not in chunks
  UcxTaskPtr next_chunk_ TORCHSPAN_GUARDED_BY(mutex_);          ///< ready to go
  std::uint64_t chunks_ TORCHSPAN_GUARDED_BY(mutex_) = 0;       ///< made so far
  std::uint64_t queued_ TORCHSPAN_GUARDED_BY(mutex_) = 0;       ///< bytes of the stream so far
  std::uint64_t sent_ TORCHSPAN_GUARDED_BY(mutex_) = 0;         ///< of which UCX took over
  std::deque<Apart> apart_ TORCHSPAN_GUARDED_BY(mutex_);        ///< from the first that is not done
  std::uint64_t first_apart_ TORCHSPAN_GUARDED_BY(mutex_) = 1;  ///< the number of the first in apart_
  std::size_t offered_ TORCHSPAN_GUARDED_BY(mutex_) = 0;        ///< in apart_, UCX took over
  std::size_t offered_bytes_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  ///< of those, not fetched yet
  std::size_t under_way_ TORCHSPAN_GUARDED_BY(mutex_) = 0;      ///< tasks that UCX has
  std::size_t chunks_under_way_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  bool posted_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< the driver is asked to flush
  bool closing_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::optional<std::string> broken_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<std::string> ended_ TORCHSPAN_GUARDED_BY(mutex_);  ///< why nothing goes through any more
};

}  // namespace torchspan::net
