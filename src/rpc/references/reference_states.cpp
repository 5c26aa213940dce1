#include "rpc/references/reference_states.h"

#include <fmt/format.h>

#include "rpc/references/references.h"

namespace torchspan::rpc {
namespace {

std::weak_ptr<FutureHost> host_of(const std::weak_ptr<Endpoint>& endpoint) {
  auto alive = endpoint.lock();
  return alive ? alive->host() : std::weak_ptr<FutureHost>();
}

std::shared_ptr<Endpoint> require(const std::weak_ptr<Endpoint>& endpoint) {
  auto alive = endpoint.lock();
  if (!alive)
    throw Error(ErrorKind::kCancelled, "this RRef's worker was shut down; it cannot be used any more");
  return alive;
}

}  // namespace

OwnerReference::OwnerReference(std::weak_ptr<Endpoint> endpoint, PeerId self, GlobalId value,
                               std::uint64_t tag, Origin origin)
    : endpoint_(std::move(endpoint)),
      self_(self),
      value_(value),
      tag_(tag),
      origin_(origin),
      promise_(host_of(endpoint_)),
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

std::shared_ptr<Endpoint> OwnerReference::endpoint() const { return require(endpoint_); }

UserReference::UserReference(std::weak_ptr<Endpoint> endpoint, std::weak_ptr<References> references, Ids ids,
                             Origin origin)
    : endpoint_(std::move(endpoint)),
      references_(std::move(references)),
      ids_(ids),
      origin_(origin),
      ready_(host_of(endpoint_)),
      ready_future_(ready_.future()) {}

UserReference::~UserReference() {
  if (detached_.load(std::memory_order_acquire)) return;
  if (auto references = references_.lock()) references->release(ids_.fork);
}

ValuePtr UserReference::value(Deadline) const {
  auto alive = endpoint();
  throw Error(ErrorKind::kInvalid,
              fmt::format("local_value() of a value that is on worker '{}' was called on worker '{}'; call a "
                          "function on the RRef there, or fetch a copy with to_here()",
                          alive->name_of(ids_.owner.rank), alive->self().name));
}

void UserReference::name_type(const std::string& name) const {
  if (auto references = references_.lock()) references->names().check_and_add_type(ids_.tag, name);
}

std::shared_ptr<Endpoint> UserReference::endpoint() const {
  if (detached_.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kCancelled,
                "this RRef was released when its worker shut down; it cannot be used any more");
  }
  return require(endpoint_);
}

}  // namespace torchspan::rpc
