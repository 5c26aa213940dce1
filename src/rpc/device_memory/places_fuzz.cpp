// Places of tensors in device memory, as a peer names them: whatever it sends, buffers lie within what it has shared,
// and everything that is taken is returned once.
#include <cstdlib>
#include <map>
#include <vector>

#include <ATen/core/ivalue.h>

#include "rpc/device_memory/incoming_memory.h"
#include "tests/support/fuzz_seeds.h"

namespace torchspan::rpc {
namespace {

constexpr std::size_t kArea = 4096;
constexpr PeerId kPeer{1, 0};

/// "Maps" host memory.
class HeapRuntime final : public device::DeviceRuntime {
 public:
  explicit HeapRuntime(std::byte* memory) : memory_(memory) {}
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  void* native_stream(const c10::Stream&) const override { return nullptr; }
  std::string identity(c10::Device device) const override { return device.str(); }
  std::shared_ptr<std::byte> allocate(c10::Device, std::size_t) const override { return nullptr; }
  Bytes export_memory(c10::Device, const std::byte*) const override { return {}; }
  std::shared_ptr<std::byte> open_memory(c10::Device, BytesView, std::size_t) const override {
    return {std::shared_ptr<void>(), memory_};
  }

 private:
  std::byte* const memory_;
};

void require(bool condition) {
  if (!condition) std::abort();
}

void fuzz_places(BytesView input) {
  std::vector<std::byte> area(kArea);
  std::size_t taken = 0, returned = 0;
  IncomingMemory memory(std::make_shared<HeapRuntime>(area.data()),
                        [&](PeerId to, std::uint32_t route, std::uint64_t) {
                          require(to == kPeer && route == 1);
                          ++returned;
                        });
  OfferDeviceMemory offer;
  offer.route = 1;
  offer.bytes = kArea;
  memory.open(kPeer, offer, c10::Device(c10::DeviceType::PrivateUse1, 0));
  std::vector<Buffer> segments{allocate_buffer(1), allocate_buffer(2)};
  std::vector<wire::DeviceSegment> on_device;
  try {
    memory.insert(kPeer, input, {segments, on_device});
    taken = on_device.size();
    require(segments.size() == taken + 2);
    for (const wire::DeviceSegment& one : on_device) {
      const Buffer& buffer = segments.at(one.index);
      require(buffer.size != 0 && buffer.data >= area.data() &&
              buffer.data + buffer.size <= area.data() + kArea);
    }
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalid);
    taken = segments.size() - 2;
  }
  segments.clear();
  require(returned == taken);
}

std::vector<Bytes> places_seeds() {
  return {wire::to_payload(SharedPlaces{}).value, wire::to_payload(SharedPlaces{{{0, 1, 1, 0, 16}}}).value,
          wire::to_payload(SharedPlaces{{{0, 1, 1, 0, 16}, {3, 1, 2, 256, 3840}}}).value};
}

}  // namespace
}  // namespace torchspan::rpc

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, torchspan::rpc::places_seeds);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  torchspan::rpc::fuzz_places({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
