#include "collective/serial/serial_backend.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <limits>
#include <numeric>
#include <tuple>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>

#include "collective/serial/gathers.h"
#include "collective/single.h"
#include "collective/tensors.h"
#include "core/api/agreement.h"
#include "core/api/step_part.h"
#include "core/api/timeout_notice.h"
#include "device/api/tensors.h"

namespace torchspan::collective {
namespace {

constexpr Duration kAnswerLimit = std::chrono::seconds(1);

void throw_if_rank_departed(const SerialOptions& options) {
  const auto departed =
      options.world ? options.world->first_departed(options.members.instances) : std::nullopt;
  if (departed) throw departed_rank_error(options.members.names[departed->rank], departed->how);
}

/// Asks the ranks through the membership whether call `number` of the group failed there too. Returns which ranks did not
/// answer within a second; empty if all did.
std::string find_silent_ranks(Executor& executor, const SerialOptions& options, std::uint64_t number) {
  std::vector<int> ranks = options.members.ranks;
  std::sort(ranks.begin(), ranks.end());
  try {
    options.world->ask([&](rendezvous::Membership& world) {
      world.barrier(fmt::format("torchspan.roll_call.{}", number), std::move(ranks),
                    executor.deadline_in(kAnswerLimit));
    });
  } catch (const Error& error) {
    return error.message();
  }
  return {};
}

/// The ranks that are gone, or else those that do not answer, for a message about call `number`; begins with "; ".
std::string missing_ranks(Executor& executor, const SerialOptions& options, BlockingCollectives& collectives,
                          std::uint64_t number) {
  if (const auto first =
          options.world ? options.world->first_departed(options.members.instances) : std::nullopt) {
    return fmt::format("; {}", text_of_departed(options.members.names[first->rank], first->how));
  }
  const std::string awaited = collectives.awaited();
  if (!awaited.empty()) return "; it waits for " + awaited;
  if (!options.world) return {};
  const std::string silent = find_silent_ranks(executor, options, number);
  return silent.empty() ? "; all ranks report this failure"
                        : "; the ranks were asked whether it failed on them too: " + silent;
}

/// The error for what the engine threw during call `number` of the group.
Error explain_failure(Executor& executor, const SerialOptions& options, BlockingCollectives& collectives,
                      const std::string& call, std::uint64_t number, const std::exception_ptr& exception) {
  const auto about = [&](ErrorKind kind, const std::string& text) {
    if (kind == ErrorKind::kDisconnected && options.world)
      options.world->await_first_departed(options.members.instances);
    return Error(kind,
                 fmt::format("{}, call {} of the group, failed in {}: {}{}", call, number, collectives.name(),
                             text, missing_ranks(executor, options, collectives, number)));
  };
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    const bool lost = error.kind() == ErrorKind::kDisconnected || error.kind() == ErrorKind::kTimedOut;
    return lost ? about(error.kind(), error.message()) : error;
  } catch (...) {
  }
  const std::string text = torchspan::describe(exception).text;
  // Engines that announce failures report lost connections as Errors; anything else concerns this rank alone.
  if (collectives.announces()) {
    return {to_error(exception).kind(), fmt::format("{}, call {} of the group, failed on {}: {}", call,
                                                    number, options.members.name(options.rank), text)};
  }
  const bool late = text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos;
  return about(late ? ErrorKind::kTimedOut : ErrorKind::kDisconnected, text);
}

/// A dense tensor, also of dtypes and reductions that the engine lacks.
void reduce_dense(BlockingCollectives& collectives, const at::Tensor& tensor, ReduceOp reduction, int ranks) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (tensor.numel() == 0) return;
  if (collectives.reduces(dtype, reduction)) return collectives.all_reduce(tensor, reduction);
  if (device::is_half(dtype)) {
    const at::Tensor wide = tensor.to(at::kFloat);
    reduce_dense(collectives, wide, reduction, ranks);
    tensor.copy_(wide);
    return;
  }
  if (reduction != kAvg || !collectives.reduces(dtype, kSum)) {
    return reduce_gathered(collectives, tensor, reduction, ranks);
  }
  collectives.all_reduce(tensor, kSum);
  tensor.div_(ranks);
}

constexpr const char* kBarrierLine = "barrier()";
constexpr const char* kBytesLine = "all_gather_bytes()";

}  // namespace

