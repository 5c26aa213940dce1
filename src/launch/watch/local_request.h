#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "core/api/descriptor.h"

namespace torchspan::launch {

/// A request to a process of this host over its Unix socket, without blocking.
class LocalRequest {
 public:
  /// Connects and sends the request, which fits into the socket's buffer.
  LocalRequest(const std::string& socket_path, const std::string& path);

  /// For a poller, while it is not over().
  int descriptor() const { return socket_.get(); }
  /// Reads what is there.
  void read();
  /// Whether nothing more will be read.
  bool over() const { return over_; }
  /// The answer; empty if there is none, or not all of it.
  std::string_view body() const;
  /// The process that listens; 0 if it is unknown.
  std::int64_t process() const { return process_; }

 private:
  Descriptor socket_;
  std::string answer_;
  std::int64_t process_ = 0;
  bool over_ = false;
};

}  // namespace torchspan::launch
