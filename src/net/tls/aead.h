#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <openssl/evp.h>
#include <span>

namespace torchspan::net {

inline constexpr std::size_t kAeadNonceBytes = 12;
inline constexpr std::size_t kAeadTagBytes = 16;
using AeadNonce = std::array<unsigned char, kAeadNonceBytes>;

enum class CipherUse : std::uint8_t { kEncrypt, kDecrypt };

/// Authenticated encryption or decryption of messages that come in parts, one message after another. Not thread-safe.
class Aead {
 public:
  virtual ~Aead() = default;
  virtual std::size_t key_bytes() const = 0;
  /// For the next messages; before the first one, it must be called.
  virtual void set_key(std::span<const unsigned char> key) = 0;
  /// Starts a message. `header` is authenticated, and not part of it. A nonce must be used once with a key.
  virtual void begin(const AeadNonce& nonce, std::span<const char> header) = 0;
  virtual void add(const char* from, char* to, std::size_t size) = 0;
  /// Ends an encrypted message: writes kAeadTagBytes.
  virtual void finish(char* tag) = 0;
  /// Ends a decrypted message; false if it is not what was encrypted.
  [[nodiscard]] virtual bool verify(const char* tag) = 0;
};

/// `algorithm`: of OpenSSL, an AEAD with nonces and tags of these sizes. Throws kUnsupported if OpenSSL lacks it.
std::unique_ptr<Aead> make_openssl_aead(const EVP_CIPHER* algorithm, CipherUse use);
/// AES-GCM by Intel's IPsec-MB library (Debian: libipsec-mb1), which is loaded on demand. Null if it is not installed, was
/// not there when this was built, or the processor lacks VAES: then it would not be faster than OpenSSL.
std::unique_ptr<Aead> make_ipsec_mb_aead(const EVP_CIPHER* algorithm, CipherUse use);
/// The faster of the two: OpenSSL uses VAES itself from 3.1 on.
std::unique_ptr<Aead> make_aead(const EVP_CIPHER* algorithm, CipherUse use);

}  // namespace torchspan::net
