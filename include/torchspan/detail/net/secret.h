#pragma once
#include <string>
#include <string_view>

#include <torchspan/core/bytes.h>

namespace torchspan::net {

/// Cluster secret: at least 16 bytes that all workers of one job know and never send. May be empty only on
/// in-process transports (sim).
class Secret {
 public:
  Secret() = default;
  /// Throws kInvalid for fewer than 16 bytes.
  static Secret from_bytes(Bytes bytes);
  /// 32 bytes from the system's random source.
  static Secret random();
  /// Reads a file with mode 0600 or stricter. Throws kDenied if others can read it, and kInvalid if it is
  /// missing or too short; the message gives the command that creates one.
  static Secret from_file(const std::string& path);
  /// Writes a new file with mode 0600. Throws kInvalid if it exists or cannot be created.
  void write_file(const std::string& path) const;

  /// Derives 32 bytes for one use of this secret, which reveal neither the secret nor those of other uses.
  /// Throws kInvalid for an empty secret.
  Secret derived(std::string_view use) const;

  bool empty() const { return bytes_.empty(); }
  BytesView bytes() const { return bytes_; }

 private:
  Bytes bytes_;
};

}  // namespace torchspan::net
