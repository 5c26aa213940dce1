#pragma once
#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// A transport that sleeps on a poller of its own, so that a transport made of several can sleep for them
/// all: it asks each to prepare, sleeps until one's descriptor is readable, and ends the sleep of each. For
/// the thread that drives.
class PolledTransport : public Transport {
 public:
  /// Gets ready for a sleep until `until`, which it may bring forward. False when there is work already.
  /// end_sleep() must follow either way.
  virtual bool prepare_sleep(Deadline& until) = 0;
  /// `ready`: the descriptor was readable, so the next poll() has to look at every socket.
  virtual void end_sleep(bool ready) = 0;
  virtual int descriptor() const = 0;
};

}  // namespace torchspan::net
