#pragma once
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include "core/api/descriptor.h"
#include "net/api/tls.h"

/// What the suites of two hosts share: each host is a process with one transport, and they talk through pipes.
namespace torchspan::net::transport_hosts {

/// Counts what arrives; echoes headers if asked to.
class Listening : public Handler {
 public:
  void on_accepted(const std::shared_ptr<Channel>& channel) override { peer = channel; }
  void on_message(const std::shared_ptr<Channel>& channel, Message message) override {
    ++messages;
    if (echo) channel->send(message.header, {});
  }
  void on_closed(const std::shared_ptr<Channel>&, const Error& reason) override { closed.push_back(reason); }

  void on_refused(const std::string&, const Error& reason) override { refused(reason); }

  bool echo = false;
  std::function<void(const Error&)> refused = [](const Error&) {};
  std::size_t messages = 0;
  std::shared_ptr<Channel> peer;
  std::vector<Error> closed;
};

/// One end of a pipe pair: lines to and from the other process.
class Wire {
 public:
  Wire(int in, int out) : in_(in), out_(out) {}
  void write_line(const std::string& line) const {
    const std::string text = line + "\n";
    if (::write(out_.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) std::abort();
  }
  std::string read_line() const {
    std::string line;
    for (char c; ::read(in_.get(), &c, 1) == 1 && c != '\n';) line += c;
    return line;
  }

 private:
  Descriptor in_, out_;
};

inline std::unique_ptr<Transport> make_transport(Executor& executor, Handler& handler,
                                                 Duration dead_after = TlsOptions().dead_after,
                                                 TransportOptions options = {}) {
  options.secret = Secret::from_bytes(Bytes(32, std::byte{'k'}));
  return make_tls_transport(executor, handler, std::move(options), {.dead_after = dead_after});
}

/// Drives the transport until something has happened, for at most 30 s; returns whether it has.
inline bool drive_until(Executor& executor, Transport& transport, const std::function<bool()>& happened) {
  const Deadline deadline = executor.deadline_in(std::chrono::seconds(30));
  while (!happened()) {
    if (deadline.passed(executor.now())) return false;
    if (!transport.poll())
      transport.wait(earlier(deadline, executor.deadline_in(std::chrono::milliseconds(50))));
  }
  return true;
}

}  // namespace torchspan::net::transport_hosts
