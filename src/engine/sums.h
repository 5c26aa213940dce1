#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::engine {

/// Whether `tensor` is a plain dense tensor whose object and memory nobody else holds, so that writing to it
/// shows nowhere.
bool is_ours_alone(const at::Tensor& tensor);

/// held += incoming, in place only in memory that is ours alone; both defined, of one shape and type. Dense
/// and sparse, in either order, give dense. What is not needed any more is left in `incoming` and in the
/// result, so that a caller may drop it outside a lock. `held` is unchanged when it throws. Call with grad
/// mode off.
at::Tensor add_into(at::Tensor& held, at::Tensor& incoming);

/// `gradient` as the first gradient of `parameter`: itself when that is safe (GradientMap::accumulate tells
/// when), else a copy in the parameter's layout. Call with grad mode off.
at::Tensor adopt_gradient(const at::Tensor& parameter, at::Tensor gradient);

}  // namespace torchspan::engine
