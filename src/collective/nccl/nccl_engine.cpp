#include "collective/nccl/nccl_engine.h"

#include <cstring>
#include <fmt/format.h>

#include <c10/core/DeviceGuard.h>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/device/streams.h>

#include "collective/tensors.h"
#include "core/api/agreement.h"

namespace torchspan::collective::nccl {
namespace {

constexpr Duration kYielding = std::chrono::microseconds(100);
constexpr Duration kSleep = std::chrono::microseconds(100);
/// How long the destructor lets operations end.
constexpr Duration kEndLimit = std::chrono::seconds(5);

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<const NcclLibrary> library, const EngineParts& parts)
    : library_(std::move(library)), parts_(parts) {
  Backend& control = *parts_.control;
  const c10::DeviceGuard guard(parts_.device);
  UniqueId id{};
  const auto make_id = [&] {
    const Result made = control.rank() == 0 ? library_->functions().get_unique_id(&id) : kSuccess;
    if (made != kSuccess) throw error_of(made, "ncclGetUniqueId");
    const auto* const first = reinterpret_cast<const std::byte*>(id.bytes);
    return Bytes(first, first + kIdBytes);
  };
  const std::vector<Bytes> all = all_or_none(
      [&](BytesView mine) { return control.all_gather_bytes(mine, parts_.timeout); }, outcome_of(make_id),
      [](std::size_t, const Error& failure) { return Error(ErrorKind::kUnsupported, failure.message()); });
  const Bytes& bytes = all[0];
  if (bytes.size() != kIdBytes) {
    throw_invalid("the first rank sent an NCCL id of another size than NCCL's");
  }
  std::memcpy(id.bytes, bytes.data(), kIdBytes);
  try {
    connect(id);
  } catch (const Error& error) {
    control.abort(error);  // the other ranks are connecting, too
    abort();
    throw;
  }
}

void NcclCommunicator::connect(const UniqueId& id) {
  Configuration configuration;
  const Result result = library_->functions().init_rank(&handle_, parts_.control->size(), id,
                                                        parts_.control->rank(), &configuration);
  settle(result, "ncclCommInitRankConfig", parts_.control->runtime().executor.deadline_in(parts_.timeout));
}

NcclCommunicator::~NcclCommunicator() {
  if (handle_ == nullptr) return;
  if (parts_.failure->get()) {
    abort();
    return;
  }
  try {
    const c10::DeviceGuard guard(parts_.device);
    const Deadline deadline = parts_.control->runtime().executor.deadline_in(kEndLimit);
    settle(library_->functions().finalize(handle_), "ncclCommFinalize", deadline);
    // ncclCommDestroy waits without a limit for the ranks of this host. If one keeps its communicator, the memory and
    // threads of this one stay until the process ends.
    if (all_ranks_end(parts_)) static_cast<void>(library_->functions().destroy(handle_));
    handle_ = nullptr;
  } catch (...) {
    abort();
  }
}

void NcclCommunicator::abort() noexcept {
  if (handle_ == nullptr) return;
  c10::OptionalDeviceGuard guard;
  try {
    guard.reset_device(parts_.device);
  } catch (const std::exception&) {  // a device that has failed
  }
  static_cast<void>(library_->functions().abort(std::exchange(handle_, nullptr)));
}

void NcclCommunicator::enqueue(const char* name, const Call& call) {
  if (handle_ == nullptr)
    throw Error(ErrorKind::kCancelled, "the NCCL communicator of this group was aborted");
  const StreamHandle stream = parts_.runtime->native_stream(device::current_stream(parts_.device));
  settle(call(library_->functions(), handle_, stream), name,
         parts_.control->runtime().executor.deadline_in(parts_.timeout));
}

std::optional<Error> NcclCommunicator::failure() const {
  Result state = kSuccess;
  if (handle_ == nullptr) return std::nullopt;
  const Result asked = library_->functions().get_async_error(handle_, &state);
  if (asked != kSuccess) state = asked;
  if (state == kSuccess || state == kInProgress) return std::nullopt;
  return error_of(state, "an operation that was launched");
}

void NcclCommunicator::throw_if_failed() const {
  parts_.failure->throw_if_set();
  if (const auto cause = parts_.control->failure()) throw Error(*cause);
}

void NcclCommunicator::settle(Result result, const char* name, Deadline deadline) const {
  Executor& executor = parts_.control->runtime().executor;
  const TimePoint began = executor.now();
  std::unique_ptr<Parker> parker;
  while (result == kInProgress) {
    throw_if_failed();
    const TimePoint now = executor.now();
    if (const auto lost = parts_.departed(); lost && now - began > kLeftLimit) throw Error(*lost);
    if (deadline.passed(now)) {
      throw Error(
          ErrorKind::kTimedOut,
          fmt::format("NCCL did not finish {} within {:.3g} s: a rank's process or device has stopped, or "
                      "NCCL's connections are blocked (NCCL_DEBUG=INFO shows which)",
                      name, to_seconds(now - began)));
    }
    if (now - began < kYielding) {
      executor.yield();
    } else {
      if (!parker) parker = executor.make_parker();
      parker->park(executor.deadline_in(kSleep));
    }
    const Result asked = library_->functions().get_async_error(handle_, &result);
    if (asked != kSuccess) result = asked;
  }
  if (result != kSuccess) throw error_of(result, name);
}

Error NcclCommunicator::error_of(Result result, const char* name) const {
  const bool lost = result == kRemoteError || result == kSystemError;
  const bool wrong = result == kInvalidArgument || result == kInvalidUsage;
  return {lost    ? ErrorKind::kDisconnected
          : wrong ? ErrorKind::kInvalid
                  : ErrorKind::kRemoteFailure,
          fmt::format("{} failed in NCCL {} on {} of rank {}: {}; NCCL_DEBUG=WARN prints the reason", name,
                      library_->version_text(), parts_.device.str(),
                      parts_.control->ranks()[static_cast<std::size_t>(parts_.control->rank())],
                      library_->describe(result, handle_))};
}

namespace {

/// How NCCL reduces a dtype: as so many elements of its types.
struct Form {
  DataType type = kUint8;
  std::size_t elements = 1;  ///< per element of the tensor
};

std::optional<Form> form_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar:
      return Form{kInt8};
    case at::kByte:
    case at::kBool:
      return Form{kUint8};
    case at::kInt:
      return Form{kInt32};
    case at::kLong:
      return Form{kInt64};
    case at::kHalf:
      return Form{kFloat16};
    case at::kBFloat16:
      return Form{kBfloat16};
    case at::kFloat:
      return Form{kFloat32};
    case at::kDouble:
      return Form{kFloat64};
    case at::kComplexFloat:
      return Form{kFloat32, 2};
    case at::kComplexDouble:
      return Form{kFloat64, 2};
    default:
      return std::nullopt;
  }
}

