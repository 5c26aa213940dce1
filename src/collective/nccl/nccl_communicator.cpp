#include "collective/nccl/nccl_communicator.h"

#include <cstring>
#include <fmt/format.h>

#include <c10/core/DeviceGuard.h>

#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/device/streams.h>

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
  ByteWriter writer;
  const Result made = control.rank() == 0 ? library_->functions().get_unique_id(&id) : kSuccess;
  writer.put_string(made == kSuccess ? std::string() : error_of(made, "ncclGetUniqueId").message());
  const auto* const first = reinterpret_cast<const std::byte*>(id.bytes);
  writer.put_bytes(BytesView(first, kIdBytes));
  const std::vector<Bytes> all = control.all_gather_bytes(writer.bytes(), parts_.timeout);
  ByteReader reader(all[0]);
  const std::string trouble = reader.get_string();
  if (!trouble.empty()) throw Error(ErrorKind::kUnsupported, trouble);
  const BytesView bytes = reader.get_bytes(reader.left());
  if (bytes.size() != kIdBytes) {
    throw Error(ErrorKind::kInvalid, "the first rank sent an NCCL id of another size than NCCL's");
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
    if (const auto lost = parts_.gone(); lost && now - began > kLeftLimit) throw Error(*lost);
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

}  // namespace torchspan::collective::nccl
