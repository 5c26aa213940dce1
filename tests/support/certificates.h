#pragma once
#include <cstdio>
#include <memory>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <stdexcept>
#include <string>

namespace torchspan::testing {

/// A certificate authority for one test, and the certificates that it signs, as PEM files in `folder`.
class TestAuthority {
 public:
  TestAuthority(std::string folder, const std::string& name) : folder_(std::move(folder)), name_(name) {
    certificate_ = make(name, key_.get(), nullptr, "");
    write_certificate(authority_file(), certificate_.get());
  }

  std::string authority_file() const { return folder_ + "/" + name_ + ".authority.pem"; }
  std::string certificate_file(const std::string& who) const { return file(who, "certificate"); }
  std::string key_file(const std::string& who) const { return file(who, "key"); }

  /// Writes a key and a certificate for `who`, valid for `names`, e.g. "DNS:localhost,IP:127.0.0.1".
  /// From `from` to `until`, in seconds from now.
  void issue(const std::string& who, const std::string& names, long from = -3600, long until = 3600) const {
    const Key key(EVP_EC_gen("P-256"));
    const Certificate certificate = make(who, key.get(), certificate_.get(), names);
    X509_gmtime_adj(X509_getm_notBefore(certificate.get()), from);
    X509_gmtime_adj(X509_getm_notAfter(certificate.get()), until);
    X509_sign(certificate.get(), key_.get(), EVP_sha256());
    write_certificate(certificate_file(who), certificate.get());
    const File out(std::fopen(key_file(who).c_str(), "w"));
    if (!out || PEM_write_PrivateKey(out.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr) != 1) {
      throw std::runtime_error("cannot write " + key_file(who));
    }
  }

 private:
  template <auto kFree>
  struct Free {
    template <class T>
    void operator()(T* object) const {
      kFree(object);
    }
  };
  using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY_free>>;
  using Certificate = std::unique_ptr<X509, Free<X509_free>>;
  using File = std::unique_ptr<std::FILE, Free<std::fclose>>;

  std::string file(const std::string& who, const std::string& kind) const {
    return folder_ + "/" + name_ + "." + who + "." + kind + ".pem";
  }

  static void write_certificate(const std::string& path, X509* certificate) {
    const File out(std::fopen(path.c_str(), "w"));
    if (!out || PEM_write_X509(out.get(), certificate) != 1) throw std::runtime_error("cannot write " + path);
  }

  static void extend(X509* certificate, int kind, const char* value) {
    const std::unique_ptr<X509_EXTENSION, Free<X509_EXTENSION_free>> extension(
        X509V3_EXT_conf_nid(nullptr, nullptr, kind, value));
    X509_add_ext(certificate, extension.get(), -1);
  }

  /// Signs a certificate; without an issuer, the authority's own.
  Certificate make(const std::string& who, EVP_PKEY* key, X509* issuer, const std::string& names) const {
    Certificate certificate(X509_new());
    X509* raw = certificate.get();
    X509_set_version(raw, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(raw), issuer == nullptr ? 1 : 2);
    X509_gmtime_adj(X509_getm_notBefore(raw), -3600);
    X509_gmtime_adj(X509_getm_notAfter(raw), 3600);
    X509_set_pubkey(raw, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(raw), "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(who.c_str()), -1, -1, 0);
    X509_set_issuer_name(raw, X509_get_subject_name(issuer == nullptr ? raw : issuer));
    extend(raw, NID_basic_constraints, issuer == nullptr ? "critical,CA:TRUE" : "CA:FALSE");
    if (!names.empty()) extend(raw, NID_subject_alt_name, names.c_str());
    X509_sign(raw, key_.get(), EVP_sha256());
    return certificate;
  }

  const std::string folder_;
  const std::string name_;
  const Key key_{EVP_EC_gen("P-256")};
  Certificate certificate_;
};

}  // namespace torchspan::testing
