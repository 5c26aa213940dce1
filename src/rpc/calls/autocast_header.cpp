#include "rpc/calls/autocast_header.h"

#include <fmt/format.h>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

namespace torchspan::rpc {

Bytes encode_autocast() {
  const device::Autocast here = device::Autocast::of_thread();
  if (!here.enabled()) return {};
  AutocastHeader header;
  header.cache = here.cache;
  for (const device::Autocast::Mode& mode : here.modes)
    header.modes.push_back({c10::DeviceTypeName(mode.device, /*lower_case=*/true), mode.dtype});
  return wire::to_payload(header).value;
}

device::Autocast decode_autocast(BytesView bytes) {
  wire::Payload payload;
  payload.value.assign(bytes.begin(), bytes.end());
  const auto header = wire::from_payload<AutocastHeader>(payload);
  device::Autocast autocast;
  autocast.cache = header.cache;
  for (const AutocastMode& mode : header.modes) {
    if (const auto type = device::Autocast::type_named(mode.device); type && c10::isFloatingType(mode.dtype))
      autocast.modes.push_back({*type, mode.dtype});
  }
  try {
    device::AutocastScope trial;
    trial.enter(autocast);
  } catch (const c10::Error& error) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("the caller's autocast is not possible with the LibTorch of this worker: {}; choose "
                    "a dtype that both support",
                    error.what_without_backtrace()));
  }
  return autocast;
}

}  // namespace torchspan::rpc
