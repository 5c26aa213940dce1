#include "collective/serial/serial_back_end.h"

#include <cstring>
#include <fmt/format.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "collective/kernels.h"
#include "collective/single.h"
#include "collective/splits.h"
#include "collective/tensors.h"

namespace torchspan::collective {
namespace {

at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {static_cast<std::int64_t>(tensor.nbytes())}, at::kByte);
}

at::Tensor bytes_of(void* data, std::size_t size) {
  return at::from_blob(data, {static_cast<std::int64_t>(size)}, at::kByte);
}

at::Tensor empty_bytes(at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kByte));
}

std::string comma(Reduction reduction) { return ", " + to_string(reduction); }

}  // namespace

SerialBackEnd::SerialBackEnd(Runtime& runtime, std::unique_ptr<Wire> wire, SerialOptions options)
    : runtime_(runtime),
      options_(std::move(options)),
      wire_(std::move(wire)),
      host_(std::make_shared<GroupHost>(runtime)),
      parker_(runtime.executor.make_parker()) {
  thread_ = runtime.executor.spawn("group", [this] { run(); });
}

SerialBackEnd::~SerialBackEnd() {
  break_with(Error(ErrorKind::kCancelled, "the last handle of this group went while it was pending"));
  stopping_.store(true);
  parker_->unpark();
  thread_.join();
  GroupHost::close(host_);
}

template <class T>
Future<T> SerialBackEnd::submit(CallLine call, UniqueFunction<T()> body) {
  auto promise = std::make_shared<Promise<T>>(host_);
  Future<T> future = promise->future();
  auto job = std::make_unique<Job>();
  job->call = std::move(call);
  job->run = [promise, body = std::move(body)]() mutable {
    if constexpr (std::is_void_v<T>) {
      body();
      promise->set_value();
    } else {
      promise->set_value(body());
    }
  };
  job->fail = [promise](std::exception_ptr error) { promise->set_error(std::move(error)); };
  enqueue(std::move(job));
  return future;
}

void SerialBackEnd::enqueue(std::unique_ptr<Job> job) {
  std::optional<Error> failure;
  std::unique_ptr<Job> refused;
  {
    MutexLock lock(mutex_);
    failure = failure_;
    if (failure) {
      refused = std::move(job);
    } else {
      queue_.push_back(std::move(job));
    }
  }
  if (refused) {
    refused->fail(std::make_exception_ptr(Error(*failure).with_call(refused->call.text)));
  } else {
    parker_->unpark();
  }
}

void SerialBackEnd::run() {
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
      parker_->park(Deadline::never());
    }
  }
}

void SerialBackEnd::run_one(Job& job) {
  const at::NoGradGuard no_grad;
  try {
    compare(job.call);
    job.run();
  } catch (...) {
    break_with(explain(job.call, std::current_exception()));
    job.fail(std::make_exception_ptr(Error(*failure()).with_call(job.call.text)));
  }
}

std::optional<Error> SerialBackEnd::failure() {
  MutexLock lock(mutex_);
  return failure_;
}

void SerialBackEnd::throw_if_broken(const char* call) {
  if (const auto cause = failure()) throw Error(*cause).with_call(call);
}

void SerialBackEnd::compare(const CallLine& call) {
  const std::uint64_t number = calls_++;
  if (!options_.compare_calls) return;
  LineBytes mine = pack_line(call, number);
  std::vector<LineBytes> lines(options_.ranks.size());
  at::Tensor all =
      bytes_of(lines.data(), lines.size() * kLineBytes)
          .view({static_cast<std::int64_t>(lines.size()), static_cast<std::int64_t>(kLineBytes)});
  wire_->all_gather(bytes_of(mine.data(), mine.size()), all);
  for (std::size_t rank = 1; rank < lines.size(); ++rank) {
    if (lines[rank] == lines[0]) continue;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("the ranks of a group must call the same, in the same order, but {} called {}, and {} "
                    "called {}",
                    options_.people[0], unpack_line(lines[0]), options_.people[rank],
                    unpack_line(lines[rank])));
  }
}