/// Flags are bytes of 0 and 1: "any" is the maximum, "all" the minimum.
Operation operation_of(at::ScalarType dtype, ReduceOp reduction) {
  const bool flags = dtype == at::kBool;
  switch (reduction) {
    case kSum:
      return flags ? kMaximum : kAdd;
    case kAvg:
      return kAverage;
    case kMin:
      return kMinimum;
    case kMax:
      return kMaximum;
    case kProduct:
      return flags ? kMinimum : kMultiply;
    case kBitAnd:
    case kBitOr:
    case kBitXor:
      break;  // reduces() is false for these
  }
  return kAdd;
}

}  // namespace

bool NcclEngine::reduces(at::ScalarType dtype, ReduceOp reduction) const {
  if (reduction == kBitAnd || reduction == kBitOr || reduction == kBitXor) return false;
  if (loses_nan(dtype, reduction)) return false;
  return form_of(dtype) && (!at::isComplexType(dtype) || reduction == kSum || reduction == kAvg);
}

void NcclEngine::all_reduce(const at::Tensor& tensor, ReduceOp reduction) {
  const Form form = *form_of(tensor.scalar_type());
  communicator_.enqueue("ncclAllReduce", [&](const auto& functions, auto communicator, auto stream) {
    return functions.all_reduce(tensor.data_ptr(), tensor.data_ptr(),
                                static_cast<std::size_t>(tensor.numel()) * form.elements, form.type,
                                operation_of(tensor.scalar_type(), reduction), communicator, stream);
  });
}

void NcclEngine::reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) {
  const Form form = *form_of(tensor.scalar_type());
  communicator_.enqueue("ncclReduceScatter", [&](const auto& functions, auto communicator, auto stream) {
    return functions.reduce_scatter(tensor.data_ptr(), part.data_ptr(),
                                    static_cast<std::size_t>(part.numel()) * form.elements, form.type,
                                    operation_of(tensor.scalar_type(), reduction), communicator, stream);
  });
}

void NcclEngine::broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) {
  communicator_.enqueue("ncclBroadcast", [&](const auto& functions, auto communicator, auto stream) {
    Result result = functions.group_start();
    for (std::size_t i = 0; i < tensors.size() && (result == kSuccess || result == kInProgress); ++i) {
      result = functions.broadcast(tensors[i].data_ptr(), tensors[i].data_ptr(), tensors[i].nbytes(), kUint8,
                                   roots[i], communicator, stream);
    }
    const Result ended = functions.group_end();
    return result == kSuccess || result == kInProgress ? ended : result;
  });
}

void NcclEngine::all_to_all(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) {
  communicator_.enqueue("ncclSend and ncclRecv", [&](const auto& functions, auto communicator, auto stream) {
    Result result = functions.group_start();
    const auto call = [&](auto&& function, const at::Tensor& tensor, std::size_t peer) {
      if (tensor.nbytes() == 0 || (result != kSuccess && result != kInProgress)) return;
      result =
          function(tensor.data_ptr(), tensor.nbytes(), kUint8, static_cast<int>(peer), communicator, stream);
    };
    for (std::size_t peer = 0; peer < sent.size(); ++peer) {
      call(functions.send, sent[peer], peer);
      call(functions.receive, received[peer], peer);
    }
    const Result ended = functions.group_end();
    return result == kSuccess || result == kInProgress ? ended : result;
  });
}

}  // namespace torchspan::collective::nccl
