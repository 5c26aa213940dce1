#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>

/// The bytes that release 0.1 writes, in tests/wire_versions/0.1. A line of a file is a key and byte strings in
/// hexadecimal, such as a frame and its segments.
namespace torchspan::wire_versions {

using Parts = std::vector<Bytes>;

/// Something that is written, and how to read it.
struct Fixture {
  std::string key;
  Parts written;                               ///< by today's encoder, for the version of the file
  std::function<Parts(const Parts&)> rewrite;  ///< reads bytes, and writes what it has read
};
using Fixtures = std::vector<Fixture>;

/// The version of every protocol that the files hold.
inline constexpr std::uint16_t kFilesVersion = 1;

std::map<std::string, Parts> read_file(const std::string& name);
/// The text of a file of the repository.
std::string read_source(const std::string& path);
/// Today's encoders write the bytes of the file, and today's decoders read them. Every fixture has a line, and every
/// line a fixture. With TORCHSPAN_WRITE_FIXTURES=1, adds missing lines; never changes one.
void check(const std::string& name, const Fixtures& fixtures);

/// Frames of the messages between workers, by room and name, as in "rpc/Hello".
namespace message_bytes {
Fixtures fixtures();
}
/// Frames of the messages that have no struct, by type: calls and creations. Runs a conversation.
namespace call_bytes {
Fixtures fixtures();
}
/// Messages of the store, by number and name.
namespace store_bytes {
Fixtures fixtures();
}
/// Handshakes and framing of transports, and messages of groups between hosts.
namespace connection_bytes {
Fixtures fixtures();
}
/// A trace file, a checkpoint's manifest, and what launchers of several hosts tell each other.
namespace file_bytes {
Fixtures fixtures();
}

}  // namespace torchspan::wire_versions
