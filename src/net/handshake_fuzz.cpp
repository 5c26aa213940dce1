#include <algorithm>
#include <cstdlib>

#include "net/handshake.h"
#include "tests/support/fuzz_seeds.h"

/// The first byte selects the role and the size of the pieces. No input may complete a handshake without the
/// secret, and the pieces must not change the outcome.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace torchspan;
  using namespace torchspan::net;
  if (size == 0) return 0;
  const Role role = (data[0] & 1) != 0 ? Role::kDialer : Role::kListener;
  const std::size_t piece = 1 + (data[0] >> 1);
  const BytesView bytes = std::as_bytes(std::span(data + 1, size - 1));
  const auto run = [&](std::size_t most) {
    Handshake handshake(
        role, {.secret = Secret::from_bytes(Bytes(32, std::byte{'s'})), .peer = "an unauthenticated peer"});
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

/// Seeds: the other side's bytes with another secret, a refusal, and invalid messages.
extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using namespace torchspan;
    using namespace torchspan::net;
    using torchspan::testing::bytes_of, torchspan::testing::joined;
    std::vector<Bytes> seeds;
    for (const Role role : {Role::kDialer, Role::kListener}) {
      const Role other = role == Role::kDialer ? Role::kListener : Role::kDialer;
      const auto side = [](Role which, char secret, char nonce) {
        HandshakeOptions options{.secret = Secret::from_bytes(Bytes(32, static_cast<std::byte>(secret))),
                                 .peer = "peer"};
        options.nonce.fill(static_cast<std::byte>(nonce));
        return Handshake(which, options);
      };
      Handshake theirs = side(other, 'x', 1), ours = side(role, 'x', 0);
      const Bytes hello = theirs.take_output();
      theirs.receive(ours.take_output());
      if (other == Role::kListener) ours.receive(hello);
      const Bytes mine = ours.take_output();
      if (!mine.empty()) theirs.receive(mine);
      const Bytes proof = theirs.take_output();
      for (const int cut : {0, 2, 254}) {
        const Bytes first = bytes_of({cut | (role == Role::kDialer ? 1 : 0)});
        seeds.push_back(joined({first, hello, proof}));
        seeds.push_back(joined({first, hello, bytes_of({3})}));
        seeds.push_back(joined({first, side(role, 's', 0).take_output()}));
      }
    }
    return seeds;
  });
}
