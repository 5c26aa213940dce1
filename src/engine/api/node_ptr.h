#pragma once
// Owning pointers to autograd nodes: shared before LibTorch 2.13, intrusive since.
#include <memory>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include "device/api/torch_version.h"

#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 13)
#include <c10/util/intrusive_ptr.h>
#endif

namespace torchspan::engine {

#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 13)
template <class T>
using NodePtrTo = c10::intrusive_ptr<T>;
using WeakNodePtr = c10::weak_intrusive_ptr<torch::autograd::Node>;
#else
template <class T>
using NodePtrTo = std::shared_ptr<T>;
using WeakNodePtr = std::weak_ptr<torch::autograd::Node>;
#endif
using NodePtr = NodePtrTo<torch::autograd::Node>;

template <class T, class... Arguments>
NodePtrTo<T> make_node(Arguments&&... arguments) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 13)
  return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
#else
  return std::make_shared<T>(std::forward<Arguments>(arguments)...);
#endif
}

/// An owning pointer to a node that has one already.
inline NodePtr owner_of(torch::autograd::Node& node) {
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 13)
  return node.getptr();
#else
  return node.shared_from_this();
#endif
}

/// Base of nodes that hold tensors, which release_variables() drops. Since LibTorch 2.13 a weak pointer keeps
/// the memory of a dead node; its tensors are released when the last owning pointer goes, as before.
struct TensorNode : torch::autograd::Node {
  using Node::Node;
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 13)
  void release_resources() override {
    release_variables();
    Node::release_resources();
  }
#endif
};

}  // namespace torchspan::engine
