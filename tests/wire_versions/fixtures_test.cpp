// The bytes of release 0.1: today's encoders write them, today's decoders read them, and none is missing.
#include "tests/wire_versions/fixtures.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <regex>
#include <set>
#include <sstream>

#include <torchspan/detail/wire/frame.h>

namespace torchspan::wire_versions::fixtures_test {
namespace {

TEST(BytesOf01, OfMessagesBetweenWorkersAreReadAndWritten) {
  check("messages.txt", message_bytes::fixtures());
}
TEST(BytesOf01, OfCallsAreReadAndWritten) { check("calls.txt", call_bytes::fixtures()); }
TEST(BytesOf01, OfTheStoreAreReadAndWritten) { check("store.txt", store_bytes::fixtures()); }
TEST(BytesOf01, OfConnectionsAreReadAndWritten) { check("connections.txt", connection_bytes::fixtures()); }
TEST(BytesOf01, OfFilesAndLaunchersAreReadAndWritten) { check("files.txt", file_bytes::fixtures()); }

std::set<std::string> keys_of(const std::string& file) {
  std::set<std::string> keys;
  for (const auto& [key, parts] : read_file(file)) keys.insert(key);
  return keys;
}

constexpr const char* kAddOne =
    ": add it to the fixtures in tests/wire_versions, then run TORCHSPAN_WRITE_FIXTURES=1 "
    "build/dev/bin/wire_versions_test; a message that release 0.1 does not have also needs a feature bit or "
    "a new "
    "version (docs/wire.md, 'Versions and features')";

/// tools/check-wire keeps these tables equal to the structs of the sources.
TEST(BytesOf01, ExistForEveryStructInTheTablesOfTheDocumentation) {
  const std::set<std::string> keys = keys_of("messages.txt");
  std::istringstream document(read_source("docs/wire.md"));
  const std::regex section("<!-- messages of (\\w+) -->");
  const std::regex row("\\| (?:0x[0-9A-F]{4})? ?\\| (\\w+).*");
  std::string room;
  std::size_t count = 0;
  for (std::string line; std::getline(document, line);) {
    std::smatch match;
    if (std::regex_match(line, match, section)) {
      room = match[1];
    } else if (line == "<!-- end -->") {
      room.clear();
    } else if (line.resize(std::min<std::size_t>(line.size(), 80));
               !room.empty() && std::regex_match(line, match, row)) {
      ++count;
      const std::string key = room + "/" + match[1].str();
      EXPECT_TRUE(keys.contains(key)) << "docs/wire.md has " << key << ", which has no bytes" << kAddOne;
    }
  }
  EXPECT_GT(count, 80u) << "the tables were not found";
}

TEST(BytesOf01, ExistForEveryMessageTypeOfTheDocumentation) {
  std::set<int> types;
  for (const char* file : {"messages.txt", "calls.txt"}) {
    for (const auto& [key, parts] : read_file(file))
      types.insert(static_cast<int>(wire::decode_frame(parts.at(0)).header.type));
  }
  std::istringstream document(read_source("docs/wire.md"));
  const std::regex number("\\| (0x[0-9A-F]{4})(?:, (0x[0-9A-F]{4}))? \\|.*");
  std::size_t count = 0;
  for (std::string line; std::getline(document, line);) {
    std::smatch match;
    if (!std::regex_match(line, match, number)) continue;
    for (const std::string& text : {match[1].str(), match[2].str()}) {
      if (text.empty()) continue;
      ++count;
      EXPECT_TRUE(types.contains(std::stoi(text, nullptr, 16)))
          << "no fixture has the message type " << text << kAddOne;
    }
  }
  EXPECT_GT(count, 50u) << "the tables were not found";
}

TEST(BytesOf01, ExistForEveryMessageOfTheStore) {
  std::set<std::string> types;
  for (const std::string& key : keys_of("store.txt")) types.insert(key.substr(0, key.find('/')));
  std::istringstream source(read_source("src/rendezvous/messages/messages.h"));
  const std::regex number(".* kType = (\\d+);");
  std::size_t count = 0;
  for (std::string line; std::getline(source, line);) {
    std::smatch match;
    if (!std::regex_match(line, match, number)) continue;
    ++count;
    EXPECT_TRUE(types.contains(match[1])) << "the store's message " << match[1] << " has no bytes" << kAddOne;
  }
  EXPECT_GE(count, 16u) << "the messages were not found";
}

}  // namespace
}  // namespace torchspan::wire_versions::fixtures_test
