#include "collective/device/device_backend.h"

#include <algorithm>
#include <fmt/format.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collective/device/device_engine.h"
#include "collective/single.h"
#include "collective/tensors.h"
#include "core/api/throw_invalid.h"

namespace torchspan::collective {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Calls with tensors on a device differ from the same calls with tensors on the CPU.
std::string on_device(const std::string& line, c10::Device device) {
  return fmt::format("{} on {}", line, c10::DeviceTypeName(device.type(), /*lower_case=*/true));
}

/// Every rank's tensor, on every rank; `all` has this rank's already.
void gather_into(DeviceEngine& engine, const Tensors& all) {
  Tensors filled;
  std::vector<int> roots;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].nbytes() == 0) continue;
    filled.push_back(all[rank]);
    roots.push_back(static_cast<int>(rank));
  }
  if (!filled.empty()) engine.broadcast(filled, roots);
}

/// Where ranks are, for steps that need all contributions.
struct Place {
  int rank;
  int size;
};

/// `all` is memory for the tensors of all ranks, which the operation must have captured: if the engine fails, work that was
/// launched may write to them until it is aborted.
void reduce_dense(DeviceEngine& engine, const at::Tensor& tensor, ReduceOp reduction, Place place,
                  Tensors& all) {
  if (tensor.numel() == 0) return;
  if (engine.reduces(tensor.scalar_type(), reduction)) return engine.all_reduce(tensor, reduction);
  for (int rank = 0; rank < place.size; ++rank) {
    all.push_back(rank == place.rank ? tensor.clone() : at::empty_like(tensor));
  }
  gather_into(engine, all);
  tensor.copy_(reduce_in_rank_order(all, reduction));
  all.clear();
}

Place place_of(const DeviceQueue& queue) { return {queue.options().rank, queue.options().members.size()}; }

/// Completes with `result` when the operation is launched.
template <class T>
Future<T> submit(DeviceQueue& queue, std::unique_ptr<DeviceOperation> operation, const Tensors& tensors,
                 UniqueFunction<T()> result) {
  auto promise = std::make_shared<Promise<T>>(queue.continuations());
  Future<T> future = promise->future();
  queue.submit(std::move(operation), tensors,
               [promise, result = std::move(result)](std::shared_ptr<const ValueGate> gate,
                                                     std::exception_ptr error) mutable {
                 if (error) {
                   promise->set_error(std::move(error));
                 } else {
                   promise->set_value_behind(std::move(gate), result());
                 }
               });
  return future;
}

Future<at::Tensor> reduce_line(DeviceQueue& queue, std::string line, const at::Tensor& tensor,
                               ReduceOp reduction) {
  auto operation = std::make_unique<DeviceOperation>();
  operation->line = std::move(line);
  const at::Tensor work = plain(tensor);
  operation->launch = [engine = &queue.engine(), work, tensor, reduction, place = place_of(queue),
                       all = Tensors()]() mutable {
    reduce_dense(*engine, work, reduction, place, all);
    put_back(work, tensor);
  };
  operation->values = [tensor] { return Tensors{tensor}; };
  return submit<at::Tensor>(queue, std::move(operation), {work, tensor}, [tensor] { return tensor; });
}

Future<at::Tensor> scatter_line(DeviceQueue& queue, std::string line, const at::Tensor& tensor,
                                ReduceOp reduction) {
  const at::NoGradGuard no_grad;
  auto operation = std::make_unique<DeviceOperation>();
  operation->line = std::move(line);
  const at::Tensor work = plain(tensor);
  std::vector<std::int64_t> sizes = work.sizes().vec();
  sizes[0] /= queue.options().members.size();
  const at::Tensor part = at::empty(sizes, work.options());
  operation->launch = [engine = &queue.engine(), work, part, reduction, place = place_of(queue),
                       whole = at::Tensor(), all = Tensors()]() mutable {
    if (part.numel() == 0) return;
    if (engine->reduces(work.scalar_type(), reduction)) return engine->reduce_scatter(work, part, reduction);
    whole = work.clone();
    reduce_dense(*engine, whole, reduction, place, all);
    part.copy_(whole.narrow(0, place.rank * part.size(0), part.size(0)));
    whole.reset();
  };
  operation->values = [part] { return Tensors{part}; };
  return submit<at::Tensor>(queue, std::move(operation), {work, part}, [part] { return part; });
}

