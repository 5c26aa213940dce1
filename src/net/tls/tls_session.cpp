#include "net/tls/tls_session.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <openssl/err.h>
#include <sys/socket.h>

#include "net/tls/tls_failure.h"

namespace torchspan::net {
namespace {

constexpr std::size_t kRecord = SSL3_RT_MAX_PLAIN_LENGTH;
/// Encrypted bytes per system call, and plain bytes that one call encrypts while it holds the lock.
constexpr std::size_t kBatch = 4 * kRecord;
constexpr std::size_t kUnauthenticatedRoom = 4 << 10;
constexpr std::size_t kUnauthenticatedBytes = 64 << 10;
constexpr std::size_t kTrustedRoom = 128 << 10;

}  // namespace

TlsSession::TlsSession(std::shared_ptr<const TlsContext> context, Descriptor socket, Start start)
    : context_(std::move(context)),
      start_(std::move(start)),
      socket_(std::move(socket)),
      ssl_(context_->make_connection(start_.role, start_.host)),
      ahead_(std::make_unique_for_overwrite<char[]>(kUnauthenticatedRoom)),
      ahead_room_(kUnauthenticatedRoom) {
  BIO* bio = BIO_new(context_->method());
  if (bio == nullptr) throw Error(ErrorKind::kOverloaded, "no memory left for a TLS connection");
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  SSL_set_bio(ssl_.get(), bio, bio);
}

TlsSession::~TlsSession() = default;

int TlsSession::pull(BIO* bio, char* to, int size) {
  BIO_clear_retry_flags(bio);
  if (ahead_at_ == ahead_end_) refill();
  if (ahead_at_ == ahead_end_) {
    if (ended_) return 0;
    if (read_error_ == 0 && !flooded_) BIO_set_retry_read(bio);
    return -1;
  }
  const std::size_t taken = std::min<std::size_t>(static_cast<std::size_t>(size), ahead_end_ - ahead_at_);
  std::memcpy(to, ahead_.get() + ahead_at_, taken);
  ahead_at_ += taken;
  return static_cast<int>(taken);
}

void TlsSession::refill() {
  if (drained_ || ended_ || read_error_ != 0 || closed_) return;
  std::size_t room = ahead_room_;
  if (!trusted_) room = std::min(room, kUnauthenticatedBytes - unauthenticated_bytes_);
  flooded_ = room == 0;
  if (flooded_) return;
  ssize_t got;
  do {
    got = ::recv(socket_.get(), ahead_.get(), room, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  drained_ = got < static_cast<ssize_t>(room);
  if (got == 0) ended_ = true;
  if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK) read_error_ = errno;
  if (got <= 0) return;
  heard_ = true;
  ahead_at_ = 0;
  ahead_end_ = static_cast<std::size_t>(got);
  if (!trusted_) unauthenticated_bytes_ += ahead_end_;
}

int TlsSession::push(const char* from, int size) {
  cipher_.insert(cipher_.end(), from, from + size);
  return size;
}

bool TlsSession::flush_locked() {
  while (sent_ < cipher_.size()) {
    const ssize_t written =
        ::send(socket_.get(), cipher_.data() + sent_, cipher_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS) {
      broken_ = std::strerror(errno);
      cipher_.clear();
      sent_ = 0;
      unsent_.store(0, std::memory_order_relaxed);
      return false;
    }
    if (written < 0) break;
    sent_ += static_cast<std::size_t>(written);
  }
  if (sent_ == cipher_.size()) {
    cipher_.clear();
    sent_ = 0;
  } else if (sent_ >= kBatch) {
    cipher_.erase(cipher_.begin(), cipher_.begin() + static_cast<std::ptrdiff_t>(sent_));
    sent_ = 0;
  }
  unsent_.store(cipher_.size() - sent_, std::memory_order_relaxed);
  return true;
}

bool TlsSession::shake_hands() {
  MutexLock lock(mutex_);
  drained_ = false;
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  flush_locked();
  if (result == 1) {
    check_proof();
    return true;
  }
  const bool waiting = SSL_get_error(ssl_.get(), result) == SSL_ERROR_WANT_READ;
  if (!waiting || ended_ || read_error_ != 0) fail();
  return false;
}

void TlsSession::check_proof() {
  // Only the pre-shared key counts as a resumed session here. Without it, only a verified certificate does.
  const bool proven = context_->by_certificate() ? SSL_get0_peer_certificate(ssl_.get()) != nullptr &&
                                                       SSL_get_verify_result(ssl_.get()) == X509_V_OK
                                                 : SSL_session_reused(ssl_.get()) == 1;
  if (SSL_version(ssl_.get()) != TLS1_3_VERSION || !proven) {
    throw Error(ErrorKind::kDenied,
                fmt::format("'{}' did not prove that it belongs to this job", start_.peer));
  }
}

void TlsSession::fail() {
  if (flooded_) {
    throw Error(ErrorKind::kInvalid, fmt::format("'{}' sent more than {} bytes before it proved anything",
                                                 start_.peer, kUnauthenticatedBytes));
  }
  if (ERR_peek_error() == 0 || ended_ || read_error_ != 0) {
    throw Error(
        ErrorKind::kDisconnected,
        fmt::format("'{}' disconnected during the handshake: see its log for the reason", start_.peer));
  }
  if (!trusted_) throw handshake_failure(start_.peer, context_->by_certificate());
  throw Error(ErrorKind::kInvalid,
              fmt::format("'{}' is cut off: its bytes are not valid TLS of this connection ({})", start_.peer,
                          tls_reason()));
}

void TlsSession::trust() {
  MutexLock lock(mutex_);
  trusted_ = true;
  auto roomier = std::make_unique_for_overwrite<char[]>(kTrustedRoom);
  ahead_end_ -= ahead_at_;
  std::memcpy(roomier.get(), ahead_.get() + ahead_at_, ahead_end_);
  ahead_at_ = 0;
  ahead_ = std::move(roomier);
  ahead_room_ = kTrustedRoom;
}

TlsSession::Got TlsSession::read(std::span<const iovec> places) {
  MutexLock lock(mutex_);
  Got got;
  if (closed_) {
    got.ended = true;
    return got;
  }
  drained_ = false;
  heard_ = false;
  std::size_t limit = kBatch;
  for (std::size_t i = 0, offset = 0; i < places.size() && limit != 0;) {
    const std::size_t wanted = std::min(places[i].iov_len - offset, limit);
    std::size_t size = 0;
    ERR_clear_error();
    const int result =
        SSL_read_ex(ssl_.get(), static_cast<char*>(places[i].iov_base) + offset, wanted, &size);
    if (result != 1) {
      const int why = SSL_get_error(ssl_.get(), result);
      got.heard = heard_;
      got.ended = ended_ || why == SSL_ERROR_ZERO_RETURN;
      got.broken = read_error_;
      if (unsent_.load(std::memory_order_relaxed) != cipher_.size() - sent_) flush_locked();
      if (why == SSL_ERROR_WANT_READ || got.ended || got.broken != 0) return got;
      fail();
    }
    got.size += size;
    limit -= size;
    offset += size;
    if (offset == places[i].iov_len) {
      ++i;
      offset = 0;
    }
  }
  got.heard = heard_ || got.size != 0;
  got.more = true;
  return got;
}

std::size_t TlsSession::encrypt(std::span<const iovec> places, std::size_t from) {
  std::size_t i = 0;
  while (i < places.size() && from >= places[i].iov_len) from -= places[i++].iov_len;
  if (i == places.size()) return 0;
  const auto begin = [&](std::size_t place) { return static_cast<const char*>(places[place].iov_base); };
  std::size_t size = std::min(places[i].iov_len - from, kRecord);
  const char* data = begin(i) + from;
  if (size < kRecord && i + 1 < places.size()) {
    if (!record_) record_ = std::make_unique_for_overwrite<char[]>(kRecord);
    std::memcpy(record_.get(), data, size);
    for (++i; i < places.size() && size < kRecord; ++i) {
      const std::size_t taken = std::min(places[i].iov_len, kRecord - size);
      std::memcpy(record_.get() + size, begin(i), taken);
      size += taken;
    }
    data = record_.get();
  }
  renew_key(size);
  ERR_clear_error();
  std::size_t written = 0;
  if (SSL_write_ex(ssl_.get(), data, size, &written) == 1) return written;
  broken_ = fmt::format("TLS: {}", tls_reason());
  return 0;
}

void TlsSession::renew_key(std::size_t bytes) {
  under_this_key_ += bytes;
  if (under_this_key_ < start_.bytes_per_key) return;
  under_this_key_ = 0;
  if (SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) == 1) ++key_renewals_;
}

ssize_t TlsSession::write(std::span<const iovec> places) {
  MutexLock lock(mutex_);
  if (closed_ && broken_.empty()) broken_ = "this side ended it";
  if (!broken_.empty()) return -1;
  std::size_t all = 0, taken = 0;
  for (const iovec& place : places) all += place.iov_len;
  all = std::min(all, kBatch);
  while (taken < all) {
    if (cipher_.size() - sent_ >= kBatch && !flush_locked()) return -1;
    if (cipher_.size() - sent_ >= kBatch) break;
    taken += encrypt(places, taken);
    if (!broken_.empty()) return -1;
  }
  return flush_locked() ? static_cast<ssize_t>(taken) : -1;
}

bool TlsSession::flush() {
  MutexLock lock(mutex_);
  return broken_.empty() && (closed_ || flush_locked());
}

std::string TlsSession::broken() const {
  MutexLock lock(mutex_);
  return broken_;
}

std::uint64_t TlsSession::key_renewals() const {
  MutexLock lock(mutex_);
  return key_renewals_;
}

void TlsSession::close(bool at_once) {
  MutexLock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  if (at_once) {
    const linger now{1, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }
}

}  // namespace torchspan::net
