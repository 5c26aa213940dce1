#include <atomic>
#include <cstdint>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <memory>
#include <optional>
#include <string_view>

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/collective.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>

#include "collective/api/shares_memory.h"
#include "collective/point_to_point/point_to_point.h"
#include "collective/tensors.h"
#include "core/api/step_part.h"
#include "core/api/timeout_notice.h"

namespace torchspan::collective {

/// Numbers the operations of one group and records them as spans in a traced run. Does not keep the runtime
/// alive, because its last owner must not be a thread of the group.
class OperationLog {
 public:
  /// An operation that has begun; without spans in a run that is not traced.
  struct Operation {
    const char* call;
    std::uint64_t number;
    std::uint64_t bytes;
    std::optional<TimePoint> began;
  };

  /// `number`: the group's, as group_number() makes it.
  OperationLog(const std::shared_ptr<Runtime>& runtime, std::int32_t number);

  /// The log of a part of the group.
  std::shared_ptr<OperationLog> of_part(std::int32_t number) const;

  Operation begin(const char* call, std::uint64_t bytes);
  void end(const Operation& operation) const;

  /// A blocking operation, listed as open until the destructor ends it.
  class Blocking {
   public:
    Blocking(OperationLog& log, const char* call, std::uint64_t bytes);

    /// Returns what `work` returns; reports it to the launcher if it times out.
    template <class F>
    auto run(F work) const {
      try {
        return work();
      } catch (const Error& error) {
        note(error);
        throw;
      }
    }

   private:
    void note(const Error& error) const;

    const char* const call_;
    const std::uint64_t number_;
    const std::int32_t group_;
    std::shared_ptr<Runtime> runtime_;
    TimePoint began_;
    std::optional<SpanScope> scope_;
  };

  /// Ends the operation when `work` completes; `log` may be null.
  template <class T>
  static Future<T> until(const std::shared_ptr<OperationLog>& log, const Operation& operation,
                         Future<T> work) {
    if (operation.began) work.add_done_callback([log, operation](const Future<T>&) { log->end(operation); });
    return work;
  }

 private:
  std::shared_ptr<Runtime> runtime() const { return borrowed_ ? borrowed_ : owned_.lock(); }

