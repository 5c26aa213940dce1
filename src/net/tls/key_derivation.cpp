#include "net/tls/key_derivation.h"

#include <fmt/format.h>
#include <openssl/core_names.h>
#include <openssl/kdf.h>

#include <torchspan/core/error.h>

#include "net/tls/tls_context.h"

namespace torchspan::net {

void derive_key(BytesView secret, std::string_view label, std::span<unsigned char> key) {
  const std::unique_ptr<EVP_KDF, Release<EVP_KDF_free>> algorithm(EVP_KDF_fetch(nullptr, "HKDF", nullptr));
  const std::unique_ptr<EVP_KDF_CTX, Release<EVP_KDF_CTX_free>> context(EVP_KDF_CTX_new(algorithm.get()));
  char hash[] = "SHA256";
  const OSSL_PARAM parameters[] = {
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, hash, 0),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, const_cast<std::byte*>(secret.data()),
                                        secret.size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, const_cast<char*>(label.data()), label.size()),
      OSSL_PARAM_construct_end()};
  if (context == nullptr || EVP_KDF_derive(context.get(), key.data(), key.size(), parameters) != 1) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("OpenSSL cannot derive a key with HKDF-SHA-256: {}", tls_reason()));
  }
}

}  // namespace torchspan::net
