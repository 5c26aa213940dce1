#include "rnn/model.h"

#include <cmath>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>

namespace rnn {
namespace {

/// Draws the parameters uniformly up to 1 / sqrt(width). `part` distinguishes modules of one model.
void draw_parameters(torch::nn::Module& module, const Shape& shape, std::uint64_t part) {
  if (shape.is_double) module.to(at::kDouble);
  const at::Generator random = at::detail::createCPUGenerator(shape.seed * 10 + part);
  const double most = 1 / std::sqrt(static_cast<double>(shape.width));
  const c10::NoGradGuard off;
  for (const at::Tensor& parameter : module.parameters())
    parameter.copy_(at::empty(parameter.sizes(), at::kDouble).uniform_(-most, most, random));
}

}  // namespace

EmbeddingTableImpl::EmbeddingTableImpl(const Shape& shape)
    : rows_(register_module("rows", torch::nn::Embedding(shape.vocabulary, shape.width))) {
  draw_parameters(*this, shape, 0);
}
at::Tensor EmbeddingTableImpl::forward(const at::Tensor& characters) { return rows_->forward(characters); }

LstmImpl::LstmImpl(const Shape& shape)
    : lstm_(register_module(
          "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(shape.width, shape.width).batch_first(true)))) {
  draw_parameters(*this, shape, 1);
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> LstmImpl::forward(const at::Tensor& input,
                                                                 const at::Tensor& hidden,
                                                                 const at::Tensor& cell) {
  const auto [output, state] = lstm_->forward(input, std::tuple(hidden, cell));
  return {output, std::get<0>(state), std::get<1>(state)};
}

DecoderImpl::DecoderImpl(const Shape& shape)
    : linear_(register_module("linear", torch::nn::Linear(shape.width, shape.vocabulary))) {
  draw_parameters(*this, shape, 2);
}
at::Tensor DecoderImpl::forward(const at::Tensor& hidden) { return linear_->forward(hidden); }

State::State(const Shape& shape, std::int64_t rows)
    : hidden(at::zeros({1, rows, shape.width}, shape.is_double ? at::kDouble : at::kFloat)),
      cell(at::zeros_like(hidden)) {}

RNNModel::RNNModel(torchspan::Worker& worker, const torchspan::Destination& table_and_decoder,
                   const torchspan::Destination& lstm, const Shape& shape)
    : embedding_(worker, table_and_decoder, kEmbeddingTable, shape),
      lstm_(worker, lstm, kLstm, shape),
      decoder_(worker, table_and_decoder, kDecoder, shape) {}

at::Tensor RNNModel::forward(const at::Tensor& characters, State& state) const {
  const auto [output, hidden, cell] = lstm_.forward(embedding_.forward(characters), state.hidden, state.cell);
  state.hidden = hidden.detach();
  state.cell = cell.detach();
  return decoder_.forward(output);
}

RNNModel RNNModel::for_evaluation() const {
  RNNModel model = *this;
  model.embedding_ = embedding_.with({.no_grad = true});
  model.lstm_ = lstm_.with({.no_grad = true});
  model.decoder_ = decoder_.with({.no_grad = true});
  return model;
}

LocalModel::LocalModel(const Shape& shape)
    : embedding_(register_module("embedding", EmbeddingTable(shape))),
      lstm_(register_module("lstm", Lstm(shape))),
      decoder_(register_module("decoder", Decoder(shape))) {}

at::Tensor LocalModel::forward(const at::Tensor& characters, State& state) {
  const auto [output, hidden, cell] =
      lstm_->forward(embedding_->forward(characters), state.hidden, state.cell);
  state.hidden = hidden.detach();
  state.cell = cell.detach();
  return decoder_->forward(output);
}

}  // namespace rnn
