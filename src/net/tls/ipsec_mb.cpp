// The only source that knows Intel's IPsec-MB library. Built without its header, it offers nothing.
#include "net/tls/aead.h"

#ifdef TORCHSPAN_IPSEC_MB
#include <array>
#include <dlfcn.h>
#include <fmt/format.h>
#include <intel-ipsec-mb.h>
#include <openssl/crypto.h>
#include <string>

namespace torchspan::net {
namespace {

constexpr unsigned long kMajorVersion = IMB_VERSION_NUM >> 16;
constexpr std::uint64_t kNeeded =
    IMB_FEATURE_VAES | IMB_FEATURE_VPCLMULQDQ | IMB_FEATURE_AVX512_SKX | IMB_FEATURE_SELF_TEST_PASS;

/// The library's functions for this processor. Immutable, so that all threads and forked processes share it.
class IpsecMb {
 public:
  IpsecMb() {
    const std::string file = fmt::format("libIPSec_MB.so.{}", kMajorVersion);
    void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) return;
    const auto make = reinterpret_cast<decltype(&alloc_mb_mgr)>(::dlsym(library, "alloc_mb_mgr"));
    const auto choose = reinterpret_cast<decltype(&init_mb_mgr_auto)>(::dlsym(library, "init_mb_mgr_auto"));
    const auto release = reinterpret_cast<decltype(&free_mb_mgr)>(::dlsym(library, "free_mb_mgr"));
    if (make == nullptr || choose == nullptr || release == nullptr) return;
    IMB_MGR* const manager = make(0);
    if (manager == nullptr) return;
    IMB_ARCH chosen = IMB_ARCH_NONE;
    choose(manager, &chosen);
    if ((manager->features & kNeeded) == kNeeded) {
      manager_ = manager;
    } else {
      release(manager);
    }
  }

  /// Null if the library cannot be used.
  const IMB_MGR* manager() const { return manager_; }

 private:
  const IMB_MGR* manager_ = nullptr;
};

const IpsecMb& library() {
  static const IpsecMb library;
  return library;
}

/// AES-GCM with keys of 128 or 256 bits.
class IpsecMbAead final : public Aead {
 public:
  IpsecMbAead(const IMB_MGR& library, bool is_long, CipherUse use)
      : key_bytes_(is_long ? IMB_KEY_256_BYTES : IMB_KEY_128_BYTES),
        expand_key_(is_long ? library.gcm256_pre : library.gcm128_pre),
        init_(is_long ? library.gcm256_init : library.gcm128_init) {
    if (use == CipherUse::kEncrypt) {
      update_ = is_long ? library.gcm256_enc_update : library.gcm128_enc_update;
      finalize_ = is_long ? library.gcm256_enc_finalize : library.gcm128_enc_finalize;
    } else {
      update_ = is_long ? library.gcm256_dec_update : library.gcm128_dec_update;
      finalize_ = is_long ? library.gcm256_dec_finalize : library.gcm128_dec_finalize;
    }
  }
  ~IpsecMbAead() override {
    OPENSSL_cleanse(&key_, sizeof key_);
    OPENSSL_cleanse(&message_, sizeof message_);
  }
  IpsecMbAead(const IpsecMbAead&) = delete;

  std::size_t key_bytes() const override { return key_bytes_; }
  void set_key(std::span<const unsigned char> key) override { expand_key_(key.data(), &key_); }
  void begin(const AeadNonce& nonce, std::span<const char> header) override {
    init_(&key_, &message_, nonce.data(), reinterpret_cast<const std::uint8_t*>(header.data()),
          header.size());
  }
  void add(const char* from, char* to, std::size_t size) override {
    update_(&key_, &message_, reinterpret_cast<std::uint8_t*>(to),
            reinterpret_cast<const std::uint8_t*>(from), size);
  }
  void finish(char* tag) override {
    finalize_(&key_, &message_, reinterpret_cast<std::uint8_t*>(tag), kAeadTagBytes);
  }
  bool verify(const char* tag) override {
    std::array<char, kAeadTagBytes> computed;
    finish(computed.data());
    return CRYPTO_memcmp(computed.data(), tag, computed.size()) == 0;
  }

 private:
  static constexpr std::size_t kCacheLine = 64;  // the library's alignment

  const std::size_t key_bytes_;
  const aes_gcm_pre_t expand_key_;
  const aes_gcm_init_t init_;
  aes_gcm_enc_dec_update_t update_;
  aes_gcm_enc_dec_finalize_t finalize_;
  alignas(kCacheLine) gcm_key_data key_{};
  gcm_context_data message_{};
};

}  // namespace

std::unique_ptr<Aead> make_ipsec_mb_aead(const EVP_CIPHER* algorithm, CipherUse use) {
  const bool is_short = EVP_CIPHER_is_a(algorithm, "AES-128-GCM") == 1;
  const bool is_long = EVP_CIPHER_is_a(algorithm, "AES-256-GCM") == 1;
  if (!is_short && !is_long) return nullptr;
  const IMB_MGR* const manager = library().manager();
  return manager == nullptr ? nullptr : std::make_unique<IpsecMbAead>(*manager, is_long, use);
}

}  // namespace torchspan::net
#else
namespace torchspan::net {

std::unique_ptr<Aead> make_ipsec_mb_aead(const EVP_CIPHER*, CipherUse) { return nullptr; }

}  // namespace torchspan::net
#endif