Future<Tensors> gather_line(DeviceQueue& queue, std::string line, const at::Tensor& tensor) {
  auto operation = std::make_unique<DeviceOperation>();
  operation->line = std::move(line);
  operation->numbers = {tensor.dim() == 0 ? 1 : tensor.size(0)};
  const at::Tensor work = plain(tensor);
  const auto results = std::make_shared<Tensors>();
  operation->prepare = [results, work](const CallNumbers& rows) {
    for (const auto& theirs : rows) {
      std::vector<std::int64_t> sizes = work.sizes().vec();
      if (!sizes.empty()) sizes[0] = theirs.at(0);
      results->push_back(at::empty(sizes, work.options()));
    }
  };
  operation->launch = [engine = &queue.engine(), results, work,
                       rank = static_cast<std::size_t>(queue.options().rank)] {
    (*results)[rank].copy_(work);
    gather_into(*engine, *results);
  };
  operation->values = [results] { return *results; };
  return submit<Tensors>(queue, std::move(operation), {work}, [results] { return *results; });
}

Future<Tensors> exchange(DeviceQueue& queue, const std::string& line, Tensors parts) {
  auto operation = std::make_unique<DeviceOperation>();
  operation->line = on_device(line, queue.options().device);
  for (at::Tensor& part : parts) {
    part = plain(part);
    operation->numbers.push_back(part.dim());
    for (const std::int64_t size : part.sizes()) operation->numbers.push_back(size);
  }
  const auto results = std::make_shared<Tensors>();
  operation->prepare = [results, options = parts[0].options(),
                        rank = queue.options().rank](const CallNumbers& shapes) {
    for (const auto& theirs : shapes) {
      std::size_t at = 0;
      for (int to = 0; to < rank; ++to) at += static_cast<std::size_t>(theirs.at(at)) + 1;
      std::vector<std::int64_t> sizes;
      for (std::int64_t i = 1; i <= theirs.at(at); ++i)
        sizes.push_back(theirs.at(at + static_cast<std::size_t>(i)));
      results->push_back(at::empty(sizes, options));
    }
  };
  operation->launch = [engine = &queue.engine(), results, parts] { engine->all_to_all(parts, *results); };
  operation->values = [results] { return *results; };
  return submit<Tensors>(queue, std::move(operation), parts, [results] { return *results; });
}

Future<at::Tensor> all_reduce_sparse(DeviceQueue& queue, const std::string& line, const at::Tensor& tensor,
                                     ReduceOp reduction) {
  const at::NoGradGuard no_grad;
  const at::Tensor work = tensor.detach().coalesce();
  auto operation = std::make_unique<DeviceOperation>();
  operation->line = line;
  operation->numbers = {work._nnz(), work.sparse_dim()};
  struct Parts {
    Tensors indices, values;
    at::Tensor sum;
  };
  const auto parts = std::make_shared<Parts>();
  const at::Tensor indices = work.indices().t().contiguous(), values = plain(work.values());
  operation->prepare = [parts, indices, values, sizes = work.sizes().vec(), line,
                        peers = queue.options().members.names](const CallNumbers& all) {
    const std::int64_t sparse_dim = common_sparse_dim(all, line, peers);
    std::vector<std::int64_t> of_value(sizes.begin() + sparse_dim, sizes.end());
    of_value.insert(of_value.begin(), 0);
    for (const auto& theirs : all) {
      of_value[0] = theirs[0];
      parts->indices.push_back(at::empty({theirs[0], sparse_dim}, indices.options()));
      parts->values.push_back(at::empty(of_value, values.options()));
    }
  };
  operation->launch = [&queue, parts, indices, values, sizes = work.sizes().vec(), reduction,
                       place = place_of(queue)] {
    const auto rank = static_cast<std::size_t>(place.rank);
    if (indices.size(0) != 0) {
      parts->indices[rank].copy_(indices);
      parts->values[rank].copy_(values);
    }
    gather_into(queue.engine(), parts->indices);
    gather_into(queue.engine(), parts->values);
    // LibTorch waits on the host for what follows, without a limit: first, until the parts of all ranks are here.
    queue.wait_for_stream();
    parts->sum = sum_of_sparse(at::cat(parts->indices).t(), at::cat(parts->values), sizes,
                               reduction == kAvg ? place.size : 1);
  };
  operation->values = [parts] {
    return parts->sum.defined() ? Tensors{parts->sum.indices(), parts->sum.values()} : Tensors();
  };
  return submit<at::Tensor>(queue, std::move(operation), {indices, values}, [parts] { return parts->sum; });
}

