#pragma once
// Streams and events of the stand-in devices (stand_in_device.h), and a checker of the order between them. Every
// operation belongs to the stream that is current where it is called. Vector clocks say which operations a stream
// has waited for; an access that is not ordered after the last write to the same bytes is a race.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <torchspan/detail/core/mutex.h>

namespace torchspan::testing {

inline c10::Device stand_in(int index) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

/// A stream of a stand-in device: device index and number; 0 is the default stream.
using Lane = std::pair<int, std::int64_t>;

inline std::string name_of(Lane lane) {
  return "stream " + std::to_string(lane.second) + " of device " + std::to_string(lane.first);
}

/// The current streams of a thread, as LibTorch's guards set them.
class CurrentLanes {
 public:
  static Lane get(int device) {
    const auto& here = of_thread();
    const auto found = here.find(device);
    return {device, found == here.end() ? 0 : found->second};
  }
  static Lane exchange(Lane lane) {
    const Lane before = get(lane.first);
    of_thread()[lane.first] = lane.second;
    return before;
  }

 private:
  static std::map<int, std::int64_t>& of_thread() {
    thread_local std::map<int, std::int64_t> the_lanes;
    return the_lanes;
  }
};

/// Vector clocks of all streams, and the copies that their streams have not come to yet. Every operation comes after what
/// the host knows to be complete; the clocks of streams do not repeat that, so that an operation costs the same after a
/// process has used many streams.
class StreamClocks {
 public:
  using Clock = std::map<Lane, std::uint64_t>;
  struct Stream {
    Clock clock;
    std::deque<std::pair<std::uint64_t, std::function<void()>>> pending = {};
  };

  Stream& at(Lane lane) { return streams_[lane]; }
  std::uint64_t now(Lane lane) { return streams_[lane].clock[lane]; }
  /// Begins the next operation of a stream, after what the host knows to be complete.
  void begin(Lane lane) {
    Clock& clock = streams_[lane].clock;
    ++clock[lane];
    std::erase_if(clock, [&](const auto& entry) {
      return entry.first != lane && reaches(completed_, entry.first, entry.second);
    });
    run_pending(Clock(clock));
  }
  /// Whether the current operation of a stream runs after that of another one.
  bool is_after(Lane lane, Lane other, std::uint64_t time) const {
    if (reaches(completed_, other, time)) return true;
    const auto found = streams_.find(lane);
    return found != streams_.end() && reaches(found->second.clock, other, time);
  }
  /// Makes the later work of a stream wait.
  void wait(Lane lane, const Clock& clock) { merge(streams_[lane].clock, clock); }
  /// The host learns that all of this is done.
  void complete(Clock clock) {
    run_pending(clock);
    merge(completed_, clock);
  }
  void complete_device(int device) {
    for (auto& [lane, stream] : streams_) {
      if (device < 0 || lane.first == device) complete(stream.clock);
    }
  }
  bool is_complete(const Clock& clock) const {
    return std::all_of(clock.begin(), clock.end(),
                       [this](const auto& entry) { return reaches(completed_, entry.first, entry.second); });
  }
  void run_pending(const Clock& clock) {
    for (const auto& [lane, time] : clock) {
      auto& pending = streams_[lane].pending;
      while (!pending.empty() && pending.front().first <= time) {
        const std::function<void()> action = std::move(pending.front().second);
        pending.pop_front();
        action();
      }
    }
  }

 private:
  static bool reaches(const Clock& clock, Lane lane, std::uint64_t time) {
    const auto found = clock.find(lane);
    return time == 0 || (found != clock.end() && found->second >= time);
  }
  static void merge(Clock& into, const Clock& from) {
    for (const auto& [lane, time] : from) into[lane] = std::max(into[lane], time);
  }
  std::map<Lane, Stream> streams_;
  Clock completed_;
};

/// One use of device memory.
struct DeviceAccess {
  Lane lane;
  std::uint64_t time = 0;
  std::size_t begin = 0, end = 0;  ///< bytes
  std::string operation;
};

/// Device memory, and which operations used it.
struct DeviceBlock {
  DeviceBlock(std::size_t size, Lane lane) : memory(size + 1), home(lane) {}
  std::vector<std::byte> memory;
  const Lane home;  ///< the stream of its allocation
  std::set<Lane> recorded = {};
  std::vector<DeviceAccess> writes = {}, reads = {};
};

/// What a c10::Event of the stand-in devices refers to.
struct DeviceEvent {
  StreamClocks::Clock clock;
  int polls = 0;
};

/// Simulates the order in which devices with streams work, and reports races. Copies with `non_blocking`
/// between host and device run late: when an operation or the host waits for them. Thread-safe.
class StandInStreams {
 public:
  static StandInStreams& get() {
    static StandInStreams* const all = new StandInStreams();
    return *all;
  }

