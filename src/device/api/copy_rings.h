#pragma once
#include <array>
#include <cstddef>
#include <memory>
#include <optional>

#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/device/streams.h>

namespace torchspan::device {

/// Two pinned host buffers, each with a stream, through which a large host tensor goes to a device: the device
/// copies from one buffer while the host fills the other. Not thread-safe.
class UploadRing {
 public:
  static constexpr std::size_t kChunk = std::size_t{4} << 20;
  explicit UploadRing(c10::Device device, std::size_t chunk = kChunk);

  /// Copies to a new tensor on the device, whose memory belongs to `stream`. Waits until it is complete.
  /// `tensor` must be dense and strided, and not quantized.
  at::Tensor upload(const at::Tensor& tensor, const c10::Stream& stream);

 private:
  struct Half {
    c10::Stream stream;
    at::Tensor buffer;
  };
  Half make_half() const;

  const c10::Device device_;
  const std::size_t chunk_;
  const std::array<Half, 2> halves_;
};

/// Two pinned host buffers through which a large tensor of a device goes elsewhere in parts: the device fills one
/// buffer while the other is being sent. The buffers are allocated by the first copies. Not thread-safe, but any
/// thread may release a part, also after the ring is gone.
class DownloadRing {
 public:
  static constexpr std::size_t kPart = std::size_t{4} << 20;
  /// `part`: bytes of each buffer.
  explicit DownloadRing(c10::Device device, std::size_t part = kPart);
  ~DownloadRing() = default;
  DownloadRing(const DownloadRing&) = delete;
  DownloadRing& operator=(const DownloadRing&) = delete;

  std::size_t part() const { return part_; }
  /// The stream of the copies. Make it wait for the tensor before fill().
  const c10::Stream& stream() const { return stream_; }
  /// Whether fill() has a buffer.
  bool has_room() const;
  /// Begins to copy `count` bytes of a dense tensor of the device, from a byte on, to the next buffer. Returns false
  /// if that buffer is in use.
  bool fill(const at::Tensor& tensor, std::size_t from, std::size_t count);
  /// Whether take() returns a part. Does not wait.
  bool ready() const;
  /// The oldest part, when the device has written it. Its buffer is free again when the last copy of `keep` is gone.
  std::optional<Segment> take();
  /// Forgets the parts that were not taken.
  void discard();

 private:
  struct Half;
  Half& half(std::size_t number) const { return *halves_[number % halves_.size()]; }

  const c10::Device device_;
  const std::size_t part_;
  const c10::Stream stream_;
  const EventPoolPtr events_ = std::make_shared<EventPool>();
  const std::array<std::shared_ptr<Half>, 2> halves_;
  std::size_t filled_ = 0, taken_ = 0;  ///< parts
};

}  // namespace torchspan::device
