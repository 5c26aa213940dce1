#include "net/tls/record_cipher.h"

#include <algorithm>
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <string_view>
#include <vector>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

constexpr std::string_view kRecordKeyLabel = "torchspan record key, version 1";

const unsigned char* as_unsigned(const char* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* as_unsigned(char* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

}  // namespace

RecordCipher::RecordCipher(const EVP_CIPHER* algorithm, const KeySecret& secret, CipherUse use)
    : algorithm_(algorithm), use_(use), secret_(secret), context_(EVP_CIPHER_CTX_new()) {
  if (algorithm_ == nullptr || context_ == nullptr ||
      EVP_CIPHER_get_iv_length(algorithm_) != static_cast<int>(base_.size())) {
    fail();
  }
  renew_key();
}

RecordCipher::~RecordCipher() { OPENSSL_cleanse(secret_.data(), secret_.size()); }

void RecordCipher::fail() {
  throw Error(ErrorKind::kUnsupported, fmt::format("OpenSSL cannot encrypt records: {}", tls_reason()));
}

void RecordCipher::renew_key() {
  const auto key_size = static_cast<std::size_t>(EVP_CIPHER_get_key_length(algorithm_));
  std::vector<unsigned char> derived(secret_.size() + key_size + base_.size());
  derive_key(std::as_bytes(std::span(secret_)), kRecordKeyLabel, derived);
  const auto* key = derived.data() + secret_.size();
  std::copy_n(derived.data(), secret_.size(), secret_.begin());
  std::copy_n(key + key_size, base_.size(), base_.begin());
  number_ = 0;
  const int encrypts = use_ == CipherUse::kEncrypt ? 1 : 0;
  const int done = EVP_CipherInit_ex(context_.get(), algorithm_, nullptr, key, base_.data(), encrypts);
  OPENSSL_cleanse(derived.data(), derived.size());
  if (done != 1) fail();
}

void RecordCipher::begin(const std::array<char, kRecordHeaderBytes>& header) {
  auto nonce = base_;
  for (std::size_t i = 0; i < sizeof number_; ++i) {
    nonce[nonce.size() - 1 - i] ^= static_cast<unsigned char>(number_ >> (8 * i));
  }
  ++number_;
  int size = 0;
  if (EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) != 1 ||
      EVP_CipherUpdate(context_.get(), nullptr, &size, as_unsigned(header.data()), header.size()) != 1) {
    fail();
  }
}

void RecordCipher::add(const char* from, char* to, std::size_t size) {
  int written = 0;
  if (EVP_CipherUpdate(context_.get(), as_unsigned(to), &written, as_unsigned(from),
                       static_cast<int>(size)) != 1 ||
      written != static_cast<int>(size)) {
    fail();
  }
}

void RecordCipher::finish(char* tag) {
  int none = 0;
  if (EVP_CipherFinal_ex(context_.get(), nullptr, &none) != 1 ||
      EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, kRecordTagBytes, tag) != 1) {
    fail();
  }
}

bool RecordCipher::verify(const char* tag) {
  int none = 0;
  if (EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, kRecordTagBytes, const_cast<char*>(tag)) !=
      1)
    fail();
  const bool valid = EVP_CipherFinal_ex(context_.get(), nullptr, &none) == 1;
  if (!valid) ERR_clear_error();
  return valid;
}

}  // namespace torchspan::net
