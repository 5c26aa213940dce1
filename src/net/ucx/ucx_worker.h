#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

#include "net/api/ucx.h"
#include "net/ucx/inbox.h"
#include "net/ucx/ucx_context.h"

namespace torchspan::net {

class UcxChannel;
class UcxWorker;

/// The route to one peer's UCX worker, shared by all channels to it. It stays until UCX reports its failure
/// or the worker ends: UCX pairs the endpoints of two sides by count, so neither side may close one alone.
class UcxRoute : public std::enable_shared_from_this<UcxRoute> {
 private:
  friend class UcxWorker;
  UcxWorker* worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;  ///< guarded by the worker's lock; null once it failed
  bool is_connected_ = false;    ///< likewise; whether UCX has sent anything
};

/// An operation of UCX in progress, with the memory that it uses.
struct UcxTask {
  enum class Kind : std::uint8_t { kHello, kChunk, kSegment, kFetch };
  Kind kind;
  UcxLabel label;
  Bytes chunk = {};
  Segment segment = {};
  Buffer into = {};
  std::shared_ptr<UcxChannel> channel = {};  ///< the sender; null for a fetch
  std::shared_ptr<UcxRoute> route = {};      ///< likewise; set by UcxWorker
  std::uint64_t link = 0;                    ///< token of the channel
  ucs_status_t status = UCS_OK;
  UcxWorker* worker = nullptr;
};
using UcxTaskPtr = std::unique_ptr<UcxTask>;

/// UCX's context and worker. Every call holds the lock for one step of UCX; callbacks of UCX only append to
/// lists, which take_events() empties. Thread-safe.
class UcxWorker {
 public:
  /// `device_memory`: in which segments may be, if UCX supports it. Throws kUnsupported if UCX has no device that
  /// `options` allow.
  UcxWorker(Executor& executor, const UcxOptions& options,
            DeviceMemoryKind device_memory = DeviceMemoryKind::kNone);
  /// Closes all routes; no operation uses its memory afterwards. With UCX 1.13, UCX's worker and the memory of
  /// its operations are leaked instead while a peer is connecting, or may be: see unpaired().
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  const UcxLibrary& library() const { return library_; }
  /// In which memory segments with a device_target are.
  DeviceMemoryKind device_memory() const { return context_.device_memory(); }
  /// The worker's address for peers, in UCX's form.
  const Bytes& address() const { return address_; }
  /// Readable if there is something to progress(), after arm() returned true.
  int event_descriptor() const { return event_descriptor_; }
  std::string text_of(ucs_status_t status) const { return library_.status_string(status); }

  /// Throws kUnsupported for an address that no device here reaches.
  std::shared_ptr<UcxRoute> open_route(BytesView address);
  enum class Outcome : std::uint8_t {
    kBusy,      ///< another thread uses UCX; `task` is unchanged
    kDone,      ///< `task` is finished
    kUnderWay,  ///< `task` is taken over; take_events() returns it
    kFailed,    ///< the route has ended; `task` is unchanged
  };
  /// Unless `patient`, never waits for another thread.
  Outcome send(UcxRoute& route, UcxTaskPtr& task, bool patient);
  /// States that a peer has this worker's address, and may connect to it without a route of this side.
  void unpaired() { is_unpaired_ = true; }
  /// Fetches the data of `descriptor`, which came from the peer of `route`, into the task's memory; consumes the
  /// descriptor.
  Outcome fetch(const UcxRoute& route, void* descriptor, UcxTaskPtr& task);
  /// Discards the data of `descriptor`.
  void release(void* descriptor);

  struct Arrival {
    UcxTask::Kind kind;
    UcxLabel label;
    UcxOffer offer;
  };
  struct FailedRoute {
    const UcxRoute* route;
    std::string reason;
  };
  struct Events {
    std::vector<Arrival> arrivals;
    std::vector<UcxTaskPtr> finished;
    std::vector<FailedRoute> failed;
    bool empty() const { return arrivals.empty() && finished.empty() && failed.empty(); }
  };
  /// Lets UCX work for a few steps; returns whether it did anything.
  bool progress();
  bool has_events() const;
  Events take_events();
  enum class Armed : std::uint8_t {
    kYes,     ///< the descriptor becomes readable at the next event
    kBusy,    ///< there is something to progress already
    kFailed,  ///< events may come without a notice
  };
  Armed arm();

 private:
  static void finished(void* request, ucs_status_t status, void* task) TORCHSPAN_UNCHECKED;
  static void fetched(void* request, ucs_status_t status, std::size_t size, void* task) TORCHSPAN_UNCHECKED;
  static void closed(void* request, ucs_status_t status, void* worker) TORCHSPAN_UNCHECKED;
  static void failed(void* route, ucp_ep_h endpoint, ucs_status_t status) TORCHSPAN_UNCHECKED;
  static ucs_status_t hello_arrived(void* worker, const void* header, std::size_t header_size, void* data,
                                    std::size_t size, const ucp_am_recv_param_t* param) TORCHSPAN_UNCHECKED;
  static ucs_status_t chunk_arrived(void* worker, const void* header, std::size_t header_size, void* data,
                                    std::size_t size, const ucp_am_recv_param_t* param) TORCHSPAN_UNCHECKED;
  static ucs_status_t segment_arrived(void* worker, const void* header, std::size_t header_size, void* data,
                                      std::size_t size, const ucp_am_recv_param_t* param) TORCHSPAN_UNCHECKED;
  void make_worker();
  void tear_down();
  void listen_for(UcxTask::Kind kind, ucp_am_recv_callback_t callback);
  Outcome send_locked(UcxRoute& route, UcxTaskPtr& task) TORCHSPAN_REQUIRES(mutex_);
  template <class Begin>
  Outcome start(UcxTaskPtr& task, const Begin& begin) TORCHSPAN_REQUIRES(mutex_);
  void finish(UcxTask* task, void* request, ucs_status_t status) TORCHSPAN_REQUIRES(mutex_);
  void close_failed() TORCHSPAN_REQUIRES(mutex_);
  enum class Ending : std::uint8_t { kFlush, kClose };
  void end(ucp_ep_h endpoint, Ending ending) TORCHSPAN_REQUIRES(mutex_);
  /// For the open routes, under the lock.
  void for_routes(const std::function<void(UcxRoute&)>& step);
  /// Lets UCX work, and drops all news, until it has nothing to do and `done` returns true; calls `done`
  /// under the lock.
  void settle(Duration patience, const std::function<bool()>& done);

  Executor& executor_;
  const UcxLibrary library_;
  UcxContext context_;
  ucp_worker_h worker_ = nullptr;
  int event_descriptor_ = -1;
  Bytes address_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<UcxRoute>> routes_ TORCHSPAN_GUARDED_BY(mutex_);
  std::unordered_map<const UcxTask*, UcxTaskPtr> under_way_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<ucp_ep_h> to_close_ TORCHSPAN_GUARDED_BY(mutex_);
  std::size_t closing_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  ///< endpoints that are being flushed or closed
  std::size_t arrived_bytes_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::atomic<bool> is_unpaired_ = false;
  Events news_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::net