  /// Forgets all findings; what ran so far is complete. Queries of a new event answer "not yet" `polls` times.
  void reset(int polls = 0) {
    MutexLock lock(mutex_);
    clocks_.complete_device(-1);
    races_.clear();
    host_waits_ = 0;
    stray_event_calls_ = 0;
    polls_ = polls;
    failed_ = false;
    largest_allocation_ = ~std::size_t{0};
  }
  /// Larger allocations fail until reset(), as those of a device that is full.
  void set_largest_allocation(std::size_t bytes) {
    MutexLock lock(mutex_);
    largest_allocation_ = bytes;
  }
  void check_room(std::size_t bytes) const {
    MutexLock lock(mutex_);
    if (bytes > largest_allocation_) throw std::runtime_error("the stand-in device has no memory left");
  }
  /// The host's queries and waits throw until reset(), as those of a device that has failed.
  void fail() {
    MutexLock lock(mutex_);
    failed_ = true;
  }
  /// Ends all work, as the driver does before it unmaps memory. Does not count as a wait.
  void finish() {
    MutexLock lock(mutex_);
    clocks_.complete_device(-1);
  }
  std::vector<std::string> take_races() {
    MutexLock lock(mutex_);
    return std::exchange(races_, {});
  }
  /// How often the host has waited for a device since reset().
  std::size_t host_waits() const {
    MutexLock lock(mutex_);
    return host_waits_;
  }
  /// How often an event was recorded, waited for by a stream or destroyed on a thread whose current device was another
  /// one, since reset(). LibTorch restores that device, for which CUDA makes a context.
  std::size_t stray_event_calls() const {
    MutexLock lock(mutex_);
    return stray_event_calls_;
  }
  void count_stray_event_call() {
    MutexLock lock(mutex_);
    ++stray_event_calls_;
  }
  /// How many events were created in this process.
  std::size_t events_made() const {
    MutexLock lock(mutex_);
    return events_made_;
  }

  Lane fresh(int device) {
    MutexLock lock(mutex_);
    return {device, ++last_stream_};
  }
  DeviceEvent* record(DeviceEvent* event, Lane lane) {
    MutexLock lock(mutex_);
    if (event == nullptr) {
      event = new DeviceEvent();
      ++events_made_;
    }
    event->clock = clocks_.at(lane).clock;
    event->polls = polls_;
    return event;
  }
  void block(const DeviceEvent& event, Lane lane) {
    MutexLock lock(mutex_);
    clocks_.wait(lane, event.clock);
  }
  bool query(DeviceEvent& event) {
    MutexLock lock(mutex_);
    check_works();
    if (clocks_.is_complete(event.clock)) return true;
    if (event.polls-- > 0) return false;
    clocks_.complete(event.clock);
    return true;
  }
  bool query(Lane lane) {
    MutexLock lock(mutex_);
    check_works();
    return clocks_.is_complete(clocks_.at(lane).clock);
  }
  /// The host waits.
  void synchronize(const DeviceEvent& event) {
    MutexLock lock(mutex_);
    check_works();
    ++host_waits_;
    clocks_.complete(event.clock);
  }
  void synchronize(Lane lane) {
    MutexLock lock(mutex_);
    check_works();
    ++host_waits_;
    clocks_.complete(clocks_.at(lane).clock);
  }
  void synchronize_device(int device) {
    MutexLock lock(mutex_);
    check_works();
    ++host_waits_;
    clocks_.complete_device(device);
  }

  void keep_for(DeviceBlock& block, Lane lane) {
    MutexLock lock(mutex_);
    block.recorded.insert(lane);
  }
  /// A caching allocator gives freed memory to the next operation of its home stream.
  void freed(const DeviceBlock& block) {
    MutexLock lock(mutex_);
    for (const auto* accesses : {&block.writes, &block.reads}) {
      for (const DeviceAccess& access : *accesses) {
        if (access.lane == block.home || block.recorded.contains(access.lane)) continue;
        if (clocks_.is_after(block.home, access.lane, access.time)) continue;
        races_.push_back("memory of " + name_of(block.home) + " was freed while '" + access.operation +
                         "' on " + name_of(access.lane) + " may still use it");
      }
    }
  }

