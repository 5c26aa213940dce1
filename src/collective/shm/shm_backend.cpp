#include "collective/shm/shm_backend.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fmt/format.h>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <torchspan/core/bytes.h>
#include <torchspan/core/error.h>

#include "collective/shm/control.h"
#include "collective/tensors.h"

namespace torchspan::collective::shm {
namespace {

// Shapes in shared memory. A peer wrote them: they are checked before memory is allocated for them.

/// One of several tensors in a row.
struct PartOfRow {
  std::uint64_t offset = 0;
  std::vector<std::int64_t> sizes = {};
};
/// Returns the part at `index`, out of `count` shapes.
PartOfRow read_part(BytesView shapes, std::size_t index, std::size_t count, std::size_t item);

/// The sparse tensors of all ranks, as they arrive.
struct SparseParts {
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;

  /// The number of sparse dimensions of the sum: that of the tensors that have entries.
  static std::uint32_t sparse_dimensions(const std::vector<Call>& calls);
  /// Allocates memory for a rank's entries.
  void add(const Call& call, std::uint32_t sparse_dimensions, at::ScalarType dtype);
  /// The coalesced sum, divided by `divisor`.
  at::Tensor sum(at::IntArrayRef sizes, int divisor) const;
};

constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;

[[noreturn]] void throw_malformed() { throw_invalid("a member of the group described an impossible tensor"); }

/// The bytes of a shape; throws if no machine has that many.
std::uint64_t bytes_of(at::IntArrayRef sizes, std::size_t item) {
  std::uint64_t bytes = item;
  for (const std::int64_t size : sizes) {
    if (size < 0 || static_cast<std::uint64_t>(size) > kMostBytes) throw_malformed();
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes) || bytes > kMostBytes) {
      throw_malformed();
    }
  }
  return bytes;
}

/// Throws kUnsupported for more than kMostDimensions.
void put_sizes(Call& call, at::IntArrayRef sizes) {
  if (sizes.size() > kMostDimensions) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("a tensor with {} dimensions; this backend supports at most {}: flatten it",
                            sizes.size(), kMostDimensions));
  }
  call.dimensions = static_cast<std::uint32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), call.sizes.begin());
}

/// The shape of the call's contribution; throws kInvalid unless it has call.bytes bytes.
std::vector<std::int64_t> get_sizes(const Call& call, std::size_t item) {
  if (call.dimensions > kMostDimensions) throw_malformed();
  std::vector<std::int64_t> sizes(call.sizes.begin(), call.sizes.begin() + call.dimensions);
  if (bytes_of(sizes, item) != call.bytes) throw_malformed();
  return sizes;
}

/// Checks a size before memory is allocated for it; throws kInvalid for one that no machine has.
std::size_t checked_size(std::uint64_t bytes) {
  if (bytes > kMostBytes) throw_malformed();
  return static_cast<std::size_t>(bytes);
}

void write_shape(ByteWriter& writer, at::IntArrayRef sizes) {
  writer.put(static_cast<std::uint32_t>(sizes.size()));
  for (const std::int64_t size : sizes) writer.put(size);
}

PartOfRow read_part(BytesView shapes, std::size_t index, std::size_t count, std::size_t item) {
  ByteReader reader(shapes);
  PartOfRow wanted;
  std::uint64_t offset = 0;
  for (std::size_t part = 0; part < count; ++part) {
    std::vector<std::int64_t> sizes(reader.get_count(sizeof(std::int64_t)));
    for (std::int64_t& size : sizes) size = reader.get<std::int64_t>();
    const std::uint64_t bytes = bytes_of(sizes, item);
    if (part == index) wanted = {offset, std::move(sizes)};
    offset += bytes;
  }
  reader.expect_end();
  return wanted;
}

std::uint32_t SparseParts::sparse_dimensions(const std::vector<Call>& calls) {
  for (const Call& call : calls) {
    if (call.entries != 0) return call.sparse_dimensions;
  }
  return calls.at(0).sparse_dimensions;
}