SerialBackend::SerialBackend(std::shared_ptr<Runtime> runtime,
                             std::unique_ptr<BlockingCollectives> collectives, SerialOptions options)
    : runtime_(std::move(runtime)),
      options_(std::move(options)),
      collectives_(std::move(collectives)),
      gathers_(*collectives_, options_.rank, options_.members.size()),
      continuations_(std::make_shared<GroupExecutor>(runtime_)),
      parker_(runtime_->executor.make_parker()) {
  collectives_->watch([parker = parker_] { parker->unpark(); }, {});
  thread_ = runtime_->executor.spawn("group", [this] { run(); });
}

std::shared_ptr<SerialBackend> SerialBackend::make(std::shared_ptr<Runtime> runtime,
                                                   std::unique_ptr<BlockingCollectives> collectives,
                                                   SerialOptions options) {
  const std::shared_ptr<SerialBackend> backend(
      new SerialBackend(std::move(runtime), std::move(collectives), std::move(options)));
  const auto& [world, members] = std::tie(backend->options_.world, backend->options_.members);
  if (!world) return backend;
  world->add(backend);
  if (const auto departed = world->first_departed(members.instances)) {
    backend->break_with(departed_rank_error(members.names[departed->rank], departed->how));
  }
  return backend;
}

SerialBackend::~SerialBackend() {
  const bool announces = collectives_->announces() && !is_leaving();
  const auto cause = announces ? collectives_->idle_failure() : std::nullopt;
  dropped_.store(true);
  const Error dropped(ErrorKind::kCancelled,
                      "the last handle of the group was dropped while this operation was pending");
  break_with(dropped);
  // Ranks that learn of this rank's end first must not take it for the cause.
  if (cause) collectives_->fail_call(*cause, calls_.load() + 1);
  if (collectives_->announces()) collectives_->end(dropped);
  stop_thread();
  GroupExecutor::close(continuations_, options_.world && options_.world->ended());
}

void SerialBackend::stop_thread() {
  stopping_.store(true);
  parker_->unpark();
  if (thread_.joinable()) thread_.join();
}

void SerialBackend::member_died(const rendezvous::Member& member, const Error& reason) {
  if (!options_.members.contains(member)) return;
  const Error cause = departed_rank_error(describe(member), reason.message());
  if (collectives_->announces()) collectives_->abort(cause);  // before this rank may end because of it
  break_with(cause);
  collectives_->abort(cause);
}

void SerialBackend::world_ended(const Error& reason) {
  break_with(reason);
  collectives_->end(reason);
}

void SerialBackend::world_closing() { stop_thread(); }

template <class T>
Future<T> SerialBackend::submit(std::string call, UniqueFunction<T()> body, std::uint64_t* number) {
  auto promise = std::make_shared<Promise<T>>(continuations_);
  Future<T> future = promise->future();
  auto job = std::make_unique<Job>();
  job->call = std::move(call);
  job->call += describe(StepPartScope::current());
  job->run = [promise, body = std::move(body)]() mutable {
    if constexpr (std::is_void_v<T>) {
      body();
      promise->set_value();
    } else {
      promise->set_value(body());
    }
  };
  job->fail = [promise](std::exception_ptr error) { promise->set_error(std::move(error)); };
  const std::uint64_t its_number = enqueue(std::move(job));
  if (number != nullptr) *number = its_number;
  return future;
}

void SerialBackend::Job::fail_with(const Error& cause) {
  fail(
      std::make_exception_ptr(Error(cause).with_call(fmt::format("{}, call {} of the group", call, number))));
}

std::uint64_t SerialBackend::enqueue(std::unique_ptr<Job> job) {
  std::optional<Error> failure;
  std::unique_ptr<Job> refused;
  std::uint64_t number = 0;
  {
    MutexLock lock(mutex_);
    failure = failure_;
    number = job->number = ++called_;
    if (failure) {
      refused = std::move(job);
    } else {
      queue_.push_back(std::move(job));
    }
  }
  if (refused) {
    refused->fail_with(*failure);
  } else {
    parker_->unpark();
  }
  return number;
}

void SerialBackend::run() {
  while (true) {
    std::unique_ptr<Job> job;
    {
      MutexLock lock(mutex_);
      if (!queue_.empty()) {
        job = std::move(queue_.front());
        queue_.pop_front();
      }
    }
    if (job) {
      run_one(*job);
    } else if (stopping_.load()) {
      return;
    } else {
      const auto cause = collectives_->idle_failure();
      if (cause && !recorded_failure() && !is_leaving()) {
        // It may concern later calls only, but others wait for this rank in those that it now refuses.
        break_with(*cause);
        collectives_->fail_call(*cause, calls_.load() + 1);
      }
      const Duration interval = collectives_->idle_interval();
      const bool asks = interval > Duration::zero() && !recorded_failure();
      parker_->park(asks ? runtime_->executor.deadline_in(interval) : Deadline::never());
    }
  }
}

