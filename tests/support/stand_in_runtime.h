#pragma once
// What groups need of the stand-in devices (stand_in_device.h): memory that processes share, by names.
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <torchspan/core/error.h>

#include "device/api/device_runtime.h"
#include "tests/support/stand_in_streams.h"

namespace torchspan::testing {

/// Thread-safe. `shared`: all ranks say that they use one physical device.
class StandInRuntime : public device::DeviceRuntime {
 public:
  explicit StandInRuntime(bool shared = true, std::string refusal = {})
      : shared_(shared), refusal_(std::move(refusal)) {
    remove_memory_of_dead_processes();
  }

  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  void* native_stream(const c10::Stream& stream) const override {
    // An engine is about to give the stream an operation, of which the streams would know nothing.
    const DeviceOperation operation(StandInStreams::get(), {stream.device_index(), stream.id()}, "engine");
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream.id()));
  }
  std::string identity(c10::Device device) const override {
    if (shared_) return device.str();
    return device.str() + " of process " + std::to_string(getpid()) + ", " + std::to_string(next_++);
  }
  /// The next `times` allocations fail for lack of memory.
  void run_out_of_memory(int times) { failing_.store(times); }
  std::shared_ptr<std::byte> allocate(c10::Device, std::size_t bytes) const override {
    if (failing_.load() > 0) {
      failing_.fetch_sub(1);
      throw Error(ErrorKind::kOverloaded, "a stand-in device has no memory left");
    }
    const std::string name =
        "/torchspan-stand-in-" + std::to_string(getpid()) + "-" + std::to_string(next_++);
    const int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0)
      throw Error(ErrorKind::kOverloaded, "no memory for a stand-in device");
    auto memory = map(file, bytes, name);
    MutexLock lock(mutex_);
    names_[memory.get()] = name;
    return memory;
  }
  Bytes export_memory(c10::Device, const std::byte* allocation) const override {
    if (!refusal_.empty()) throw Error(ErrorKind::kUnsupported, refusal_);
    MutexLock lock(mutex_);
    const std::string& name = names_.at(allocation);
    const auto* first = reinterpret_cast<const std::byte*>(name.data());
    return Bytes(first, first + name.size());
  }
  std::shared_ptr<std::byte> open_memory(c10::Device, BytesView handle, std::size_t bytes) const override {
    const std::string name(reinterpret_cast<const char*>(handle.data()), handle.size());
    const int file = shm_open(name.c_str(), O_RDWR, 0600);
    if (file < 0) throw Error(ErrorKind::kInvalid, "unknown handle of a stand-in device's memory: " + name);
    struct stat about {};
    if (fstat(file, &about) != 0 || static_cast<std::size_t>(about.st_size) < bytes) {
      close(file);
      throw Error(ErrorKind::kInvalid, "a stand-in device's memory is smaller than its handle says");
    }
    return map(file, bytes, {});
  }

 private:
  /// Tests kill processes, which then cannot remove their memory.
  static void remove_memory_of_dead_processes() {
    const std::string prefix = "torchspan-stand-in-";
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with(prefix)) continue;
      const pid_t owner = std::atoi(name.c_str() + prefix.size());
      if (owner > 0 && ::kill(owner, 0) != 0 && errno == ESRCH) shm_unlink(("/" + name).c_str());
    }
  }
  static std::shared_ptr<std::byte> map(int file, std::size_t bytes, const std::string& name) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) throw Error(ErrorKind::kOverloaded, "cannot map a stand-in device's memory");
    return {static_cast<std::byte*>(memory), [bytes, name](std::byte* data) {
              StandInStreams::get().finish();
              munmap(data, bytes);
              if (!name.empty()) shm_unlink(name.c_str());
            }};
  }

  const bool shared_;
  const std::string refusal_;
  mutable std::atomic<int> failing_{0};
  mutable Mutex mutex_;
  mutable std::map<const std::byte*, std::string> names_ TORCHSPAN_GUARDED_BY(mutex_);  ///< of allocations
  inline static std::atomic<int> next_{0};
};

}  // namespace torchspan::testing
