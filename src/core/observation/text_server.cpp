#include "core/api/text_server.h"

#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

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

namespace {

constexpr std::size_t kMostConnections = 16;
constexpr Duration kConnectionLimit = std::chrono::seconds(10);
constexpr Duration kAcceptPause = std::chrono::milliseconds(200);

Descriptor open_socket(int family) {
  return Descriptor::not_inherited(
      [family] { return socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}

}  // namespace

Descriptor listen_on_loopback(std::uint16_t& port) {
  Descriptor listener = open_socket(AF_INET);
  const int yes = 1;
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  socklen_t size = sizeof address;
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener.get(), static_cast<int>(kMostConnections)) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw_invalid(
        "metrics cannot be served at 127.0.0.1:{}: {}; choose another TORCHSPAN_METRICS_PORT (torchspan run "
        "--metrics-port)",
        port, std::strerror(errno));
  }
  port = ntohs(address.sin_port);
  return listener;
}

Descriptor listen_on_path(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    throw_invalid("the socket's path '{}' is longer than {} characters: set TMPDIR to a shorter one", path,
                  sizeof address.sun_path - 1);
  }
  path.copy(static_cast<char*>(address.sun_path), path.size());
  Descriptor listener = open_socket(AF_UNIX);
  unlink(path.c_str());
  // No client can connect before listen().
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      chmod(path.c_str(), 0600) != 0 || listen(listener.get(), static_cast<int>(kMostConnections)) != 0) {
    throw_invalid("the socket '{}' cannot be created: {}", path, std::strerror(errno));
  }
  return listener;
}

TextServer::TextServer(Executor& executor, Poller& poller, Descriptor listener, std::uint64_t first_token,
                       Answer answer)
    : executor_(executor),
      poller_(poller),
      listener_(std::move(listener)),
      first_token_(first_token),
      answer_(std::move(answer)),
      next_token_(first_token + 1) {
  poller_.add(listener_.get(), first_token_, false);
}

TextServer::~TextServer() {
  while (!connections_.empty()) close(connections_.begin()->first);
  if (paused_until_.is_never()) poller_.remove(listener_.get());
}

bool TextServer::handle(const Poller::Event& event) {
  if (event.token == first_token_) {
    accept_all();
    return true;
  }
  const auto found = connections_.find(event.token);
  if (found == connections_.end()) return event.token > first_token_ && event.token < next_token_;
  if (!serve(event.token, found->second)) close(event.token);
  return true;
}

void TextServer::accept_all() {
  for (;;) {
    Descriptor socket = Descriptor::not_inherited(
        [this] { return accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (!socket && (errno == EMFILE || errno == ENFILE)) return pause_accepting();
    if (!socket) return;
    if (connections_.size() == kMostConnections) continue;  // closes it
    const std::uint64_t token = next_token_++;
    poller_.add(socket.get(), token, false);
    connections_.emplace(token, Connection{std::move(socket), executor_.deadline_in(kConnectionLimit)});
  }
}

void TextServer::pause_accepting() {
  poller_.remove(listener_.get());
  paused_until_ = executor_.deadline_in(kAcceptPause);
}

bool TextServer::read_request(Connection& connection) {
  std::array<char, 2048> place;
  for (;;) {
    const ssize_t size = recv(connection.socket.get(), place.data(), place.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return true;
    if (size <= 0) return false;
    connection.request.append(place.data(), static_cast<std::size_t>(size));
    const auto request = parse_text_request(connection.request);
    if (!request) continue;
    TextReply reply{.status = request->status, .body = "only GET is served\n"};
    if (reply.status == 200) reply = answer_(request->path);
    connection.response = encode_text_response(reply.status, reply.type, reply.body);
    return true;
  }
}

bool TextServer::serve(std::uint64_t token, Connection& connection) {
  if (connection.response.empty() && !read_request(connection)) return false;
  while (!connection.response.empty()) {
    const ssize_t size =
        send(connection.socket.get(), connection.response.data(), connection.response.size(), MSG_NOSIGNAL);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) {
      poller_.change(connection.socket.get(), token, true);
      return true;
    }
    if (size <= 0) return false;
    connection.response.erase(0, static_cast<std::size_t>(size));
    if (connection.response.empty()) return false;  // answered
  }
  return true;
}

void TextServer::close(std::uint64_t token) {
  const auto found = connections_.find(token);
  poller_.remove(found->second.socket.get());
  connections_.erase(found);
}

void TextServer::advance() {
  const TimePoint now = executor_.now();
  if (paused_until_.passed(now)) {
    paused_until_ = Deadline::never();
    poller_.add(listener_.get(), first_token_, false);
  }
  for (auto at = connections_.begin(); at != connections_.end();) {
    const std::uint64_t token = at->first;
    const bool over = at->second.until.passed(now);
    ++at;
    if (over) close(token);
  }
}

Deadline TextServer::next_deadline() const {
  Deadline next = paused_until_;
  for (const auto& [token, connection] : connections_) next = earlier(next, connection.until);
  return next;
}

}  // namespace torchspan
