#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <torchspan/detail/core/mutex.h>

namespace torchspan::device {

/// Whether this process has devices whose work is ordered by streams, such as GPUs. Never changes. If not,
/// everything below has no effect and costs one branch.
bool has_streams();
/// Whether `device` is one of them.
bool has_streams(c10::Device device);

/// This thread's current stream of a device that has streams.
c10::Stream current_stream(c10::Device device);
c10::Stream default_stream(c10::Device device);
/// Another stream, which LibTorch shares among its users in turn.
c10::Stream stream_from_pool(c10::Device device, bool high_priority = false);

/// Events for reuse, because creating one calls the driver. Thread-safe.
class EventPool {
 public:
  EventPool() = default;
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  std::unique_ptr<c10::Event> take(c10::Device device);
  void give(c10::Device device, std::unique_ptr<c10::Event> event);

 private:
  Mutex mutex_;
  std::vector<std::pair<c10::Device, std::unique_ptr<c10::Event>>> free_ TORCHSPAN_GUARDED_BY(mutex_);
};
using EventPoolPtr = std::shared_ptr<EventPool>;

/// A point in the work of a stream. Returns its event to the pool.
class Mark {
 public:
  /// Marks what `stream` has been given so far. `events` must not be null.
  Mark(const c10::Stream& stream, EventPoolPtr events);
  ~Mark();
  Mark(Mark&&) noexcept = default;
  Mark& operator=(Mark&&) = delete;

  const c10::Stream& stream() const { return stream_; }
  /// Makes the later work of `later` wait. No effect if it is the stream of the mark.
  void hold_back(const c10::Stream& later) const;
  /// Whether the device has reached the mark. Does not wait. Throws if the device has failed.
  bool reached() const;
  /// Waits on the host until the device has reached the mark. Throws if the device has failed.
  void synchronize() const;
  /// The same, but returns if the device has failed.
  void wait() const noexcept;

 private:
  c10::Stream stream_;
  EventPoolPtr events_;
  std::unique_ptr<c10::Event> event_;
};

/// Makes the later work of `later` wait for the work that `earlier` has been given so far.
void order_after(const c10::Stream& later, const c10::Stream& earlier, EventPool& events);
/// The same with a new event.
void order_after(const c10::Stream& later, const c10::Stream& earlier);

/// Calls `visit` with each tensor that has storage: `tensor` itself, or the parts of a sparse one of any layout.
void visit_parts(const at::Tensor& tensor, const std::function<void(const at::Tensor&)>& visit);
/// Prevents reuse of the tensor's memory before the current work of `stream` is done. Skips memory of other
/// devices.
void keep_memory_for(const at::Tensor& tensor, const c10::Stream& stream);

/// At most one stream for each device.
class Streams {
 public:
  /// This thread's current streams, of all devices that have streams.
  static Streams current();
  /// Those that are not the default streams of their devices; usually none.
  static Streams current_side();

  /// Null if there is none.
  const c10::Stream* of(c10::Device device) const;
  void set(const c10::Stream& stream);
  bool empty() const { return streams_.empty(); }
  auto begin() const { return streams_.begin(); }
  auto end() const { return streams_.end(); }

 private:
  std::vector<c10::Stream> streams_;
};

/// Makes streams current on this thread for a scope.
class StreamsScope {
 public:
  StreamsScope() = default;
  explicit StreamsScope(const Streams& streams) { enter(streams); }
  ~StreamsScope();
  StreamsScope(const StreamsScope&) = delete;
  StreamsScope& operator=(const StreamsScope&) = delete;
  void enter(const Streams& streams);
  void enter(const c10::Stream& stream);

 private:
  std::vector<c10::Stream> before_;
};

/// Restores this thread's current device of each type at the end of a scope, whatever the code in between changed.
class CurrentDevicesScope {
 public:
  CurrentDevicesScope();
  ~CurrentDevicesScope();
  CurrentDevicesScope(const CurrentDevicesScope&) = delete;
  CurrentDevicesScope& operator=(const CurrentDevicesScope&) = delete;

 private:
  std::vector<c10::Device> before_;
};

/// Makes `side` current on this thread for a scope, and the default streams of all other devices. At its end,
/// the streams from before are current, whatever the code in between changed.
class SideStreamsScope {
 public:
  explicit SideStreamsScope(const Streams& side);
  ~SideStreamsScope();
  SideStreamsScope(const SideStreamsScope&) = delete;
  SideStreamsScope& operator=(const SideStreamsScope&) = delete;

 private:
  static void make_current(const Streams& side);
  Streams before_;
};

}  // namespace torchspan::device