Error SerialBackEnd::explain(const CallLine& call, const std::exception_ptr& exception) const {
  const auto about = [&](ErrorKind kind, const std::string& text) {
    return Error(kind, fmt::format("{}, call {} of the group, failed in {}: {}{}", call.text, calls_.load(),
                                   wire_->name(), text, who_is_missing()));
  };
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    const bool lost = error.kind() == ErrorKind::kDisconnected || error.kind() == ErrorKind::kTimedOut;
    return lost ? about(error.kind(), error.message()) : error;
  } catch (...) {
  }
  const std::string text = torchspan::describe(exception).text;
  const bool late = text.find("imed out") != std::string::npos || text.find("imeout") != std::string::npos;
  return about(late ? ErrorKind::kTimedOut : ErrorKind::kDisconnected, text);
}

std::string SerialBackEnd::who_is_missing() const {
  std::string who;
  for (std::size_t rank = 0; options_.gone && rank < options_.ranks.size(); ++rank) {
    if (const auto how = options_.gone(static_cast<int>(rank))) {
      who += fmt::format("; {} is gone: {}", options_.people[rank], *how);
    }
  }
  if (!who.empty() || !options_.roll_call) return who;
  const std::string silent = options_.roll_call(calls_.load(), options_.ranks);
  return silent.empty() ? "; all ranks gave up on it"
                        : "; a roll call of those that gave up on it: " + silent;
}

template <class T>
T SerialBackEnd::wait_until(Deadline deadline, const Future<T>& future, const char* call) {
  try {
    return future.wait(deadline);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimedOut || future.done()) throw;
    break_with(
        Error(ErrorKind::kTimedOut, fmt::format("{}, call {} of the group, was not over by its deadline{}",
                                                call, calls_.load(), who_is_missing())));
    throw_if_broken(call);
    throw;
  }
}

void SerialBackEnd::break_with(const Error& cause) {
  std::deque<std::unique_ptr<Job>> failed;
  Error first = cause;
  {
    MutexLock lock(mutex_);
    if (!failure_) failure_ = cause;
    first = *failure_;
    failed.swap(queue_);
  }
  for (const auto& job : failed) {
    job->fail(std::make_exception_ptr(Error(first).with_call(job->call.text)));
  }
}

void SerialBackEnd::abort(const Error& cause) {
  break_with(
      Error(cause.kind(), fmt::format("{} aborted the group: {}",
                                      options_.people[static_cast<std::size_t>(rank())], cause.message())));
  wire_->abort();
}

std::shared_ptr<BackEnd> SerialBackEnd::split(int color, int key) {
  struct Part {
    std::unique_ptr<Wire> wire;
    SerialOptions options;
  };
  const auto part = std::make_shared<Part>();
  submit<void>({"split()"}, [this, part, color, key] {
    const std::vector<int> members =
        ranks_of_split([&](BytesView mine) { return gather_bytes(mine); }, color, key);
    part->options = options_;
    part->options.ranks.clear();
    part->options.people.clear();
    for (std::size_t i = 0; i < members.size(); ++i) {
      const auto member = static_cast<std::size_t>(members[i]);
      part->options.ranks.push_back(options_.ranks[member]);
      part->options.people.push_back(options_.people[member]);
      if (members[i] == rank()) part->options.rank = static_cast<int>(i);
    }
    if (options_.gone) {
      part->options.gone = [gone = options_.gone, members](int rank) {
        return gone(members[static_cast<std::size_t>(rank)]);
      };
    }
    part->wire = wire_->split(members);
  }).wait();
  if (part->options.ranks.size() == 1) return std::make_shared<SingleBackEnd>(part->options.ranks[0]);
  return std::make_shared<SerialBackEnd>(runtime_, std::move(part->wire), std::move(part->options));
}

