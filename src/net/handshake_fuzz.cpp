#include <algorithm>
#include <cstdlib>

#include "net/handshake.h"

/// The first byte chooses the role and how the rest is cut; no bytes may finish a handshake without the
/// secret, and cutting may not change its outcome.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace torchspan;
  using namespace torchspan::net;
  if (size == 0) return 0;
  const Role role = (data[0] & 1) != 0 ? Role::kDialer : Role::kListener;
  const std::size_t piece = 1 + (data[0] >> 1);
  const BytesView bytes = std::as_bytes(std::span(data + 1, size - 1));
  const auto run = [&](std::size_t most) {
    Handshake handshake(role,
                        {.secret = Secret::from_bytes(Bytes(32, std::byte{'s'})), .peer = "a stranger"});
    int outcome = 0;
    try {
      for (std::size_t at = 0; at < bytes.size(); at += most) {
        handshake.receive(bytes.subspan(at, std::min(most, bytes.size() - at)));
      }
    } catch (const Error& error) {
      outcome = static_cast<int>(error.kind());
    }
    if (handshake.done()) std::abort();
    return outcome;
  };
  if (run(piece) != run(bytes.size() + 1)) std::abort();
  return 0;
}
