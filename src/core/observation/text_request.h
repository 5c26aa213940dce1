#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace torchspan {

/// What a client of a TextServer sent.
struct TextRequest {
  int status = 200;  ///< else the HTTP status of the refusal
  std::string path;  ///< without the query
};

/// Parses the head of an HTTP request; nullopt while it is incomplete. Only GET is served.
std::optional<TextRequest> parse_text_request(std::string_view bytes);

/// Encodes an HTTP/1.0 response, after which the server closes the connection.
std::string encode_text_response(int status, std::string_view type, std::string_view body);

}  // namespace torchspan