/// Whether the parts are on the CPU; throws if some of them are.
bool all_on_cpu(const char* call, const Tensors& parts, int rank) {
  const auto on_cpu = [](const at::Tensor& part) { return part.is_cpu(); };
  if (!std::any_of(parts.begin(), parts.end(), on_cpu)) return false;
  for (std::size_t to = 0; to < parts.size(); ++to) {
    if (parts[to].is_cpu()) continue;
    throw_invalid(
        "the parts of {} on rank {} of the group are on several devices: part {} is on {}, another one is on "
        "the CPU; move all of them to one of the two",
        call, rank, to, parts[to].device().str());
  }
  return true;
}

}  // namespace

std::shared_ptr<DeviceBackend> DeviceBackend::make(std::shared_ptr<Backend> made, Plan plan) {
  auto failure = std::make_shared<GroupFailure>();
  std::shared_ptr<Backend> control = made->split(0, made->rank());
  plan.queue.departed = [world = plan.queue.world, members = plan.queue.members]() -> std::optional<Error> {
    const auto departed = world ? world->first_departed(members.instances) : std::nullopt;
    return departed ? std::optional(departed_member_error(members.names[departed->rank], departed->how))
                    : std::nullopt;
  };
  std::unique_ptr<DeviceEngine> engine = plan.engine({.control = std::move(made),
                                                      .device = plan.queue.device,
                                                      .runtime = plan.runtime,
                                                      .failure = failure,
                                                      .departed = plan.queue.departed,
                                                      .timeout = plan.queue.timeout});
  plan.queue.members.ranks = control->ranks();
  plan.queue.rank = control->rank();
  auto queue = DeviceQueue::make(std::move(control), std::move(engine), std::move(failure), plan.queue);
  return std::shared_ptr<DeviceBackend>(new DeviceBackend(std::move(plan), std::move(queue)));
}

bool DeviceBackend::takes(c10::Device device) const {
  return device.is_cpu() || device == plan_.queue.device;
}

std::shared_ptr<Backend> DeviceBackend::split(int color, int key) {
  queue_->failure()->throw_if_set();
  std::shared_ptr<Backend> part = control().split(color, key);
  if (part->size() == 1) {
    return SingleBackend::make(part->ranks()[0], std::shared_ptr<Runtime>(part, &part->runtime()),
                               plan_.queue.world, plan_.queue.device);
  }
  Plan plan = plan_;
  plan.queue.members = plan_.queue.members.part(part->ranks());
  return make(std::move(part), std::move(plan));
}

Future<at::Tensor> DeviceBackend::all_reduce(at::Tensor tensor, ReduceOp reduction) {
  if (tensor.is_cpu()) return control().all_reduce(std::move(tensor), reduction);
  const std::string line = on_device(line_of_reduction("all_reduce", tensor, reduction), tensor.device());
  if (tensor.is_sparse()) return all_reduce_sparse(*queue_, line, tensor, reduction);
  return reduce_line(*queue_, line, tensor, reduction);
}

