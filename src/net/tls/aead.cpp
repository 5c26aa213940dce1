#include "net/tls/aead.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/err.h>

#include <torchspan/core/error.h>

#include "net/tls/tls_context.h"

namespace torchspan::net {
namespace {

const unsigned char* as_unsigned(const char* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* as_unsigned(char* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

class OpensslAead final : public Aead {
 public:
  OpensslAead(const EVP_CIPHER* algorithm, CipherUse use)
      : algorithm_(algorithm), encrypts_(use == CipherUse::kEncrypt ? 1 : 0), context_(EVP_CIPHER_CTX_new()) {
    if (algorithm_ == nullptr || context_ == nullptr ||
        EVP_CIPHER_get_iv_length(algorithm_) != static_cast<int>(kAeadNonceBytes)) {
      fail();
    }
  }

  std::size_t key_bytes() const override {
    return static_cast<std::size_t>(EVP_CIPHER_get_key_length(algorithm_));
  }

  void set_key(std::span<const unsigned char> key) override {
    if (EVP_CipherInit_ex(context_.get(), algorithm_, nullptr, key.data(), nullptr, encrypts_) != 1) fail();
  }

  void begin(const AeadNonce& nonce, std::span<const char> header) override {
    int size = 0;
    if (EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) != 1 ||
        EVP_CipherUpdate(context_.get(), nullptr, &size, as_unsigned(header.data()),
                         static_cast<int>(header.size())) != 1) {
      fail();
    }
  }

  void add(const char* from, char* to, std::size_t size) override {
    int written = 0;
    if (EVP_CipherUpdate(context_.get(), as_unsigned(to), &written, as_unsigned(from),
                         static_cast<int>(size)) != 1 ||
        written != static_cast<int>(size)) {
      fail();
    }
  }

  void finish(char* tag) override {
    int none = 0;
    if (EVP_CipherFinal_ex(context_.get(), nullptr, &none) != 1 ||
        EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, kAeadTagBytes, tag) != 1) {
      fail();
    }
  }

  bool verify(const char* tag) override {
    int none = 0;
    char* const expected = const_cast<char*>(tag);
    if (EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, kAeadTagBytes, expected) != 1) fail();
    const bool valid = EVP_CipherFinal_ex(context_.get(), nullptr, &none) == 1;
    if (!valid) ERR_clear_error();
    return valid;
  }

 private:
  [[noreturn]] static void fail() {
    throw Error(ErrorKind::kUnsupported, fmt::format("OpenSSL cannot encrypt records: {}", tls_reason()));
  }

  const EVP_CIPHER* algorithm_;
  const int encrypts_;
  std::unique_ptr<EVP_CIPHER_CTX, Release<EVP_CIPHER_CTX_free>> context_;
};

constexpr unsigned long kFirstOpensslWithVaes = 0x30100000;

}  // namespace

std::unique_ptr<Aead> make_openssl_aead(const EVP_CIPHER* algorithm, CipherUse use) {
  return std::make_unique<OpensslAead>(algorithm, use);
}

std::unique_ptr<Aead> make_aead(const EVP_CIPHER* algorithm, CipherUse use) {
  if (OpenSSL_version_num() < kFirstOpensslWithVaes) {
    if (auto aead = make_ipsec_mb_aead(algorithm, use)) return aead;
  }
  return make_openssl_aead(algorithm, use);
}

}  // namespace torchspan::net