  const std::weak_ptr<Runtime> owned_;
  const std::shared_ptr<Runtime> borrowed_;  ///< owns nothing
  const std::int32_t group_;
  std::atomic<std::uint64_t> next_{0};
};

OperationLog::OperationLog(const std::shared_ptr<Runtime>& runtime, std::int32_t number)
    : owned_(runtime),
      borrowed_(runtime.use_count() == 0 ? runtime : std::shared_ptr<Runtime>()),
      group_(number) {}

std::shared_ptr<OperationLog> OperationLog::of_part(std::int32_t number) const {
  return std::make_shared<OperationLog>(borrowed_ ? borrowed_ : owned_.lock(), number);
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

namespace {

void check(bool good, std::string text) {
  if (!good) throw_invalid(std::move(text));
}

std::string text_of(at::IntArrayRef sizes) { return fmt::format("[{}]", fmt::join(sizes.vec(), ", ")); }

void check_tensor(const Backend& backend, std::string_view call, const at::Tensor& tensor,
                  bool sparse_too = false) {
  check(tensor.defined(),
        fmt::format("{} of an undefined tensor: pass a defined tensor on every rank", call));
  if (!backend.takes(tensor.device())) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format(
            "{} of a {} tensor {} on {}: the backend of this group ({}, here rank {} of {}) does not support "
            "that device; {}",
            call, c10::toString(tensor.scalar_type()), text_of(tensor.sizes()), tensor.device().str(),
            backend.name(), backend.rank(), backend.size(),
            tensor.is_meta() ? "a meta tensor has no values to send"
                             : "make the group with this GroupOptions::device, or move the tensor to the "
                               "group's device or the CPU"));
  }
  if (tensor.layout() == at::kStrided || (sparse_too && tensor.layout() == at::kSparse)) {
    check(!tensor._is_zerotensor(),
          fmt::format("{} of a ZeroTensor {}, which has no memory: pass its clone()", call,
                      text_of(tensor.sizes())));
    if (!tensor.is_quantized()) return;
  }
  throw Error(ErrorKind::kUnsupported,
              fmt::format("{} takes {}tensors that are not quantized; convert this one first", call,
                          sparse_too ? "dense and sparse COO " : "dense "));
}

/// A tensor that the operation writes.
void check_written(const Backend& backend, std::string_view call, const at::Tensor& tensor,
                   bool sparse_too = false) {
  check_tensor(backend, call, tensor, sparse_too);
  check(tensor.is_sparse() || at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
        fmt::format("{} writes a tensor {} with strides {}, of which several elements share memory, as after "
                    "expand(): pass its clone()",
                    call, text_of(tensor.sizes()), text_of(tensor.strides())));
}

void check_rank(const char* what, int rank, int size) {
  check(rank >= 0 && rank < size,
        fmt::format("{} is {}, but the ranks of this group are 0 to {}", what, rank, size - 1));
}

/// The output of all_gather_into_tensor() has all ranks' tensors behind each other, or stacked.
void check_output(std::string_view call, const at::Tensor& output, const at::Tensor& tensor, int ranks) {
  std::vector<std::int64_t> joined = tensor.sizes().vec(), stacked = joined;
  stacked.insert(stacked.begin(), ranks);
  if (joined.empty()) {
    joined = stacked;  // tensors without dimensions can only be stacked
  } else {
    joined[0] *= ranks;
  }
  check(output.scalar_type() == tensor.scalar_type() &&
            (output.sizes() == at::IntArrayRef(stacked) || output.sizes() == at::IntArrayRef(joined)),
        fmt::format(
            "{} of {} {} on {} ranks needs an output of the same dtype and shape {} or {}, but it is {} {}",
            call, c10::toString(tensor.scalar_type()), text_of(tensor.sizes()), ranks, text_of(joined),
            text_of(stacked), c10::toString(output.scalar_type()), text_of(output.sizes())));
}

/// Tensors of coalesced operations.
void check_alike(const Backend& backend, std::string_view call, const std::vector<at::Tensor>& tensors) {
  check(!tensors.empty(), fmt::format("{} of no tensors: pass at least one", call));
  for (const at::Tensor& tensor : tensors) {
    check_tensor(backend, call, tensor);
    check(tensor.scalar_type() == tensors[0].scalar_type() && tensor.device() == tensors[0].device(),
          fmt::format(
              "the tensors of {} on rank {} of the group are {} on {} and {} on {}; make one call for each "
              "dtype and device",
              call, backend.rank(), c10::toString(tensors[0].scalar_type()), tensors[0].device().str(),
              c10::toString(tensor.scalar_type()), tensor.device().str()));
  }
}

void check_divisible(std::string_view call, const at::Tensor& tensor, int ranks) {
  check(tensor.dim() > 0 && tensor.size(0) % ranks == 0,
        fmt::format("{} splits the first dimension into {} equal parts, but {}", call, ranks,
                    tensor.dim() == 0 ? "the tensor has no dimension"
                                      : fmt::format("it is {}: pad it", tensor.size(0))));
}

std::uint64_t logged_bytes(const at::Tensor& tensor) {
  return tensor.is_sparse() ? 0 : static_cast<std::uint64_t>(tensor.nbytes());
}

std::uint64_t logged_bytes(const std::vector<at::Tensor>& tensors) {
  std::uint64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += logged_bytes(tensor);
  return bytes;
}

/// Operations of one rank need no order.
void begin_in_step(const Backend& backend, const char* call) {
  backend.runtime().check_process();
  if (backend.size() > 1) StepPartScope::begin_operation(call);
}

}  // namespace

/// Runs `begin()`, which returns the future of an operation.
template <class F>
auto Group::start(const char* call, std::uint64_t bytes, F begin) const {
  begin_in_step(*backend_, call);
  if (!log_) return begin();
  const OperationLog::Operation operation = log_->begin(call, bytes);
  return OperationLog::until(log_, operation, begin());
}

std::string to_string(ReduceOp reduction) {
  switch (reduction) {
    case kSum:
      return "sum";
    case kAvg:
      return "average";
    case kMin:
      return "minimum";
    case kMax:
      return "maximum";
    case kProduct:
      return "product";
    case kBitAnd:
      return "bitwise and";
    case kBitOr:
      return "bitwise or";
    case kBitXor:
      return "bitwise exclusive or";
  }
  return fmt::format("reduction {}", static_cast<int>(reduction));
}

