#pragma once
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <torchspan/core/future.h>
#include <torchspan/detail/device/streams.h>

namespace torchspan::data_parallel {

/// Runs a scope on a stream; nullopt: on the thread's current one.
class StreamScope {
 public:
  explicit StreamScope(const std::optional<c10::Stream>& stream) {
    if (stream) guard_.reset_stream(*stream);
  }

 private:
  c10::OptionalStreamGuard guard_;
};

/// The stream on which one reducer launches reductions and takes their results, so that the streams of a backward
/// pass do not wait for them, and the reducer's events. Has no effect for parameters on the CPU. Thread-safe.
class ReductionStream {
 public:
  explicit ReductionStream(c10::Device device);

  /// The stream; nullopt on the CPU.
  const std::optional<c10::Stream>& stream() const { return stream_; }
  /// The events of everything that orders this reducer's streams.
  const device::EventPoolPtr& events() const { return events_; }
  /// The stream of the device that is current on this thread; nullopt on the CPU.
  std::optional<c10::Stream> current() const;
  /// The gate of what the stream has been given so far, whose values `earlier` lead to; null on the CPU.
  std::shared_ptr<const ValueGate> gate(std::vector<std::shared_ptr<const ValueGate>> earlier) const;

 private:
  const c10::Device device_;
  const device::EventPoolPtr events_ = std::make_shared<device::EventPool>();
  std::optional<c10::Stream> stream_;
};

/// Runs a scope on the stream of the thread that runs the backward pass, on whichever thread it is: what the scope
/// writes is ready there. At its end the thread's own stream waits for it, through an event of `events`. Nullopt: no
/// effect.
class PassStreamScope {
 public:
  PassStreamScope(const std::optional<c10::Stream>& pass, device::EventPoolPtr events);
  ~PassStreamScope();
  PassStreamScope(const PassStreamScope&) = delete;
  PassStreamScope& operator=(const PassStreamScope&) = delete;

 private:
  const std::optional<c10::Stream> pass_;
  const device::EventPoolPtr events_;
  std::optional<c10::Stream> own_;
  device::StreamsScope current_;
};

/// The streams on which one bucket's gradients were put into it.
class ProducerStreams {
 public:
  void add(const c10::Stream& stream);
  /// Records one event of `events` on each stream. Call it when the bucket is full.
  void record(const device::EventPoolPtr& events);
  /// Makes this thread's current stream wait for the recorded events, or, without record(), for what the streams have
  /// been given so far, through an event of `events`.
  void wait(device::EventPool& events) const;

 private:
  std::vector<c10::Stream> streams_;
  std::vector<device::Mark> marks_;
};

}  // namespace torchspan::data_parallel
