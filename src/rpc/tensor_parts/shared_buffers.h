#pragma once
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>

#include "rpc/device_memory/outgoing_memory.h"
#include "rpc/tensor_parts/split_tensor.h"

namespace torchspan::rpc {

/// Device memory that the peer maps: up to three quarters of an area, so that smaller tensors find room. If the area has
/// no room although no part is on its way, parts go through host memory. Thus no tensor waits for whole tensors in the
/// area, whose messages may wait for a thread of the peer, or for parts that were lost with a connection.
class SharedBuffers final : public PartBuffers {
 public:
  /// Whether the connection has not ended.
  using IsOpen = std::function<bool(const net::Channel*)>;
  SharedBuffers(c10::Device device, SharedArea shared, IsOpen is_open);
  /// Waits for the copies.
  ~SharedBuffers() override;

  /// Bytes of a part; 0 if the area is too small for parts.
  static std::size_t part_of(const LentArea& area);

  const c10::Stream& stream() const override { return host_.stream(); }
  bool has_room(std::size_t rest) override;
  std::size_t fill(const at::Tensor& tensor, std::size_t from) override;
  bool ready() const override;
  std::optional<Part> take() override;
  void sent(const Part& part, const std::shared_ptr<net::Channel>& channel) override;
  void discard() override;

 private:
  /// A part of the area, and the copy that fills it; without `lent`, a part in `host_`.
  struct Copied {
    LentTensorPtr lent = nullptr;
    std::optional<device::Mark> written = std::nullopt;
  };
  struct Sent {
    LentTensorPtr lent;
    std::weak_ptr<net::Channel> channel;
  };
  std::size_t lent_parts() const;
  void forget_returned();
  void forget_written() noexcept;
  bool copy(const at::Tensor& tensor, std::size_t from, std::size_t count);

  const SharedArea shared_;
  const std::size_t part_;
  const IsOpen is_open_;
  const device::EventPoolPtr events_ = std::make_shared<device::EventPool>();
  HostBuffers host_;
  std::list<Copied> filled_;     ///< in the order of fill()
  std::list<Copied> discarded_;  ///< until they are written
  std::list<Sent> sent_;         ///< until they are returned, or their connection ends
};

}  // namespace torchspan::rpc