/// The groups that were split from one and still live, for abort().
class Group::Parts {
 public:
  void add(const Group& part) {
    std::optional<Error> aborted;
    {
      MutexLock lock(mutex_);
      std::erase_if(parts_, [](const Part& ended) { return ended.backend.expired(); });
      parts_.push_back({part.backend_, part.parts_});
      aborted = aborted_;
    }
    if (aborted) part.abort(*aborted);
  }
  void abort(const Error& cause) {
    std::vector<Part> parts;
    {
      MutexLock lock(mutex_);
      if (!aborted_) aborted_ = cause;
      parts = parts_;
    }
    for (const Part& part : parts) {
      if (const auto backend = part.backend.lock()) backend->abort(cause);
      if (const auto its = part.parts.lock()) its->abort(cause);
    }
  }

 private:
  struct Part {
    std::weak_ptr<Backend> backend;
    std::weak_ptr<Parts> parts;
  };
  Mutex mutex_;
  std::vector<Part> parts_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> aborted_ TORCHSPAN_GUARDED_BY(mutex_);
};

Group::Group(std::shared_ptr<Backend> backend)
    : backend_(kept_in_forks(std::move(backend))), parts_(std::make_shared<Parts>()) {
  check(backend_ != nullptr, "a group needs a backend: use Group::make()");
}
Group::Group(std::shared_ptr<Backend> backend, const std::shared_ptr<Runtime>& runtime,
             std::shared_ptr<PointToPoint> messages)
    : Group(std::move(backend)) {
  messages_ = kept_in_forks(std::move(messages));
  log_ = std::make_shared<OperationLog>(runtime, identify());
}

/// Tells the backend which of the groups of its ranks this is; returns the group's number.
std::int32_t Group::identify() const {
  const std::uint64_t instance = messages_ ? messages_->group() : 0;
  backend_->set_instance(instance);
  return group_number(ranks(), instance);
}

int Group::rank() const { return backend_->rank(); }
const std::vector<int>& Group::ranks() const { return backend_->ranks(); }

Group Group::split(int color, int key) const {
  check(color >= 0,
        fmt::format(
            "color is {}; it must be 0 or more: ranks that should not share a group use different colors",
            color));
  begin_in_step(*backend_, "split");
  // Counted also where making the part fails, which it may do for one color only.
  const std::uint64_t number = messages_ ? messages_->next_split() : 0;
  Group part(backend_->split(color, key));
  if (messages_) part.messages_ = kept_in_forks(messages_->of_part(part.backend_, number));
  if (log_) part.log_ = log_->of_part(part.identify());
  parts_->add(part);
  return part;
}

Future<at::Tensor> Group::all_reduce(at::Tensor tensor, ReduceOp reduction) const {
  check_written(*backend_, "all_reduce", tensor, /*sparse_too=*/true);
  const std::uint64_t bytes = logged_bytes(tensor);
  return start("all_reduce", bytes, [&] { return backend_->all_reduce(std::move(tensor), reduction); });
}

Future<at::Tensor> Group::reduce_scatter(at::Tensor tensor, ReduceOp reduction) const {
  check_tensor(*backend_, "reduce_scatter", tensor);
  check_divisible("reduce_scatter", tensor, size());
  const std::uint64_t bytes = logged_bytes(tensor);
  return start("reduce_scatter", bytes,
               [&] { return backend_->reduce_scatter(std::move(tensor), reduction); });
}

Future<at::Tensor> Group::reduce_scatter_tensor(at::Tensor output, at::Tensor tensor,
                                                ReduceOp reduction) const {
  const char* const call = "reduce_scatter_tensor";
  check_tensor(*backend_, call, tensor);
  check_written(*backend_, call, output);
  check_divisible(call, tensor, size());
  check(output.scalar_type() == tensor.scalar_type() && output.numel() * size() == tensor.numel(),
        fmt::format(
            "{} of {} {} on {} ranks needs an output of the same dtype with {} elements, but it is {} {}",
            call, c10::toString(tensor.scalar_type()), text_of(tensor.sizes()), size(),
            tensor.numel() / size(), c10::toString(output.scalar_type()), text_of(output.sizes())));
  const std::uint64_t bytes = logged_bytes(tensor);
  if (auto* in_place = dynamic_cast<SharesMemory*>(backend_.get())) {
    return start(call, bytes, [&] {
      return in_place->reduce_scatter_into(std::move(output), std::move(tensor), reduction);
    });
  }
  return start(call, bytes, [&] {
    return backend_->reduce_scatter(std::move(tensor), reduction)
        .then([output](const Future<at::Tensor>& done) {
          return put_back(done.wait().reshape(output.sizes()), output);
        });
  });
}

