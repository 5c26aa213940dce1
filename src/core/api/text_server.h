#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include <torchspan/detail/core/executor.h>

#include "core/api/descriptor.h"

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

/// What a TextServer answers.
struct TextReply {
  int status = 200;
  std::string type = "text/plain; charset=utf-8";
  std::string body = {};
};

/// Answers GET requests on a listening socket: at most 16 connections at a time, heads of at most 4 KiB, 10 seconds
/// each; a slow client does not delay others. Runs on the thread that owns the poller.
class TextServer {
 public:
  using Answer = std::function<TextReply(const std::string& path)>;
  /// Uses the tokens `first_token` to `first_token` + 2^32 - 1 of the poller, which must outlive it.
  TextServer(Executor& executor, Poller& poller, Descriptor listener, std::uint64_t first_token,
             Answer answer);
  ~TextServer();
  TextServer(const TextServer&) = delete;

  /// Handles an event; returns false if it belongs to another user of the poller.
  bool handle(const Poller::Event& event);
  /// Closes connections whose time is over, and accepts others again after a pause.
  void advance();
  Deadline next_deadline() const;

 private:
  struct Connection {
    Descriptor socket;
    Deadline until;
    std::string request = {};
    std::string response = {};
  };

  void accept_all();
  /// The process has no descriptor for the connection that waits, which the poller would report again and again.
  void pause_accepting();
  /// Returns false when the connection is over.
  bool serve(std::uint64_t token, Connection& connection);
  bool read_request(Connection& connection);
  void close(std::uint64_t token);

  Executor& executor_;
  Poller& poller_;
  const Descriptor listener_;
  const std::uint64_t first_token_;
  const Answer answer_;
  std::map<std::uint64_t, Connection> connections_;
  std::uint64_t next_token_;
  Deadline paused_until_ = Deadline::never();  ///< never: not paused
};

/// Listens on the loopback interface; sets `port` to the port, of which 0 requests any. Throws Error{kInvalid} that
/// names a port in use.
Descriptor listen_on_loopback(std::uint16_t& port);
/// Listens on a Unix socket that only this user may connect to, and replaces an old one. Throws Error{kInvalid}.
Descriptor listen_on_path(const std::string& path);

}  // namespace torchspan