void SparseParts::add(const Call& call, std::uint32_t sparse_dimensions, at::ScalarType dtype) {
  if (call.dimensions > kMostDimensions || sparse_dimensions > call.dimensions) throw_malformed();
  const auto entries = static_cast<std::int64_t>(checked_size(call.entries));
  std::vector<std::int64_t> shape{entries};
  shape.insert(shape.end(), call.sizes.begin() + sparse_dimensions, call.sizes.begin() + call.dimensions);
  const std::vector<std::int64_t> places{sparse_dimensions, entries};
  if (bytes_of(shape, c10::elementSize(dtype)) + bytes_of(places, sizeof(std::int64_t)) != call.bytes) {
    throw_malformed();
  }
  indices.push_back(at::empty(places, at::TensorOptions().dtype(at::kLong)));
  values.push_back(at::empty(shape, at::TensorOptions().dtype(dtype)));
}

at::Tensor SparseParts::sum(at::IntArrayRef sizes, int divisor) const {
  return sum_of_sparse(at::cat(indices, 1), at::cat(values, 0), sizes, divisor);
}

Piece piece_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

at::Tensor empty(const std::vector<std::int64_t>& sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype));
}

/// Never for zero: the group's timeout applies.
Deadline limit_in(Executor& executor, Duration timeout) {
  return timeout == Duration::zero() ? Deadline::never() : executor.deadline_in(timeout);
}

/// An operation whose contribution is `tensor`, which is dense and contiguous.
std::unique_ptr<Operation> describe_tensor(const Call& kind, const at::Tensor& tensor) {
  auto operation = std::make_unique<Operation>();
  Call& call = operation->call;
  call = kind;
  call.dtype = static_cast<std::int8_t>(tensor.scalar_type());
  put_sizes(call, tensor.sizes());
  call.bytes = tensor.nbytes();
  operation->pieces = {piece_of(tensor)};
  return operation;
}

/// Puts a small contribution into the slot, or records where it is in shared memory.
void place(const GroupMemory& memory, Operation& operation) {
  Call& call = operation.call;
  call.note = operation.note.size();
  if (call.note > kSlotBytes) {
    throw Error(ErrorKind::kUnsupported,
                "the shapes of the parts are too large for this backend: use fewer parts or dimensions");
  }
  call.in_slot = call.bytes <= kSlotBytes - call.note ? 1 : 0;
  if (call.in_slot != 0 || operation.pieces.size() != 1) return;
  const auto place = memory.place_of(operation.pieces[0].data, operation.pieces[0].size);
  call.shared = place ? 1 : 0;
  call.place = place.value_or(0);
}

Call call_of(Verb verb) {
  Call call;
  call.verb = verb;
  return call;
}

/// FNV-1a.
std::uint32_t hash_of(const std::string& text) {
  std::uint32_t hash = 2166136261U;
  for (const char character : text) hash = (hash ^ static_cast<unsigned char>(character)) * 16777619U;
  return hash;
}

/// Submits the operation; the future gets the result of `result`, or the operation's failure.
template <class T>
Future<T> submit(OpQueue& queue, std::unique_ptr<Operation> operation, UniqueFunction<T()> result) {
  auto promise = std::make_shared<Promise<T>>(queue.continuations());
  Future<T> future = promise->future();
  operation->succeed = [promise, result = std::move(result)]() mutable { promise->set_from(result); };
  operation->fail = [promise](std::exception_ptr error) { promise->set_error(std::move(error)); };
  queue.submit(std::move(operation));
  return future;
}

/// all_reduce() and reduce(), whose root is that of `call`.
Future<at::Tensor> reduce_dense(OpQueue& queue, Call call, const at::Tensor& tensor, ReduceOp reduction) {
  const Kernel kernel = find_kernel(tensor.scalar_type(), reduction);
  const at::Tensor work = plain(tensor);
  call.reduction = static_cast<std::uint8_t>(reduction);
  auto operation = describe_tensor(call, work);
  place(queue.memory(), *operation);
  operation->begin = [algorithms = &queue.algorithms(), piece = piece_of(work), kernel, root = call.root,
                      item = static_cast<std::size_t>(work.element_size())] {
    return algorithms->reduce({piece.data, piece.size, item, kernel, root}, nullptr);
  };
  const bool gets = call.root < 0 || call.root == queue.memory().rank();
  return submit<at::Tensor>(queue, std::move(operation),
                            [work, tensor, gets] { return gets ? put_back(work, tensor) : tensor; });
}

