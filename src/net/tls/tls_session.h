#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <sys/types.h>
#include <sys/uio.h>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/mutex.h>

#include "core/api/descriptor.h"
#include "net/tls/tls_context.h"

namespace torchspan::net {

/// TLS over one non-blocking socket, which it owns. One thread does the handshake and reads, any thread
/// writes; a call holds the lock for at most kBatch bytes. Until trust() is called, the session accepts few
/// bytes from the peer and uses little memory.
class TlsSession {
 public:
  struct Start {
    Role role;
    std::string peer;  ///< name of the peer in errors
    std::string host;  ///< that the certificate must name, if that is checked
    /// AES-128-GCM may protect 2^24.5 full records under one key (RFC 8446, 5.5); sessions change it long
    /// before.
    std::uint64_t bytes_per_key = std::uint64_t{64} << 30;
  };
  TlsSession(std::shared_ptr<const TlsContext> context, Descriptor socket, Start start);
  ~TlsSession();

  int socket() const { return socket_.get(); }
  /// Continues the handshake; returns true once it is done. Throws kDenied, kUnsupported, kInvalid or
  /// kDisconnected, after the TLS alert to the peer.
  bool shake_hands();
  /// The peer proved that it belongs to this job.
  void trust();

  struct Got {
    std::size_t size = 0;  ///< bytes in the places, in order
    bool heard = false;    ///< any byte arrived, perhaps only part of a record
    bool more = false;     ///< the places are full; there may be more
    bool ended = false;    ///< the stream has ended
    int broken = 0;        ///< or the socket failed, with this error number
  };
  /// Throws kInvalid for bytes that the peer did not encrypt; before trust() also as shake_hands().
  Got read(std::span<const iovec> places);

  /// Returns how many bytes were accepted, 0 if the socket is full, -1 if it is broken (broken() is the
  /// reason).
  ssize_t write(std::span<const iovec> places);
  /// Sends encrypted bytes that were not sent; returns false if the socket is broken.
  bool flush();
  /// Encrypted bytes that wait for room in the socket.
  std::size_t unsent() const { return unsent_.load(std::memory_order_relaxed); }
  std::string broken() const;
  /// How often this side changed its encryption key.
  std::uint64_t key_renewals() const;

  /// Ends the connection; drops bytes that the peer has not received yet if `at_once`. The descriptor stays
  /// open until the session is destroyed.
  void close(bool at_once);

  /// For the BIO, with the lock held.
  int pull(BIO* bio, char* to, int size) TORCHSPAN_UNCHECKED;
  int push(const char* from, int size) TORCHSPAN_UNCHECKED;

 private:
  void refill() TORCHSPAN_REQUIRES(mutex_);
  bool flush_locked() TORCHSPAN_REQUIRES(mutex_);
  std::size_t encrypt(std::span<const iovec> places, std::size_t from) TORCHSPAN_REQUIRES(mutex_);
  void renew_key(std::size_t bytes) TORCHSPAN_REQUIRES(mutex_);
  [[noreturn]] void fail() TORCHSPAN_REQUIRES(mutex_);
  void check_proof() TORCHSPAN_REQUIRES(mutex_);

  const std::shared_ptr<const TlsContext> context_;
  const Start start_;
  const Descriptor socket_;
  mutable Mutex mutex_;
  SslPtr ssl_ TORCHSPAN_GUARDED_BY(mutex_);
  bool closed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool trusted_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  /// Bytes received before OpenSSL asked for them.
  std::unique_ptr<char[]> ahead_ TORCHSPAN_GUARDED_BY(mutex_);
  std::size_t ahead_room_ TORCHSPAN_GUARDED_BY(mutex_);
  std::size_t ahead_at_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t ahead_end_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::size_t unauthenticated_bytes_ TORCHSPAN_GUARDED_BY(mutex_) = 0;  ///< received before trust()
  bool drained_ TORCHSPAN_GUARDED_BY(mutex_) =
      false;  ///< the last read returned fewer bytes than it asked for
  bool heard_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool ended_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  bool flooded_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< an unauthenticated peer sent too much
  int read_error_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  /// Encrypted bytes from sent_ on wait for the socket.
  std::vector<char> cipher_ TORCHSPAN_GUARDED_BY(mutex_);
  std::size_t sent_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<char[]> record_ TORCHSPAN_GUARDED_BY(mutex_);  ///< small pieces, collected for one record
  std::uint64_t under_this_key_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::uint64_t key_renewals_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::string broken_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<std::size_t> unsent_{0};
};

}  // namespace torchspan::net
