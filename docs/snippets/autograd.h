#pragma once
#include <thread>

#include "docs/snippets/modules.h"

struct TowerImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x);
};
TORCH_MODULE(Tower);
struct TableImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor ids);
};
TORCH_MODULE(Table);
inline constexpr ts::ModuleClass<Tower> kTower{"Tower"};
inline constexpr ts::ModuleClass<Table> kTable{"Table"};
at::Tensor loss_there(const ts::RRef<Tower>& tower, const at::Tensor& x, const at::Tensor& target);
inline constexpr ts::Function<loss_there> kLossThere{"loss_there"};

extern ts::RemoteModule<Tower> tower;
extern ts::RemoteModule<Table> table;
extern ts::Context& context;
extern at::Tensor x, target, out, loss, first_loss, second_loss;
extern std::stop_source source;
