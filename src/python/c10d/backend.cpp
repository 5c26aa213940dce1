#include "python/c10d/backend.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "core/api/throw_invalid.h"
#include "python/errors.h"
#include "python/gil.h"

namespace torchspan::python {
namespace {

using collective::ReduceOp;

/// How long rank 0 serves the others after its program has destroyed its process group.
constexpr Duration kLeaveTimeout = std::chrono::seconds(30);

ReduceOp reduction_of(const c10d::ReduceOp& operation) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(operation.op_)) {
    case c10d::ReduceOp::SUM:
      return collective::kSum;
    case c10d::ReduceOp::PREMUL_SUM:
      throw Error(ErrorKind::kUnsupported, "PREMUL_SUM is NCCL's: multiply the tensor, then use SUM");
    case c10d::ReduceOp::AVG:
      return collective::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return collective::kProduct;
    case c10d::ReduceOp::MIN:
      return collective::kMin;
    case c10d::ReduceOp::MAX:
      return collective::kMax;
    case c10d::ReduceOp::BAND:
      return collective::kBitAnd;
    case c10d::ReduceOp::BOR:
      return collective::kBitOr;
    case c10d::ReduceOp::BXOR:
      return collective::kBitXor;
    default:
      throw_invalid("unknown reduction {}", static_cast<int>(operation.op_));
  }
}

/// c10d's lists have one tensor for each device of a rank; ranks have one.
at::Tensor& only(std::vector<at::Tensor>& tensors, const char* what) {
  if (tensors.size() != 1) throw_invalid("there are {} {}; expected one", tensors.size(), what);
  return tensors[0];
}

std::vector<at::Tensor>& only(std::vector<std::vector<at::Tensor>>& lists, const char* what) {
  if (lists.size() != 1) throw_invalid("there are {} lists of {}; expected one", lists.size(), what);
  return lists[0];
}

void require_count(const std::vector<at::Tensor>& tensors, int size, const char* what) {
  if (static_cast<int>(tensors.size()) == size) return;
  throw_invalid("there are {} {}; expected one for each of the {} ranks", tensors.size(), what, size);
}

/// The program's tensors may need gradients or be inference tensors; operations change them as torch's own do.
void write(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from.sizes() == to.sizes() ? from : from.reshape(to.sizes()));
  if (!to.is_inference()) to.unsafeGetTensorImpl()->bump_version();
}

/// `of_rank`: how many tensors each rank sent, in the order of ranks. Writes all or nothing; copy_() alone would repeat a
/// single row.
void copy_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from,
               std::size_t of_rank = 1) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (to[i].numel() == from[i].numel()) continue;
    throw_invalid(
        "rank {} sent a tensor of shape [{}], and the output for it has shape [{}]: pass outputs of the "
        "sizes that the ranks send",
        i / of_rank, fmt::join(from[i].sizes(), ", "), fmt::join(to[i].sizes(), ", "));
  }
  for (std::size_t i = 0; i < to.size(); ++i) write(to[i], from[i]);
}

std::function<void(const std::vector<at::Tensor>&)> into(std::vector<at::Tensor> outputs) {
  return
      [outputs = std::move(outputs)](const std::vector<at::Tensor>& results) { copy_each(outputs, results); };
}

std::function<void(const at::Tensor&)> into(at::Tensor output) {
  return [output = std::move(output)](const at::Tensor& result) { write(output, result); };
}

at::Tensor flat(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;  // a view has the version of its tensor
  return tensor.reshape(-1);
}

/// Where the elements of an output arrive: its own memory, or other memory, if it has gaps, which is then written to it.
at::Tensor memory_for(const at::Tensor& output) {
  return output.is_contiguous() ? flat(output) : at::empty({output.numel()}, output.options());
}

/// One operation has one dtype and no sparse tensors; others take one operation for each tensor.
bool fit_together(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && tensor.scalar_type() == tensors[0].scalar_type();
  });
}

