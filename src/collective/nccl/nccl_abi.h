#pragma once
#include <cstddef>

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

}  // namespace torchspan::collective::nccl
