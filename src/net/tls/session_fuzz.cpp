#include <algorithm>
#include <cstdlib>
#include <sys/socket.h>

#include "net/tls/tls_session.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::net;

std::shared_ptr<const TlsContext> make_context(char letter) {
  const Secret secret = Secret::from_bytes(Bytes(32, static_cast<std::byte>(letter)));
  return std::make_shared<const TlsContext>(secret, TlsOptions());
}

struct Pair {
  Pair() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) std::abort();
    ours.reset(ends[0]);
    theirs.reset(ends[1]);
  }
  Descriptor ours, theirs;
};

std::unique_ptr<TlsSession> make_session(std::shared_ptr<const TlsContext> context, Descriptor socket,
                                         Role role) {
  return std::make_unique<TlsSession>(
      std::move(context), std::move(socket),
      TlsSession::Start{.role = role, .peer = "an unauthenticated peer", .host = {}});
}

Bytes read_all(const Descriptor& socket) {
  Bytes bytes(64 << 10);
  const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
  bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return bytes;
}

/// Records what a side with the secret `secret` sends to one with the secret 'k', up to its proof.
Bytes recorded(Role role, char secret) {
  Pair pair;
  const auto theirs = make_session(make_context(secret), std::move(pair.theirs), role);
  const auto ours = make_session(make_context('k'), Descriptor(::dup(pair.ours.get())),
                                 role == Role::kDialer ? Role::kListener : Role::kDialer);
  Bytes all;
  try {
    for (int i = 0; i < 4; ++i) {
      theirs->shake_hands();
      // Peeks at the bytes before the other end reads them.
      Bytes peeked(64 << 10);
      const ssize_t got = ::recv(pair.ours.get(), peeked.data(), peeked.size(), MSG_PEEK);
      if (got > 0) all.insert(all.end(), peeked.begin(), peeked.begin() + got);
      ours->shake_hands();
    }
  } catch (const Error&) {
  }
  return all;
}

}  // namespace

/// The first bytes of an unauthenticated peer, to a connection that listens or (by the first byte) dials.
/// Whatever they are, nothing is proven, and the handshake fails when the peer disconnects.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::shared_ptr<const TlsContext> context = make_context('k');
  if (size == 0) return 0;
  const Role role = (data[0] & 1) != 0 ? Role::kDialer : Role::kListener;
  const std::size_t piece = 1 + 8 * static_cast<std::size_t>(data[0] >> 1);
  BytesView bytes = std::as_bytes(std::span(data + 1, size - 1));
  Pair pair;
  const auto session = make_session(context, std::move(pair.ours), role);
  try {
    if (session->shake_hands()) std::abort();
    while (!bytes.empty()) {
      const BytesView part = bytes.first(std::min(piece, bytes.size()));
      if (::send(pair.theirs.get(), part.data(), part.size(), MSG_NOSIGNAL) < 0) break;
      if (session->shake_hands()) std::abort();
      bytes = bytes.subspan(part.size());
    }
    read_all(pair.theirs);
    pair.theirs.reset();
    if (session->shake_hands()) std::abort();
  } catch (const Error&) {
    return 0;
  }
  std::abort();
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return ::testing::offer_seeds(count, arguments, [] {
    std::vector<Bytes> seeds;
    for (const Role role : {Role::kDialer, Role::kListener}) {
      for (const char secret : {'k', 'x'}) {
        for (const int cut : {0, 20, 254}) {
          seeds.push_back(::testing::joined(
              {::testing::bytes_of({cut | (role == Role::kListener ? 1 : 0)}), recorded(role, secret)}));
        }
      }
    }
    return seeds;
  });
}
