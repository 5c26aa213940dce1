#pragma once
#include <string>
#include <string_view>

#include <torchspan/core/bytes.h>

namespace torchspan::net {

/// The cluster secret: at least 16 bytes that every worker of one job knows and never sends. An empty one is
/// allowed only on transports that stay inside the process (sim).
class Secret {
 public:
  Secret() = default;
  /// Throws kInvalid for fewer than 16 bytes.
  static Secret from_bytes(Bytes bytes);
  /// 32 bytes from the system's random source.
  static Secret random();
  /// Reads a file that only its owner may read (mode 0600 or stricter). Throws kDenied for a file others can
  /// read, kInvalid for one that is missing or too short; the text says which command makes a good one.
  static Secret from_file(const std::string& path);
  /// Writes the secret to a new file of mode 0600. Throws kInvalid when the file exists or cannot be made.
  void write_file(const std::string& path) const;

  /// 32 bytes for one use of this secret, from which neither it nor those for other uses can be told. Throws
  /// kInvalid for an empty one.
  Secret derived(std::string_view use) const;

  bool empty() const { return bytes_.empty(); }
  BytesView bytes() const { return bytes_; }

 private:
  Bytes bytes_;
};

}  // namespace torchspan::net