/// Writes this rank's part to `output`; undefined: a new tensor.
Future<at::Tensor> scatter_dense(OpQueue& queue, Call call, const at::Tensor& tensor, ReduceOp reduction,
                                 const at::Tensor& output = {}) {
  const Kernel kernel = find_kernel(tensor.scalar_type(), reduction);
  const at::Tensor work = plain(tensor);
  call.reduction = static_cast<std::uint8_t>(reduction);
  auto operation = describe_tensor(call, work);
  place(queue.memory(), *operation);
  std::vector<std::int64_t> sizes = work.sizes().vec();
  sizes[0] /= queue.memory().size();
  const at::Tensor part = output.defined() ? plain(output) : empty(sizes, work.scalar_type());
  operation->begin = [algorithms = &queue.algorithms(), piece = piece_of(work), kernel,
                      item = static_cast<std::size_t>(work.element_size()), into = piece_of(part).data] {
    return algorithms->reduce({piece.data, piece.size, item, kernel}, into);
  };
  return submit<at::Tensor>(queue, std::move(operation), [work, part, output] {
    return output.defined() ? put_back(part, output) : part;
  });
}

Future<std::vector<at::Tensor>> gather_dense(OpQueue& queue, const Call& call, const at::Tensor& tensor) {
  const at::Tensor work = plain(tensor);
  auto operation = describe_tensor(call, work);
  place(queue.memory(), *operation);
  const auto results = std::make_shared<std::vector<at::Tensor>>();
  operation->begin = [algorithms = &queue.algorithms(), results, dtype = work.scalar_type(),
                      pieces = operation->pieces] {
    std::vector<FetchRange> wants;
    for (const Call& its : algorithms->calls()) {
      results->push_back(empty(get_sizes(its, c10::elementSize(dtype)), dtype));
      wants.push_back({.into = {piece_of(results->back())}});
    }
    return algorithms->fetch(std::move(wants), pieces);
  };
  return submit<std::vector<at::Tensor>>(queue, std::move(operation),
                                         [work, results] { return std::move(*results); });
}

Future<std::vector<at::Tensor>> exchange(OpQueue& queue, const Call& call, std::vector<at::Tensor> parts) {
  auto operation = std::make_unique<Operation>();
  operation->call = call;
  operation->call.dtype = static_cast<std::int8_t>(parts[0].scalar_type());
  ByteWriter note;
  for (at::Tensor& part : parts) {
    part = plain(part);
    write_shape(note, part.sizes());
    operation->pieces.push_back(piece_of(part));
    operation->call.bytes += part.nbytes();
  }
  operation->note = note.take();
  place(queue.memory(), *operation);
  const auto results = std::make_shared<std::vector<at::Tensor>>();
  operation->begin = [algorithms = &queue.algorithms(), results, dtype = parts[0].scalar_type(),
                      rank = queue.memory().rank(), pieces = operation->pieces] {
    std::vector<FetchRange> wants;
    for (std::size_t from = 0; from < algorithms->calls().size(); ++from) {
      const PartOfRow part =
          read_part(algorithms->note(static_cast<int>(from)), static_cast<std::size_t>(rank),
                    algorithms->calls().size(), c10::elementSize(dtype));
      results->push_back(empty(part.sizes, dtype));
      wants.push_back({part.offset, {piece_of(results->back())}});
    }
    return algorithms->fetch(std::move(wants), pieces);
  };
  return submit<std::vector<at::Tensor>>(queue, std::move(operation),
                                         [parts = std::move(parts), results] { return std::move(*results); });
}