bool SerialBackend::is_leaving() const {
  return dropped_.load() || (options_.world && options_.world->ended());
}

void SerialBackend::run_one(Job& job) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView unversioned;  // as in put_back()
  // Barriers and gathers of bytes block their callers, which the group lists and reports.
  const bool listed_by_caller = job.call.starts_with(kBarrierLine) || job.call.starts_with(kBytesLine);
  const TimePoint began = runtime_->executor.now();
  std::optional<SpanScope> running;
  if (!listed_by_caller) {
    running.emplace(runtime_->spans, SpanKind::kWait, job.call,
                    SpanLink{.id = job.number, .part = group_number_});
  }
  try {
    if (const auto cause = recorded_failure()) throw Error(*cause);
    // Engines that announce failures see the end of a rank in the order of calls.
    if (!collectives_->announces()) throw_if_rank_departed(options_);
    compare(job.call);
    job.run();
  } catch (...) {
    const auto announced = collectives_->failure();
    if (!recorded_failure())
      break_with(announced ? *announced
                           : explain_failure(runtime_->executor, options_, *collectives_, job.call,
                                             calls_.load(), std::current_exception()));
    const Error cause = *recorded_failure();
    if (collectives_->announces() && !is_leaving()) collectives_->fail_call(cause, job.number);
    if (cause.kind() == ErrorKind::kTimedOut && !listed_by_caller) {
      report_timeout({.kind = "wait",
                      .name = job.call,
                      .seconds = to_seconds(runtime_->executor.now() - began),
                      .id = job.number,
                      .part = group_number_});
    }
    job.fail_with(cause);
  }
}

std::optional<Error> SerialBackend::failure() {
  if (auto recorded = recorded_failure()) return recorded;
  return collectives_->idle_failure();
}

std::optional<Error> SerialBackend::recorded_failure() {
  MutexLock lock(mutex_);
  return failure_;
}

void SerialBackend::compare(const std::string& call) {
  const std::uint64_t number = calls_++;
  collectives_->begin(number + 1);
  if (!options_.compare_calls) return;
  LineBytes mine = pack_line(call, number);
  std::vector<LineBytes> lines(options_.members.ranks.size());
  at::Tensor all =
      bytes_of(lines.data(), lines.size() * kLineBytes)
          .view({static_cast<std::int64_t>(lines.size()), static_cast<std::int64_t>(kLineBytes)});
  collectives_->all_gather(bytes_of(mine.data(), mine.size()), all);
  if (const auto rank = first_difference(lines))
    throw_different_calls(options_.members.names[0], unpack_line(lines[0]), options_.members.names[*rank],
                          unpack_line(lines[*rank]));
}

template <class T>
T SerialBackend::submit_and_wait(Duration timeout, const char* call, UniqueFunction<T()> body) {
  std::uint64_t number = 0;
  const Future<T> future = submit<T>({call}, std::move(body), &number);
  Duration waited{0};
  WaitWarnings warnings;
  while (timeout == Duration::zero() || warnings.next() < timeout) {
    if (future.wait_for(warnings.next() - waited)) break;
    waited = warnings.next();
    warnings.due(waited);
    const std::string awaited = collectives_->awaited();
    runtime_->log.warning(fmt::format(
        "{}, call {} of the group, has waited {:.0f} s{}: torchspan stacks shows what each rank does", call,
        number, to_seconds(waited), awaited.empty() ? " for other ranks" : " for " + awaited));
  }
  if (timeout == Duration::zero() || future.wait_for(timeout - waited)) return future.wait();
  const std::uint64_t dropped = break_with(
      Error(ErrorKind::kTimedOut,
            fmt::format("{}, call {} of the group, did not complete by its deadline{}", call, number,
                        missing_ranks(runtime_->executor, options_, *collectives_, number))));
  const Error cause = *recorded_failure();
  if (collectives_->announces()) collectives_->fail_call(cause, std::min(number, dropped));
  throw Error(cause).with_call(call);
}

