#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace torchspan::checkpoint {

/// Tensors by name.
using NamedTensors = std::map<std::string, at::Tensor>;

struct SaveModelOptions {
  std::uint64_t max_file_bytes = std::uint64_t{5} << 30;  ///< of one file's data; a larger tensor has its own
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

/// Writes parameters and buffers as the Hugging Face libraries do: "model.safetensors", or numbered files and
/// "model.safetensors.index.json". A tensor with several names is written under the first one. Replaces a model that
/// the folder has: a reader finds the old model, none, or the new one. Not collective: call it on one rank.
void save_model(const torch::nn::Module& module, const std::string& folder, SaveModelOptions options = {});

struct LoadModelOptions {
  /// Name in the folder of each parameter and buffer; empty: its name in the module.
  std::function<std::string(const std::string& name)> saved_name = {};
  bool allow_missing = false;     ///< leaves tensors that the folder lacks unchanged
  bool allow_unexpected = false;  ///< ignores tensors that the module lacks
  bool cast = false;              ///< converts other dtypes
};

/// Loads parameters and buffers by name from such a folder, or from one safetensors file. All names, shapes and
/// dtypes are checked before the first tensor changes; Error{kInvalid} names the tensors that do not fit.
void load_model(torch::nn::Module& module, const std::string& path, LoadModelOptions options = {});

/// Writes one safetensors file, replacing it at once. Tensors are stored contiguously.
void save_safetensors(const std::string& file, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata = {});
/// Reads all tensors of a safetensors file or of a model folder. Each has memory that nothing else uses: a mapping of
/// its part of the file, or a copy. Writes to it do not reach the file.
NamedTensors load_safetensors(const std::string& path);

}  // namespace torchspan::checkpoint

namespace torchspan {
using checkpoint::load_model;
using checkpoint::LoadModelOptions;
using checkpoint::save_model;
using checkpoint::SaveModelOptions;
}  // namespace torchspan