std::vector<Bytes> gather_bytes(OpQueue& queue, BytesView mine, Deadline deadline) {
  auto operation = std::make_unique<Operation>();
  operation->call.verb = Verb::kExchange;
  operation->call.bytes = mine.size();
  operation->deadline = deadline;
  const auto bytes = std::make_shared<Bytes>(mine.begin(), mine.end());
  operation->pieces = {{bytes->data(), bytes->size()}};
  place(queue.memory(), *operation);
  const auto results = std::make_shared<std::vector<Bytes>>();
  operation->begin = [algorithms = &queue.algorithms(), results, pieces = operation->pieces] {
    std::vector<FetchRange> wants;
    for (const Call& call : algorithms->calls()) results->emplace_back(checked_size(call.bytes));
    for (Bytes& result : *results) wants.push_back({.into = {{result.data(), result.size()}}});
    return algorithms->fetch(std::move(wants), pieces);
  };
  return submit<std::vector<Bytes>>(queue, std::move(operation),
                                    [bytes, results] { return std::move(*results); })
      .wait();
}

Future<at::Tensor> all_reduce_sparse(OpQueue& queue, const at::Tensor& tensor, ReduceOp reduction) {
  check_reducible(tensor, reduction);
  const at::NoGradGuard no_grad;
  const at::Tensor work = tensor.detach().coalesce();
  const at::Tensor indices = work.indices().contiguous(), values = plain(work.values());
  auto operation = std::make_unique<Operation>();
  Call& call = operation->call;
  call.verb = Verb::kAllReduce;
  call.dtype = static_cast<std::int8_t>(work.scalar_type());
  call.reduction = static_cast<std::uint8_t>(reduction);
  call.sparse = 1;
  call.sparse_dimensions = static_cast<std::uint32_t>(work.sparse_dim());
  put_sizes(call, work.sizes());
  call.entries = static_cast<std::uint64_t>(values.size(0));
  call.bytes = indices.nbytes() + values.nbytes();
  operation->pieces = {piece_of(indices), piece_of(values)};
  place(queue.memory(), *operation);
  const auto parts = std::make_shared<SparseParts>();
  operation->begin = [algorithms = &queue.algorithms(), parts, dtype = work.scalar_type(),
                      pieces = operation->pieces] {
    std::vector<FetchRange> wants;
    const std::uint32_t sparse_dimensions = SparseParts::sparse_dimensions(algorithms->calls());
    for (const Call& of : algorithms->calls()) {
      parts->add(of, sparse_dimensions, dtype);
      wants.push_back({.into = {piece_of(parts->indices.back()), piece_of(parts->values.back())}});
    }
    return algorithms->fetch(std::move(wants), pieces);
  };
  return submit<at::Tensor>(
      queue, std::move(operation),
      [parts, indices, values, sizes = work.sizes().vec(), reduction, ranks = queue.memory().size()] {
        return parts->sum(sizes, reduction == kAvg ? ranks : 1);
      });
}

}  // namespace

ShmBackend::ShmBackend(std::shared_ptr<OpQueue> op_queue) : op_queue_(std::move(op_queue)) {
  for (int rank = 0; rank < op_queue_->memory().size(); ++rank)
    ranks_.push_back(op_queue_->memory().peer(rank).world_rank);
}

std::shared_ptr<ShmBackend> ShmBackend::make(std::shared_ptr<PeerMemory> peer_memory,
                                             std::vector<int> members, Duration timeout,
                                             const GatherBytes& gather) {
  std::vector<int> answering(members.size());
  for (std::size_t i = 0; i < members.size(); ++i) answering[i] = static_cast<int>(i);
  auto memory = GroupMemory::make(std::move(peer_memory), std::move(members), gather, answering);
  return std::shared_ptr<ShmBackend>(new ShmBackend(OpQueue::make(std::move(memory), timeout)));
}

