#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>
#include <torchspan/core/time.h>
#include <torchspan/detail/net/secret.h>

namespace torchspan::net {

inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::uint16_t kProtocolLowest = 1;
inline constexpr std::uint16_t kProtocolHighest = 1;

/// Feature: can share memory with peers of this host.
inline constexpr std::uint64_t kSharesMemory = 1;

/// Every unauthenticated peer gets at least this time for its handshake, even while others are queued.
inline constexpr Duration kMinHandshakeTimeout = std::chrono::milliseconds(100);

enum class Role : std::uint8_t { kDialer = 1, kListener = 2 };

struct HandshakeOptions {
  Secret secret;                               ///< not empty
  std::string peer;                            ///< name of the peer in errors
  std::array<std::byte, kNonceBytes> nonce{};  ///< fresh random bytes, never used twice
  std::uint16_t lowest = kProtocolLowest;      ///< protocol versions that this side supports
  std::uint16_t highest = kProtocolHighest;
  std::uint64_t features = 0;  ///< a bit for each optional ability of this side
};

/// Fills `nonce` from the system's random source.
void draw_nonce(std::array<std::byte, kNonceBytes>& nonce);

/// Two sides prove to each other that they know the cluster secret, without sending it. A pure state machine:
/// bytes in, bytes out, no clock, no sockets. Integers are little-endian; every record has one fixed size:
///
///   hello    u8 magic[8]  u8 role  u8 0  u16 lowest  u16 highest  u16 0  u64 features  u8 nonce[32]
///   proof    u8 2  u8 mac[32]    mac = HMAC-SHA-256(secret, label of the role ‖ dialer's hello ‖ listener's
///   hello) refusal  u8 3
///
/// dialer → hello, listener → hello, dialer → proof, listener → proof or refusal. The labels differ by role
/// and the transcript holds both nonces, so a proof can be neither reflected nor replayed; it also holds both
/// version ranges and feature sets, so an attacker in between cannot downgrade them. The hello is the same in
/// all versions, so an error can name both versions. Holds less than 100 bytes for an unauthenticated peer.
class Handshake {
 public:
  Handshake(Role role, HandshakeOptions options);

  /// Takes bytes from the peer and returns how many of them belonged to the handshake; the rest are the first
  /// frames. Throws kDenied (one side does not know the secret of the other), kInvalid (the peer does not
  /// speak this protocol) or kUnsupported (no version in common); send take_output() even then, and close.
  std::size_t receive(BytesView bytes);
  /// The bytes to send now.
  Bytes take_output() { return std::exchange(output_, {}); }
  bool done() const { return stage_ == Stage::kDone; }

  /// The version and features both sides have; valid once done.
  std::uint16_t version() const { return version_; }
  std::uint64_t features() const { return features_; }

 private:
  enum class Stage : std::uint8_t { kHello, kProof, kDone, kFailed };
  static constexpr std::size_t kHelloBytes = 56;
  static constexpr std::size_t kMacBytes = 32;
  using Mac = std::array<std::byte, kMacBytes>;

  void take_hello();
  void take_proof();
  void agree(std::uint16_t lowest, std::uint16_t highest);
  std::size_t record_size() const;
  Mac mac_of(Role role) const;
  void send_proof();
  [[noreturn]] void fail(ErrorKind kind, const std::string& what);

  const Role role_;
  const HandshakeOptions options_;
  Stage stage_ = Stage::kHello;
  Bytes mine_;    ///< the hello that was sent
  Bytes theirs_;  ///< the hello that was received
  Bytes record_;  ///< the record that is being received
  Bytes output_;
  std::uint16_t version_ = 0;
  std::uint64_t features_ = 0;
};

}  // namespace torchspan::net
