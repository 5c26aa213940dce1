#pragma once
#include <map>
#include <memory>
#include <string>

#include <torchspan/pipeline/pipelines.h>
#include <torchspan/rpc/worker.h>

#include "pipeline/mailbox.h"

namespace torchspan::pipeline {

/// The mailboxes of one worker, by pipeline.
class Pipelines::Office {
 public:
  explicit Office(Worker& worker) : worker_(worker.endpoint()->weak_from_this()) {}

  /// The id of the next pipeline of these workers and name, equal on all of them as long as they make such
  /// pipelines in the same order, and its mailbox here, which exists as long as somebody keeps it.
  struct Opened {
    std::uint64_t id = 0;
    std::shared_ptr<Mailbox> mailbox;
  };
  Opened open(const std::string& name, const std::string& workers, std::weak_ptr<FutureHost> host);
  /// Throws Error{kInvalid} when there is no such pipeline (any more).
  std::shared_ptr<Mailbox> find(std::uint64_t id);
  void departed(std::uint32_t rank, const Error& error);
  TimePoint now() const;

 private:
  const std::weak_ptr<rpc::Endpoint> worker_;
  Mutex mutex_;
  std::map<std::string, std::uint64_t> counts_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::weak_ptr<Mailbox>> mailboxes_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Sends a message that nobody waits for: what goes wrong becomes a letter in the sender's own mailbox.
template <rpc::Message M>
void post(const Worker& worker, const std::shared_ptr<Mailbox>& mailbox, std::uint32_t rank,
          const M& message);

namespace office_detail {
/// Turns the failure of a message into a letter.
class NoteFailure final : public rpc::Completion {
 public:
  NoteFailure(std::weak_ptr<Mailbox> mailbox, StepId id, std::uint32_t rank)
      : mailbox_(std::move(mailbox)), id_(id), rank_(rank) {}
  void succeed(wire::Payload&) override {}
  void fail(std::exception_ptr error) override {
    if (auto mailbox = mailbox_.lock()) mailbox->put(NotSent{id_, rank_, to_error(error)});
  }

 private:
  const std::weak_ptr<Mailbox> mailbox_;
  const StepId id_;
  const std::uint32_t rank_;
};
}  // namespace office_detail

template <rpc::Message M>
void post(const Worker& worker, const std::shared_ptr<Mailbox>& mailbox, std::uint32_t rank,
          const M& message) {
  worker.endpoint()->send(rank, rpc::make_request(message),
                          std::make_shared<office_detail::NoteFailure>(mailbox, message.id, rank));
}

}  // namespace torchspan::pipeline
