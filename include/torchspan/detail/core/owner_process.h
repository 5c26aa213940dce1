#pragma once
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan {

/// The process that made an object. A child of fork() has copies of the object, and of locks that threads held which it
/// does not have: it must neither use nor destroy its copy. Copies of this value name the same process.
class OwnerProcess {
 public:
  OwnerProcess() noexcept;
  /// False in a child that was forked after this object was made.
  bool is_current() const noexcept;
  /// Throws forked() in such a child.
  void check(std::string_view worker = {}) const {
    if (!is_current()) throw forked(worker);
  }
  /// Called after user code: a child that it forked and that returns from it ends here, with code 1 and a message,
  /// because the caller is the parent's work.
  void end_child(std::string_view worker) const noexcept {
    if (!is_current()) end_forked(worker);
  }
  /// Error{kInvalid}: this process is a fork of the named worker's, or of an unnamed one's.
  static Error forked(std::string_view worker = {});

 private:
  [[noreturn]] static void end_forked(std::string_view worker) noexcept;

  std::uint32_t forks_;  ///< that led to this process
};

/// Tells leak checkers that `object` stays in memory. Takes no lock.
void keep_until_exit(const void* object) noexcept;

/// Deletes an object in the process that made it; in a forked child the object stays in memory as it is.
template <class T>
class DeleteInOwner {
 public:
  DeleteInOwner() = default;
  template <class U>
  requires std::is_convertible_v<U*, T*> DeleteInOwner(std::default_delete<U>) {}
  template <class U>
  requires std::is_convertible_v<U*, T*> DeleteInOwner(const DeleteInOwner<U>& other)
      : process_(other.process()) {}
  void operator()(T* object) const {
    process_.is_current() ? std::default_delete<T>()(object) : keep_until_exit(object);
  }
  OwnerProcess process() const { return process_; }

 private:
  OwnerProcess process_;
};

/// A unique_ptr for objects whose destructors act on threads, connections or shared memory. Takes what
/// std::make_unique() returns.
template <class T>
using ProcessOwned = std::unique_ptr<T, DeleteInOwner<T>>;

/// std::make_shared() for such objects.
template <class T, class... Args>
std::shared_ptr<T> make_process_shared(Args&&... args) {
  return ProcessOwned<T>(new T(std::forward<Args>(args)...));
}

/// A pointer to the same object, whose copies do not release it in a forked child.
template <class T>
std::shared_ptr<T> kept_in_forks(std::shared_ptr<T> object) {
  if (!object) return object;
  T* const address = object.get();
  return {address, [process = OwnerProcess(), object = std::move(object)](T*) mutable {
            if (!process.is_current()) keep_until_exit(new std::shared_ptr<T>(std::move(object)));
          }};
}

}  // namespace torchspan
