#include "rpc/references/reference_states.h"

#include "core/api/throw_invalid.h"
#include "rpc/references/references.h"

namespace torchspan::rpc {
namespace {

std::weak_ptr<ContinuationExecutor> continuations_of(const std::weak_ptr<WorkerBackend>& backend) {
  auto alive = backend.lock();
  return alive ? alive->continuations() : std::weak_ptr<ContinuationExecutor>();
}

std::shared_ptr<WorkerBackend> require(const std::weak_ptr<WorkerBackend>& backend) {
  auto alive = backend.lock();
  if (!alive)
    throw Error(ErrorKind::kCancelled, "this RRef's worker was shut down; it cannot be used any more");
  return alive;
}

}  // namespace

OwnerReference::OwnerReference(std::weak_ptr<WorkerBackend> backend, PeerId self, GlobalId value,
                               std::uint64_t tag, Origin origin)
    : backend_(std::move(backend)),
      self_(self),
      value_(value),
      tag_(tag),
      origin_(origin),
      promise_(continuations_of(backend_)),
      slot_(promise_.future()) {}

void OwnerReference::set(ValuePtr value) {
  try {
    if (const KnownSize size = value->size()) size_.store(static_cast<std::int64_t>(*size));
  } catch (...) {  // a value of unknown size is still a value
  }
  promise_.set_value(std::move(value));
}

KnownSize OwnerReference::size() const {
  const std::int64_t size = size_.load();
  return size < 0 ? KnownSize() : KnownSize(static_cast<std::uint64_t>(size));
}

Future<void> OwnerReference::ready() const {
  if (slot_.done()) {
    return slot_.error() ? make_failed_future<void>(slot_.error()) : make_ready_future<void>();
  }
  return slot_.then([](Future<ValuePtr> value) { value.wait(); });
}

std::shared_ptr<WorkerBackend> OwnerReference::backend() const { return require(backend_); }

UserReference::UserReference(std::weak_ptr<WorkerBackend> backend, std::weak_ptr<References> references,
                             Ids ids, Origin origin)
    : backend_(std::move(backend)),
      references_(std::move(references)),
      ids_(ids),
      origin_(origin),
      ready_(continuations_of(backend_)),
      ready_future_(ready_.future()) {}

UserReference::~UserReference() {
  if (detached_.load(std::memory_order_acquire)) return;
  if (auto references = references_.lock()) references->release(ids_.fork);
}

ValuePtr UserReference::value(Deadline) const {
  auto alive = backend();
  throw_invalid(
      "local_value() of a value that is on worker '{}' was called on worker '{}'; call a function on the "
      "RRef there, or fetch a copy with to_here()",
      alive->name_of(ids_.owner.rank), alive->self().name);
}

void UserReference::name_type(const std::string& name) const {
  if (auto references = references_.lock()) references->names().check_and_add_type(ids_.tag, name);
}

std::shared_ptr<WorkerBackend> UserReference::backend() const {
  if (detached_.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kCancelled,
                "this RRef was released when its worker shut down; it cannot be used any more");
  }
  return require(backend_);
}

}  // namespace torchspan::rpc