Future<at::Tensor> SerialBackEnd::all_reduce(at::Tensor tensor, Reduction reduction) {
  find_kernel(tensor.scalar_type(), reduction);
  CallLine line = line_of_tensor("all_reduce", tensor, comma(reduction));
  if (tensor.is_sparse()) {
    if (reduction != kSum && reduction != kAverage) {
      throw Error(ErrorKind::kUnsupported,
                  "sparse tensors can be summed and averaged only; densify them first");
    }
    return submit<at::Tensor>(std::move(line),
                              [this, tensor, reduction] { return reduce_sparse(tensor, reduction); });
  }
  return submit<at::Tensor>(std::move(line), [this, tensor, reduction] {
    const at::Tensor work = plain(tensor);
    reduce_dense(work, reduction);
    return put_back(work, tensor);
  });
}

Future<at::Tensor> SerialBackEnd::reduce_scatter(at::Tensor tensor, Reduction reduction) {
  find_kernel(tensor.scalar_type(), reduction);
  return submit<at::Tensor>(line_of_tensor("reduce_scatter", tensor, comma(reduction)),
                            [this, tensor, reduction] {
                              const at::Tensor work = plain(tensor).clone();
                              reduce_dense(work, reduction);
                              const std::int64_t part = work.size(0) / size();
                              return work.narrow(0, part * rank(), part).clone();
                            });
}

Future<std::vector<at::Tensor>> SerialBackEnd::all_gather(at::Tensor tensor) {
  return submit<std::vector<at::Tensor>>(line_of_tensor("all_gather", tensor, {}, /*first_free=*/true),
                                         [this, tensor] { return gather_dense(plain(tensor)); });
}

Future<at::Tensor> SerialBackEnd::broadcast(at::Tensor tensor, int root) {
  return submit<at::Tensor>(line_of_tensor("broadcast", tensor, fmt::format(" from rank {}", root)),
                            [this, tensor, root] {
                              const at::Tensor work = plain(tensor);
                              if (work.nbytes() != 0) wire_->broadcast(bytes_of(work), root);
                              return root == rank() ? tensor : put_back(work, tensor);
                            });
}

Future<std::vector<at::Tensor>> SerialBackEnd::all_to_all(std::vector<at::Tensor> parts) {
  CallLine line{fmt::format("all_to_all({} parts)", c10::toString(parts[0].scalar_type()))};
  return submit<std::vector<at::Tensor>>(std::move(line), [this, parts = std::move(parts)] {
    ByteWriter shapes;
    std::vector<at::Tensor> sent;
    std::vector<std::int64_t> sent_counts, counts;
    for (const at::Tensor& part : parts) {
      shapes.put(static_cast<std::uint32_t>(part.dim()));
      for (const std::int64_t size : part.sizes()) shapes.put(size);
      const at::Tensor work = plain(part);
      sent_counts.push_back(static_cast<std::int64_t>(work.nbytes()));
      sent.push_back(bytes_of(work).clone());
    }
    std::vector<at::Tensor> results;
    std::int64_t total = 0;
    for (const Bytes& theirs : gather_bytes(shapes.bytes())) {
      ByteReader reader(theirs);
      std::vector<std::int64_t> sizes;
      for (int to = 0; to <= rank(); ++to) {
        sizes.resize(reader.get_count(sizeof(std::int64_t)));
        for (std::int64_t& size : sizes) size = reader.get<std::int64_t>();
      }
      results.push_back(at::empty(sizes, parts[0].options().layout(at::kStrided)));
      counts.push_back(static_cast<std::int64_t>(results.back().nbytes()));
      total += counts.back();
    }
    const at::Tensor received = empty_bytes({total});
    wire_->all_to_all(at::cat(sent), sent_counts, received, counts);
    std::int64_t at = 0;
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (counts[i] != 0) bytes_of(results[i]).copy_(received.narrow(0, at, counts[i]));
      at += counts[i];
    }
    return results;
  });
}

std::vector<Bytes> SerialBackEnd::exchange(BytesView mine, Deadline deadline) {
  const auto bytes = std::make_shared<Bytes>(mine.begin(), mine.end());
  return wait_until(
      deadline, submit<std::vector<Bytes>>({"exchange()"}, [this, bytes] { return gather_bytes(*bytes); }),
      "exchange()");
}

