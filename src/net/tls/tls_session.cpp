#include "net/tls/tls_session.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <sys/socket.h>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "net/tls/byte_stream.h"
#include "net/tls/record_cipher.h"

namespace torchspan::net {
namespace {

/// Unencrypted, unauthenticated bytes over a socket, which another object owns: TcpNetwork::kIsolated. Bytes
/// go between the socket and the caller's memory without a copy in this process.
class PlainStream final : public ByteStream {
 public:
  /// `ahead`: bytes that have arrived already; `unsent`: bytes to send before all others.
  PlainStream(int socket, std::vector<char> ahead, std::vector<char> unsent);

  Got read(std::span<const iovec> places) override;
  ssize_t write(std::span<const iovec> places) override;
  bool flush() override;
  std::size_t unsent() const override { return waiting_.load(std::memory_order_relaxed); }
  std::string broken() const override;
  std::uint64_t key_renewals() const override { return 0; }

 private:
  ssize_t send(std::span<const iovec> places) TORCHSPAN_REQUIRES(mutex_);
  bool flush_locked() TORCHSPAN_REQUIRES(mutex_);

  const int socket_;
  std::vector<char> ahead_;  ///< for the reading thread
  mutable Mutex mutex_;
  std::vector<char> unsent_ TORCHSPAN_GUARDED_BY(mutex_);
  std::string broken_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<std::size_t> waiting_;
};

PlainStream::PlainStream(int socket, std::vector<char> ahead, std::vector<char> unsent)
    : socket_(socket), ahead_(std::move(ahead)), unsent_(std::move(unsent)), waiting_(unsent_.size()) {}

ByteStream::Got PlainStream::read(std::span<const iovec> places) {
  if (ahead_.empty()) {
    Got got = receive_now(socket_, places);
    got.more = got.size == bytes_in(places);
    return got;
  }
  Got got{.heard = true, .more = true};
  for (PlaceCursor cursor(places); !cursor.at_end() && got.size < ahead_.size();) {
    const std::span<char> part = cursor.next(ahead_.size() - got.size);
    std::memcpy(part.data(), ahead_.data() + got.size, part.size());
    got.size += part.size();
  }
  ahead_.erase(ahead_.begin(), ahead_.begin() + static_cast<std::ptrdiff_t>(got.size));
  return got;
}

ssize_t PlainStream::write(std::span<const iovec> places) {
  MutexLock lock(mutex_);
  if (!broken_.empty() || !flush_locked()) return -1;
  return unsent_.empty() ? send(places) : 0;
}

bool PlainStream::flush() {
  MutexLock lock(mutex_);
  return broken_.empty() && flush_locked();
}

ssize_t PlainStream::send(std::span<const iovec> places) {
  const ssize_t sent = send_now(socket_, places);
  if (sent < 0) {
    broken_ = std::strerror(errno);
    unsent_.clear();
    waiting_.store(0, std::memory_order_relaxed);
  }
  return sent;
}

bool PlainStream::flush_locked() {
  if (unsent_.empty()) return true;
  const iovec place{unsent_.data(), unsent_.size()};
  const ssize_t sent = send(std::span(&place, 1));
  if (sent < 0) return false;
  unsent_.erase(unsent_.begin(), unsent_.begin() + sent);
  waiting_.store(unsent_.size(), std::memory_order_relaxed);
  return true;
}

std::string PlainStream::broken() const {
  MutexLock lock(mutex_);
  return broken_;
}

/// Encrypted records over a socket, which another object owns. Reading and writing have separate locks, each
/// held for one batch.
class SealedStream final : public ByteStream {
 public:
  SealedStream(int socket, RecordReader reader, RecordWriter writer);

  Got read(std::span<const iovec> places) override;
  ssize_t write(std::span<const iovec> places) override;
  bool flush() override;
  std::size_t unsent() const override { return unsent_.load(std::memory_order_relaxed); }
  std::string broken() const override;
  std::uint64_t key_renewals() const override;

 private:
  bool flush_locked() TORCHSPAN_REQUIRES(writing_);