/// Rows of dimension 0 for each rank: as `sizes` say, or the same number.
std::vector<at::Tensor> split_rows(const at::Tensor& tensor, std::vector<std::int64_t> sizes, int ranks,
                                   const char* what) {
  const at::NoGradGuard no_grad;  // a view has the version of its tensor
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (sizes.empty()) {
    if (rows % ranks != 0)
      throw_invalid("the {} has {} rows, which the {} ranks cannot divide evenly: pass split sizes", what,
                    rows, ranks);
    sizes.assign(static_cast<std::size_t>(ranks), rows / ranks);
  }
  if (static_cast<int>(sizes.size()) != ranks)
    throw_invalid("there are {} split sizes of the {}; expected one for each of the {} ranks", sizes.size(),
                  what, ranks);
  std::int64_t sum = 0;
  for (const std::int64_t size : sizes) sum += size;
  if (sum != rows)
    throw_invalid("the split sizes of the {} have the sum {}, but it has {} rows", what, sum, rows);
  return tensor.dim() == 0 ? std::vector<at::Tensor>{tensor} : at::split_with_sizes(tensor, sizes);
}

/// Names that members understand: letters, digits and a few signs.
std::string member_name(const std::string& text) {
  std::string name = text.substr(0, 100);
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != '.' && c != '-') c = '-';
  }
  return name.empty() ? "default" : name;
}

}  // namespace

c10::intrusive_ptr<Backend> Backend::make(std::shared_ptr<World> world, std::vector<int> ranks, Names names,
                                          std::chrono::milliseconds timeout) {
  collective::GroupOptions options;
  options.ranks = std::move(ranks);
  options.timeout = timeout;
  options.name = member_name(names.group);
  collective::Group group = world->make_group(std::move(options));
  return c10::make_intrusive<Backend>(std::move(world), std::move(group), std::move(names), timeout);
}

Backend::Backend(std::shared_ptr<World> world, collective::Group group, Names names,
                 std::chrono::milliseconds timeout)
    : c10d::Backend(group.rank(), group.size()),
      world_(std::move(world)),
      names_(std::move(names)),
      group_(std::move(group), names_),
      timeout_(timeout) {}

Backend::~Backend() {
  without_gil([this] {
    group_.reset();
    world_.reset();
  });
}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(names_.backend, timeout_);
  options->group_name = names_.group;
  return options;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  return with_torch_errors([&]() -> c10::intrusive_ptr<c10d::Backend> {
    if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) return nullptr;
    std::vector<int> members;
    for (const int rank : ranks) members.push_back(group_->ranks().at(static_cast<std::size_t>(rank)));
    const bool named = options && !options->group_name.empty();
    return make(world_, std::move(members),
                {names_.backend, named ? options->group_name : fmt::format("{}.{}", names_.group, ++splits_)},
                options ? options->timeout : timeout_);
  });
}

void Backend::abort() {
  group_->abort(
      Error(ErrorKind::kCancelled, fmt::format("rank {} called abort() of the process group", rank_)));
}

void Backend::shutdown() {
  group_.destroy();
  if (names_.ends_world) with_torch_errors([&] { world_->leave(kLeaveTimeout); });
}

c10d::ErrorType Backend::getError() {
  const std::optional<Error> failure = group_->backend()->failure();
  if (!failure) return c10d::ErrorType::SUCCESS;
  return failure->kind() == ErrorKind::kTimedOut ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
}

bool Backend::supportsTensorAlloc(c10::DeviceIndex /*device*/) { return true; }

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  return with_torch_errors([&] {
    if (!options.device().is_cpu())
      throw Error(ErrorKind::kUnsupported, fmt::format("this backend allocates CPU tensors; the device is {}",
                                                       options.device().str()));
    return group_->allocate({size}, c10::typeMetaToScalarType(options.dtype()));
  });
}

collective::Group& Backend::OwnGroup::usable(at::TensorList tensors) {
  if (destroyed_.load()) {
    throw Error(ErrorKind::kCancelled,
                fmt::format("destroy_process_group() has ended process group '{}': make another one with {}",
                            names_.group, names_.ends_world ? "init_process_group()" : "new_group()"));
  }
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.device().is_cpu()) continue;
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("backend '{}' takes tensors on CPUs, and one is on {}: pass its cpu(), or name a backend "
                    "for its device, as in init_process_group(\"cpu:{},cuda:nccl\")",
                    names_.backend, tensor.device().str(), names_.backend));
  }
  return *group_;
}