Future<std::vector<at::Tensor>> Group::all_gather(at::Tensor tensor) const {
  check_tensor(*backend_, "all_gather", tensor);
  const std::uint64_t bytes = logged_bytes(tensor);
  return start("all_gather", bytes, [&] { return backend_->all_gather(std::move(tensor)); });
}

Future<at::Tensor> Group::broadcast(at::Tensor tensor, int root) const {
  check_written(*backend_, "broadcast", tensor);
  check_rank("root", root, size());
  const std::uint64_t bytes = logged_bytes(tensor);
  return start("broadcast", bytes, [&] { return backend_->broadcast(std::move(tensor), root); });
}

Future<std::vector<at::Tensor>> Group::all_to_all(std::vector<at::Tensor> parts) const {
  check(parts.size() == static_cast<std::size_t>(size()),
        fmt::format("all_to_all needs one part for each of the {} ranks, but got {}", size(), parts.size()));
  for (const at::Tensor& part : parts) {
    check_tensor(*backend_, "all_to_all", part);
    check(part.scalar_type() == parts[0].scalar_type(),
          fmt::format("the parts of all_to_all have dtypes {} and {}; they must have the same",
                      c10::toString(parts[0].scalar_type()), c10::toString(part.scalar_type())));
  }
  const std::uint64_t bytes = logged_bytes(parts);
  return start("all_to_all", bytes, [&] { return backend_->all_to_all(std::move(parts)); });
}

Future<at::Tensor> Group::all_gather_into_tensor(at::Tensor output, at::Tensor tensor) const {
  check_tensor(*backend_, "all_gather_into_tensor", tensor);
  check_written(*backend_, "all_gather_into_tensor", output);
  check_output("all_gather_into_tensor", output, tensor, size());
  const std::uint64_t bytes = logged_bytes(tensor);
  if (auto* in_place = dynamic_cast<SharesMemory*>(backend_.get())) {
    return start("all_gather_into_tensor", bytes,
                 [&] { return in_place->all_gather_into(std::move(output), std::move(tensor)); });
  }
  const auto stacked_into = [output,
                             sizes = tensor.sizes().vec()](const Future<std::vector<at::Tensor>>& done) {
    const std::vector<at::Tensor> all = done.wait();
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      check(all[rank].sizes() == at::IntArrayRef(sizes), different_shapes(rank, all[rank].sizes(), sizes));
    }
    return put_back(at::stack(all).view(output.sizes()), output);
  };
  return start("all_gather_into_tensor", bytes,
               [&] { return backend_->all_gather(tensor).then(stacked_into); });
}

Future<std::vector<at::Tensor>> Group::gather(at::Tensor tensor, int root) const {
  check_tensor(*backend_, "gather", tensor);
  check_rank("root", root, size());
  std::vector<at::Tensor> parts(static_cast<std::size_t>(size()), at::empty({0}, tensor.options()));
  parts[static_cast<std::size_t>(root)] = std::move(tensor);
  return start("gather", logged_bytes(parts), [&] {
    return backend_->rooted_all_to_all({RootedCall::Verb::kGather, root}, std::move(parts))
        .then([here = root == rank()](const Future<std::vector<at::Tensor>>& gathered) {
          std::vector<at::Tensor> all = gathered.wait();
          return here ? all : std::vector<at::Tensor>();
        });
  });
}

Future<at::Tensor> Group::scatter(at::Tensor output, std::vector<at::Tensor> parts, int root) const {
  check_written(*backend_, "scatter", output);
  check_rank("root", root, size());
  const auto needed = static_cast<std::size_t>(root == rank() ? size() : 0);
  check(parts.size() == needed,
        fmt::format("scatter from rank {} needs {} parts on rank {}, but got {}: only the root passes parts, "
                    "one for each rank",
                    root, needed, rank(), parts.size()));
  for (const at::Tensor& part : parts) {
    check_tensor(*backend_, "scatter", part);
    check(part.scalar_type() == output.scalar_type(),
          fmt::format("a part of scatter is {}, but the output {}; they must have the same dtype",
                      c10::toString(part.scalar_type()), c10::toString(output.scalar_type())));
  }
  parts.resize(static_cast<std::size_t>(size()), at::empty({0}, output.options()));
  return start("scatter", logged_bytes(parts), [&] {
    return backend_->rooted_all_to_all({RootedCall::Verb::kScatter, root}, std::move(parts))
        .then([output, root](const Future<std::vector<at::Tensor>>& received) {
          const at::Tensor mine = received.wait()[static_cast<std::size_t>(root)];
          check(mine.sizes() == output.sizes(),
                fmt::format("rank {} scattered a part of shape {} to this rank, whose output is {}", root,
                            text_of(mine.sizes()), text_of(output.sizes())));
          return put_back(mine, output);
        });
  });
}