void SerialBackEnd::barrier(Deadline deadline) {
  const auto body = [this] {
    if (options_.compare_calls) return;  // that was one
    at::Tensor mine = at::zeros({1}, at::TensorOptions().dtype(at::kByte));
    wire_->all_gather(mine, empty_bytes({size(), 1}));
  };
  wait_until(deadline, submit<void>({"barrier()"}, body), "barrier()");
}

at::Tensor SerialBackEnd::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype));
}

void SerialBackEnd::reduce_dense(at::Tensor tensor, Reduction reduction) {
  const at::ScalarType dtype = tensor.scalar_type();
  const Reduction first = reduction == kAverage ? kSum : reduction;
  if (tensor.numel() == 0) return;
  if (dtype == at::kHalf || dtype == at::kBFloat16) {
    const at::Tensor wide = tensor.to(at::kFloat);
    reduce_dense(wide, reduction);
    tensor.copy_(wide);
    return;
  }
  if (!wire_->reduces(dtype, first)) {
    reduce_gathered(std::move(tensor), reduction);
    return;
  }
  wire_->all_reduce(tensor, first);
  if (reduction == kAverage) tensor.div_(size());
}

void SerialBackEnd::reduce_gathered(at::Tensor tensor, Reduction reduction) {
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  const at::Tensor all = empty_bytes({size(), bytes});
  wire_->all_gather(bytes_of(tensor), all);
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < size(); ++rank) {
    sources.push_back(static_cast<const std::byte*>(all.data_ptr()) + rank * bytes);
  }
  auto* const target = static_cast<std::byte*>(tensor.data_ptr());
  find_kernel(tensor.scalar_type(), reduction)(
      {sources, {&target, 1}, static_cast<std::size_t>(tensor.numel()), static_cast<std::size_t>(size())});
}

std::vector<at::Tensor> SerialBackEnd::gather_dense(const at::Tensor& tensor) {
  std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const at::Tensor all_rows = at::empty({size(), 1}, at::TensorOptions().dtype(at::kLong));
  wire_->all_gather(
      bytes_of(&rows, sizeof rows),
      at::from_blob(all_rows.data_ptr(), {size(), static_cast<std::int64_t>(sizeof rows)}, at::kByte));
  std::vector<at::Tensor> results;
  for (int rank = 0; rank < size(); ++rank) {
    std::vector<std::int64_t> sizes = tensor.sizes().vec();
    if (!sizes.empty()) sizes[0] = all_rows[rank][0].item<std::int64_t>();
    results.push_back(rank == this->rank() ? tensor.clone() : at::empty(sizes, tensor.options()));
    if (results.back().nbytes() != 0) wire_->broadcast(bytes_of(results.back()), rank);
  }
  return results;
}

std::vector<Bytes> SerialBackEnd::gather_bytes(BytesView mine) {
  const at::Tensor tensor = empty_bytes({static_cast<std::int64_t>(mine.size())});
  if (!mine.empty()) std::memcpy(tensor.data_ptr(), mine.data(), mine.size());
  std::vector<Bytes> all;
  for (const at::Tensor& theirs : gather_dense(tensor)) {
    const auto* data = static_cast<const std::byte*>(theirs.data_ptr());
    all.emplace_back(data, data + theirs.nbytes());
  }
  return all;
}

at::Tensor SerialBackEnd::reduce_sparse(const at::Tensor& tensor, Reduction reduction) {
  const at::Tensor work = tensor.detach().coalesce();
  // Entries are the first dimension, which may differ.
  const auto indices = gather_dense(plain(work.indices().t()));
  const auto values = gather_dense(plain(work.values()));
  at::Tensor sum = at::sparse_coo_tensor(at::cat(indices).t(), at::cat(values), work.sizes()).coalesce();
  if (reduction == kAverage) sum.values().div_(size());
  return sum;
}

}  // namespace torchspan::collective
