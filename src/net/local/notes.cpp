#include "net/local/notes.h"

#include <cerrno>
#include <sys/socket.h>

#include <torchspan/core/error.h>

namespace torchspan::net {
namespace {

/// Descriptors that wait for the note that announces them.
constexpr std::size_t kMostWaiting = 64;

}  // namespace

bool send_note(int socket, BytesView bytes, int descriptor) {
  return send_with_descriptor(socket, bytes, descriptor, MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

ReceivedNotes receive_notes(int socket, std::span<std::byte> bytes, std::deque<Descriptor>& descriptors,
                            const LocalFaults& faults) {
  ReceivedBytes received = receive_with_descriptors(socket, bytes, MSG_DONTWAIT);
  if (received.size < 0) return {.ended = errno != EAGAIN && errno != EWOULDBLOCK};
  if (received.size == 0) return {.ended = true};
  ReceivedNotes received_notes{.size = static_cast<std::size_t>(received.size),
                               .truncated = received.truncated};
  for (Descriptor& descriptor : received.descriptors) {
    if (fails(faults, LocalStep::kTakeDescriptor)) {
      received_notes.truncated = true;
    } else {
      descriptors.push_back(std::move(descriptor));
    }
  }
  return received_notes;
}

void NoteParser::feed(BytesView bytes, bool truncated, std::deque<Note>& notes) {
  truncated_ |= truncated;
  partial_.insert(partial_.end(), bytes.begin(), bytes.end());
  std::size_t at = 0;
  while (at < partial_.size()) {
    const auto kind = static_cast<Note::Kind>(partial_[at]);
    if (kind == Note::Kind::kWake) {
      ++at;
      continue;
    }
    if (kind != Note::Kind::kBlock && kind != Note::Kind::kRetired) {
      throw Error(ErrorKind::kInvalid, "sent a note of an unknown type");
    }
    if (partial_.size() - at < kNoteBytes) break;
    ByteReader reader(BytesView(partial_).subspan(at + 8, kNoteBytes - 8));
    Note note{.kind = kind};
    note.number = reader.get<std::uint64_t>();
    note.size = reader.get<std::uint64_t>();
    at += kNoteBytes;
    if (kind == Note::Kind::kBlock) {
      if (descriptors_.empty() && truncated_) {
        throw Error(ErrorKind::kOverloaded,
                    "passed memory, but this process has no descriptor left for it: raise the limit of open "
                    "files (ulimit -n)");
      }
      if (descriptors_.empty()) throw Error(ErrorKind::kInvalid, "announced memory that it did not pass");
      note.descriptor = std::move(descriptors_.front());
      descriptors_.pop_front();
    }
    notes.push_back(std::move(note));
  }
  partial_.erase(partial_.begin(), partial_.begin() + static_cast<std::ptrdiff_t>(at));
  if (descriptors_.size() > kMostWaiting) {
    throw Error(ErrorKind::kInvalid, "passed descriptors that were not requested");
  }
}

}  // namespace torchspan::net