Future<at::Tensor> Group::reduce(at::Tensor tensor, int root, ReduceOp reduction) const {
  root == rank() ? check_written(*backend_, "reduce", tensor) : check_tensor(*backend_, "reduce", tensor);
  check_rank("root", root, size());
  return start("reduce", logged_bytes(tensor),
               [&] { return backend_->reduce(std::move(tensor), root, reduction); });
}

Future<std::vector<at::Tensor>> all_reduce_coalesced(const Group& group, std::vector<at::Tensor> tensors,
                                                     ReduceOp reduction) {
  using Verb = CoalescedCall::Verb;
  check_alike(*group.backend_, name_of(Verb::kAllReduce), tensors);
  for (const at::Tensor& tensor : tensors) check_written(*group.backend_, name_of(Verb::kAllReduce), tensor);
  return group.start("all_reduce_coalesced", logged_bytes(tensors), [&] {
    std::vector<std::vector<std::int64_t>> sizes;
    for (const at::Tensor& tensor : tensors) sizes.push_back(tensor.sizes().vec());
    return group.backend_
        ->coalesced({Verb::kAllReduce, reduction, shapes_of(tensors)}, join_rows(tensors, 1).view({-1}))
        .then([tensors, sizes](const Future<std::vector<at::Tensor>>& reduced) {
          const std::vector<at::Tensor> parts = cut_row(reduced.wait()[0], sizes);
          for (std::size_t i = 0; i < parts.size(); ++i) put_back(parts[i], tensors[i]);
          return tensors;
        });
  });
}

Future<std::vector<at::Tensor>> reduce_scatter_coalesced(const Group& group,
                                                         const std::vector<at::Tensor>& tensors,
                                                         ReduceOp reduction) {
  using Verb = CoalescedCall::Verb;
  check_alike(*group.backend_, name_of(Verb::kReduceScatter), tensors);
  std::vector<std::vector<std::int64_t>> sizes;
  std::vector<at::Tensor>
      results;  // made here: on a device, memory belongs to the stream of the thread that allocates it
  for (const at::Tensor& tensor : tensors) {
    check_divisible(name_of(Verb::kReduceScatter), tensor, group.size());
    sizes.push_back(tensor.sizes().vec());
    sizes.back()[0] /= group.size();
    results.push_back(at::empty(sizes.back(), tensor.options().requires_grad(false)));
  }
  return group.start("reduce_scatter_coalesced", logged_bytes(tensors), [&] {
    return group.backend_
        ->coalesced({Verb::kReduceScatter, reduction, shapes_of(tensors)}, join_rows(tensors, group.size()))
        .then([sizes, results](const Future<std::vector<at::Tensor>>& reduced) {
          const std::vector<at::Tensor> parts = cut_row(reduced.wait()[0].view({-1}), sizes);
          for (std::size_t i = 0; i < parts.size(); ++i) put_back(parts[i], results[i]);
          return results;
        });
  });
}

Future<std::vector<at::Tensor>> all_gather_into_tensor_coalesced(const Group& group,
                                                                 std::vector<at::Tensor> outputs,
                                                                 const std::vector<at::Tensor>& tensors) {
  using Verb = CoalescedCall::Verb;
  const std::string_view call = name_of(Verb::kAllGather);
  check_alike(*group.backend_, call, tensors);
  check(outputs.size() == tensors.size(), fmt::format("{} got {} outputs for {} tensors; pass one for each",
                                                      call, outputs.size(), tensors.size()));
  std::vector<std::vector<std::int64_t>> sizes;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check_written(*group.backend_, call, outputs[i]);
    check_output(call, outputs[i], tensors[i], group.size());
    sizes.push_back(tensors[i].sizes().vec());
  }
  return group.start("all_gather_into_tensor_coalesced", logged_bytes(tensors), [&] {
    const at::Tensor flat = join_rows(tensors, 1).view({-1});
    return group.backend_->coalesced({Verb::kAllGather, kSum, shapes_of(tensors)}, flat)
        .then([outputs, sizes, length = flat.numel()](const Future<std::vector<at::Tensor>>& gathered) {
          std::vector<std::vector<at::Tensor>> parts(outputs.size());
          for (const at::Tensor& row : gathered.wait()) {
            check(row.numel() == length,
                  fmt::format(
                      "all_gather_into_tensor_coalesced needs tensors of the same shapes on all ranks, but "
                      "one rank has {} elements and this rank {}",
                      row.numel(), length));
            const std::vector<at::Tensor> cut = cut_row(row, sizes);
            for (std::size_t i = 0; i < cut.size(); ++i) parts[i].push_back(cut[i]);
          }
          for (std::size_t i = 0; i < parts.size(); ++i) {
            put_back(at::stack(parts[i]).view(outputs[i].sizes()), outputs[i]);
          }
          return outputs;
        });
  });
}

