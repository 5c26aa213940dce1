#include "collective/nccl/nccl_engine.h"

#include "collective/dtypes.h"

namespace torchspan::collective::nccl {
namespace {

/// How NCCL reduces a dtype: as so many elements of its own types.
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
