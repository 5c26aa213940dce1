#pragma once
// The fake NCCL (fake_nccl.cpp) as tests see it: its path, and what makes it misbehave.
#include <dlfcn.h>
#include <stdexcept>
#include <string>

namespace torchspan::testing {

/// Libraries with NCCL's interface, and with one that is too old, beside the test programs, which find them by these names.
inline std::string fake_nccl() { return "libfake_nccl.so"; }
inline std::string fake_nccl_old() { return "libfake_nccl_old.so"; }

/// The faults of this process's fake NCCL, which end with this object.
class FakeNccl {
 public:
  FakeNccl() : library_(dlopen(fake_nccl().c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) throw std::runtime_error("cannot load " + fake_nccl());
  }
  ~FakeNccl() {
    for (const char* fault : {"stall", "async_error", "refuse", "die"}) set(fault, 0);
    set("version", 22809);
    dlclose(library_);
  }
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  /// The faults are those of the struct `Faults` in fake_nccl.cpp.
  void set(const char* fault, int value) const {
    reinterpret_cast<void (*)(const char*, int)>(dlsym(library_, "fake_nccl_set"))(fault, value);
  }
  /// How many communicators were aborted in this process.
  int aborted() const { return count("fake_nccl_aborted"); }
  /// How many communicators were destroyed without an abort.
  int destroyed() const { return count("fake_nccl_destroyed"); }

 private:
  int count(const char* name) const { return reinterpret_cast<int (*)()>(dlsym(library_, name))(); }

  void* const library_;
};

}  // namespace torchspan::testing
