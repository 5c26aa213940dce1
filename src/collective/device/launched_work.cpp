#include "collective/device/launched_work.h"

namespace torchspan::collective {

void LaunchedWork::release_finished() {
  while (!launches_.empty() && launches_.front().gate->done()) launches_.pop_front();
}

const LaunchedWork::Launch* LaunchedWork::overdue(TimePoint since) const {
  return launches_.empty() || launches_.front().at > since ? nullptr : &launches_.front();
}

void LaunchedWork::list_late(SpanRecorder& spans, TimePoint since, int group) {
  const Launch* late = overdue(since);
  if (listed_ && (late == nullptr || late->number != listed_number_)) listed_.reset();
  if (listed_ || late == nullptr) return;
  listed_number_ = late->number;
  listed_.emplace(spans, SpanKind::kWait, late->text, SpanLink{.id = late->number, .part = group});
}

void LaunchedWork::fail(const Error& cause) {
  listed_.reset();
  try {
    release_finished();
  } catch (...) {  // the device itself has failed: none of these results is trusted
  }
  for (const Launch& launch : launches_) launch.gate->fail(Error(cause).with_call(launch.call));
}

void LaunchedWork::release() {
  for (const Launch& launch : launches_) launch.keep();
  launches_.clear();
}

}  // namespace torchspan::collective
