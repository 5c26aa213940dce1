#include "rpc/device_memory/lent_tensor.h"

#include "device/api/tensors.h"

namespace torchspan::rpc {

at::Tensor LentTensor::view_like(const at::Tensor& tensor) const {
  return device::view_memory(area_->data() + lease_.offset, tensor.sizes(),
                             device::dense_strides_like(tensor), tensor.scalar_type(), tensor.device());
}

}  // namespace torchspan::rpc
