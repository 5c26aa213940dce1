#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/net/secret.h>

#include "core/api/descriptor.h"
#include "core/api/throw_invalid.h"
#include "core/api/write_all.h"

namespace torchspan::net {
namespace {

constexpr std::size_t kLeastBytes = 16;
constexpr std::size_t kRandomBytes = 32;
constexpr std::size_t kLargestFile = 4096;
constexpr mode_t kOthers = 077;

std::string how_to_make(const std::string& path) {
  const std::string folder = path.substr(0, path.rfind('/'));
  const bool there = folder == path || folder.empty() || ::access(folder.c_str(), F_OK) == 0;
  return fmt::format("make one with: (umask 077; {}openssl rand -hex 32 > '{}')",
                     there ? "" : fmt::format("mkdir -p '{}'; ", folder), path);
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/// The bytes of the hexadecimal number `text`; nullopt if it is not one.
Bytes from_hex(std::string_view text) {
  if (text.size() % 2 != 0) return {};
  Bytes bytes;
  for (std::size_t i = 0; i < text.size(); i += 2) {
    const int high = hex_digit(text[i]), low = hex_digit(text[i + 1]);
    if (high < 0 || low < 0) return {};
    bytes.push_back(static_cast<std::byte>(high * 16 + low));
  }
  return bytes;
}

std::string to_hex(BytesView bytes) {
  std::string text;
  for (std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

std::string read_small_file(int fd, const std::string& path) {
  std::array<char, kLargestFile + 1> raw;
  std::size_t size = 0;
  while (size < raw.size()) {
    const ssize_t got = ::read(fd, raw.data() + size, raw.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw_invalid("secret file '{}' cannot be read: {}", path, std::strerror(errno));
    }
    if (got == 0) return std::string(raw.data(), size);
    size += static_cast<std::size_t>(got);
  }
  throw_invalid("secret file '{}' is larger than {} bytes, so it is not a secret; {}", path, kLargestFile,
                how_to_make(path));
}

/// Removes a file when it goes out of scope.
struct Removal {
  std::string path;
  ~Removal() { ::unlink(path.c_str()); }
};

}  // namespace

Secret Secret::from_bytes(Bytes bytes) {
  if (bytes.size() < kLeastBytes) {
    throw_invalid("a cluster secret has at least {} bytes, this one has {}", kLeastBytes, bytes.size());
  }
  Secret secret;
  secret.bytes_ = std::move(bytes);
  return secret;
}

Secret Secret::random() {
  Bytes bytes(kRandomBytes);
  if (RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(bytes.size())) != 1) {
    throw Error(ErrorKind::kUnsupported, "the system's random source returned no bytes for a cluster secret");
  }
  return from_bytes(std::move(bytes));
}

Secret Secret::from_file(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) {
    throw_invalid("secret file '{}' cannot be opened: {}; {}", path, std::strerror(errno), how_to_make(path));
  }
  struct stat about {};
  if (::fstat(file.get(), &about) != 0 || !S_ISREG(about.st_mode)) {
    throw_invalid("secret file '{}' is not a regular file; {}", path, how_to_make(path));
  }
  if ((about.st_mode & kOthers) != 0) {
    throw Error(
        ErrorKind::kDenied,
        fmt::format("secret file '{0}' has mode {1:04o}, so other users may use it; run: chmod 600 '{0}' "
                    "(and make a new secret if other users had access)",
                    path, about.st_mode & 07777));
  }
  if (about.st_uid != ::geteuid()) {
    throw Error(ErrorKind::kDenied,
                fmt::format("secret file '{}' belongs to user {}, not to this user ({}); {}", path,
                            about.st_uid, ::geteuid(), how_to_make(path)));
  }
  std::string text = read_small_file(file.get(), path);
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  Bytes bytes = from_hex(text);
  if (bytes.empty()) {
    const BytesView raw = std::as_bytes(std::span(text.data(), text.size()));
    bytes.assign(raw.begin(), raw.end());
  }
  if (bytes.size() < kLeastBytes) {
    throw_invalid("secret file '{}' holds {} bytes, a secret has at least {}; {}", path, bytes.size(),
                  kLeastBytes, how_to_make(path));
  }
  return from_bytes(std::move(bytes));
}

Secret Secret::derived(std::string_view use) const {
  if (empty()) throw_invalid("nothing can be derived from an empty cluster secret");
  Bytes bytes(kRandomBytes);
  unsigned int size = 0;
  if (HMAC(EVP_sha256(), bytes_.data(), static_cast<int>(bytes_.size()),
           reinterpret_cast<const unsigned char*>(use.data()), use.size(),
           reinterpret_cast<unsigned char*>(bytes.data()), &size) == nullptr ||
      size != bytes.size()) {
    throw Error(ErrorKind::kUnsupported, "OpenSSL cannot compute HMAC-SHA-256 here");
  }
  return from_bytes(std::move(bytes));
}

void Secret::write_file(const std::string& path) const {
  if (empty()) throw_invalid("an empty secret cannot be written to a file: use Secret::random()");
  // Written to another file and linked into place: no process reads half a secret, and one of two writers
  // wins.
  const std::string aside = path + "." + to_hex(Secret::random().bytes().first(8));
  Descriptor file(::open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) {
    throw_invalid("secret file '{}' cannot be created: {}; does its directory exist, and is it writable?",
                  path, std::strerror(errno));
  }
  const Removal removal{aside};
  if (const int reason = write_all(file.get(), to_hex(bytes_) + "\n"); reason != 0)
    throw_invalid("secret file '{}' cannot be written: {}", path, std::strerror(reason));
  if (::fsync(file.get()) != 0 || ::link(aside.c_str(), path.c_str()) != 0) {
    const int reason = errno;
    throw_invalid("secret file '{}' cannot be created: {}{}", path, std::strerror(reason),
                  reason == EEXIST ? "; read it, or remove it first" : "");
  }
}

}  // namespace torchspan::net
