#include "checkpoint/sources/rng_source.h"

#include <utility>

#include <torchspan/checkpoint/sources.h>

#include "checkpoint/files/checksum.h"

namespace torchspan::checkpoint {
namespace {

class RngSource final : public StateSource {
 public:
  explicit RngSource(std::vector<device::NamedGenerator> generators) : generators_(std::move(generators)) {}
  void save(StateWriter& writer) const override {
    for (const auto& [device, generator] : generators_) writer.add(device, device::state_of(generator));
  }
  /// All states are read before the first is set.
  void load(const StateReader& reader) override {
    std::vector<at::Tensor> states;
    for (const auto& [device, generator] : generators_)
      states.push_back(reader.has(device) ? reader.read(device) : at::Tensor());
    for (std::size_t i = 0; i < states.size(); ++i) {
      const at::Generator& one = generators_[i].generator;
      if (states[i].defined()) {
        device::set_state(one, states[i]);
        continue;
      }
      ByteWriter place;
      place.put_string(reader.full_name(generators_[i].device));
      place.put(reader.step());
      place.put(device::seed_of(one));
      device::set_seed(one, checksum_of(place.bytes()));
    }
  }
  bool owns_names() const override { return false; }

 private:
  std::vector<device::NamedGenerator> generators_;
};

}  // namespace

SourcePtr rng_source_of(std::vector<device::NamedGenerator> generators) {
  return std::make_unique<RngSource>(std::move(generators));
}

SourcePtr rng_source() { return rng_source_of(device::default_generators()); }

}  // namespace torchspan::checkpoint
