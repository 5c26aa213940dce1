#pragma once
#include <memory>
#include <typeinfo>
#include <vector>

#include <torchspan/core/task.h>

namespace at {
class ThreadLocalState;
}

namespace torchspan::rpc {

struct IncomingCall;

/// What an extension keeps in environments: immutable, at most one of each type.
class EnvironmentValue {
 public:
  virtual ~EnvironmentValue() = default;
  /// Whether captured environments have it, too. False: it is for the thread that it was put in force on.
  virtual bool is_captured() const { return true; }
};
using EnvironmentValuePtr = std::shared_ptr<const EnvironmentValue>;

/// What surrounds a piece of work, whichever thread runs it: the call that it serves, the values of
/// extensions (the autograd contexts), and LibTorch's thread-local state (grad mode, inference mode and the
/// rest). A handler begins in the environment of its call; a coroutine and a continuation run in that of the
/// place which started or added them. Immutable; a copy costs two reference counts.
class Environment {
 public:
  /// No call, no values, and LibTorch's state as a new thread has it.
  Environment() = default;
  /// The one for the handler of `call`; without grad mode where the caller wants no gradients.
  static Environment of_call(std::shared_ptr<IncomingCall> call);
  /// This thread's, for work that continues later or elsewhere.
  static Environment capture();

  /// The call that this thread serves, or null.
  static const std::shared_ptr<IncomingCall>& served();
  /// The value of type T on this thread, or null. Valid until the thread's environment changes.
  template <class T>
  static const T* find() {
    return static_cast<const T*>(find(typeid(T)));
  }
  /// Puts `value` in force on this thread, null for none, and returns the value of type T that was there.
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
};

/// Runs this thread in another environment while the scope lives. Its end restores what the thread had
/// before, whatever the code in between left behind.
class EnvironmentScope {
 public:
  explicit EnvironmentScope(const Environment& inside);
  ~EnvironmentScope();
  EnvironmentScope(const EnvironmentScope&) = delete;
  EnvironmentScope& operator=(const EnvironmentScope&) = delete;

 private:
  Environment::ValuesPtr outside_;
  std::unique_ptr<const at::ThreadLocalState> outside_torch_;  ///< null: as on a new thread
};

/// Restores the call and the values of this thread at its end, whatever was put in force in between.
/// LibTorch's state stays as it is.
class EnvironmentValuesScope {
 public:
  EnvironmentValuesScope() : outside_(Environment::of_thread()) {}
  ~EnvironmentValuesScope() { Environment::of_thread().swap(outside_); }
  EnvironmentValuesScope(const EnvironmentValuesScope&) = delete;
  EnvironmentValuesScope& operator=(const EnvironmentValuesScope&) = delete;

 private:
  Environment::ValuesPtr outside_;
};

/// Runs the steps of a coroutine in the environment of the thread that started it, each step as the one
/// before left it.
class CapturedTaskEnvironment final : public TaskEnvironment {
 public:
  void run(std::coroutine_handle<> step) override;

 private:
  Environment inside_ = Environment::capture();
};

}  // namespace torchspan::rpc
