#pragma once

namespace torchspan::net {

/// How large the kernel's buffers of TCP connections become for large messages: as large as the system allows,
/// where that is more than its own adjustment would reach. Reads the system's settings once.
class SocketBuffers {
 public:
  SocketBuffers();
  /// Only for peers that proved themselves, because the kernel's memory is limited.
  void widen(int socket) const;

 private:
  int send_;  ///< bytes; 0: the system's adjustment
  int receive_;
};

}  // namespace torchspan::net
