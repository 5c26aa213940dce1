#pragma once
#include <array>
#include <cstddef>

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

}  // namespace torchspan::device