std::shared_ptr<Backend> ShmBackend::split(int color, int key) {
  const Deadline deadline = op_queue_->executor().deadline_in(op_queue_->timeout());
  const GatherBytes gather = [&](BytesView mine) { return gather_bytes(*op_queue_, mine, deadline); };
  const std::vector<int> answering = plan_split(gather, color, key).ranks;
  std::vector<int> members;
  for (const int parent_rank : answering) {
    members.push_back(op_queue_->memory().members()[static_cast<std::size_t>(parent_rank)]);
  }
  auto part = GroupMemory::make(op_queue_->memory().peer_memory(), std::move(members), gather, answering);
  return std::shared_ptr<ShmBackend>(new ShmBackend(OpQueue::make(std::move(part), op_queue_->timeout())));
}

Future<at::Tensor> ShmBackend::all_reduce(at::Tensor tensor, ReduceOp reduction) {
  if (tensor.is_sparse()) return all_reduce_sparse(*op_queue_, tensor, reduction);
  return reduce_dense(*op_queue_, call_of(Verb::kAllReduce), tensor, reduction);
}

Future<at::Tensor> ShmBackend::reduce(at::Tensor tensor, int root, ReduceOp reduction) {
  Call call = call_of(Verb::kReduce);
  call.root = root;
  return reduce_dense(*op_queue_, call, tensor, reduction);
}

Future<at::Tensor> ShmBackend::reduce_scatter(at::Tensor tensor, ReduceOp reduction) {
  return scatter_dense(*op_queue_, call_of(Verb::kReduceScatter), tensor, reduction);
}

Future<at::Tensor> ShmBackend::reduce_scatter_into(at::Tensor output, at::Tensor tensor, ReduceOp reduction) {
  return scatter_dense(*op_queue_, call_of(Verb::kReduceScatter), tensor, reduction, output);
}

Future<std::vector<at::Tensor>> ShmBackend::all_gather(at::Tensor tensor) {
  return gather_dense(*op_queue_, call_of(Verb::kAllGather), tensor);
}

/// Each rank's bytes go to their place in `output` at once, without staging those that are in shared memory. All ranks
/// see all shapes, so all of them notice a difference, and none of them stops.
Future<at::Tensor> ShmBackend::all_gather_into(at::Tensor output, at::Tensor tensor) {
  const at::Tensor work = plain(tensor), target = plain(output);
  auto operation = describe_tensor(call_of(Verb::kAllGather), work);
  place(op_queue_->memory(), *operation);
  const auto trouble = std::make_shared<std::string>();
  operation->begin = [algorithms = &op_queue_->algorithms(), trouble, sizes = work.sizes().vec(),
                      item = static_cast<std::size_t>(work.element_size()), to = piece_of(target).data,
                      self = static_cast<std::size_t>(rank()), own = operation->pieces[0]] {
    std::vector<FetchRange> wants;
    for (std::size_t rank = 0; rank < algorithms->calls().size(); ++rank) {
      const std::vector<std::int64_t> theirs = get_sizes(algorithms->calls()[rank], item);
      if (trouble->empty() && theirs != sizes) *trouble = different_shapes(rank, theirs, sizes);
      wants.emplace_back();
      if (rank != self) wants.back().into = {{to + rank * own.size, own.size}};
    }
    if (!trouble->empty()) {
      wants.assign(wants.size(), FetchRange());
    } else if (own.size > 0 && to + self * own.size != own.data) {
      std::memcpy(to + self * own.size, own.data, own.size);
    }
    return algorithms->fetch(std::move(wants), {own});
  };
  return submit<at::Tensor>(*op_queue_, std::move(operation), [work, target, output, trouble] {
    if (!trouble->empty()) throw_invalid(*trouble);
    return put_back(target, output);
  });
}

Future<std::vector<at::Tensor>> ShmBackend::coalesced(CoalescedCall coalesced, at::Tensor flat) {
  const bool gathers = coalesced.verb == CoalescedCall::Verb::kAllGather;
  const bool scatters = coalesced.verb == CoalescedCall::Verb::kReduceScatter;
  Call call = call_of(gathers ? Verb::kAllGather : scatters ? Verb::kReduceScatter : Verb::kAllReduce);
  call.tensors =
      static_cast<std::uint32_t>(std::count(coalesced.shapes.begin(), coalesced.shapes.end(), '['));
  call.shapes = hash_of(coalesced.shapes);
  if (gathers) return gather_dense(*op_queue_, call, flat);
  return (scatters ? scatter_dense(*op_queue_, call, flat, coalesced.reduction)
                   : reduce_dense(*op_queue_, call, flat, coalesced.reduction))
      .then([](const Future<at::Tensor>& result) { return std::vector<at::Tensor>{result.wait()}; });
}

