// For sources that use modules, optimizers or the whole of LibTorch's C++ front end.
#pragma once
#include <ATen/core/ivalue.h>  // first: clang in C++20 mode needs it before the other LibTorch headers
#pragma push_macro("NDEBUG")
#undef NDEBUG
#define NDEBUG  // for its layout: LibTorch is compiled without assertions
#include <ATen/record_function.h>
#pragma pop_macro("NDEBUG")
#include <torch/torch.h>

#ifdef __clang__
#include <memory>
#include <ostream>

// A precompiled header of clang instantiates the templates that it uses, but not the virtual functions of class templates:
// each source behind it would instantiate them again, which took 2 of the 3.4 s of an empty one. What is called here is
// instantiated in the header. It generates no code.
namespace torchspan::precompiled {

template <typename... Module>
void clone(torch::nn::Cloneable<Module>&... module) {
  (module.torch::nn::template Cloneable<Module>::clone(), ...);
}

template <typename... State>
void copy(const State&... state) {
  (std::make_unique<State>(state), ...);
}

template <size_t Dimensions, typename... Convolution>
void print_and_reset(std::ostream& stream, torch::nn::ConvNdImpl<Dimensions, Convolution>&... convolution) {
  (convolution.torch::nn::template ConvNdImpl<Dimensions, Convolution>::pretty_print(stream), ...);
  (convolution.torch::nn::template ConvNdImpl<Dimensions, Convolution>::reset(), ...);
}

inline void instantiate(torch::data::datasets::MNIST& images, torch::data::datasets::TensorDataset& tensors,
                        const c10::ListType& list, const c10::FutureType& future) {
  using namespace torch::nn;
  using namespace torch::optim;
  (void)&clone<AdaptiveLogSoftmaxWithLossImpl, BilinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl,
               ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl, CrossMapLRN2dImpl,
               EmbeddingBagImpl, EmbeddingImpl, FoldImpl, FractionalMaxPool2dImpl, FractionalMaxPool3dImpl,
               GroupNormImpl, GRUCellImpl, GRUImpl, LayerNormImpl, LinearImpl, LocalResponseNormImpl,
               LogSoftmaxImpl, LSTMCellImpl, LSTMImpl, ModuleDictImpl, MultiheadAttentionImpl,
               ParameterDictImpl, RNNCellImpl, RNNImpl, SequentialImpl, SoftmaxImpl, SoftminImpl,
               ThresholdImpl, TransformerDecoderImpl, TransformerDecoderLayerImpl, TransformerEncoderImpl,
               TransformerEncoderLayerImpl, UnflattenImpl, UnfoldImpl, ZeroPad2dImpl>;
  (void)&copy<AdagradParamState, AdamParamState, AdamWParamState, LBFGSParamState, RMSpropParamState,
              SGDParamState>;
  (void)&print_and_reset<1, Conv1dImpl, ConvTranspose1dImpl>;
  (void)&print_and_reset<2, Conv2dImpl, ConvTranspose2dImpl>;
  (void)&print_and_reset<3, Conv3dImpl, ConvTranspose3dImpl>;
  images.Dataset::get_batch({});
  tensors.Dataset::get_batch({});
  list.SingleElementType::equals(list);
  future.SingleElementType::equals(future);
}

}  // namespace torchspan::precompiled
#endif
