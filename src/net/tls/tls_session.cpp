#include "net/tls/tls_session.h"

#include <sys/socket.h>

#include "net/tls/place_cursor.h"
#include "net/tls/plain_stream.h"
#include "net/tls/sealed_stream.h"

namespace torchspan::net {

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