std::uint64_t SerialBackend::break_with(const Error& cause) {
  std::deque<std::unique_ptr<Job>> failed;
  Error first = cause;
  {
    MutexLock lock(mutex_);
    if (!failure_) failure_ = cause;
    first = *failure_;
    failed.swap(queue_);
  }
  for (const auto& job : failed) job->fail_with(first);
  return failed.empty() ? std::numeric_limits<std::uint64_t>::max() : failed.front()->number;
}

void SerialBackend::abort(const Error& cause) {
  const Error reason = aborted_by(options_.members.name(rank()), cause);
  break_with(reason);
  collectives_->abort(reason);
}

std::shared_ptr<Backend> SerialBackend::split(int color, int key) {
  struct Part {
    std::unique_ptr<BlockingCollectives> collectives;
    SerialOptions options;
  };
  const auto part = std::make_shared<Part>();
  submit<void>({"split()"}, [this, part, color, key] {
    const auto [members, number] =
        plan_split([&](BytesView mine) { return gathers_.bytes(mine); }, color, key);
    part->options = options_;
    std::vector<int> ranks;
    for (const int member : members)
      ranks.push_back(options_.members.ranks[static_cast<std::size_t>(member)]);
    part->options.members = options_.members.part(ranks);
    part->options.rank = static_cast<int>(std::ranges::find(members, rank()) - members.begin());
    part->collectives = collectives_->split(members, number);
  }).wait();
  if (part->options.members.ranks.size() == 1) {
    return SingleBackend::make(part->options.members.ranks[0], runtime_, options_.world);
  }
  return make(runtime_, std::move(part->collectives), std::move(part->options));
}

Future<at::Tensor> SerialBackend::all_reduce(at::Tensor tensor, ReduceOp reduction) {
  std::string line = line_of_reduction("all_reduce", tensor, reduction);
  if (tensor.is_sparse()) {
    return submit<at::Tensor>(line, [this, line, tensor, divisor = reduction == kAvg ? size() : 1] {
      return reduce_sparse(gathers_, tensor, line, divisor, options_.members.names);
    });
  }
  return submit<at::Tensor>(std::move(line), [this, tensor, reduction] {
    const at::Tensor work = plain(tensor);
    reduce_dense(*collectives_, work, reduction, size());
    return put_back(work, tensor);
  });
}

Future<at::Tensor> SerialBackend::reduce_scatter(at::Tensor tensor, ReduceOp reduction) {
  return submit<at::Tensor>(line_of_reduction("reduce_scatter", tensor, reduction),
                            [this, tensor, reduction] { return scatter_dense(plain(tensor), reduction); });
}

Future<at::Tensor> SerialBackend::reduce(at::Tensor tensor, int root, ReduceOp reduction) {
  std::string line = line_of_reduction("reduce", tensor, reduction, fmt::format(", to rank {}", root));
  return submit<at::Tensor>(std::move(line), [this, tensor, root, reduction] {
    if (tensor.numel() == 0) return tensor;
    at::Tensor work = plain(tensor);
    const bool gets = root == rank();
    if (!collectives_->reduces(work.scalar_type(), reduction) ||
        !collectives_->reduce(work, root, reduction)) {
      if (!gets) work = work.clone();
      reduce_dense(*collectives_, work, reduction, size());
    }
    return gets ? put_back(work, tensor) : tensor;
  });
}

Future<std::vector<at::Tensor>> SerialBackend::coalesced(CoalescedCall call, at::Tensor flat) {
  using Verb = CoalescedCall::Verb;
  return submit<std::vector<at::Tensor>>(line_of_coalesced(call, flat),
                                         [this, verb = call.verb, reduction = call.reduction, flat] {
                                           if (verb == Verb::kAllGather) return gathers_.dense(flat);
                                           if (verb == Verb::kReduceScatter)
                                             return std::vector<at::Tensor>{scatter_dense(flat, reduction)};
                                           reduce_dense(*collectives_, flat, reduction, size());
                                           return std::vector<at::Tensor>{flat};
                                         });
}

Future<std::vector<at::Tensor>> SerialBackend::all_gather(at::Tensor tensor) {
  return submit<std::vector<at::Tensor>>(line_of_tensor("all_gather", tensor, {}, /*first_free=*/true),
                                         [this, tensor] { return gathers_.dense(plain(tensor)); });
}

