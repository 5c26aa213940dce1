#include "net/network/place.h"

#include <algorithm>
#include <fmt/format.h>
#include <fstream>
#include <string_view>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

constexpr std::string_view kNear = "unix:";
constexpr std::string_view kFar[] = {"tls:", "ucx:"};

}  // namespace

std::string NetworkPlace::text() const {
  std::string text = near;
  if (!mark.empty()) text += "@" + mark;
  if (!far.empty()) text += (text.empty() ? "" : ",") + far;
  return text;
}

NetworkPlace parse_network_place(const std::string& text) {
  NetworkPlace place;
  for (const std::string_view far : kFar) {
    if (text.starts_with(far)) {
      place.far = text;
      return place;
    }
  }
  if (!text.starts_with(kNear)) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("'{}' is not an address of this transport: write unix:/path,tls:host:port (or ucx:), "
                    "or one of the two",
                    text));
  }
  std::size_t comma = std::string::npos;
  for (const std::string_view far : kFar) {
    const std::size_t found = text.rfind("," + std::string(far));
    if (found != std::string::npos && (comma == std::string::npos || found > comma)) comma = found;
  }
  place.near = text.substr(0, comma);
  if (comma != std::string::npos) place.far = text.substr(comma + 1);
  const std::size_t at = place.near.rfind('@');
  if (at != std::string::npos && place.near.find('/', at) == std::string::npos) {
    place.mark = place.near.substr(at + 1);
    place.near.resize(at);
  }
  return place;
}

std::string boot_mark() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  std::erase(id, '-');
  return id;
}

}  // namespace torchspan::net
