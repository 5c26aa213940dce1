#include <algorithm>
#include <cstdlib>
#include <span>

#include <ATen/core/ivalue.h>

#include <torchspan/core/error.h>

#include "elastic/peer_copies.h"
#include "elastic/tracked_state.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::elastic;

/// NaN differs from itself, so encodings are compared.
void check_listing(BytesView bytes) {
  const Bytes again = StateListing::decode(bytes).encode();
  if (StateListing::decode(again).encode() != again) std::abort();
}

void check_inventory(BytesView bytes) {
  const CopyInventory read = CopyInventory::decode(bytes);
  const Bytes again = read.encode();
  if (again.size() != bytes.size() || !std::equal(again.begin(), again.end(), bytes.begin())) std::abort();
  static_cast<void>(newest_complete({read, read, CopyInventory()}));
}

}  // namespace

/// Another rank's bytes are refused with an Error, or their value can be encoded and read again.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const BytesView bytes = std::as_bytes(std::span(data + 1, size - 1));
  try {
    data[0] % 2 == 0 ? check_listing(bytes) : check_inventory(bytes);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kInvalid) std::abort();
  }
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using torchspan::testing::bytes_of, torchspan::testing::joined;
    StateListing listing{.position = {7, 2, 30}, .tensors = {}, .values = {}};
    listing.tensors.push_back({"module.weight", at::kDouble, {3, 4}});
    listing.values = {{"a", true}, {"b", std::int64_t{-5}}, {"c", 0.25}, {"d", std::string("text")}};
    const CopyInventory inventory{
        .own = {{5, 1}, {10, 1}}, .held = {{5, 1}}, .newest_checkpoint = 7, .round = 3};
    return std::vector<Bytes>{joined({bytes_of({0}), listing.encode()}),
                              joined({bytes_of({1}), inventory.encode()})};
  });
}
