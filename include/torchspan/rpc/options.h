#pragma once
// Options of calls, and which devices stand for which on another worker. Includes no torch/nn.
#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/source_location.h>
#include <torchspan/wire.h>

namespace torchspan {

/// Identity of a worker. Can be sent as an argument; equal if name and rank are.
struct WorkerInfo {
  static constexpr FixedString kWireName = "WorkerInfo";
  std::string name;
  std::uint32_t rank = 0;
  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
};

/// Where a call goes: a worker's name, rank or info. Records the call site for errors.
class Destination {
 public:
  Destination(const char* name, SourceLocation site = SourceLocation::current()) : name_(name), site_(site) {}
  Destination(std::string name, SourceLocation site = SourceLocation::current())
      : name_(std::move(name)), site_(site) {}
  Destination(const WorkerInfo& info, SourceLocation site = SourceLocation::current())
      : rank_(info.rank), site_(site) {}
  template <std::integral I>
  Destination(I rank, SourceLocation site = SourceLocation::current())
      : rank_(static_cast<std::int64_t>(rank)), site_(site) {}

  const std::string& name() const { return name_; }
  std::optional<std::int64_t> rank() const { return rank_; }
  const SourceLocation& site() const { return site_; }

 private:
  std::string name_;
  std::optional<std::int64_t> rank_;
  SourceLocation site_;
};

/// The call that a handler serves: Worker::current_call(). A std::stop_callback on its stop token runs on
/// the worker's internal thread: it must be short and never wait.
struct CurrentCall {
  WorkerInfo caller;
  std::string name;      ///< of the function, operator or method
  Deadline deadline;     ///< the caller's; never: no limit
  std::stop_token stop;  ///< set on cancel, loss of the caller, deadline or shutdown
};

/// Options of individual calls, for Worker::with().
struct CallOptions {
  /// Timeout at the caller; unset: the worker's default (60 s). Zero: no limit. The callee receives the
  /// remaining time.
  std::optional<Duration> timeout = {};
  /// Cancels the call: it fails at once with kCancelled, and its handler's stop token is set.
  std::stop_token stop = {};
  /// By default a call made by a handler ends with the call being served: at its deadline and when it is
  /// cancelled. True: it does not.
  bool detached = false;
  /// For evaluation. The callee runs the function, and the calls that it makes, under at::NoGradGuard and
  /// without an autograd context. Tensors are sent without their graphs, both ways, and without a warning.
  bool no_grad = false;
};

}  // namespace torchspan

template <>
struct std::hash<torchspan::WorkerInfo> {
  std::size_t operator()(const torchspan::WorkerInfo& worker) const noexcept {
    return std::hash<std::string>()(worker.name) ^ worker.rank;
  }
};

namespace torchspan {

/// Maps devices of this worker one-to-one to devices of one peer. Tensors in calls to the peer are placed
/// by the map, and tensors in their results by its inverse. CPU tensors stay on the CPU unless the map
/// names it.
class DeviceMap {
 public:
  using Pair = std::pair<c10::Device, c10::Device>;

  DeviceMap() = default;
  /// Builds the map from {{here, there}, …}. Throws Error{kInvalid} for a device that occurs twice on one
  /// side or has no index ("cuda" instead of "cuda:0").
  DeviceMap(std::initializer_list<Pair> pairs) : DeviceMap(std::vector<Pair>(pairs)) {}
  explicit DeviceMap(std::vector<Pair> pairs);

  /// Returns nullopt for a device that the map does not name.
  std::optional<c10::Device> there(c10::Device here) const;
  std::optional<c10::Device> here(c10::Device there) const;
  const std::vector<Pair>& pairs() const { return pairs_; }

 private:
  std::vector<Pair> pairs_;
};

}  // namespace torchspan
