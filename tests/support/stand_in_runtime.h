#pragma once
// What groups need of the stand-in devices (stand_in_device.h): memory that processes share, by names.
#include <atomic>
#include <fcntl.h>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include <torchspan/core/error.h>

#include "collective/api/device_runtime.h"
#include "tests/support/stand_in_streams.h"

namespace torchspan::testing {

/// Thread-safe. `shared`: all ranks say that they use one physical device.
class StandInRuntime final : public collective::DeviceRuntime {
 public:
  explicit StandInRuntime(bool shared = true, std::string refusal = {})
      : shared_(shared), refusal_(std::move(refusal)) {}

  void* native_stream(const c10::Stream& stream) const override {
    // An engine is about to give the stream an operation, of which the streams would know nothing.
    const DeviceOperation operation(StandInStreams::get(), {stream.device_index(), stream.id()}, "engine");
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream.id()));
  }
  std::string identity(c10::Device device) const override {
    if (shared_) return device.str();
    return device.str() + " of process " + std::to_string(getpid()) + ", " + std::to_string(next_++);
  }
  std::shared_ptr<std::byte> allocate(c10::Device, std::size_t bytes) const override {
    const std::string name =
        "/torchspan-stand-in-" + std::to_string(getpid()) + "-" + std::to_string(next_++);
    const int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0)
      throw Error(ErrorKind::kOverloaded, "no memory for a stand-in device");
    auto memory = map(file, bytes, name);
    names_ = name;
    return memory;
  }
  Bytes export_memory(const std::byte*) const override {
    if (!refusal_.empty()) throw Error(ErrorKind::kUnsupported, refusal_);
    const auto* first = reinterpret_cast<const std::byte*>(names_.data());
    return Bytes(first, first + names_.size());
  }
  std::shared_ptr<std::byte> open_memory(c10::Device, BytesView handle, std::size_t bytes) const override {
    const std::string name(reinterpret_cast<const char*>(handle.data()), handle.size());
    const int file = shm_open(name.c_str(), O_RDWR, 0600);
    if (file < 0) throw Error(ErrorKind::kInvalid, "unknown handle of a stand-in device's memory: " + name);
    return map(file, bytes, {});
  }

 private:
  static std::shared_ptr<std::byte> map(int file, std::size_t bytes, const std::string& name) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) throw Error(ErrorKind::kOverloaded, "cannot map a stand-in device's memory");
    return {static_cast<std::byte*>(memory), [bytes, name](std::byte* data) {
              munmap(data, bytes);
              if (!name.empty()) shm_unlink(name.c_str());
            }};
  }

  const bool shared_;
  const std::string refusal_;
  mutable std::string names_;  ///< of the last allocation
  inline static std::atomic<int> next_{0};
};

}  // namespace torchspan::testing
