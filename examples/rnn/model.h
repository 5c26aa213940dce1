#pragma once
#include <cstdint>
#include <tuple>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/pimpl.h>

#include <torchspan/optim/distributed_optimizer.h>
#include <torchspan/rpc/remote_module.h>

namespace rnn {

/// What all parts of the model agree on. Parameters are drawn from `seed`, the same in any process.
struct Shape {
  static constexpr torchspan::FixedString kWireName = "Shape";
  std::int64_t vocabulary = 0, width = 128;
  std::uint64_t seed = 1;
  bool is_double = false;
};

/// Characters int64 [n, t] to [n, t, width].
class EmbeddingTableImpl : public torch::nn::Module {
 public:
  explicit EmbeddingTableImpl(const Shape& shape);
  at::Tensor forward(const at::Tensor& characters);

 private:
  torch::nn::Embedding rows_;
};
TORCH_MODULE(EmbeddingTable);

/// [n, t, width], and the state [1, n, width] before it, to the output [n, t, width] and the state after it.
class LstmImpl : public torch::nn::Module {
 public:
  explicit LstmImpl(const Shape& shape);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& input, const at::Tensor& hidden,
                                                         const at::Tensor& cell);

 private:
  torch::nn::LSTM lstm_;
};
TORCH_MODULE(Lstm);

/// [n, t, width] to logits [n, t, vocabulary].
class DecoderImpl : public torch::nn::Module {
 public:
  explicit DecoderImpl(const Shape& shape);
  at::Tensor forward(const at::Tensor& hidden);

 private:
  torch::nn::Linear linear_;
};
TORCH_MODULE(Decoder);

inline constexpr torchspan::ModuleClass<EmbeddingTable, Shape> kEmbeddingTable{"EmbeddingTable"};
inline constexpr torchspan::ModuleClass<Lstm, Shape> kLstm{"Lstm"};
inline constexpr torchspan::ModuleClass<Decoder, Shape> kDecoder{"Decoder"};

/// The state of the LSTM between two windows.
struct State {
  State(const Shape& shape, std::int64_t rows);
  at::Tensor hidden, cell;
};

/// A language model whose embedding and decoder live on one worker, and whose LSTM lives on another one.
class RNNModel {
 public:
  RNNModel(torchspan::Worker& worker, const torchspan::Destination& table_and_decoder,
           const torchspan::Destination& lstm, const Shape& shape);

  /// Logits [n, t, vocabulary] of the characters after `characters`, int64 [n, t]. Replaces the state by a detached
  /// one.
  at::Tensor forward(const at::Tensor& characters, State& state) const;
  /// The same model without gradients.
  RNNModel for_evaluation() const;
  std::vector<torchspan::optim::Target> parts() const { return {embedding_, lstm_, decoder_}; }

 private:
  torchspan::RemoteModule<EmbeddingTable, Shape> embedding_;
  torchspan::RemoteModule<Lstm, Shape> lstm_;
  torchspan::RemoteModule<Decoder, Shape> decoder_;
};

/// The same model in one process, without TorchSpan.
class LocalModel : public torch::nn::Module {
 public:
  explicit LocalModel(const Shape& shape);
  at::Tensor forward(const at::Tensor& characters, State& state);

 private:
  EmbeddingTable embedding_;
  Lstm lstm_;
  Decoder decoder_;
};

}  // namespace rnn
