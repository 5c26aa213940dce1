#pragma once
#include <cstddef>
#include <memory>
#include <string>

/// The part of NCCL's binary interface that this room uses, declared here so that building needs no NCCL header and
/// any release from 2.14 on works: the configuration carries its size, and enumerations have fixed values.

namespace torchspan::collective::nccl {

struct Communicator;
using CommunicatorHandle = Communicator*;
using StreamHandle = void*;  ///< cudaStream_t

inline constexpr std::size_t kIdBytes = 128;
struct UniqueId {
  char bytes[kIdBytes];
};

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum Operation : int { kAdd = 0, kMultiply = 1, kMaximum = 2, kMinimum = 3, kAverage = 4 };

/// The configuration of release 2.14, which later releases accept.
struct Configuration {
  std::size_t size = offsetof(Configuration, blocking) + sizeof(int);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

/// NCCL, loaded at run time. Never unloaded while a copy of the pointer exists. Immutable.
class NcclLibrary {
 public:
  /// Loads `path`; if it is empty, the library that the environment variable TORCHSPAN_NCCL_LIBRARY names, else
  /// libnccl.so.2, which finds the one that LibTorch has loaded. Throws Error{kUnsupported} that says what is
  /// missing.
  static std::shared_ptr<const NcclLibrary> load(const std::string& path = {});
  ~NcclLibrary();
  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;

  /// 22809 is release 2.28.9.
  int version() const { return version_; }
  std::string version_text() const;
  /// NCCL's words for a result, with its last error if it has one.
  std::string describe(Result result, CommunicatorHandle communicator) const;

  struct Functions {
    Result (*get_version)(int*);
    Result (*get_unique_id)(UniqueId*);
    Result (*init_rank)(CommunicatorHandle*, int ranks, UniqueId, int rank, Configuration*);
    Result (*finalize)(CommunicatorHandle);
    Result (*destroy)(CommunicatorHandle);
    Result (*abort)(CommunicatorHandle);
    Result (*get_async_error)(CommunicatorHandle, Result*);
    const char* (*get_error_string)(Result);
    const char* (*get_last_error)(CommunicatorHandle);
    Result (*all_reduce)(const void* from, void* to, std::size_t, DataType, Operation, CommunicatorHandle,
                         StreamHandle);
    Result (*reduce_scatter)(const void* from, void* to, std::size_t received, DataType, Operation,
                             CommunicatorHandle, StreamHandle);
    Result (*broadcast)(const void* from, void* to, std::size_t, DataType, int root, CommunicatorHandle,
                        StreamHandle);
    Result (*send)(const void*, std::size_t, DataType, int peer, CommunicatorHandle, StreamHandle);
    Result (*receive)(void*, std::size_t, DataType, int peer, CommunicatorHandle, StreamHandle);
    Result (*group_start)();
    Result (*group_end)();
  };
  const Functions& functions() const { return functions_; }

 private:
  explicit NcclLibrary(const std::string& name);

  void* handle_ = nullptr;
  int version_ = 0;
  Functions functions_{};
};

/// The first release of NCCL that lets ranks share a GPU, if this environment variable is 1.
inline constexpr int kSharedGpuVersion = 23000;
inline constexpr const char* kSharedGpuVariable = "NCCL_MULTI_RANK_GPU_ENABLE";
/// Whether the library lets ranks of this process's environment share a GPU.
bool may_share_gpu(const NcclLibrary& library);

}  // namespace torchspan::collective::nccl
