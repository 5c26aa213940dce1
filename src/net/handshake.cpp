#include "net/handshake.h"

#include <algorithm>
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <string_view>

namespace torchspan::net {
namespace {

/// Not text, and changed by programs that convert line ends.
constexpr std::array<std::uint8_t, 8> kHandshakeMagic = {0x89, 'T', 'S', 'P', 'A', 'N', '\r', '\n'};
constexpr std::byte kProofTag{2};
constexpr std::byte kRefusalTag{3};

constexpr std::string_view label_of(Role role) {
  return role == Role::kDialer ? "torchspan handshake: dialer  " : "torchspan handshake: listener";
}
static_assert(label_of(Role::kDialer).size() == label_of(Role::kListener).size());

constexpr Role other(Role role) { return role == Role::kDialer ? Role::kListener : Role::kDialer; }
constexpr std::string_view name_of(Role role) { return role == Role::kDialer ? "dials" : "listens"; }

std::string versions(std::uint16_t lowest, std::uint16_t highest) {
  return lowest == highest ? fmt::format("{}", lowest) : fmt::format("{} to {}", lowest, highest);
}

const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

}  // namespace

void draw_nonce(std::array<std::byte, kNonceBytes>& nonce) {
  if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) != 1) {
    throw Error(ErrorKind::kUnsupported, "the system's random source returned no bytes for a handshake");
  }
}

Handshake::Handshake(Role role, HandshakeOptions options) : role_(role), options_(std::move(options)) {
  if (options_.secret.empty()) {
    throw_invalid(
        "a transport over sockets needs a cluster secret: set TransportOptions::secret on every worker");
  }
  ByteWriter hello;
  hello.put_bytes(std::as_bytes(std::span(kHandshakeMagic)));
  hello.put(role_);
  hello.put(std::uint8_t{0});
  hello.put(options_.lowest);
  hello.put(options_.highest);
  hello.put(std::uint16_t{0});
  hello.put(options_.features);
  hello.put_bytes(options_.nonce);
  mine_ = hello.take();
  output_ = mine_;
}

std::size_t Handshake::receive(BytesView bytes) {
  std::size_t taken = 0;
  while (taken < bytes.size() && stage_ != Stage::kDone) {
    if (stage_ == Stage::kFailed) throw_invalid("the handshake has failed already");
    record_.push_back(bytes[taken++]);
    // The first wrong byte is enough: this side does not wait for more bytes of an unauthenticated peer.
    if (stage_ == Stage::kHello && record_.size() <= kHandshakeMagic.size() &&
        static_cast<std::uint8_t>(record_.back()) != kHandshakeMagic[record_.size() - 1]) {
      fail(ErrorKind::kInvalid, "does not speak TorchSpan's protocol: is the address right?");
    }
    if (record_.size() < record_size()) continue;
    stage_ == Stage::kHello ? take_hello() : take_proof();
    record_.clear();
  }
  return taken;
}

std::size_t Handshake::record_size() const {
  if (stage_ == Stage::kHello) return kHelloBytes;
  return record_.front() == kProofTag ? 1 + kMacBytes : 1;
}

void Handshake::take_hello() {
  theirs_ = record_;
  ByteReader reader(theirs_);
  reader.get_bytes(kHandshakeMagic.size());
  const auto role = reader.get<Role>();
  const auto zero = reader.get<std::uint8_t>();
  const auto lowest = reader.get<std::uint16_t>();
  const auto highest = reader.get<std::uint16_t>();
  const auto zeros = reader.get<std::uint16_t>();
  features_ = reader.get<std::uint64_t>() & options_.features;
  if (role != other(role_) || std::ranges::equal(reader.get_bytes(kNonceBytes), options_.nonce)) {
    fail(ErrorKind::kDenied,
         fmt::format("says that it {}, as this side does: it sends back what it receives", name_of(role_)));
  }
  if (zero != 0 || zeros != 0 || lowest > highest) fail(ErrorKind::kInvalid, "sent a malformed greeting");
  agree(lowest, highest);
  stage_ = Stage::kProof;
  // The dialer proves first, so an unauthenticated peer that dials gets nothing that is computed from the
  // secret.
  if (role_ == Role::kDialer) send_proof();
}

void Handshake::agree(std::uint16_t lowest, std::uint16_t highest) {
  version_ = std::min(highest, options_.highest);
  if (version_ < std::max(lowest, options_.lowest)) {
    fail(ErrorKind::kUnsupported,
         fmt::format("speaks protocol version {}, this side {}: run the same TorchSpan on all workers",
                     versions(lowest, highest), versions(options_.lowest, options_.highest)));
  }
}

void Handshake::take_proof() {
  if (record_.front() == kRefusalTag) {
    fail(ErrorKind::kDenied,
         "refused this side's proof: its cluster secret differs; give both the same secret "
         "file (TORCHSPAN_SECRET_FILE)");
  }
  if (record_.front() != kProofTag)
    fail(ErrorKind::kInvalid, "broke the handshake: neither a proof nor a refusal");
  const Mac expected = mac_of(other(role_));
  if (CRYPTO_memcmp(expected.data(), record_.data() + 1, kMacBytes) != 0) {
    if (role_ == Role::kListener) output_.push_back(kRefusalTag);
    fail(ErrorKind::kDenied,
         "does not know this side's cluster secret; give both the same secret file "
         "(TORCHSPAN_SECRET_FILE)");
  }
  if (role_ == Role::kListener) send_proof();
  stage_ = Stage::kDone;
}

Handshake::Mac Handshake::mac_of(Role role) const {
  const Bytes& dialer = role_ == Role::kDialer ? mine_ : theirs_;
  const Bytes& listener = role_ == Role::kDialer ? theirs_ : mine_;
  const std::string_view label = label_of(role);
  ByteWriter text;
  text.put_bytes(std::as_bytes(std::span(label)));
  text.put_bytes(dialer);
  text.put_bytes(listener);
  Mac mac;
  unsigned int size = 0;
  const BytesView key = options_.secret.bytes();
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), raw(text.bytes().data()), text.size(),
           reinterpret_cast<unsigned char*>(mac.data()), &size) == nullptr ||
      size != mac.size()) {
    throw Error(ErrorKind::kUnsupported, "OpenSSL cannot compute HMAC-SHA-256 here");
  }
  return mac;
}

void Handshake::send_proof() {
  const Mac mac = mac_of(role_);
  output_.push_back(kProofTag);
  output_.insert(output_.end(), mac.begin(), mac.end());
}

void Handshake::fail(ErrorKind kind, const std::string& what) {
  stage_ = Stage::kFailed;
  throw Error(kind, fmt::format("{} {}", options_.peer, what));
}

}  // namespace torchspan::net