Future<at::Tensor> ShmBackend::broadcast(at::Tensor tensor, int root) {
  const at::Tensor work = plain(tensor);
  auto operation = describe_tensor(call_of(Verb::kBroadcast), work);
  operation->call.root = root;
  const bool sends = root == rank();
  const Piece piece = operation->pieces[0];
  if (!sends) {
    operation->pieces.clear();
    operation->call.bytes = 0;
  }
  place(op_queue_->memory(), *operation);
  operation->begin = [algorithms = &op_queue_->algorithms(), piece, sends, root, pieces = operation->pieces] {
    std::vector<FetchRange> wants(algorithms->calls().size());
    if (!sends) wants[static_cast<std::size_t>(root)].into = {piece};
    return algorithms->fetch(std::move(wants), pieces);
  };
  return submit<at::Tensor>(*op_queue_, std::move(operation),
                            [work, tensor, sends] { return sends ? tensor : put_back(work, tensor); });
}

Future<std::vector<at::Tensor>> ShmBackend::all_to_all(std::vector<at::Tensor> parts) {
  return exchange(*op_queue_, call_of(Verb::kAllToAll), std::move(parts));
}

Future<std::vector<at::Tensor>> ShmBackend::rooted_all_to_all(RootedCall rooted,
                                                              std::vector<at::Tensor> parts) {
  Call call = call_of(rooted.verb == RootedCall::Verb::kGather ? Verb::kGather : Verb::kScatter);
  call.root = rooted.root;
  return exchange(*op_queue_, call, std::move(parts));
}

std::vector<Bytes> ShmBackend::all_gather_bytes(BytesView mine, Duration timeout) {
  return gather_bytes(*op_queue_, mine, limit_in(op_queue_->executor(), timeout));
}

void ShmBackend::barrier(Duration timeout) {
  auto operation = std::make_unique<Operation>();
  operation->call.verb = Verb::kBarrier;
  operation->deadline = limit_in(op_queue_->executor(), timeout);
  place(op_queue_->memory(), *operation);
  operation->begin = [] { return OpCoroutine(); };
  submit<void>(*op_queue_, std::move(operation), [] {}).wait();
}

at::Tensor ShmBackend::allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::size_t bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  std::shared_ptr<std::byte> block = op_queue_->memory().peer_memory()->own()->allocate(bytes);
  std::byte* const data = block.get();
  return at::from_blob(
      data, sizes, [block = std::move(block)](void*) {}, at::TensorOptions().dtype(dtype));
}

std::vector<std::byte*> ShmBackend::peer_memory_of(const at::Tensor& mine) {
  const GroupMemory& memory = op_queue_->memory();
  const auto place =
      mine.is_contiguous() ? memory.place_of(mine.data_ptr(), mine.nbytes()) : std::optional<std::uint64_t>();
  ByteWriter writer;
  writer.put(static_cast<std::uint8_t>(place ? 1 : 0));
  writer.put(place.value_or(0));
  writer.put(static_cast<std::uint64_t>(mine.nbytes()));
  std::vector<std::byte*> places;
  int rank = 0;
  for (const Bytes& answer : all_gather_bytes(writer.take(), Duration::zero())) {
    ByteReader reader(answer);
    const bool is_shared = reader.get<std::uint8_t>() != 0;
    Call call;
    call.place = reader.get<std::uint64_t>();
    call.bytes = reader.get<std::uint64_t>();
    reader.expect_end();
    if (!is_shared || call.bytes != mine.nbytes()) return {};
    places.push_back(memory.place(rank++, call));
  }
  return places;
}

}  // namespace torchspan::collective::shm
