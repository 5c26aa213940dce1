#pragma once
// The interface through which objects list their state, for checkpoints and copies. Includes no torch/nn.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torchspan::rpc {
class Reference;
}  // namespace torchspan::rpc
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

/// How objects list their state, for checkpoints and for ranks that join. The names are in `torchspan::checkpoint`, too.
namespace torchspan::state {

/// A number, flag or text of the program that a checkpoint stores in its manifest.
using Value = std::variant<bool, std::int64_t, double, std::string>;
/// The content of a value of type T; throws Error{kInvalid} naming both types if it has another one.
template <class T>
T value_as(const Value& value);

using RemoteValue = std::shared_ptr<rpc::Reference>;

/// A tensor of this rank: the whole tensor that the name denotes, or a shard of it.
struct StateTensor {
  std::string name;
  at::Tensor tensor;
  std::vector<std::int64_t> shape;   ///< of the whole tensor
  std::vector<std::int64_t> offset;  ///< of the shard in it
  /// Equal for replicas, whose sizes may then differ; distinguishes them from other tensors of the same name. 0: not
  /// checked.
  std::uint64_t fingerprint = 0;
};

/// Collects what a rank saves. Names are relative to the name that the object was registered with; an empty
/// name stands for that name itself. Ranks that save the same part of the same tensor are replicas: one of
/// them writes it.
class StateWriter {
 public:
  /// Adds a whole tensor. Throws Error{kUnsupported} naming it for a sparse tensor, and Error{kInvalid} for a name that
  /// was added before. A checkpoint rejects dtypes that the safetensors format lacks.
  void add(const std::string& name, const at::Tensor& tensor, std::uint64_t fingerprint = 0);
  /// Adds a shard at `offset` of a tensor with this shape. All shards together must make up the tensor. A rank
  /// may add several shards of one tensor.
  void add_shard(const std::string& name, const at::Tensor& shard, std::vector<std::int64_t> shape,
                 std::vector<std::int64_t> offset);
  /// Adds the tensors of a value on another worker, which writes them: a module, a tensor or a StateDict.
  void add_remote(const std::string& name, RemoteValue value);
  /// Adds a number, flag or text; equal on all ranks that add it.
  void add_value(const std::string& name, Value value);

  void set_prefix(std::string prefix) { prefix_ = std::move(prefix); }
  const std::vector<StateTensor>& tensors() const { return tensors_; }
  const std::map<std::string, Value>& values() const { return values_; }
  const std::vector<std::pair<std::string, RemoteValue>>& remote() const { return remote_; }

 private:
  std::string prefix_;
  std::vector<StateTensor> tensors_;
  std::vector<std::pair<std::string, RemoteValue>> remote_;
  std::map<std::string, Value> values_;
  std::map<std::string, std::size_t> places_;
};

/// The content of one checkpoint. Names are relative as in StateWriter. Errors name the tensor, the file and
/// both shapes or dtypes.
class StateReader {
 public:
  virtual ~StateReader() = default;

  /// Names of tensors with the current prefix.
  std::vector<std::string> names() const;
  bool has(const std::string& name) const;
  /// Shape of the whole tensor.
  std::vector<std::int64_t> shape(const std::string& name) const;
  /// The whole tensor. Read from a checkpoint, it has its own memory: a mapping of its part of the file, or a copy.
  /// Writes reach neither the file nor later reads. An elastic trainer returns its receive buffer.
  at::Tensor read(const std::string& name) const;
  /// Throws what read_into() would throw, except for failures of the disk; reads no data. With `cast`, `target` may have
  /// another dtype, for a caller that converts what read() returns.
  void check(const std::string& name, const at::Tensor& target, bool cast = false) const;
  /// Copies the whole tensor into `target`, which has its shape and dtype.
  void read_into(const std::string& name, const at::Tensor& target) const;
  /// Copies the part at `offset` that has the shape of `shard`.
  void read_shard_into(const std::string& name, const at::Tensor& shard,
                       const std::vector<std::int64_t>& offset) const;
  /// Makes the owner of a module or tensor read it.
  void read_remote(const std::string& name, const RemoteValue& value) const;
  /// Throws Error{kInvalid} if there is no such value.
  Value value(const std::string& name) const;

  virtual std::int64_t step() const = 0;
  void set_prefix(std::string prefix) { prefix_ = std::move(prefix); }
  /// Complete name of a tensor or value.
  std::string full_name(const std::string& name) const;
  virtual at::ScalarType dtype_of(const std::string& full_name) const = 0;

 protected:
  virtual std::vector<std::string> all_names() const = 0;
  virtual bool contains(const std::string& full_name) const = 0;
  virtual at::Tensor read_tensor(const std::string& full_name) const = 0;
  virtual std::vector<std::int64_t> shape_of(const std::string& full_name) const = 0;
  /// `target` has the right dtype and lies within the tensor.
  virtual void read_box(const std::string& full_name, const at::Tensor& target,
                        const std::vector<std::int64_t>& offset) const = 0;
  virtual const Value* find_value(const std::string& full_name) const = 0;
  virtual void read_on_owner(const std::string& full_name, const RemoteValue& value) const = 0;
  /// Where the checkpoint is, for errors.
  virtual std::string describe() const = 0;

 private:
  std::string prefix_;
};

/// An object whose state a checkpoint contains. Derive from it to save a class of your program.
class StateSource {
 public:
  virtual ~StateSource() = default;
  /// Lists the current state; tensors are copied later, before CheckpointManager::save() returns.
  virtual void save(StateWriter& writer) const = 0;
  /// Restores the state. Should check everything before it changes anything.
  virtual void load(const StateReader& reader) = 0;
  /// Whether load() takes all tensors under the object's name for its own. No other object may then have a name that
  /// begins with this one and a dot.
  virtual bool owns_names() const { return true; }
  /// Whether each rank that registers such an object has a state of its own, as trainers that share a remote table have. It is
  /// then saved for each rank, as "<name>.rank<number>"; a rank that was not there gets a copy of another rank's.
  virtual bool is_of_rank() const { return false; }
};
using SourcePtr = std::unique_ptr<StateSource>;

/// Parameters and buffers by name. A tensor with several names is saved under the first one.
SourcePtr module_source(std::shared_ptr<torch::nn::Module> module);
/// The same; holds a reference.
SourcePtr module_source(torch::nn::Module& module);

/// State of an optimizer: ordered tensors by name. Numbers are zero-dimensional tensors, strings are byte
/// tensors. Works with torch::save and torch::load, and can be sent to other workers. The names are
/// "group.<group>.kind", "group.<group>.lr" and "group.<group>.parameter.<name>.<entry>".
struct StateDict : torch::OrderedDict<std::string, at::Tensor> {
  using Entries = std::vector<std::pair<std::string, at::Tensor>>;
  StateDict() : OrderedDict("Entry") {}
  /// Throws Error{kInvalid} naming an entry that is listed twice.
  explicit StateDict(Entries entries);
};

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const StateDict& state);
/// Throws Error{kInvalid} for an archive with other contents.
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, StateDict& state);

}  // namespace torchspan::state
