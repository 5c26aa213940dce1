#include "collective/operation_log.h"

#include "core/api/step_part.h"
#include "core/api/timeout_notice.h"

namespace torchspan::collective {

OperationLog::OperationLog(const std::shared_ptr<Runtime>& runtime, const std::vector<int>& ranks)
    : owned_(runtime),
      borrowed_(runtime.use_count() == 0 ? runtime : std::shared_ptr<Runtime>()),
      group_(group_number(ranks)) {}

std::shared_ptr<OperationLog> OperationLog::of_part(const std::vector<int>& ranks) const {
  return std::make_shared<OperationLog>(borrowed_ ? borrowed_ : owned_.lock(), ranks);
}

OperationLog::Blocking::Blocking(OperationLog& log, const char* call, std::uint64_t bytes)
    : call_(call),
      number_(log.next_.fetch_add(1, std::memory_order_relaxed)),
      group_(log.group_),
      runtime_(log.runtime()) {
  if (!runtime_) return;
  began_ = runtime_->executor.now();
  scope_.emplace(runtime_->spans, SpanKind::kCollective, call,
                 SpanLink{.id = number_, .part = group_, .bytes = bytes});
}

void OperationLog::Blocking::note(const Error& error) const {
  if (!runtime_ || error.kind() != ErrorKind::kTimedOut) return;
  report_timeout({.kind = "collective",
                  .name = call_,
                  .seconds = to_seconds(runtime_->executor.now() - began_),
                  .id = number_,
                  .part = group_});
}

OperationLog::Operation OperationLog::begin(const char* call, std::uint64_t bytes) {
  Operation operation{call, next_.fetch_add(1, std::memory_order_relaxed), bytes, std::nullopt};
  const std::shared_ptr<Runtime> here = runtime();
  if (here && here->spans.is_traced()) operation.began = here->executor.now();
  return operation;
}

void OperationLog::end(const Operation& operation) const {
  const std::shared_ptr<Runtime> here = runtime();
  if (!here || !operation.began) return;
  here->spans.record(SpanKind::kCollective, operation.call, *operation.began,
                     SpanLink{.id = operation.number, .part = group_, .bytes = operation.bytes});
}

}  // namespace torchspan::collective