Future<at::Tensor> DeviceBackend::reduce(at::Tensor tensor, int root, ReduceOp reduction) {
  if (tensor.is_cpu()) return control().reduce(std::move(tensor), root, reduction);
  const std::string line = on_device(
      line_of_reduction("reduce", tensor, reduction, fmt::format(", to rank {}", root)), tensor.device());
  const at::Tensor target = root == rank() ? tensor : plain(tensor).clone();
  return reduce_line(*queue_, line, target, reduction).then([tensor](const Future<at::Tensor>& reduced) {
    reduced.wait();
    return tensor;
  });
}

Future<at::Tensor> DeviceBackend::reduce_scatter(at::Tensor tensor, ReduceOp reduction) {
  if (tensor.is_cpu()) return control().reduce_scatter(std::move(tensor), reduction);
  return scatter_line(*queue_,
                      on_device(line_of_reduction("reduce_scatter", tensor, reduction), tensor.device()),
                      tensor, reduction);
}

Future<Tensors> DeviceBackend::all_gather(at::Tensor tensor) {
  if (tensor.is_cpu()) return control().all_gather(std::move(tensor));
  return gather_line(
      *queue_, on_device(line_of_tensor("all_gather", tensor, {}, /*first_free=*/true), tensor.device()),
      tensor);
}

Future<at::Tensor> DeviceBackend::broadcast(at::Tensor tensor, int root) {
  if (tensor.is_cpu()) return control().broadcast(std::move(tensor), root);
  auto operation = std::make_unique<DeviceOperation>();
  operation->line =
      on_device(line_of_tensor("broadcast", tensor, fmt::format(" from rank {}", root)), tensor.device());
  const at::Tensor work = plain(tensor);
  operation->launch = [engine = &queue_->engine(), work, tensor, root, sends = root == rank()] {
    if (work.nbytes() != 0) engine->broadcast({work}, {root});
    if (!sends) put_back(work, tensor);
  };
  operation->values = [tensor] { return Tensors{tensor}; };
  return submit<at::Tensor>(*queue_, std::move(operation), {work, tensor}, [tensor] { return tensor; });
}

Future<Tensors> DeviceBackend::coalesced(CoalescedCall call, at::Tensor flat) {
  using Verb = CoalescedCall::Verb;
  if (flat.is_cpu()) return control().coalesced(std::move(call), std::move(flat));
  const std::string line = on_device(line_of_coalesced(call, flat), flat.device());
  if (call.verb == Verb::kAllGather) return gather_line(*queue_, line, flat);
  const bool scatters = call.verb == Verb::kReduceScatter;
  return (scatters ? scatter_line(*queue_, line, flat, call.reduction)
                   : reduce_line(*queue_, line, flat, call.reduction))
      .then([](const Future<at::Tensor>& result) { return Tensors{result.wait()}; });
}

Future<Tensors> DeviceBackend::all_to_all(Tensors parts) {
  if (all_on_cpu("all_to_all", parts, rank())) return control().all_to_all(std::move(parts));
  const std::string line = line_of_all_to_all(parts);
  return exchange(*queue_, line, std::move(parts));
}

Future<Tensors> DeviceBackend::rooted_all_to_all(RootedCall call, Tensors parts) {
  const char* const verb = call.verb == RootedCall::Verb::kGather ? "gather" : "scatter";
  if (all_on_cpu(verb, parts, rank())) return control().rooted_all_to_all(call, std::move(parts));
  const std::string line = line_of_rooted(call, parts);
  return exchange(*queue_, line, std::move(parts));
}

std::vector<Bytes> DeviceBackend::all_gather_bytes(BytesView mine, Duration timeout) {
  return control().all_gather_bytes(mine, timeout);
}

at::Tensor DeviceBackend::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  return control().allocate(sizes, dtype);
}

void DeviceBackend::abort(const Error& cause) {
  queue_->break_with(aborted_by(plan_.queue.members.name(rank()), cause));
}

}  // namespace torchspan::collective
