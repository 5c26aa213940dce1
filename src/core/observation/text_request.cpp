#include "core/observation/text_request.h"

#include <fmt/format.h>

namespace torchspan {
namespace {

constexpr std::size_t kLongestHead = 4096;

std::string_view reason_of(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    default:
      return "Error";
  }
}

}  // namespace

std::optional<TextRequest> parse_text_request(std::string_view bytes) {
  const auto end = bytes.find("\r\n\r\n");
  if (end == std::string_view::npos) {
    return bytes.size() > kLongestHead ? std::optional(TextRequest{400, ""}) : std::nullopt;
  }
  const std::string_view line = bytes.substr(0, bytes.find("\r\n"));
  const auto first = line.find(' ');
  const auto second = line.find(' ', first == std::string_view::npos ? first : first + 1);
  if (second == std::string_view::npos || !line.substr(second + 1).starts_with("HTTP/1.")) {
    return TextRequest{400, ""};
  }
  if (line.substr(0, first) != "GET") return TextRequest{405, ""};
  const std::string_view target = line.substr(first + 1, second - first - 1);
  return TextRequest{200, std::string(target.substr(0, target.find('?')))};
}

std::string encode_text_response(int status, std::string_view type, std::string_view body) {
  return fmt::format(
      "HTTP/1.0 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}", status,
      reason_of(status), type, body.size(), body);
}

}  // namespace torchspan