  const int socket_;
  Mutex reading_;
  RecordReader reader_ TORCHSPAN_GUARDED_BY(reading_);
  mutable Mutex writing_;
  RecordWriter writer_ TORCHSPAN_GUARDED_BY(writing_);
  std::string broken_ TORCHSPAN_GUARDED_BY(writing_);
  std::atomic<std::size_t> unsent_;
};

SealedStream::SealedStream(int socket, RecordReader reader, RecordWriter writer)
    : socket_(socket),
      reader_(std::move(reader)),
      writer_(std::move(writer)),
      unsent_(writer_.waiting().size()) {}

ByteStream::Got SealedStream::read(std::span<const iovec> places) {
  MutexLock lock(reading_);
  Got got;
  PlaceCursor cursor(places);
  // A read that returns less than it could emptied the socket.
  bool drained = false;
  for (;;) {
    got.size += reader_.read(cursor);
    if (cursor.at_end() || got.size >= RecordWriter::kBatch) break;
    if (drained) return got;
    const std::span<char> room = reader_.room();
    const iovec place{room.data(), room.size()};
    const Got received = receive_now(socket_, std::span(&place, 1));
    reader_.received(received.size);
    got.heard |= received.heard;
    got.ended = received.ended;
    got.broken = received.broken;
    drained = received.size < room.size();
    if (received.size == 0) return got;
  }
  got.heard |= got.size != 0;
  got.more = true;
  return got;
}

ssize_t SealedStream::write(std::span<const iovec> places) {
  MutexLock lock(writing_);
  if (!broken_.empty()) return -1;
  std::size_t taken = writer_.write(places);
  if (taken == 0) {
    if (!flush_locked()) return -1;
    taken = writer_.write(places);
  }
  return flush_locked() ? static_cast<ssize_t>(taken) : -1;
}

bool SealedStream::flush() {
  MutexLock lock(writing_);
  return broken_.empty() && flush_locked();
}

bool SealedStream::flush_locked() {
  while (!writer_.waiting().empty()) {
    const std::span<const char> waiting = writer_.waiting();
    const iovec place{const_cast<char*>(waiting.data()), waiting.size()};
    const ssize_t sent = send_now(socket_, std::span(&place, 1));
    if (sent < 0) broken_ = std::strerror(errno);
    if (sent <= 0) break;
    writer_.sent(static_cast<std::size_t>(sent));
  }
  unsent_.store(broken_.empty() ? writer_.waiting().size() : 0, std::memory_order_relaxed);
  return broken_.empty();
}

std::string SealedStream::broken() const {
  MutexLock lock(writing_);
  return broken_;
}

std::uint64_t SealedStream::key_renewals() const {
  MutexLock lock(writing_);
  return writer_.key_renewals();
}

}  // namespace

TlsSession::TlsSession(std::shared_ptr<const TlsContext> context, Descriptor socket, Start start)
    : context_(std::move(context)),
      start_(std::move(start)),
      socket_(std::move(socket)),
      handshake_(std::make_unique<TlsHandshake>(
          context_, socket_.get(),
          TlsHandshake::Start{.role = start_.role, .peer = start_.peer, .host = start_.host})) {}

TlsSession::~TlsSession() = default;

bool TlsSession::shake_hands() { return handshake_->shake_hands(); }

void TlsSession::trust() {
  context_->buffers().widen(socket_.get());
  const std::vector<char> ahead = handshake_->take_ahead();
  const std::vector<char> unsent = handshake_->take_unsent();
  if (context_->network() == TcpNetwork::kIsolated) {
    stream_ = std::make_unique<PlainStream>(socket_.get(), ahead, unsent);
  } else {
    const EVP_CIPHER* cipher = handshake_->cipher();
    const Role peer = start_.role == Role::kDialer ? Role::kListener : Role::kDialer;
    RecordCipher opener(cipher, handshake_->secret_of(peer), CipherUse::kDecrypt);
    RecordCipher sealer(cipher, handshake_->secret_of(start_.role), CipherUse::kEncrypt);
    stream_ =
        std::make_unique<SealedStream>(socket_.get(), RecordReader(std::move(opener), start_.peer, ahead),
                                       RecordWriter(std::move(sealer), start_.bytes_per_key, unsent));
  }
  handshake_.reset();
}

TlsSession::Got TlsSession::read(std::span<const iovec> places) {
  if (closed_) return {.ended = true};
  return stream_ ? stream_->read(places) : handshake_->read(places);
}

ssize_t TlsSession::write(std::span<const iovec> places) {
  if (closed_) return -1;
  if (stream_) return stream_->write(places);
  return handshake_->write(places) ? static_cast<ssize_t>(bytes_in(places)) : -1;
}

bool TlsSession::flush() {
  if (closed_) return true;
  return stream_ ? stream_->flush() : handshake_->flush();
}

std::string TlsSession::broken() const {
  const std::string reason = stream_ ? stream_->broken() : "";
  return reason.empty() ? "this side ended it" : reason;
}

void TlsSession::close(bool at_once) {
  if (closed_.exchange(true) || !at_once) return;
  const linger now{1, 0};
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

}  // namespace torchspan::net
