#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::engine {

/// Whether `tensor` is a plain dense tensor whose object and memory have no other owner, so that a write to it
/// has no effect elsewhere.
bool is_unshared(const at::Tensor& tensor);

/// held += incoming, in place only in unshared memory; both must be defined, of one shape and type. Dense and
/// sparse, in either order, give dense. Tensors that are not needed any more stay in `incoming` and in the
/// result, so that the caller can destroy them outside a lock. On an exception, `held` is unchanged. Call it
/// with grad mode off.
at::Tensor add_into(at::Tensor& held, at::Tensor& incoming);

/// Adds a new gradient to the sum so far, as LibTorch's engine does, bit for bit. Call it with grad mode off.
at::Tensor sum_of(at::Tensor held, at::Tensor gradient);

/// `gradient` as the first gradient of `parameter`: itself if that is safe (see GradientMap::accumulate), else
/// a copy in the parameter's layout. Call it with grad mode off.
at::Tensor adopt_gradient(const at::Tensor& parameter, at::Tensor gradient);

}  // namespace torchspan::engine
