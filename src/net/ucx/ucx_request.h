#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <torchspan/detail/core/executor.h>

#include "net/ucx/ucx_channel.h"

namespace torchspan::net {

/// Asks the driver to make a channel by dialing `address`.
struct UcxRequest {
  std::uint64_t token;
  std::shared_ptr<UcxChannel> channel;
  std::string address;
  Deadline deadline;
};

}  // namespace torchspan::net
