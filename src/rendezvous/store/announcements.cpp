#include "rendezvous/store/announcements.h"

#include <algorithm>

namespace torchspan::rendezvous {

void Announcements::add(Changes::Change change) {
  log_.push_back(std::move(change));
  waiting_ = true;
}

SharedBytes Announcements::take_since(std::uint64_t& place) {
  if (place >= end()) return nullptr;
  if (!encoded_ || encoded_from_ != place || encoded_to_ != end()) {
    Changes changes;
    for (std::uint64_t at = std::max(place, begin_); at < end(); ++at) {
      changes.add(log_[static_cast<std::size_t>(at - begin_)]);
    }
    encoded_ = std::make_shared<const Bytes>(encode_message(changes));
    encoded_from_ = place;
    encoded_to_ = end();
  }
  place = end();
  return encoded_;
}

void Announcements::all_sent(TimePoint now, std::size_t workers) {
  begin_ = end();
  log_.clear();
  encoded_.reset();
  waiting_ = false;
  const auto count = static_cast<std::int64_t>(workers);
  const Duration pause = count > options_.most / std::max(options_.per_worker, Duration(1))
                             ? options_.most
                             : options_.per_worker * count;
  not_before_ = now + pause;
}

}  // namespace torchspan::rendezvous
