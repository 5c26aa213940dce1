#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <torchspan/detail/device/streams.h>

namespace torchspan::device {

class UploadRing;

/// Copies from devices, to host memory or to memory that processes share, that may not be complete yet, and what
/// they need until then. If dropped before, waits for them.
class PendingCopies {
 public:
  PendingCopies() = default;
  ~PendingCopies();
  PendingCopies(PendingCopies&&) noexcept = default;
  PendingCopies& operator=(PendingCopies&& other) noexcept;

  /// Whether the copies are complete. Does not wait. Throws if a device has failed.
  bool complete();
  /// Waits until the copies are complete. Throws if a device has failed; their memory then has arbitrary contents.
  void wait();

 private:
  friend class CopyStreams;
  void mark(const c10::Stream& stream, const EventPoolPtr& events);
  std::vector<Mark> marks_;
  std::vector<at::Tensor> host_;
};

/// The streams on which one worker copies between its devices and the host, so that copies and computation
/// overlap. Thread-safe.
class CopyStreams {
 public:
  /// The stream for copies to the device.
  c10::Stream in(c10::Device device) { return stream(device, 0); }

  /// Returns host memory with the shape of `tensor`, a strided tensor of a device with streams, that `copies`
  /// is going to fill: with its contents after the work of this thread's current stream so far. Later work of
  /// that stream may overwrite the tensor. Without gaps: strides as at::empty_like() has them.
  at::Tensor to_host(const at::Tensor& tensor, PendingCopies& copies);
  /// Copies a host tensor to a device, for use on this thread's current stream. Waits for this copy, but not for
  /// other work of the device. Large tensors of CUDA devices go through pinned buffers.
  at::Tensor to_device(const at::Tensor& tensor, c10::Device device);
  /// Fills `shared`, memory of the host, or of the tensor's device where another process maps it: with the
  /// contents after the work of this thread's current stream so far. `copies` are complete when it has them; the
  /// caller keeps the memory until then.
  void share(const at::Tensor& tensor, at::Tensor shared, PendingCopies& copies);
  /// Copies such memory, of another process, to `device`: as to_device(). The other process's copies must be
  /// complete.
  at::Tensor from_shared(const at::Tensor& shared, c10::Device device);
  /// Copies between tensors of the same sizes, in memory of this process or of another one, on the streams for copies to
  /// their devices. Waits for these streams.
  void copy_and_wait(const at::Tensor& source, at::Tensor target);
  /// Makes the default streams of the devices of `streams` wait for these, or the other way around.
  void order_defaults_after(const Streams& streams) const;
  void order_after_defaults(const Streams& streams) const;
  const EventPoolPtr& events() const { return events_; }

 private:
  /// Below this size, a copy is so short that it may delay the current stream.
  static constexpr std::size_t kDirect = 64 << 10;
  /// From this size on, two pinned buffers are faster than the driver's copies of pageable memory.
  static constexpr std::size_t kLarge = std::size_t{8} << 20;
  using Place = std::pair<int, int>;  ///< a device's type and index
  c10::Stream out(c10::Device device) { return stream(device, 1); }
  c10::Stream stream(c10::Device device, int direction);
  at::Tensor upload(const at::Tensor& tensor, c10::Device device);

  const EventPoolPtr events_ = std::make_shared<EventPool>();
  Mutex mutex_;
  std::map<std::pair<Place, int>, c10::Stream> streams_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<Place, std::vector<std::shared_ptr<UploadRing>>> idle_rings_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::device