Future<at::Tensor> SerialBackend::broadcast(at::Tensor tensor, int root) {
  return submit<at::Tensor>(line_of_tensor("broadcast", tensor, fmt::format(" from rank {}", root)),
                            [this, tensor, root] {
                              const at::Tensor work = plain(tensor);
                              if (work.nbytes() != 0) collectives_->broadcast(bytes_of(work), root);
                              return root == rank() ? tensor : put_back(work, tensor);
                            });
}

Future<std::vector<at::Tensor>> SerialBackend::all_to_all(std::vector<at::Tensor> parts) {
  std::string line = line_of_all_to_all(parts);
  return exchange(std::move(line), std::move(parts));
}

Future<std::vector<at::Tensor>> SerialBackend::rooted_all_to_all(RootedCall call,
                                                                 std::vector<at::Tensor> parts) {
  std::string line = line_of_rooted(call, parts);
  return exchange(std::move(line), std::move(parts));
}

Future<std::vector<at::Tensor>> SerialBackend::exchange(std::string line, std::vector<at::Tensor> parts) {
  return submit<std::vector<at::Tensor>>(std::move(line), [this, parts = std::move(parts)] {
    const auto ranks = static_cast<std::size_t>(size());
    ByteWriter shapes;
    std::vector<at::Tensor> sent;
    for (const at::Tensor& part : parts) {
      shapes.put(static_cast<std::uint32_t>(part.dim()));
      for (const std::int64_t size : part.sizes()) shapes.put(size);
      sent.push_back(bytes_of(plain(part)).clone());
    }
    ByteCounts counts(ranks);
    std::vector<at::Tensor> results;
    const std::vector<Bytes> all_shapes = gathers_.bytes(shapes.bytes());
    for (std::size_t from = 0; from < ranks; ++from) {
      ByteReader reader(all_shapes[from]);
      for (std::size_t to = 0; to < ranks; ++to) {
        std::vector<std::int64_t> sizes(reader.get_count(sizeof(std::int64_t)));
        for (std::int64_t& size : sizes) size = reader.get<std::int64_t>();
        counts.at(from, to) =
            c10::multiply_integers(sizes) * static_cast<std::int64_t>(parts[0].element_size());
        if (static_cast<int>(to) != rank()) continue;
        results.push_back(at::empty(sizes, parts[0].options().layout(at::kStrided)));
      }
    }
    const std::vector<std::int64_t> received_counts = counts.received_by(rank());
    const std::int64_t total =
        std::accumulate(received_counts.begin(), received_counts.end(), std::int64_t{0});
    const at::Tensor received = empty_bytes({total});
    collectives_->all_to_all(at::cat(sent), received, counts);
    std::int64_t at = 0;
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (received_counts[i] != 0) bytes_of(results[i]).copy_(received.narrow(0, at, received_counts[i]));
      at += received_counts[i];
    }
    return results;
  });
}

std::vector<Bytes> SerialBackend::all_gather_bytes(BytesView mine, Duration timeout) {
  const auto bytes = std::make_shared<Bytes>(mine.begin(), mine.end());
  return submit_and_wait<std::vector<Bytes>>(timeout, kBytesLine,
                                             [this, bytes] { return gathers_.bytes(*bytes); });
}

void SerialBackend::barrier(Duration timeout) {
  submit_and_wait<void>(timeout, kBarrierLine, [this] {
    if (options_.compare_calls) return;  // the comparison of calls was a barrier
    at::Tensor mine = at::zeros({1}, at::TensorOptions().dtype(at::kByte));
    collectives_->all_gather(mine, empty_bytes({size(), 1}));
  });
}

at::Tensor SerialBackend::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype));
}

at::Tensor SerialBackend::scatter_dense(const at::Tensor& tensor, ReduceOp reduction) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (device::is_half(dtype) && !collectives_->reduces(dtype, reduction)) {
    return scatter_dense(tensor.to(at::kFloat), reduction).to(dtype);
  }
  if (reduction == kAvg && !collectives_->reduces(dtype, kAvg) && collectives_->reduces(dtype, kSum)) {
    return scatter_dense(tensor, kSum).div_(size());
  }
  const std::int64_t rows = tensor.size(0) / size();
  const at::Tensor part = at::empty_like(tensor.narrow(0, 0, rows));
  if (part.numel() == 0) return part;
  if (collectives_->reduces(dtype, reduction) && collectives_->reduce_scatter(tensor, part, reduction)) {
    return part;
  }
  const at::Tensor work = tensor.clone();
  reduce_dense(*collectives_, work, reduction, size());
  return work.narrow(0, rows * rank(), rows).clone();
}

}  // namespace torchspan::collective
