#pragma once
#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// A transport whose sleep can be part of the sleep of another transport, which contains several: that one
/// prepares each, sleeps until one of the descriptors is readable, and ends the sleep of each. For the
/// driver.
class PolledTransport : public Transport {
 public:
  /// Prepares a sleep until `until`, which it may make earlier. Returns false if there is work already.
  /// end_sleep() must follow in both cases.
  virtual bool prepare_sleep(Deadline& until) = 0;
  /// `ready`: the descriptor was readable, so the next poll() polls every socket.
  virtual void end_sleep(bool ready) = 0;
  virtual int descriptor() const = 0;
};

}  // namespace torchspan::net
