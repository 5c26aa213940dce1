#include "net/local/notes.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/socket.h>

#include "net/local/memory.h"

namespace torchspan::net {
namespace {

/// A sender passes one descriptor with each note.
constexpr std::size_t kDescriptorsAtOnce = 4;
constexpr std::size_t kMostWaiting = 64;

}  // namespace

bool send_note(int socket, BytesView bytes, int descriptor) {
  return send_with_descriptor(socket, bytes, descriptor, MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

Reception receive_with_descriptors(int socket, std::span<std::byte> bytes,
                                   std::deque<Descriptor>& descriptors, const LocalOptions& options) {
  iovec place{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kDescriptorsAtOnce * sizeof(int))> control;
  msghdr message{};
  message.msg_iov = &place;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got;
  do {
    got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return {.ended = errno != EAGAIN && errno != EWOULDBLOCK};
  if (got == 0) return {.ended = true};
  Reception reception{.size = static_cast<std::size_t>(got),
                      .truncated = (message.msg_flags & MSG_CTRUNC) != 0};
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at + sizeof(int) <= head->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int descriptor;
      std::memcpy(&descriptor, CMSG_DATA(head) + at, sizeof descriptor);
      Descriptor owned(descriptor);
      if (refused(options, LocalStep::kTakeDescriptor)) {
        reception.truncated = true;
      } else {
        descriptors.push_back(std::move(owned));
      }
    }
  }
  return reception;
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
      throw Error(ErrorKind::kInvalid, "said something beside its ring that means nothing");
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
