#include "autograd/smart/mark_exchange.h"

#include <memory>
#include <utility>

#include "autograd/messages/notification.h"
#include "autograd/passes/pass_errors.h"

namespace torchspan::autograd {

void MarkExchange::begin(const std::vector<at::Tensor>& roots) {
  ending_.enter();  // the pass must not end while this thread sends its marks, even if all gradients are back
  parts_.marks.begin(roots);
  send_marks();
  end_request();
  ending_.leave();
}

/// enter() keeps the pass open while this thread sends marks: gradients that agree with them may end it.
void MarkExchange::mark(const std::vector<MarkedSend>& sends, std::uint32_t peer, Answer<MarkSends>& answer) {
  ending_.enter();
  take_marks(find(sends, peer), answer);  // an exception fails the pass, which needs no leave()
}

bool MarkExchange::try_mark(const std::vector<MarkedSend>& sends, std::uint32_t peer,
                            Answer<MarkSends>& answer) {
  SmartMarks::Marks marks;
  try {
    marks = find(sends, peer);
    ending_.enter();
  } catch (const Error&) {
    return false;
  }
  try {
    take_marks(marks, answer);
  } catch (...) {  // the pass has failed meanwhile
    const Error error = to_error(std::current_exception());
    if (answer) answer.give(MarkedWorkers{{}, as_remote(error, parts_.worker.name())});
    parts_.owner.post([this, error] { ending_.fail_here(error); });
  }
  return true;
}

SmartMarks::Marks MarkExchange::find(const std::vector<MarkedSend>& sends, std::uint32_t peer) const {
  SmartMarks::Marks marks;
  for (const MarkedSend& marked : sends) {
    auto send = parts_.graph.find_send(marked.message, peer);
    for (const std::uint32_t output : marked.outputs) {
      if (output >= send->num_outputs())
        throw Error(ErrorKind::kInvalid, "a mark names a tensor that is not in its message");
    }
    marks.emplace_back(std::move(send), marked);
  }
  return marks;
}

/// Answers at once unless these marks begin a round of marking, which is answered at its end. Leaves the pass.
void MarkExchange::take_marks(const SmartMarks::Marks& marks, Answer<MarkSends>& answer) {
  SmartMarks::Marked marked = parts_.marks.mark(marks, answer);
  if (marked.sealed) drive_soon();
  send_marks();
  end_request();
  for (; marked.settled > 0; --marked.settled) ending_.leave();
  ending_.leave();
  if (answer) answer.give(parts_.marks.has_unmarked() ? MarkedWorkers{{parts_.rank}, {}} : MarkedWorkers{});
}

/// Marks the sends, on other workers, that the walk has reached.
void MarkExchange::send_marks() {
  for (auto& [rank, sends] : parts_.marks.take_unsent()) {
    MarkSends message{parts_.context.id(), parts_.key.id, parts_.key.retain_graph, parts_.key.threads,
                      std::move(sends)};
    ending_.enter();
    parts_.outbox.ask(rank, std::move(message),
                      [this, weak = parts_.owner.weak_from_this(), to = rank](MarkedWorkers marked,
                                                                              std::exception_ptr error) {
                        auto alive = weak.lock();
                        if (!alive) return;
                        take_answer(std::move(marked), error, to);
                        PassOwner::release_on_pool(std::move(alive));
                      });
  }
}

void MarkExchange::take_answer(MarkedWorkers marked, const std::exception_ptr& error, std::uint32_t from) {
  if (error) return parts_.owner.post([this, error, from] { ending_.fail_without(from, to_error(error)); });
  if (marked.failure) return parts_.owner.post([this, failure = *marked.failure] { ending_.fail(failure); });
  parts_.marks.add_unmarked_workers(marked.ranks);
  end_request();
  ending_.leave();
}

/// The last request ends the round: the worker whose marks began it gets its answer; on the root, all marks
/// are final.
void MarkExchange::end_request() {
  std::optional<SmartMarks::Round> round = parts_.marks.end_request();
  if (!round) return;
  if (!parts_.marks.is_root()) {
    if (round->parent) round->parent->give(MarkedWorkers{std::move(round->unmarked_workers), {}});
    return;
  }
  if (const auto endpoint = parts_.worker.endpoint()) {
    for (const std::uint32_t rank : round->unmarked_workers) {
      if (rank == parts_.rank) continue;
      const MarksFinal message{parts_.context.id(), parts_.key.id};
      static_cast<void>(std::make_shared<Notification<MarksFinal>>(Worker(endpoint), rank, message)->start());
    }
  }
  marks_are_final();
}

void MarkExchange::marks_are_final() {
  if (parts_.graph.seal()) drive_soon();
}

/// Another thread runs the nodes that became ready.
void MarkExchange::drive_soon() {
  parts_.owner.post([this] { parts_.owner.drive(); });
}

}  // namespace torchspan::autograd
