#pragma once
#include <map>
#include <memory>
#include <string>

#include <torchspan/detail/pipeline/extension.h>
#include <torchspan/rpc/worker.h>

#include "pipeline/messages/event_queue.h"

namespace torchspan::pipeline {

/// Finds the event queue of a message's pipeline among those of one worker. Thread-safe.
class PipelineExtension::MessageRouter {
 public:
  explicit MessageRouter(Worker& worker) : worker_(worker.endpoint()->weak_from_this()) {}

  /// Id and event queue of a pipeline on this worker. The router does not own the queue.
  struct Opened {
    std::uint64_t id = 0;
    std::shared_ptr<EventQueue> event_queue;
  };
  /// The number of the next pipeline of these workers and name. A worker that took a dead one's place counts from 0,
  /// so the workers agree on the highest number.
  std::uint64_t next_number(const std::string& name, const std::string& workers);
  /// Registers the pipeline of these workers and name with the number that they have agreed on, from which its id
  /// is computed.
  Opened open(const std::string& name, const std::string& workers, std::uint64_t number,
              std::weak_ptr<FutureHost> host);
  /// Throws Error{kInvalid} if the pipeline does not exist or was destroyed.
  std::shared_ptr<EventQueue> find(std::uint64_t id);
  void departed(std::uint32_t rank, const Error& error);
  TimePoint now() const;

 private:
  const std::weak_ptr<rpc::Endpoint> worker_;
  Mutex mutex_;
  std::map<std::string, std::uint64_t> next_numbers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::weak_ptr<EventQueue>> event_queues_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::pipeline