template <class T>
Backend::WorkPtr Backend::start(Title title, const Tensors& inputs, Tensors outputs, Future<T> future,
                                std::function<void(const T&)> take) {
  return c10::make_intrusive<Work>(
      Work::Call{names_.backend, title.operation, title.type, ++calls_, inputs, world_}, std::move(outputs),
      std::make_unique<PendingCallOf<T>>(std::move(future), std::move(take)));
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return with_torch_errors([&] {
    const at::Tensor& tensor = only(tensors, "tensors");
    return start({c10d::OpType::BROADCAST, "broadcast"}, tensors, tensors,
                 group_.usable(tensor).broadcast(tensor, static_cast<int>(options.rootRank)));
  });
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return with_torch_errors([&] {
    const at::Tensor& tensor = only(tensors, "tensors");
    const ReduceOp reduction = reduction_of(options.reduceOp);
    const Title title{c10d::OpType::ALLREDUCE, "all_reduce"};
    if (tensor.layout() == at::kStrided)
      return start(title, tensors, tensors, group_.usable(tensor).all_reduce(tensor, reduction));
    return start(title, tensors, tensors, group_.usable(tensor).all_reduce(tensor, reduction), into(tensor));
  });
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return allreduce(tensors, options);
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  return with_torch_errors([&] {
    if (tensors.empty()) throw_invalid("there are no tensors");
    const ReduceOp reduction = reduction_of(options.reduceOp);
    const Title title{c10d::OpType::ALLREDUCE_COALESCED, "all_reduce"};
    if (fit_together(tensors))
      return start(title, tensors, tensors, all_reduce_coalesced(group_.usable(tensors), tensors, reduction));
    std::vector<Future<at::Tensor>> each;
    for (const at::Tensor& tensor : tensors)
      each.push_back(group_.usable(tensor).all_reduce(tensor, reduction));
    return start(title, tensors, tensors, when_all(std::move(each)), into(tensors));
  });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return with_torch_errors([&] {
    return start({c10d::OpType::REDUCE, "reduce"}, tensors, tensors,
                 group_.usable(tensors).reduce(only(tensors, "tensors"), static_cast<int>(options.rootRank),
                                               reduction_of(options.reduceOp)));
  });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& /*options*/) {
  return with_torch_errors([&] {
    Tensors& parts = only(outputs, "outputs");
    require_count(parts, size_, "outputs");
    return start({c10d::OpType::ALLGATHER, "all_gather"}, inputs, parts,
                 group_.usable(inputs).all_gather(only(inputs, "inputs")), into(parts));
  });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& /*options*/) {
  return with_torch_errors([&] {
    const Title title{c10d::OpType::_ALLGATHER_BASE, "all_gather_into_tensor"};
    if (output.numel() != size_ * input.numel())
      throw_invalid("the output has {} elements; expected {} times the {} of the input", output.numel(),
                    size_, input.numel());
    Future<at::Tensor> gathered =
        group_.usable({output, input}).all_gather_into_tensor(memory_for(output), flat(input));
    if (output.is_contiguous()) return start(title, {input}, {output}, std::move(gathered));
    return start(title, {input}, {output}, std::move(gathered), into(output));
  });
}

Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& /*options*/) {
  return with_torch_errors([&] {
    if (static_cast<int>(outputs.size()) != size_)
      throw_invalid("there are {} lists of outputs; expected one for each of the {} ranks", outputs.size(),
                    size_);
    Tensors all, wide;
    for (const Tensors& list : outputs) {
      if (list.size() != inputs.size())
        throw_invalid("a list has {} outputs for {} inputs", list.size(), inputs.size());
      all.insert(all.end(), list.begin(), list.end());
    }
    std::vector<Future<at::Tensor>> each;
    for (const at::Tensor& input : inputs) {
      wide.push_back(at::empty({size_, input.numel()}, input.options()));
      each.push_back(group_.usable(input).all_gather_into_tensor(wide.back().view(-1), flat(input)));
    }
    const std::function<void(const Tensors&)> take = [all, wide, count = inputs.size()](const Tensors&) {
      Tensors received;
      for (std::size_t i = 0; i < all.size(); ++i)
        received.push_back(wide[i % count][static_cast<std::int64_t>(i / count)]);
      copy_each(all, received, count);
    };
    return start({c10d::OpType::ALLGATHER_COALESCED, "all_gather"}, inputs, all, when_all(std::move(each)),
                 take);
  });
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& /*options*/) {
  return with_torch_errors([&] {
    if (outputs.size() != inputs.size())
      throw_invalid("there are {} outputs for {} inputs", outputs.size(), inputs.size());
    const Title title{c10d::OpType::COALESCED, "all_gather_into_tensor"};
    std::vector<Future<at::Tensor>> each;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      each.push_back(group_.usable({outputs[i], inputs[i]})
                         .all_gather_into_tensor(memory_for(outputs[i]), flat(inputs[i])));
    }
    const std::function<void(const Tensors&)> take = [outputs](const Tensors& results) {
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (!outputs[i].is_contiguous()) write(outputs[i], results[i]);
      }
    };
    return start(title, inputs, outputs, when_all(std::move(each)), take);
  });
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  return with_torch_errors([&] {
    const int root = static_cast<int>(options.rootRank);
    const Title title{c10d::OpType::GATHER, "gather"};
    const at::Tensor& input = only(inputs, "inputs");
    if (rank_ != root) {
      if (!outputs.empty() && !outputs[0].empty()) throw_invalid("only the root passes outputs");
      return start(title, inputs, {}, group_.usable(input).gather(input, root));
    }
    Tensors& parts = only(outputs, "outputs");
    require_count(parts, size_, "outputs");
    return start(title, inputs, parts, group_.usable(input).gather(input, root), into(parts));
  });
}