namespace {

void check_message(const Group& group, const char* call, const at::Tensor& tensor, int tag) {
  check_tensor(*group.backend(), call, tensor);
  check(tag >= 0, fmt::format("the tag of {} is {}; it must be 0 or more", call, tag));
}

void check_peer(const Group& group, const char* call, const char* what, int peer) {
  check(peer >= 0 && peer < group.size(),
        fmt::format("{} is {}, but the ranks of this group are 0 to {}{}", what, peer, group.size() - 1,
                    call == std::string_view("recv") ? "; to receive from any rank, pass kAnySource" : ""));
  check(peer != group.rank(),
        fmt::format("{} with rank {} as the other rank, which is this one: copy the tensor instead", call,
                    peer));
}

void check_has_messages(const std::shared_ptr<PointToPoint>& messages, const Backend& backend,
                        const char* call) {
  if (messages) return;
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format("this group was made from a backend ({}) and has no {}: make it with Group::make(), for "
                  "example session.group()",
                  backend.name(), call));
}

}  // namespace

Future<at::Tensor> Group::send(at::Tensor tensor, int to, int tag) const {
  check_message(*this, "send", tensor, tag);
  check_peer(*this, "send", "the receiver", to);
  check_has_messages(messages_, *backend_, "send");
  return start("send", logged_bytes(tensor), [&] { return messages_->send(tensor, to, tag); });
}

Future<at::Tensor> Group::recv(at::Tensor tensor, int from, int tag) const {
  check_message(*this, "recv", tensor, tag);
  check_written(*backend_, "recv", tensor);
  check_peer(*this, "recv", "the sender", from);
  check_has_messages(messages_, *backend_, "recv");
  return start("recv", logged_bytes(tensor), [&] { return messages_->recv(tensor, from, tag); });
}

Future<ReceivedMessage> Group::recv(at::Tensor tensor, AnySource, int tag) const {
  check_message(*this, "recv", tensor, tag);
  check_written(*backend_, "recv", tensor);
  check(size() > 1, "recv from any rank in a group of one rank, to which no other rank can send");
  check_has_messages(messages_, *backend_, "recv");
  return start("recv", logged_bytes(tensor), [&] { return messages_->recv_from_any(tensor, tag); });
}

std::vector<Bytes> Group::all_gather_bytes(BytesView mine, Duration timeout) const {
  begin_in_step(*backend_, "all_gather_bytes");
  if (!log_) return backend_->all_gather_bytes(mine, timeout);
  const OperationLog::Blocking operation(*log_, "all_gather_bytes", mine.size());
  return operation.run([&] { return backend_->all_gather_bytes(mine, timeout); });
}

void Group::barrier(Duration timeout) const {
  begin_in_step(*backend_, "barrier");
  if (!log_) return backend_->barrier(timeout);
  const OperationLog::Blocking operation(*log_, "barrier", 0);
  operation.run([&] { backend_->barrier(timeout); });
}

Future<void> Group::barrier_async() const {
  // A sum has all terms only after every rank has begun it.
  return all_reduce(backend_->allocate({1}, at::kFloat).zero_()).then([](const Future<at::Tensor>& sum) {
    sum.wait();
  });
}

at::Tensor Group::allocate(at::IntArrayRef sizes, at::ScalarType dtype) const {
  for (const std::int64_t size : sizes) {
    check(size >= 0, fmt::format("allocate got a dimension of {}; it must be 0 or more", size));
  }
  backend_->runtime().check_process();
  return backend_->allocate(sizes, dtype);
}

void Group::abort(const Error& cause) const {
  if (!backend_->runtime().executor.process().is_current()) return;  // cleanup calls it
  backend_->abort(cause);
  parts_->abort(cause);
}

}  // namespace torchspan::collective
