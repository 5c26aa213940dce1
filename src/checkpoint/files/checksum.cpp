#include "checkpoint/files/checksum.h"

#include <new>
#include <xxhash.h>

namespace torchspan::checkpoint {

std::uint64_t checksum_of(BytesView bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

struct Checksum::State {
  State() : state(XXH3_createState()) {
    if (state == nullptr) throw std::bad_alloc();
    XXH3_64bits_reset(state);
  }
  ~State() { XXH3_freeState(state); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  XXH3_state_t* const state;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}
Checksum::~Checksum() = default;

void Checksum::add(BytesView part) { XXH3_64bits_update(state_->state, part.data(), part.size()); }

std::uint64_t Checksum::finish() {
  const std::uint64_t value = XXH3_64bits_digest(state_->state);
  XXH3_64bits_reset(state_->state);
  return value;
}

}  // namespace torchspan::checkpoint
