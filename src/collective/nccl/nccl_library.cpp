#include "collective/nccl/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <torchspan/core/error.h>
#include <torchspan/rendezvous.h>

namespace torchspan::collective::nccl {
namespace {

constexpr int kLeastVersion = 21400;
constexpr const char* kVariable = "TORCHSPAN_NCCL_LIBRARY";

constexpr const char* kRemedy =
    "install NCCL 2.14 or later (pip's nvidia-nccl package or Debian's libnccl2), set TORCHSPAN_NCCL_LIBRARY "
    "to "
    "its path, or use BackendKind::kCudaIpc for the ranks of one host";

std::string release(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::string name_of(const std::string& path) {
  if (!path.empty()) return path;
  const auto environment = rendezvous::process_environment();
  const auto found = environment.find(kVariable);
  return found == environment.end() || found->second.empty() ? "libnccl.so.2" : found->second;
}

/// Another NCCL than LibTorch's must call its own functions, not those that LibTorch's has put into the process before.
/// Threads that NCCL starts may outlive the last group, so it is not unloaded.
#if defined(__SANITIZE_ADDRESS__)  // which does not allow RTLD_DEEPBIND
constexpr int kLoading = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;
#else
constexpr int kLoading = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | RTLD_DEEPBIND;
#endif

}  // namespace

NcclLibrary::NcclLibrary(const std::string& name) : handle_(::dlopen(name.c_str(), kLoading)) {
  if (handle_ == nullptr) {
    const char* why = ::dlerror();
    throw Error(ErrorKind::kUnsupported,
                fmt::format("NCCL cannot be loaded: {}; {}", why == nullptr ? name : why, kRemedy));
  }
}

NcclLibrary::~NcclLibrary() { ::dlclose(handle_); }

std::shared_ptr<const NcclLibrary> NcclLibrary::load(const std::string& path) {
  const std::string name = name_of(path);
  const std::shared_ptr<NcclLibrary> library(new NcclLibrary(name));
  const auto find = [&](auto& function, const char* symbol) {
    void* const address = ::dlsym(library->handle_, symbol);
    if (address == nullptr) {
      throw Error(
          ErrorKind::kUnsupported,
          fmt::format("{} has no function {}, so it is not NCCL 2.14 or later; {}", name, symbol, kRemedy));
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  Functions& functions = library->functions_;
  find(functions.get_version, "ncclGetVersion");
  const Result result = functions.get_version(&library->version_);
  if (result != kSuccess || library->version_ < kLeastVersion) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("{} is NCCL {}, which cannot be interrupted when a rank dies; {}", name,
                            release(library->version_), kRemedy));
  }
  find(functions.get_unique_id, "ncclGetUniqueId");
  find(functions.init_rank, "ncclCommInitRankConfig");
  find(functions.finalize, "ncclCommFinalize");
  find(functions.destroy, "ncclCommDestroy");
  find(functions.abort, "ncclCommAbort");
  find(functions.get_async_error, "ncclCommGetAsyncError");
  find(functions.get_error_string, "ncclGetErrorString");
  find(functions.get_last_error, "ncclGetLastError");
  find(functions.all_reduce, "ncclAllReduce");
  find(functions.reduce_scatter, "ncclReduceScatter");
  find(functions.broadcast, "ncclBroadcast");
  find(functions.send, "ncclSend");
  find(functions.receive, "ncclRecv");
  find(functions.group_start, "ncclGroupStart");
  find(functions.group_end, "ncclGroupEnd");
  return library;
}

std::string NcclLibrary::version_text() const { return release(version_); }

std::string NcclLibrary::describe(Result result, CommunicatorHandle communicator) const {
  const char* const text = functions_.get_error_string(result);
  const char* const last = functions_.get_last_error(communicator);
  std::string all = text == nullptr ? fmt::format("result {}", static_cast<int>(result)) : text;
  if (last != nullptr && *last != '\0') all += fmt::format(" ({})", last);
  return all;
}

bool may_share_gpu(const NcclLibrary& library) {
  const auto environment = rendezvous::process_environment();
  const auto found = environment.find(kSharedGpuVariable);
  return library.version() >= kSharedGpuVersion && found != environment.end() && found->second == "1";
}

}  // namespace torchspan::collective::nccl
