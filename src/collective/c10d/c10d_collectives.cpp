#include "collective/c10d/c10d_collectives.h"

#include <fmt/format.h>

#include <ATen/Functions.h>

#include <torchspan/detail/core/owner_process.h>

#include "collective/c10d/compat.h"
#include "collective/serial/serial_backend.h"
#include "collective/tensors.h"

namespace torchspan::collective {
bool C10dCollectives::reduces(at::ScalarType dtype, ReduceOp reduction) const {
  if (reduction != kSum && reduction != kMin && reduction != kMax && reduction != kProduct) return false;
  if (loses_nan(dtype, reduction)) return false;
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

C10dCollectives::~C10dCollectives() {
  if (!left_behind_) return;
  // The process group's threads are joined when it ends, one of them at its time-out.
  const auto end = [group = group_, work = left_behind_] {
    try {
      work->wait();
    } catch (const std::exception&) {  // that of the abort, or the time-out
    }
  };
  try {
    keep_until_exit(new Thread(runtime_->executor.spawn("c10d end", end)));
  } catch (const Error&) {  // no thread is left, or this is a forked child
    keep_until_exit(new auto(end));
  }
}

// A pair of Gloo whose socket closes in the middle of a message does not tell the operation that waits for the message.
void C10dCollectives::wait(const c10::intrusive_ptr<c10d::Work>& work) {
  if (!abort_) {
    work->wait();
    return;
  }
  const auto done = std::make_shared<std::atomic<bool>>(false);
  work->getFuture()->addCallback([done, parker = parker_](c10::ivalue::Future&) {
    done->store(true);
    parker->unpark();
  });
  while (!done->load() && !aborted_.load()) parker_->park(Deadline::never());
  if (!done->load()) {
    left_behind_ = work;
    throw Error(ErrorKind::kCancelled, "the process group of this group was aborted");
  }
  work->wait();
}

void C10dCollectives::abort(const Error&) {
  if (!abort_) return;
  abort_();
  aborted_.store(true);
  parker_->unpark();
}

void C10dCollectives::all_reduce(at::Tensor tensor, ReduceOp reduction) {
  std::vector<at::Tensor> tensors{own(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d_op(reduction);
  wait(group_->allreduce(tensors, options));
  if (abort_) tensor.copy_(tensors[0]);
}

void C10dCollectives::broadcast(at::Tensor tensor, int root) {
  std::vector<at::Tensor> tensors{own(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  wait(group_->broadcast(tensors, options));
  if (abort_) tensor.copy_(tensors[0]);
}

void C10dCollectives::all_gather(at::Tensor mine, at::Tensor all) {
  if (engine_ == "gloo") {
    // When Gloo's all-gather fails, LibTorch frees the buffer that it made for it while a thread of Gloo may still send from
    // there. A sum with zeros uses the tensors that it is given.
    all.zero_();
    all[group_->getRank()].copy_(mine);
    const at::Tensor bytes = all.view({-1});
    return all_reduce(bytes.numel() % 8 == 0 ? bytes.view(at::kLong) : bytes, kSum);
  }
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (std::int64_t rank = 0; rank < all.size(0); ++rank) outputs[0].push_back(all[rank]);
  std::vector<at::Tensor> inputs{std::move(mine)};
  wait(group_->allgather(outputs, inputs));
}

void C10dCollectives::all_to_all(at::Tensor mine, at::Tensor all, const ByteCounts& counts) {
  std::vector<std::int64_t> in = counts.sent_by(group_->getRank()),
                            out = counts.received_by(group_->getRank());
  at::Tensor sent = own(mine), received = own(all);
  wait(compat::all_to_all(*group_, sent, in, received, out));
  if (abort_) all.copy_(received);
}

std::unique_ptr<BlockingCollectives> C10dCollectives::split(const std::vector<int>& members,
                                                            std::uint64_t number) {
  if (!split_) {
    throw Error(ErrorKind::kUnsupported,
                "this process group cannot be split: set C10dOptions::split to a function that makes the "
                "process group of a part");
  }
  if (members.size() == 1) return nullptr;
  return std::make_unique<C10dCollectives>(split_(members, number));
}

std::shared_ptr<Backend> make_c10d_backend(Runtime& runtime,
                                           c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                                           C10dOptions options) {
  const int size = process_group->getSize();
  GroupMembers members{.ranks = std::move(options.ranks), .names = std::move(options.peers)};
  SerialOptions serial;
  serial.rank = process_group->getRank();
  serial.compare_calls = options.compare_calls;
  for (int rank = static_cast<int>(members.ranks.size()); rank < size; ++rank) members.ranks.push_back(rank);
  for (auto rank = members.names.size(); rank < members.ranks.size(); ++rank) {
    members.names.push_back(fmt::format("rank {}", members.ranks[rank]));
  }
  serial.members = std::move(members);
  const std::string engine = process_group->getBackendName();
  C10dGroup group{std::move(process_group), engine};
  if (options.split) {
    group.split = [split = std::move(options.split), engine](const std::vector<int>& members, std::uint64_t) {
      return C10dGroup{split(members), engine};
    };
  }
  return SerialBackend::make(std::shared_ptr<Runtime>(std::shared_ptr<void>(), &runtime),
                             std::make_unique<C10dCollectives>(std::move(group)), std::move(serial));
}

}  // namespace torchspan::collective
