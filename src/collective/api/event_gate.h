#pragma once
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/device/streams.h>

namespace torchspan::collective {

/// The gate of values that one stream computes: an event recorded on it. Takers' current streams wait for the
/// event, and their memory is not reused before these streams are done.
class EventGate final : public ValueGate, public std::enable_shared_from_this<EventGate> {
 public:
  using Gates = std::vector<std::shared_ptr<const ValueGate>>;

  /// Records an event on `stream`. The event comes from `events`, which must not be null, and returns to it with the
  /// gate. `values`: tensors whose memory takers use. `earlier`: gates of values that went into them, whose failures
  /// count.
  static std::shared_ptr<EventGate> record(const c10::Stream& stream, device::EventPoolPtr events,
                                           std::vector<at::Tensor> values = {}, Gates earlier = {});

  void pass() const override;
  std::shared_ptr<const ValueGate> renew() const override;
  bool done() const override;
  /// The work failed: takers get `cause`. No effect once it was seen to be finished.
  void fail(const Error& cause);

 private:
  EventGate(const c10::Stream& stream, device::EventPoolPtr events, std::vector<at::Tensor> values,
            Gates earlier);
  void throw_if_failed() const;

  const device::EventPoolPtr events_;
  const device::Mark mark_;
  const std::vector<at::Tensor> values_;
  const Gates earlier_;
  mutable Mutex mutex_;
  mutable bool finished_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::collective
