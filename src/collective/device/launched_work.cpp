#include "collective/device/launched_work.h"

namespace torchspan::collective {

void LaunchedWork::release_finished() {
  while (!launches_.empty() && launches_.front().gate->done()) launches_.pop_front();
}

const LaunchedWork::Launch* LaunchedWork::overdue(TimePoint since) const {
  return launches_.empty() || launches_.front().at > since ? nullptr : &launches_.front();
}

void LaunchedWork::fail(const Error& cause) {
  try {
    release_finished();
  } catch (...) {  // the device itself has failed: none of these results is trusted
  }
  for (const Launch& launch : launches_) launch.gate->fail(Error(cause).with_call(launch.call));
  launches_.clear();
}

}  // namespace torchspan::collective
