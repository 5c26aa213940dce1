#include "collective/operation_log.h"

namespace torchspan::collective {
namespace {

std::int32_t hash_ranks(const std::vector<int>& ranks) {
  std::uint32_t hash = 2166136261u;  // FNV-1a
  for (const int rank : ranks) hash = (hash ^ static_cast<std::uint32_t>(rank)) * 16777619u;
  return static_cast<std::int32_t>(hash >> 1);
}

}  // namespace

OperationLog::OperationLog(const std::shared_ptr<Runtime>& runtime, const std::vector<int>& ranks)
    : owned_(runtime),
      borrowed_(runtime.use_count() == 0 ? runtime : std::shared_ptr<Runtime>()),
      group_(hash_ranks(ranks)) {}

std::shared_ptr<OperationLog> OperationLog::of_part(const std::vector<int>& ranks) const {
  return std::make_shared<OperationLog>(borrowed_ ? borrowed_ : owned_.lock(), ranks);
}

OperationLog::Blocking::Blocking(OperationLog& log, const char* call, std::uint64_t bytes)
    : runtime_(log.runtime()) {
  const std::uint64_t number = log.next_.fetch_add(1, std::memory_order_relaxed);
  if (!runtime_) return;
  scope_.emplace(runtime_->spans, SpanKind::kCollective, call,
                 SpanLink{.id = number, .part = log.group_, .bytes = bytes});
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