 private:
  friend class DeviceOperation;

  void check_works() const TORCHSPAN_REQUIRES(mutex_) {
    if (failed_) throw std::runtime_error("the stand-in device has failed");
  }

  mutable Mutex mutex_;  // held while an operation runs
  StreamClocks clocks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::string> races_ TORCHSPAN_GUARDED_BY(mutex_);
  std::size_t host_waits_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t stray_event_calls_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t events_made_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::int64_t last_stream_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  int polls_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  bool failed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::size_t largest_allocation_ TORCHSPAN_GUARDED_BY(mutex_) = ~std::size_t{0};
};

/// One operation of a stream; nothing else runs on the devices while it lives. Do not free device memory
/// meanwhile.
class DeviceOperation {
 public:
  DeviceOperation(StandInStreams& streams, Lane lane, std::string name) TORCHSPAN_UNCHECKED
      : streams_(streams),
        lane_(lane),
        name_(std::move(name)) {
    streams_.mutex_.lock();
    streams_.clocks_.begin(lane_);
  }
  ~DeviceOperation() TORCHSPAN_UNCHECKED { streams_.mutex_.unlock(); }
  DeviceOperation(const DeviceOperation&) = delete;
  DeviceOperation& operator=(const DeviceOperation&) = delete;

  /// False: a race, which has been reported.
  bool reads(DeviceBlock& block, std::size_t begin, std::size_t end) const TORCHSPAN_UNCHECKED {
    return uses(block, {lane_, streams_.clocks_.now(lane_), begin, end, name_}, false);
  }
  bool writes(DeviceBlock& block, std::size_t begin, std::size_t end) const TORCHSPAN_UNCHECKED {
    return uses(block, {lane_, streams_.clocks_.now(lane_), begin, end, name_}, true);
  }
  /// Runs after the other stream's work so far.
  void comes_after(Lane other) const TORCHSPAN_UNCHECKED {
    streams_.clocks_.wait(lane_, StreamClocks::Clock(streams_.clocks_.at(other).clock));
    streams_.clocks_.run_pending(StreamClocks::Clock(streams_.clocks_.at(lane_).clock));
  }
  /// Later work of the other stream runs after this operation.
  void comes_before(Lane other) const TORCHSPAN_UNCHECKED {
    streams_.clocks_.wait(other, StreamClocks::Clock(streams_.clocks_.at(lane_).clock));
  }
  /// Runs `action` when another operation or the host waits for this one.
  void later(std::function<void()> action) const TORCHSPAN_UNCHECKED {
    streams_.clocks_.at(lane_).pending.emplace_back(streams_.clocks_.now(lane_), std::move(action));
  }
  /// The host waits for this operation.
  void wait_on_host() const TORCHSPAN_UNCHECKED {
    ++streams_.host_waits_;
    streams_.clocks_.complete(streams_.clocks_.at(lane_).clock);
  }
  /// Reports another finding. Actions that run late call it, under the lock of the operation that runs them.
  static void report(StandInStreams& streams, std::string race) TORCHSPAN_UNCHECKED {
    streams.races_.push_back(std::move(race));
  }

 private:
  bool uses(DeviceBlock& block, DeviceAccess access, bool writes) const TORCHSPAN_UNCHECKED {
    if (access.begin == access.end) return true;
    bool ordered = true;
    const auto check = [&](const std::vector<DeviceAccess>& earlier, const char* did) TORCHSPAN_UNCHECKED {
      for (const DeviceAccess& other : earlier) {
        if (other.end <= access.begin || access.end <= other.begin) continue;
        if (streams_.clocks_.is_after(lane_, other.lane, other.time)) continue;
        ordered = false;
        streams_.races_.push_back("'" + name_ + "' on " + name_of(lane_) + (writes ? " writes" : " reads") +
                                  " what '" + other.operation + "' " + did + " on " + name_of(other.lane) +
                                  ", and nothing orders it after that");
      }
    };
    check(block.writes, "writes");
    if (writes) check(block.reads, "reads");
    const auto covered = [&](const DeviceAccess& other) {
      return access.begin <= other.begin && other.end <= access.end && (writes || other.lane == access.lane);
    };
    std::erase_if(block.reads, covered);
    if (writes) std::erase_if(block.writes, covered);
    (writes ? block.writes : block.reads).push_back(std::move(access));
    return ordered;
  }

  StandInStreams& streams_;
  const Lane lane_;
  const std::string name_;
};

}  // namespace torchspan::testing
