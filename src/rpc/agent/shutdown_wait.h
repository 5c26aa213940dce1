#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/runtime.h>

namespace torchspan::rpc {

/// Says what shutdown() waits for while it waits. Unfinished work, of this worker and as the others tell of
/// theirs, every ten seconds; that others have not called shutdown() only once nothing was asked of this
/// worker for ten seconds, then for twenty, and so on, since to serve them until they do is what many wait
/// for. One thread at a time.
class ShutdownWait {
 public:
  static constexpr Duration kEvery = std::chrono::seconds(10);
  static constexpr Duration kNewsEvery = std::chrono::seconds(1);

  explicit ShutdownWait(Runtime& runtime, std::string who = "shutdown()")
      : runtime_(runtime),
        who_(std::move(who)),
        began_(runtime.executor.now()),
        warned_(began_),
        told_(began_),
        served_at_(began_),
        patience_(kEvery) {}

  /// What to tell the others of this worker's work: nothing most of the time, since all hear it.
  std::string news(const std::string& unfinished);
  /// What another one told, or told before; it has nothing left to do unless it is busy.
  void heard(const std::string& worker, bool busy, const std::string& news);
  /// A warning, if the last is old enough, unless nobody has work left.
  void warn(const std::string& unfinished);
  /// The same; asks for the work only if need be.
  template <class F>
  void warn_of(F&& unfinished) {
    if (is_due()) warn(unfinished());
  }
  /// A warning of who has not called shutdown(). `serving`: this worker answers somebody just now;
  /// `handled`: how many requests it answered so far.
  void warn_of_missing(const std::string& names, bool serving, std::uint64_t handled);
  /// "this worker …; worker 'worker1' …", or nothing.
  std::string work(const std::string& unfinished) const;

 private:
  bool is_due() const { return runtime_.executor.now() - warned_ >= kEvery; }
  void say(const std::string& what);

  Runtime& runtime_;
  const std::string who_;
  const TimePoint began_;
  TimePoint warned_, told_, served_at_;
  Duration patience_;
  std::uint64_t handled_ = 0;
  std::map<std::string, std::string> others_;  ///< work by worker
};

}  // namespace torchspan::rpc
