#include "tests/wire_versions/fixtures.h"

#include <cstdlib>
#include <fstream>
#include <gtest/gtest.h>
#include <sstream>

#include "tests/wire_versions/source_folder.h"

namespace torchspan::wire_versions {
namespace {

constexpr const char* kWhatToDo =
    "\nReleases have these bytes, so they must not change. Keep this encoding, and add what is new in a "
    "blob, or in a "
    "message of a new type, with a feature bit (docs/wire.md, 'Versions and features'). If that is "
    "impossible, raise "
    "the version in torchspan/detail/core/protocol.h, encode by the version that is common with the "
    "receiver, and add "
    "a folder with the new bytes beside tests/wire_versions/0.1. Only what no release has written may be "
    "replaced.";

std::string path_of(const std::string& name) { return source_folder() + "/tests/wire_versions/0.1/" + name; }

std::string to_hex(BytesView bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[static_cast<unsigned>(byte) >> 4];
    text += kDigits[static_cast<unsigned>(byte) & 15];
  }
  return text.empty() ? "-" : text;
}

Bytes from_hex(const std::string& text) {
  Bytes bytes;
  if (text == "-") return bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return bytes;
}

std::string to_line(const Parts& parts) {
  std::string line;
  for (const Bytes& part : parts) line += " " + to_hex(part);
  return line;
}

void add_line(const std::string& name, const Fixture& fixture) {
  std::ofstream(path_of(name), std::ios::app) << fixture.key << to_line(fixture.written) << "\n";
}

}  // namespace

std::string read_source(const std::string& path) {
  std::ifstream file(source_folder() + "/" + path);
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_FALSE(text.str().empty()) << path << " cannot be read";
  return text.str();
}

std::map<std::string, Parts> read_file(const std::string& name) {
  std::map<std::string, Parts> lines;
  std::ifstream file(path_of(name));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key, word;
    words >> key;
    Parts parts;
    while (words >> word) parts.push_back(from_hex(word));
    EXPECT_TRUE(lines.emplace(key, parts).second) << name << " has two lines for " << key;
  }
  return lines;
}

void check(const std::string& name, const Fixtures& fixtures) {
  std::map<std::string, Parts> lines = read_file(name);
  const bool writes = std::getenv("TORCHSPAN_WRITE_FIXTURES") != nullptr;
  for (const Fixture& fixture : fixtures) {
    const auto line = lines.find(fixture.key);
    if (line == lines.end()) {
      if (writes) {
        add_line(name, fixture);
        continue;
      }
      ADD_FAILURE() << "tests/wire_versions/0.1/" << name << " lacks " << fixture.key
                    << ". If no released version is affected, add its bytes with TORCHSPAN_WRITE_FIXTURES=1 "
                       "build/dev/bin/wire_versions_test; otherwise it needs a feature bit or a new version."
                    << kWhatToDo;
      continue;
    }
    EXPECT_EQ(to_line(fixture.written), to_line(line->second))
        << "today's encoder writes other bytes for " << fixture.key << kWhatToDo;
    try {
      EXPECT_EQ(to_line(fixture.rewrite(line->second)), to_line(line->second))
          << "today's decoder reads other values from " << fixture.key << kWhatToDo;
    } catch (const Error& error) {
      ADD_FAILURE() << "today's decoder rejects " << fixture.key << ": " << error.what() << kWhatToDo;
    }
    lines.erase(line);
  }
  for (const auto& [key, parts] : lines)
    ADD_FAILURE() << key << " is in " << name << ", but nothing reads it any more" << kWhatToDo;
}

}  // namespace torchspan::wire_versions