Backend::WorkPtr Backend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                             const c10d::GatherOptions& options) {
  std::vector<Tensors> outputs;
  if (rank_ == options.rootRank) outputs.push_back(split_rows(output, {}, size_, "output"));
  Tensors inputs{input};
  return gather(outputs, inputs, options);
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  return with_torch_errors([&] {
    const int root = static_cast<int>(options.rootRank);
    const at::Tensor& output = only(outputs, "outputs");
    if (rank_ != root && !inputs.empty() && !inputs[0].empty()) throw_invalid("only the root passes inputs");
    Tensors parts;
    if (rank_ == root) {
      parts = only(inputs, "inputs");
      require_count(parts, size_, "inputs");
    }
    return start({c10d::OpType::SCATTER, "scatter"}, outputs, outputs,
                 group_.usable(output).scatter(output, parts, root));
  });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  return with_torch_errors([&] {
    const at::Tensor output = only(outputs, "outputs");
    const Tensors& parts = only(inputs, "inputs");
    require_count(parts, size_, "inputs");
    const ReduceOp reduction = reduction_of(options.reduceOp);
    const Title title{c10d::OpType::REDUCE_SCATTER, "reduce_scatter"};
    Tensors pieces;
    for (const at::Tensor& part : parts) pieces.push_back(flat(part));
    if (const at::Tensor& mine = pieces[static_cast<std::size_t>(rank_)]; mine.numel() != output.numel())
      throw_invalid("the output has {} elements, and input {}, which is reduced into it, has {}",
                    output.numel(), rank_, mine.numel());
    const bool even = std::all_of(pieces.begin(), pieces.end(), [&](const at::Tensor& piece) {
      return piece.numel() == pieces[0].numel();
    });
    if (even)
      return start(title, parts, outputs,
                   group_.usable(parts).reduce_scatter_tensor(output, at::cat(pieces), reduction));
    std::vector<Future<at::Tensor>> each;
    for (int rank = 0; rank < size_; ++rank)
      each.push_back(
          group_.usable(parts).reduce(pieces[static_cast<std::size_t>(rank)].clone(), rank, reduction));
    const std::function<void(const Tensors&)> take =
        [output, mine = static_cast<std::size_t>(rank_)](const Tensors& results) {
          write(output, results[mine]);
        };
    return start(title, parts, outputs, when_all(std::move(each)), take);
  });
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  return with_torch_errors([&] {
    if (input.numel() != size_ * output.numel())
      throw_invalid("the input has {} elements; expected {} times the {} of the output", input.numel(), size_,
                    output.numel());
    return start({c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter"}, {input}, {output},
                 group_.usable({output, input})
                     .reduce_scatter_tensor(output, flat(input), reduction_of(options.reduceOp)));
  });
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& options) {
  return with_torch_errors([&] {
    if (outputs.size() != inputs.size() || inputs.empty())
      throw_invalid("there are {} outputs for {} inputs", outputs.size(), inputs.size());
    const ReduceOp reduction = reduction_of(options.reduceOp);
    std::vector<Future<at::Tensor>> each;
    for (std::size_t i = 0; i < inputs.size(); ++i)
      each.push_back(group_.usable({outputs[i], inputs[i]})
                         .reduce_scatter_tensor(outputs[i], flat(inputs[i]), reduction));
    return start({c10d::OpType::COALESCED, "reduce_scatter"}, inputs, outputs, when_all(std::move(each)));
  });
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& /*options*/) {
  return with_torch_errors([&] {
    require_count(outputs, size_, "outputs");
    require_count(inputs, size_, "inputs");
    return start({c10d::OpType::ALLTOALL, "all_to_all"}, inputs, outputs,
                 group_.usable(inputs).all_to_all(inputs), into(outputs));
  });
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<std::int64_t>& output_sizes,
                                        std::vector<std::int64_t>& input_sizes,
                                        const c10d::AllToAllOptions& /*options*/) {
  return with_torch_errors([&] {
    const Tensors to = split_rows(output, output_sizes, size_, "output");
    return start({c10d::OpType::ALLTOALL_BASE, "all_to_all"}, {input}, {output},
                 group_.usable(input).all_to_all(split_rows(input, input_sizes, size_, "input")), into(to));
  });
}

Backend::WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  return with_torch_errors([&] {
    // c10d matches elements, not shapes.
    return start({c10d::OpType::SEND, "send"}, tensors, tensors,
                 group_.usable(tensors).send(flat(only(tensors, "tensors")), to, tag));
  });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  return with_torch_errors([&] {
    const at::Tensor& tensor = only(tensors, "tensors");
    const Title title{c10d::OpType::RECV, "recv"};
    Future<at::Tensor> received = group_.usable(tensor).recv(memory_for(tensor), from, tag);
    if (tensor.is_contiguous()) return start(title, tensors, tensors, std::move(received));
    return start(title, tensors, tensors, std::move(received), into(tensor));
  });
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return with_torch_errors([&]() -> WorkPtr {
    const auto source = std::make_shared<std::atomic<int>>(-1);
    const at::Tensor& tensor = only(tensors, "tensors");
    const std::function<void(const collective::ReceivedMessage&)> take =
        [source, tensor](const collective::ReceivedMessage& message) {
          source->store(message.source);
          if (!tensor.is_contiguous()) write(tensor, message.tensor);
        };
    auto work = c10::make_intrusive<Work>(
        Work::Call{names_.backend, "recvAnySource", c10d::OpType::RECVANYSOURCE, ++calls_, tensors, world_},
        tensors,
        std::make_unique<PendingCallOf<collective::ReceivedMessage>>(
            group_.usable(tensor).recv(memory_for(tensor), collective::kAnySource, tag), take));
    work->set_source(source);
    return work;
  });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& /*options*/) {
  return with_torch_errors([&] {
    return start({c10d::OpType::BARRIER, "barrier"}, {}, {},
                 group_.usable({}).all_reduce(at::zeros({1}, at::kByte)));
  });
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  with_torch_errors([&] {
    const Duration limit = options.timeout > std::chrono::milliseconds::zero() ? options.timeout : timeout_;
    std::vector<int> missing;  // by rank of the group
    const auto note = [&](const std::vector<rendezvous::Member>& members) {
      missing.clear();
      for (const rendezvous::Member& member : members) {
        const auto place = std::find(group_->ranks().begin(), group_->ranks().end(), member.rank);
        missing.push_back(static_cast<int>(place - group_->ranks().begin()));
      }
    };
    const std::string tag = fmt::format("c10d.{}.{}", member_name(names_.group), ++barriers_);
    try {
      world_->membership().all_gather_bytes(
          tag, {}, group_->ranks(),
          {.until = world_->runtime().executor.deadline_in(limit), .every = limit / 4, .report = note});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimedOut || missing.empty()) throw;
      // Programs search the texts of torch's Gloo.
      const std::string milliseconds = fmt::format("{:g} ms", to_seconds(limit) * 1000);
      throw Error(
          ErrorKind::kTimedOut,
          (missing.front() == 0 ? fmt::format("Rank 0 timed out in monitoredBarrier after {}", milliseconds)
                                : fmt::format("Rank {} failed to pass monitoredBarrier in {}",
                                              fmt::join(missing, ", "), milliseconds)) +
              ": " + error.message());
    }
  });
}

}  // namespace torchspan::python
