#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <torchspan/detail/core/executor.h>

#include "net/ucx/ucx_channel.h"

namespace torchspan::net {

/// A channel that the driver is to make by dialling `address`.
struct UcxRequest {
  std::uint64_t token;
  std::shared_ptr<UcxChannel> channel;
  std::string address;
  Deadline deadline;
};

}  // namespace torchspan::net
