#pragma once
#include <memory>
#include <typeinfo>
#include <vector>

#include <torchspan/core/task.h>
#include <torchspan/detail/device/autocast.h>
#include <torchspan/detail/device/streams.h>

namespace at {
class ThreadLocalState;
}

namespace torchspan::rpc {

struct IncomingCall;

/// A value that an extension stores in environments: immutable, at most one per type.
class EnvironmentValue {
 public:
  virtual ~EnvironmentValue() = default;
  /// Whether captured environments include it. False: it stays on the thread where it was set.
  virtual bool is_captured() const { return true; }
};
using EnvironmentValuePtr = std::shared_ptr<const EnvironmentValue>;

/// Context of a piece of work on any thread: the call being served, the values of extensions (autograd
/// contexts), LibTorch's thread-local state (grad mode, inference mode and others), autocast, and current streams other
/// than the default ones. A handler starts in the environment of its call; a coroutine or continuation runs in that of
/// the place that started or added it. Immutable; a copy costs two reference counts.
class Environment {
 public:
  /// No call, no values, and the LibTorch state of a new thread.
  Environment() = default;
  /// Environment of the handler of `call`; without grad mode if the caller disabled gradients, and with the
  /// caller's autocast.
  static Environment of_call(std::shared_ptr<IncomingCall> call);
  /// Captures this thread's environment for work that continues later or elsewhere.
  static Environment capture();

  /// The call that this thread serves, or null.
  static const std::shared_ptr<IncomingCall>& served();
  /// This thread's value of type T, or null. Valid until the thread's environment changes.
  template <class T>
  static const T* find() {
    return static_cast<const T*>(find(typeid(T)));
  }
  /// Sets this thread's value of type T, null for none, and returns the previous one.
  template <class T>
  static std::shared_ptr<const T> exchange(std::shared_ptr<const T> value) {
    return std::static_pointer_cast<const T>(exchange(typeid(T), std::move(value)));
  }

 private:
  friend class EnvironmentScope;
  friend class EnvironmentValuesScope;
  struct Values;
  using ValuesPtr = std::shared_ptr<const Values>;
  static ValuesPtr& of_thread();
  static const EnvironmentValue* find(const std::type_info& type);
  static EnvironmentValuePtr exchange(const std::type_info& type, EnvironmentValuePtr value);

  ValuesPtr values_;
  std::shared_ptr<const at::ThreadLocalState> torch_;  ///< null: as on a new thread
  std::shared_ptr<const device::Autocast> autocast_;   ///< null: disabled
  device::Streams streams_;                            ///< without default streams
};

/// Runs this thread in another environment for a scope. Its end restores the previous environment, whatever
/// the code in between changed.
class EnvironmentScope {
 public:
  explicit EnvironmentScope(const Environment& inside);
  ~EnvironmentScope();
  EnvironmentScope(const EnvironmentScope&) = delete;
  EnvironmentScope& operator=(const EnvironmentScope&) = delete;

 private:
  device::AutocastScope autocast_;  // restored after LibTorch's other state
  const device::CurrentDevicesScope devices_;
  const device::SideStreamsScope streams_;
  Environment::ValuesPtr outside_;
  std::unique_ptr<const at::ThreadLocalState> outside_torch_;  ///< null: as on a new thread
};

/// Restores this thread's call and values at the end of a scope, whatever the code in between changed.
/// Leaves LibTorch's state alone.
class EnvironmentValuesScope {
 public:
  EnvironmentValuesScope() : outside_(Environment::of_thread()) {}
  ~EnvironmentValuesScope() { Environment::of_thread().swap(outside_); }
  EnvironmentValuesScope(const EnvironmentValuesScope&) = delete;
  EnvironmentValuesScope& operator=(const EnvironmentValuesScope&) = delete;

 private:
  Environment::ValuesPtr outside_;
};

/// Runs a coroutine's steps in the environment of the thread that started it; each step sees the changes of
/// the previous one.
class CapturedTaskEnvironment final : public TaskEnvironment {
 public:
  void run(std::coroutine_handle<> step) override;

 private:
  Environment inside_ = Environment::capture();
};

}  // namespace torchspan::rpc
