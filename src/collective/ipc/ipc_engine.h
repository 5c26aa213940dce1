#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/detail/device/streams.h>

#include "collective/device/device_engine.h"

namespace torchspan::collective::ipc {

/// Device memory of every rank of a group, which all of them map: two areas of `area_bytes` each. Exported once,
/// over the control group, whose ranks have proved that they belong to this job. Only this memory is exported,
/// never that of LibTorch's allocator.
class Staging {
 public:
  /// Collective over parts.control; throws on all ranks if one cannot map another's memory.
  Staging(const EngineParts& parts, std::size_t area_bytes);
  /// Unmaps the memory of the others, and gives them time to do the same before its own is freed.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::size_t area_bytes() const { return area_bytes_; }
  /// A range of what a rank contributes, as bytes.
  at::Tensor sent(int rank, std::size_t offset, std::size_t bytes) const { return view(rank, offset, bytes); }
  /// A range of what a rank has reduced.
  at::Tensor reduced(int rank, std::size_t offset, std::size_t bytes) const {
    return view(rank, area_bytes_ + offset, bytes);
  }

 private:
  at::Tensor view(int rank, std::size_t offset, std::size_t bytes) const;

  const EngineParts parts_;
  const std::size_t area_bytes_;
  std::vector<std::shared_ptr<std::byte>> memory_;  ///< by rank
};

/// Memory on a device as a tensor, which does not own it.
at::Tensor device_view(std::byte* data, std::int64_t count, at::ScalarType dtype, c10::Device device);
/// A contiguous tensor as bytes; a view.
at::Tensor device_bytes(const at::Tensor& tensor);

struct IpcOptions {
  std::size_t area_bytes = std::size_t{32} << 20;  ///< of each of a rank's two areas
};

/// An engine for the ranks of one host, which may share a GPU: ranks copy chunks into memory that all of them
/// map, reduce a slice each, in rank order, and copy the others' slices. A rank announces a chunk only when its
/// device has written it. Therefore no device ever waits for another rank's device, and a dead rank leaves
/// nothing behind that could hang.
class IpcEngine final : public DeviceEngine {
 public:
  /// Collective; see Staging.
  static std::unique_ptr<IpcEngine> make(EngineParts parts, IpcOptions options);

  std::string name() const override { return "cuda_ipc"; }
  bool reduces(at::ScalarType, ReduceOp) const override { return true; }
  void all_reduce(const at::Tensor& tensor, ReduceOp reduction) override;
  void reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) override;
  void broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) override;
  void all_to_all(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) override;
  void abort() noexcept override {}
  void interrupt(const Error& cause) override {
    if (!parts_.control->failure()) parts_.control->abort(cause);
  }

 private:
  /// A tensor's bytes, and their place in a sequence of bytes.
  struct Piece {
    std::int64_t at = 0;
    at::Tensor bytes;
  };
  using Pieces = std::vector<Piece>;

  IpcEngine(EngineParts parts, IpcOptions options)
      : parts_(std::move(parts)), staging_(parts_, options.area_bytes) {}

  int rank() const { return parts_.control->rank(); }
  int size() const { return parts_.control->size(); }
  void wait_for_device() const;
  /// Waits until this rank's device has done its work, then for all ranks to have come here.
  void barrier() const;
  /// Reduces a tensor that fits into an area.
  void reduce_chunk(const at::Tensor& chunk, ReduceOp reduction) const;
  /// Every rank sends a sequence of bytes, at most `longest`; takes pieces of those of the others.
  void exchange(const Pieces& mine, const std::vector<Pieces>& wanted, std::int64_t longest) const;
  /// Copies between pieces and a rank's area, which holds the sequence from `from` on.
  void copy_pieces(const Pieces& pieces, int rank, std::int64_t from, bool into_area) const;

  const EngineParts parts_;
  const device::EventPoolPtr events_ = std::make_shared<device::EventPool>();
  const Staging staging_;
};

}  // namespace torchspan::collective::ipc
